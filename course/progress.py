"""A learner's progress: one readable file in `work/`, which no update of the course touches."""

import json
from dataclasses import dataclass
from datetime import date

from course import recordfile
from course.catalog import ROOT, Chapter
from course.check import PASSED, Verdict
from course.errors import CourseError
from course.recordfile import Record

FILE = ROOT / "work" / "progress.json"


@dataclass
class Done:
    """One exercise: when it passed, for which version of its check, and whether our answer was
    shown before."""

    passed: str = ""
    check: str = ""
    solution_seen: str = ""


def load() -> dict[str, dict[str, Done]]:
    """Chapter -> exercise -> what is done. Empty when there is no file yet."""
    if not FILE.exists():
        return {}
    try:
        raw = json.loads(FILE.read_text(encoding="utf-8"))
        return {c: {k: Done(**d) for k, d in row.items()} for c, row in raw.items()}
    except (ValueError, TypeError, AttributeError):
        raise CourseError(
            f"{FILE} is not readable as progress: mend it, or move it away to start anew"
        ) from None


def note_verdicts(chapter: Chapter, record: Record, verdicts: list[Verdict]) -> None:
    """Remember what passed; a later fail does not take it back."""
    everything = load()
    row = everything.setdefault(chapter.slug, {})
    for verdict in verdicts:
        if verdict.status == PASSED:
            done = row.setdefault(verdict.key, Done())
            if done.check != record.exercise(verdict.key).check:
                done.passed = date.today().isoformat()
                done.check = record.exercise(verdict.key).check
    _save(everything)


def note_solution(chapter: Chapter, key: str) -> None:
    """Remember that the answer to `key` was shown."""
    everything = load()
    done = everything.setdefault(chapter.slug, {}).setdefault(key, Done())
    done.solution_seen = done.solution_seen or date.today().isoformat()
    _save(everything)


def counts(chapter: Chapter) -> tuple[int, int]:
    """(passed, all) exercises; one whose check has changed since counts as open again."""
    record = recordfile.load(chapter)
    row = load().get(chapter.slug, {})
    passed = sum(
        bool(done.passed) and done.check == record.exercise(key).check
        for key, done in row.items()
        if key in record.keys
    )
    return passed, len(record.keys)


def _save(everything: dict[str, dict[str, Done]]) -> None:
    plain = {c: {k: vars(d) for k, d in sorted(row.items())} for c, row in everything.items()}
    recordfile.write_json(FILE, plain)
