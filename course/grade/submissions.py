"""What a class handed in: list it, read it as data, join it with the roster.

A submission is a folder, a single notebook or a zip. Nothing in it is trusted: files are opened
without following links, sizes come first, zips are read member by member and never extracted.
`read` runs in a child process with limits (`course.grade.reader`), for one bad file must cost one
row and not the batch.
"""

import csv
import errno
import hashlib
import io
import json
import os
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nbformat import NotebookNode

from course import catalog, lint, notebook, recordfile
from course.catalog import Chapter
from course.errors import CourseError
from course.recordfile import Record
from course.text import line

MAX_FILE = 8 << 20  # bytes of one notebook
MAX_ZIP = 64 << 20
MAX_MEMBERS = 10_000
MAX_CELLS = 2_000
NOTEBOOKS = (".ipynb", ".md")
_NOT_NOTEBOOK = "is not a notebook"
_SAVE_AS = "save it as CSV UTF-8 with commas"
_INNER = ("work", "notebooks")  # the folders of a submission
Present = Callable[[Path, list[str]], list[str]]


@dataclass(frozen=True)
class Submission:
    """One entry of the folder of submissions. `problem` says why it cannot be read at all."""

    id: str
    path: Path
    problem: str = ""


@dataclass(frozen=True)
class Student:
    """One row of the roster."""

    id: str
    name: str = ""
    email: str = ""
    github: str = ""


@dataclass
class Answer:
    """One answer cell. Without a `source` there is none; a `problem` keeps it from running."""

    source: str = ""
    tried: bool = False
    problem: str = ""
    warnings: list[str] = field(default_factory=list)
    fingerprint: str = ""


def listed(folder: Path, holds: Present | None = None) -> list[Submission]:
    """The submissions in a folder, in order of their names; a file is one submission.

    A folder that holds `notebooks` or `work` is itself the one submission, unless what lies beside
    them are submissions. CourseError if there is nothing to grade, or no telling which it is.

    Args:
        holds: `Reader.present`, where nothing that was handed in may be opened in this process.
    """
    if not folder.exists():
        raise CourseError(f"{folder} does not exist: name the folder that holds the submissions")
    if folder.is_file() or _is_one(folder, holds or present):
        path = folder.resolve()
        return [Submission(path.stem if path.is_file() else path.name, path)]
    found = [_entry(path) for path in _visible(folder)]
    if not found:
        raise CourseError(f"{folder} holds no submissions: each is a folder, a notebook or a zip")
    twice = {id for id, count in Counter(normal(s.id) for s in found).items() if count > 1}
    out: dict[str, Submission] = {}
    for one in found:
        many = f"several submissions are called {line(one.id)}: keep one"
        problem = many if normal(one.id) in twice else one.problem
        out.setdefault(normal(one.id), Submission(one.id, one.path, problem))
    return list(out.values())


def _is_one(folder: Path, holds: Present) -> bool:
    """Whether a folder is one submission; a learner of a class may be called `work`."""
    inner = [name for name in _INNER if (folder / name).is_dir()]
    if not inner:
        return False
    slugs = [chapter.slug for chapter in catalog.chapters() if chapter.status == "ready"]
    own = {*_INNER, *(slug + suffix for slug in slugs for suffix in NOTEBOOKS)}
    beside = (_entry(path) for path in _visible(folder) if path.name not in own)
    other = next((o for o in beside if not o.problem and holds(o.path, slugs)), None)
    if other and holds(folder, slugs):
        raise CourseError(
            f"{folder} holds `{inner[0]}`, as one submission does, and "
            f"`{line(other.path.name)}`, as a class does: rename one of them"
        )
    return other is None


