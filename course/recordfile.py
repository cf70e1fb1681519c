"""The record file of a chapter: what its reference answers showed, and what its mutants showed.

One JSON file per chapter, beside the notebook. It also holds the sources of setup, stub and check
cells, so that a learner's edits to those cells change nothing.
"""

import difflib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from course.catalog import Chapter, find
from course.errors import CourseError


@dataclass
class Recorded:
    """One exercise: its card, what its checks showed, and how known mistakes look."""

    key: str
    title: str
    difficulty: int
    minutes: int
    hint: str
    needs: list[str]  # other exercises whose answers this one uses
    check: str  # fingerprint of its check cells: progress is kept while it stands
    expected: list[dict] = field(default_factory=list)  # name, values, tol, part (which check cell)
    known: list[dict] = field(default_factory=list)  # see course.mutants.fingerprints
    automatic: int = 0  # changes by machine that its check has to reject


@dataclass
class Record:
    chapter: str
    depends: str  # hash of everything the outputs depend on
    cells: list[list[str]]  # [kind, key, source] of setup, answer (stub) and check cells
    exercises: list[Recorded]

    def exercise(self, key: str) -> Recorded:
        return next(e for e in self.exercises if e.key == key)

    @property
    def keys(self) -> list[str]:
        return [e.key for e in self.exercises]


def load(chapter: Chapter) -> Record:
    """Read a chapter's record. CourseError if it is missing or broken."""
    try:
        raw = json.loads(chapter.record.read_text(encoding="utf-8"))
        raw["exercises"] = [Recorded(**e) for e in raw["exercises"]]
        return Record(**raw)
    except FileNotFoundError:
        raise CourseError(
            f"`{chapter.slug}` has no record file: run `course record {chapter.slug}`, "
            f"or restore it with `git checkout notebooks`"
        ) from None
    except (ValueError, TypeError, KeyError) as problem:
        raise CourseError(
            f"{chapter.record.name} is broken ({problem}): restore it with `git checkout notebooks`"
        ) from None


def known_exercise(chapter: Chapter, record: Record, key: str) -> Recorded:
    """The exercise called `key`. CourseError with the nearest name if there is none."""
    if key in record.keys:
        return record.exercise(key)
    near = difflib.get_close_matches(key, record.keys, n=1, cutoff=0.4)
    hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(record.keys)}"
    raise CourseError(f"`{chapter.slug}` has no exercise `{key}`: {hint}")


def save(chapter: Chapter, record: Record) -> None:
    write_json(chapter.record, asdict(record))


def write_json(path: Path, data: Any) -> None:
    """Write JSON, indented, with each list of plain values on one line."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    flat = re.compile(r"\[\n\s+[^\[\]{}]*?\n\s+\]")  # a string holds no raw line break
    text = flat.sub(
        lambda m: re.sub(r"\n\s*", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text
    )
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise CourseError(
            f"cannot write {path}: it would hold half a character "
            f"({text[problem.start]!a} near {text[max(0, problem.start - 20) : problem.start]!a})"
        ) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as problem:
        raise CourseError(
            f"cannot write {path}: {problem.strerror}; is the folder read-only?"
        ) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as problem:
        Path(temporary).unlink(missing_ok=True)
        raise CourseError(f"cannot write {path}: {problem.strerror}") from None


def load_for_feedback(slug: str) -> dict[str, Recorded]:
    """The exercise of each shown name; empty if there is no record."""
    try:
        record = load(find(slug))
    except CourseError:
        return {}
    return {line["name"]: e for e in record.exercises for line in e.expected}
