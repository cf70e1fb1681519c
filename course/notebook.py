"""A chapter's notebook as the course sees it: cells with kinds, exercises, answers."""

import ast
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from course.errors import CourseError

GRADED = ("setup", "answer", "check")  # what checks, mutants and grading run
_MARK = re.compile(r"^#\s*((?i:setup|predict|demo|gpu)|((?i:answer|check)):\s*([A-Za-z_]\w*))\s*$")
_TAG = re.compile(r"^(setup|predict|demo|gpu|(answer|check)-([A-Za-z_]\w*))$")
_SOLUTION = re.compile(r"<!--\s*solution:\s*([A-Za-z_]\w*)\s*-->")
_HINT = re.compile(r"<details>\s*<summary>Hint</summary>(.*?)</details>", re.DOTALL)
_STUB = "raise NotImplementedError"
# what `ast.parse` raises; the last two for expressions nested thousands deep
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_TITLE = re.compile(r"^### (Exercise \d+: .+)$", re.MULTILINE)
_CARD = re.compile(r"^\*Difficulty ([123]) of 3 · (\d+) minutes\*$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """One code cell. `key` names the exercise of an answer or check, else it is empty."""

    kind: str
    key: str
    source: str
    index: int  # position in the notebook, from 0
    varies: bool = False


@dataclass(frozen=True)
class Exercise:
    """One exercise card of the prose."""

    key: str
    title: str
    difficulty: int
    minutes: int
    hint: str


@dataclass
class Found:
    """What a learner's notebook holds: the source of each answer, and what is wrong with some."""

    answers: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # key -> why it cannot be used


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook, .ipynb or .md. CourseError if it is missing or not a notebook."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CourseError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise CourseError(f"{path} cannot be read: {problem}") from None
    text = text.replace("\r\n", "\n")
    try:
        if path.suffix == ".ipynb":
            return nbformat.reads(text, as_version=4)
        import jupytext

        return jupytext.reads(text, fmt="md:myst")
    except Exception as problem:
        reason = str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
        raise CourseError(
            f"{path} is not a notebook ({reason}): restore it with `git checkout` or `course start`"
        ) from None


def clean(source: str) -> str:
    """A cell's source with Unix line ends and no trailing blanks, for comparing and running."""
    return "\n".join(line.rstrip() for line in source.replace("\r\n", "\n").split("\n")).strip("\n")


def mark(source: str) -> tuple[str, str] | None:
    """(kind, key) from the first source line, or from a comment right below it, or None."""
    for line in map(str.strip, source.lstrip().split("\n")):
        if found := _MARK.match(line):
            return (found[2] or found[1]).lower(), found[3] or ""
        if line and not line.startswith("#"):
            break
    return None


def tagged(cell: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """All (kind, key) pairs that a cell's tags name."""
    tags = cell.metadata.get("tags", [])
    found = [_TAG.match(tag) for tag in tags if isinstance(tag, str)]
    return [(m[2] or m[1], m[3] or "") for m in found if m]


def cells(nb: nbformat.NotebookNode, where: str) -> list[Cell]:
    """The code cells of an author's notebook.

    CourseError if one lacks a kind, has two, or is not Python.
    """
    out = []
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        kinds = {k for k in [mark(cell.source), *tagged(cell)] if k}
        if len(kinds) != 1:
            problem = "no kind" if not kinds else "two kinds: " + ", ".join(map("-".join, kinds))
            raise CourseError(
                f"{where}: code cell {index} has {problem}; start it with one of `# setup`, "
                f"`# answer: KEY`, `# check: KEY`, `# predict`, `# demo`, `# gpu` and tag it alike"
            )
        try:
            ast.parse(cell.source)
        except UNPARSABLE as problem:
            line = (getattr(problem, "text", "") or "").strip()
            raise CourseError(
                f"{where}: code cell {index}, {cell.source.splitlines()[0]!r}, is not Python "
                f"({problem}) {line[:60]!r}; is the fence of the cell closed?"
            ) from None
        kind, key = kinds.pop()
        varies = "varies" in cell.metadata.get("tags", [])
        out.append(Cell(kind, key, clean(cell.source), index, varies))
    return out


def exercises(nb: nbformat.NotebookNode, where: str) -> list[Exercise]:
    """The exercise cards, in order. CourseError if one lacks its title, card line or hint."""
    out = []
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        for solution in _SOLUTION.finditer(cell.source):
            key = solution[1]
            text = cell.source[: solution.start()]
            title, card, hint = (_last(pattern, text) for pattern in (_TITLE, _CARD, _HINT))
            if not (title and card and hint):
                raise CourseError(
                    f"{where}: exercise {key} needs `### Exercise N: title`, a line "
                    f"`*Difficulty 1 of 3 · 5 minutes*` and a folded hint before its solution"
                )
            out.append(
                Exercise(
                    key,
                    title[1].strip(),
                    int(card[1]),
                    int(card[2]),
                    " ".join(hint[1].split()),
                )
            )
    return out


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    """The match nearest to the end: a cell may hold more than one card."""
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def slug_of(nb: nbformat.NotebookNode) -> str:
    """The chapter that a notebook belongs to, from `begin("slug")`; empty if it is none."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            found = re.search(r"^begin\([\"'](\w+)[\"']\)", cell.source, re.MULTILINE)
            if found:
                return found[1]
    return ""


def answers(nb: nbformat.NotebookNode, keys: list[str]) -> Found:
    """The learner's answer cells, found by their first line, else by their tag.

    An identical copy of a cell is fine, and so is a stub that was kept beside the answer; two
    different ones are refused, since nobody can say which one is meant. A cell whose source does
    not parse, or that does not define KEY, is a problem of that exercise alone.
    """
    found = Found()
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        where = mark(cell.source) or next(iter(tagged(cell)), None)
        source = clean(cell.source)
        if not where or where[0] != "answer":
            continue
        key = where[1]
        kept = found.answers.setdefault(key, source)
        if _STUB in kept and _STUB not in source:
            found.answers[key] = source
        elif (_STUB in kept) >= (_STUB in source) and fingerprint(kept) != fingerprint(source):
            found.problems[key] = f"two different cells say `# answer: {key}`: keep one of them"
    for key in keys:
        if key not in found.answers:
            found.problems[key] = (
                f"no cell starts with `# answer: {key}`: `course reset SLUG {key}` brings it back"
            )
        elif key not in found.problems:
            problem = _unusable(found.answers[key], key)
            if problem:
                found.problems[key] = problem
    return found


def _unusable(source: str, key: str) -> str:
    try:
        tree = ast.parse(source)
    except (RecursionError, MemoryError):
        return "the answer nests too deeply to be read"
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None)
        if any(text.lstrip().startswith(("%", "!")) for text in source.split("\n")):
            return "magics and shell commands do not belong in an answer cell: remove them"
        where = f"line {line} of the answer" if line else "the answer"
        return f"{where} is not Python: {getattr(problem, 'msg', problem)}"
    if key not in defined(tree):
        names = ", ".join(f"`{n}`" for n in defined(tree)) or "nothing"
        return f"the answer cell must define `{key}`, but it defines {names}"
    return ""


def defined(tree: ast.Module) -> list[str]:
    """The names that a cell defines at its top level."""
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
    return names


def fingerprint(source: str) -> str:
    """A hash of what a cell says, blind to comments, blank lines and line ends."""
    try:
        said = ast.dump(ast.parse(source))
    except UNPARSABLE:
        said = clean(source)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]