def _visible(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(folder / e.name for e in entries if not e.name.startswith("."))


def _entry(path: Path) -> Submission:
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return Submission(path.name, path)
    if not stat.S_ISREG(mode):
        return Submission(path.stem, path, "it is a link or a device, not a file of its own")
    if path.suffix.lower() not in (*NOTEBOOKS, ".zip"):
        return Submission(path.name, path, f"{_NOT_NOTEBOOK}, a zip or a folder")
    return Submission(path.stem, path)


def normal(id: str) -> str:
    """An id as it is matched with the roster: the same characters may be stored in two ways."""
    return unicodedata.normalize("NFC", id).strip()


def roster(path: Path) -> list[Student]:
    """Read a CSV with a column `id` and optionally `name`, `email`, `github`.

    Rows without any text, which spreadsheets leave, are skipped. CourseError if it has no such
    column, an empty or repeated id, or is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise CourseError(f"{path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise CourseError(f"{path} is not UTF-8 text, {_SAVE_AS}: {problem}") from None
    head = next((row for row in text.splitlines() if row.strip(" ,;")), "")
    delimiter = ";" if head.count(";") > head.count(",") else ","  # some spreadsheets write `;`
    students: dict[str, Student] = {}
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = ([value.strip() for value in row] for row in reader if "".join(row).strip())
        columns = {name.lower(): at for at, name in enumerate(next(rows, []))}
        if "id" not in columns:
            raise CourseError(
                f"{path} has no column `id`: its first line must name the columns; if it does, "
                f"{_SAVE_AS}"
            )
        for row in rows:
            known = {name: row[at] for name, at in columns.items() if at < len(row)}
            student = Student(**{name: known.get(name, "") for name in Student.__annotations__})
            if not student.id or normal(student.id) in students:
                said = f"repeats `{line(student.id)}`" if student.id else "has no id"
                raise CourseError(f"{path}, line {reader.line_num}, {said}: ids must be unique")
            students[normal(student.id)] = student
    except csv.Error as problem:
        raise CourseError(f"{path} is not a CSV file: {problem}") from None
    return list(students.values())


def read(path: Path, slugs: list[str]) -> dict:
    """Read one submission: its answers to the exercises of each chapter.

    Returns a plain dict: `digest` of what was read, `problem`, and per chapter `problem`, `file`
    and `answers` (exercise -> the fields of `Answer`). A chapter that was not handed in has no
    file. Problems are data, never exceptions.
    """
    said: dict = {"digest": "", "problem": "", "chapters": {}}
    whole = hashlib.sha256()
    try:
        with _opened(path) as files:
            for slug in slugs:
                said["chapters"][slug] = _chapter(catalog.find(slug), files, whole)
    except CourseError as problem:
        said["problem"], said["chapters"] = str(problem), {}
    said["digest"] = whole.hexdigest()[:32]
    return said


def present(path: Path, slugs: list[str]) -> list[str]:
    """Those of the chapters for which a submission holds a notebook; none if it is unreadable."""
    try:
        with _opened(path) as files:
            return [
                slug
                for slug in slugs
                if any(files.has(name) for name in candidates(catalog.find(slug)))
            ]
    except CourseError:
        return []


def candidates(chapter: Chapter) -> list[str]:
    """Where in a submission a chapter's notebook may lie."""
    stems = (f"work/{chapter.slug}", f"notebooks/{chapter.part}/{chapter.slug}", chapter.slug)
    return [stem + suffix for stem in stems for suffix in NOTEBOOKS]


class _Files:
    """The files of a submission. `get` gives None for one that is not there."""

    def __init__(self, get: Callable[[str], bytes | None]):
        self.get = get

    def has(self, name: str) -> bool:
        try:
            return self.get(name) is not None
        except CourseError:
            return True  # it is there, and `read` says what is wrong with it


@contextmanager
def _opened(path: Path) -> Iterator[_Files]:
    if path.suffix.lower() == ".zip" and not path.is_dir():
        with (
            os.fdopen(_regular(os.fspath(path), None, MAX_ZIP), "rb") as file,
            _zip(file) as files,
        ):
            yield files
    elif path.is_dir() and not path.is_symlink():
        top = _folder_descriptor(path, None)
        try:
            inner = _only_folder(path)
            yield _Files(lambda name: _from_folder(top, f"{inner}{name}"))
        finally:
            os.close(top)
    else:
        yield _single(path)


def _single(path: Path) -> _Files:
    """A lone notebook stands for the chapter that it begins, whatever the file is called."""
    with os.fdopen(_regular(os.fspath(path), None, MAX_FILE), "rb") as file:
        data = file.read(MAX_FILE)
    suffix = path.suffix.lower()
    slug = notebook.slug_of(_parsed(data, suffix))
    if not slug:
        raise CourseError('it is no chapter of this course: no cell says `begin("CHAPTER")`')
    return _Files(lambda name: data if name == f"{slug}{suffix}" else None)


def _regular(name: str, folder: int | None, limit: int) -> int:
    """Open a regular file of at most `limit` bytes, no link and nothing that blocks."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", "") or problem
        if getattr(problem, "errno", 0) == errno.ELOOP:
            reason = "it is a link"
        raise CourseError(f"{os.path.basename(name)} cannot be opened ({reason})") from None
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_size <= limit:
        return file
    os.close(file)
    what = "is too large" if stat.S_ISREG(about.st_mode) else "is not a regular file"
    raise CourseError(f"{os.path.basename(name)} {what} (at most {limit >> 20} MiB)")


def _folder_descriptor(name: str | Path, folder: int | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder)


def _only_folder(path: Path) -> str:
    """`inner/` where a submission is one folder in a folder, as archives often unpack."""
    with os.scandir(path) as entries:
        names = [e.name for e in entries if not e.name.startswith((".", "__MACOSX"))]
    if len(names) == 1 and names[0] not in _INNER:
        inner = path / names[0]
        if inner.is_dir() and not inner.is_symlink():
            return f"{names[0]}/"
    return ""


def _from_folder(top: int, name: str) -> bytes | None:
    *folders, last = name.split("/")
    opened: list[int] = []
    try:
        here = top
        for folder in folders:
            here = _folder_descriptor(folder, here)
            opened.append(here)
        with os.fdopen(_regular(last, here, MAX_FILE), "rb") as file:
            return file.read(MAX_FILE)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise CourseError(f"{name} is behind a link or unreadable ({problem.strerror})") from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextmanager
def _zip(file: io.BufferedReader) -> Iterator[_Files]:
    try:
        archive = zipfile.ZipFile(file)
    except Exception as problem:  # a broken archive raises many kinds
        raise CourseError(f"it is not a zip file ({type(problem).__name__})") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise CourseError(f"the zip has {len(members):,} members; at most {MAX_MEMBERS:,}")
    alike: dict[str, list[zipfile.ZipInfo]] = {}
    for member in members:
        alike.setdefault(_folded(member.filename), []).append(member)
    firsts = {m.filename.split("/")[0] for m in members} - {"__MACOSX"}
    only = firsts.pop() if len(firsts) == 1 else ""
    deeper = only and only not in _INNER and not only.endswith(NOTEBOOKS)
    prefix = f"{only}/" if deeper else ""
    with archive:
        yield _Files(lambda name: _member(archive, alike, prefix + name))


def _folded(name: str) -> str:
    """What a name becomes on file systems that ignore case, accents' encoding or slashes."""
    return unicodedata.normalize("NFKC", name.replace("\\", "/")).casefold()


def _member(
    archive: zipfile.ZipFile, alike: dict[str, list[zipfile.ZipInfo]], name: str
) -> bytes | None:
    found = alike.get(_folded(name), [])
    if not any(m.filename.replace("\\", "/") == name for m in found):
        return None
    if len(found) > 1:
        raise CourseError(f"the zip has {len(found)} members that are called {name} or nearly so")
    member, folders = found[0], name.split("/")[:-1]
    above = ["/".join(folders[: n + 1]) for n in range(len(folders))]
    if any(_is_link(m) for a in (name, *above) for m in alike.get(_folded(a), [])):
        raise CourseError(f"{name} is a link in the zip, not a file")
    if member.flag_bits & 1:
        raise CourseError(f"{name} is encrypted in the zip")
    try:
        with archive.open(member) as file:
            data = file.read(MAX_FILE + 1)
    except Exception as problem:  # damaged, unknown compression, out of memory
        raise CourseError(f"{name} cannot be unpacked ({type(problem).__name__})") from None
    if len(data) > MAX_FILE:
        raise CourseError(f"{name} is too large (at most {MAX_FILE >> 20} MiB)")
    return data


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(member.external_attr >> 16)


def _parsed(data: bytes, suffix: str) -> NotebookNode:
    """The cells of a notebook. CourseError for what is none, with a reason in plain words."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
        if suffix == ".ipynb":
            raw = json.loads(text)
        else:
            import jupytext

            raw = jupytext.reads(text, fmt="md:myst")
    except Exception as problem:  # parsers of hostile text raise what they like
        raise CourseError(f"{_NOT_NOTEBOOK} ({type(problem).__name__})") from None
    if isinstance(raw, dict) and "worksheets" in raw:
        raise CourseError("is in the old notebook format 3: open it in Jupyter and save it again")
    rows = raw.get("cells") if isinstance(raw, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CourseError(f"{_NOT_NOTEBOOK} (it has no list of cells)")
    if len(rows) > MAX_CELLS:
        raise CourseError(f"has {len(rows):,} cells; at most {MAX_CELLS:,}")
    return NotebookNode(cells=[_cell(row) for row in rows])


def _cell(row: dict) -> NotebookNode:
    source, about = row.get("source", ""), row.get("metadata")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    tags = about.get("tags") if isinstance(about, dict) else None
    return NotebookNode(
        cell_type=row.get("cell_type"),
        source=source if isinstance(source, str) else "",
        metadata=NotebookNode(tags=tags if isinstance(tags, list) else []),
    )


def _chapter(chapter: Chapter, files: _Files, whole: "hashlib._Hash") -> dict:
    """The answers of one chapter, from whichever copy of its notebook holds the work."""
    record = recordfile.load(chapter)
    stubs = {key: source for kind, key, source in record.cells if kind == "answer"}
    worked: dict[str, tuple[str, notebook.Found]] = {}
    first: tuple[str, notebook.Found] | None = None
    for name in candidates(chapter):
        try:
            data = files.get(name)
            if data is None:
                continue
            whole.update(f"{name} {len(data)} ".encode() + data)
            found = notebook.answers(_parsed(data, Path(name).suffix), record.keys)
        except CourseError as problem:
            said = str(problem)
            said = said if said.startswith(Path(name).name) else f"{name} {said}"
            return {"file": name, "problem": said, "answers": {}}
        first = first or (name, found)
        if _worked(found, stubs):
            prints = {key: notebook.fingerprint(source) for key, source in found.answers.items()}
            worked.setdefault(json.dumps(prints, sort_keys=True), (name, found))
    if len(worked) > 1:
        names = " and ".join(name for name, _ in worked.values())
        return {
            "file": next(iter(worked.values()))[0],
            "problem": f"{names} hold different answers: hand in one of them",
            "answers": {},
        }
    if not first:
        return {"file": "", "problem": "", "answers": {}}
    name, found = next(iter(worked.values()), first)
    return {"file": name, "problem": "", "answers": _answers(record, found, stubs)}


def _worked(found: notebook.Found, stubs: dict[str, str]) -> bool:
    """Whether a copy holds work; the stubs of an older version of the chapter are none."""
    return any(
        key in stubs
        and notebook.fingerprint(source) != notebook.fingerprint(stubs[key])
        and "raise NotImplementedError" not in source
        for key, source in found.answers.items()
    )


def _answers(record: Record, found: notebook.Found, stubs: dict[str, str]) -> dict[str, dict]:
    """Exercise -> the fields of its `Answer`, linted."""
    sound = {k: s for k, s in found.answers.items() if k in stubs and k not in found.problems}
    out: dict[str, Answer] = {}
    for key in record.keys:
        source = found.answers.get(key, "")
        answer = Answer(source, problem=found.problems.get(key, ""))
        out[key] = answer
        if key in found.answers:
            answer.fingerprint = notebook.fingerprint(source)
            answer.tried = answer.fingerprint != notebook.fingerprint(stubs[key])
        if key in sound and answer.tried:
            checks = [s for kind, where, s in record.cells if kind == "check" and where == key]
            try:
                finding = lint.lint(source)
                found_shortcut = lint.shortcut(key, sound, lint.demanded(checks, key))
            except notebook.UNPARSABLE:  # parses, yet is too deep to walk
                answer.problem = "the answer nests too deeply to be read"
                continue
            answer.warnings = finding.warnings
            answer.problem = finding.refused or found_shortcut
    return {key: asdict(answer) for key, answer in out.items()}
