"""The folder of results: what survives when the grader does not.

A verdict file is written whole the moment a submission is done, and holds nothing that differs
between two runs of the same batch; times lie beside it. The batch's seed is readable by its owner
alone until the batch is closed, then it is published: until then nobody may know it, afterwards
everybody can repeat what was graded.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import filelock

from course.catalog import ROOT
from course.errors import CourseError
from course.grade.grader import Outcome
from course.recordfile import write_text

_SEED_FILE = ".seed"
_FOLDERS = ("verdicts", "timing", "lost", "report")


class Results:
    """One folder of results. Use `opened` to make or continue one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch: dict[str, Any] = {}
        self.seed = 0

    def verdict_path(self, id: str) -> Path:
        return self.folder / "verdicts" / f"{name_of(id)}.json"

    def has(self, id: str) -> bool:
        """Whether a submission has its final verdict; an unreadable file is none."""
        return self.verdict(id) is not None

    def verdict(self, id: str) -> dict | None:
        return _verdict(self.verdict_path(id), id)

    def timing(self, id: str) -> dict:
        """How long the boxes of a submission took; nothing if nobody knows any more."""
        found = _read(self.folder / "timing" / f"{name_of(id)}.json")
        return found if found and _is_timing(found) else {"seconds": 0, "boxes": []}

    def add(self, outcome: Outcome) -> None:
        """Keep one outcome. What the infrastructure lost is kept apart, to be graded on resume."""
        id = outcome.submission.id
        write_text(self.folder / "timing" / f"{name_of(id)}.json", _dump(outcome.timing))
        place = self.lost_path(id) if outcome.lost else self.verdict_path(id)
        write_text(place, _dump(outcome.verdict))
        if not outcome.lost:
            self.lost_path(id).unlink(missing_ok=True)

    def lost_path(self, id: str) -> Path:
        return self.folder / "lost" / f"{name_of(id)}.json"

    def lost(self, id: str) -> dict | None:
        """The provisional verdict on a submission that got lost twice."""
        return _verdict(self.lost_path(id), id)

    def close(self) -> None:
        """Publish the seed: nothing more is graded under it."""
        self.batch |= {"state": "closed", "seed": self.seed}
        write_text(self.folder / "batch.json", _dump(self.batch))
        (self.folder / _SEED_FILE).unlink(missing_ok=True)

    @property
    def closed(self) -> bool:
        return self.batch["state"] == "closed"


@contextmanager
def opened(
    folder: Path, resume: bool, seed: int | None, wanted: dict[str, Any]
) -> Iterator[Results]:
    """Make a batch in an empty folder, or continue the one that is there; locked meanwhile.

    Args:
        seed: None for a fresh secret one; ignored where a batch is continued.
        wanted: what the batch is graded with (chapters, box, limits); it must be the same when a
            batch is continued.

    Raises CourseError if the folder holds something else, another grader works in it, or the
    batch was begun differently or by another version of the course.
    """
    results = Results(folder)
    there = _begun(folder)
    if resume and there is None:
        raise CourseError(f"{folder} holds no batch to resume: leave `--resume` out")
    if not resume and folder.exists() and any(folder.iterdir()):
        what = "holds a batch: say `--resume` or name" if there else "is not empty: name"
        raise CourseError(f"{folder} {what} another folder with `--out`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise CourseError(f"another `course grade` is working in {folder}: wait for it") from None
    except OSError as problem:
        raise CourseError(f"cannot write to {folder}: {problem.strerror}") from None
    try:
        if there is None:
            _begin(results, seed, wanted)
        else:
            _continue(results, there, wanted)
        yield results
    finally:
        lock.release()


def chapters(folder: Path) -> list[str]:
    """The chapters of the batch in a folder; none if there is no batch."""
    return (_begun(folder) or {"chapters": []})["chapters"]


def _begun(folder: Path) -> dict | None:
    """What was written of the batch in a folder; CourseError if it is damaged."""
    there = _read(folder / "batch.json")
    if there is None:
        return None
    names, state = there.get("chapters"), there.get("state")
    sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not sound or state not in ("open", "closed") or "seed_sha256" not in there:
        raise CourseError(f"{folder}/batch.json is damaged: grade into a new folder")
    return there


def _begin(results: Results, seed: int | None, wanted: dict[str, Any]) -> None:
    results.seed = secrets.randbits(62) if seed is None else seed
    file = os.open(results.folder / _SEED_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(str(results.seed))
    digest = _digest(results.seed)
    results.batch = {"state": "open", "seed_sha256": digest, "course": code_hash(), **wanted}
    write_text(results.folder / "batch.json", _dump(results.batch))


def _continue(results: Results, there: dict, wanted: dict[str, Any]) -> None:
    results.batch = there
    now = {"course": code_hash(), **wanted}
    other = [name for name, value in now.items() if there.get(name) != value]
    if other:
        raise CourseError(
            f"the batch in {results.folder} was begun with another {other[0]} "
            f"({there.get(other[0])!r}, now {now[other[0]]!r}): grade into a new folder"
        )
    for name in _FOLDERS:
        if (results.folder / name).is_symlink():
            raise CourseError(f"{results.folder}/{name} is a link to files of somebody: remove it")
    try:
        secret = (results.folder / _SEED_FILE).read_text() if not results.closed else there["seed"]
        results.seed = int(secret)
    except (OSError, ValueError, TypeError, KeyError):
        raise CourseError(
            f"the seed of the batch in {results.folder} is missing or unreadable: without its seed "
            f"the batch cannot be continued, grade into a new folder"
        ) from None
    if _digest(results.seed) != there["seed_sha256"]:
        raise CourseError(
            f"the seed in {results.folder} is not the one that its batch was begun with: grade "
            f"into a new folder"
        )


def _digest(seed: int) -> str:
    """What binds a batch to its seed while nobody may know it."""
    return hashlib.sha256(str(seed).encode()).hexdigest()


def name_of(id: str) -> str:
    """A file name for any id."""
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def code_hash() -> str:
    """A hash of the course's own code, without which two graders could disagree."""
    whole = hashlib.sha256()
    for path in sorted((ROOT / "course").rglob("*.py")):
        whole.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def _dump(data: dict) -> str:
    """JSON that any id survives: half a surrogate is written as its escape."""
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _read(path: Path) -> dict | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _verdict(path: Path, id: str) -> dict | None:
    """The verdict on a submission; a file without one is none, so that it is graded again."""
    found = _read(path)
    whole = found and found.get("id") == id and isinstance(found.get("chapters"), dict)
    return found if whole else None


def _is_timing(data: dict) -> bool:
    boxes = data.get("boxes")
    return isinstance(boxes, list) and all(
        isinstance(box, dict)
        and {"chapter", "what", "seconds"} <= set(box)
        and isinstance(box.get("checks"), dict)
        for box in boxes
    )
