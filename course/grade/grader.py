"""Grade submissions from end to end: read, run in the box, compare, give credit.

Each submission runs once per chapter, all its answers together. What goes wrong there is looked at
again in fresh boxes: an answer that ended the process must not cost the others their points, and an
exercise that failed because of those it needs gets its credit apart.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from course import notebook, recordfile, solutions
from course.catalog import Chapter
from course.check import BLOCKED, FAILED, PASSED, UNTRIED
from course.errors import CourseError
from course.grade.box import Boxed
from course.grade.submissions import Answer, Submission
from course.grade.verdict import (
    INFRASTRUCTURE,
    UNCHECKABLE,
    Graded,
    graded,
    judge,
    uncheckable,
)
from course.recordfile import Record, Recorded
from course.shell import Ran

Cells = list[tuple[str, str, str]]
MAX_ENDED = 3  # boxes that one chapter of a submission may bring down; then the rest is failed
ENDED = {
    "timeout": "its answers did not end in time: an endless loop?",
    "memory": "its answers need more memory than the box has",
    "output": "its answers print more than the box lets out",
    "died": "its answers ended the process",
}


class Executor(Protocol):
    """Something that runs boxes, `width` of them at once; threads may call `run`."""

    width: int

    def run(self, cells: Cells, seed: int) -> Boxed: ...


class Reads(Protocol):
    """The one thing that grading asks of a `reader.Reader`."""

    def read(self, path: Path, slugs: list[str]) -> dict: ...


class Lost(Exception):
    """A box gave no answer for a reason that the host saw: nobody's fault, to be tried again."""


@dataclass(frozen=True)
class Reference:
    """A chapter under the batch's seed: our answers and what they showed."""

    chapter: Chapter
    record: Record
    answers: dict[str, str]
    checks: dict[str, Ran]
    closed: dict[str, str]  # exercise -> why it cannot be checked here
    fingerprints: dict[str, str]  # of our answers; `ast.parse` does not belong in many threads


@dataclass(frozen=True)
class Batch:
    """What all submissions are graded with."""

    seed: int
    references: dict[str, Reference]
    reader: Reads
    executor: Executor


@dataclass
class Outcome:
    """One submission: `verdict` is deterministic, `timing` is not. `lost` asks for another try."""

    submission: Submission
    verdict: dict
    timing: dict
    lost: bool = False


def reference(chapter: Chapter, run: Callable[[Cells, int], Boxed], seed: int) -> Reference:
    """Run a chapter's reference answers once. CourseError if nothing of it can be checked here."""
    record = recordfile.load(chapter)
    ours = {
        key: solutions.answer_cell(key, solutions.from_file(chapter.solution, key))
        for key in record.keys
    }
    boxed = run(cells(record, ours, record.keys), seed)
    if boxed.status != "ok":
        raise CourseError(
            f"`{chapter.slug}` cannot be graded here: its reference answers end with "
            f"{boxed.status} ({boxed.detail})"
        )
    nothing = Ran(error="no result")
    closed = {
        e.key: why
        for e in record.exercises
        if (why := uncheckable(e, boxed.checks.get(e.key, nothing)))
    }
    if len(closed) == len(record.keys):
        raise CourseError(
            f"`{chapter.slug}` has no check that works here, so nobody could pass: "
            f"{next(iter(closed.values()), 'it has no exercise')}"
        )
    prints = {key: notebook.fingerprint(source) for key, source in ours.items()}
    return Reference(chapter, record, ours, boxed.checks, closed, prints)


def cells(
    record: Record, answers: dict[str, str], checks: Iterable[str], only: set[str] | None = None
) -> Cells:
    """Setup, answers and the checks of some exercises, in the chapter's order.

    Args:
        answers: the source of every answer cell.
        only: leave out the answers to other exercises.
    """
    wanted, out = set(checks), []
    for kind, key, source in record.cells:
        if kind == "setup" or (kind == "check" and key in wanted):
            out.append((kind, key, source))
        elif kind == "answer" and (only is None or key in only):
            out.append((kind, key, answers[key]))
    return out


def grade(submission: Submission, batch: Batch, last: bool = False) -> Outcome:
    """Grade one submission.

    Args:
        last: after this try there is no other, so what is lost becomes an infrastructure error.
    """
    slugs = list(batch.references)
    said: dict = {"digest": "", "problem": submission.problem, "chapters": {}}
    if not submission.problem:
        said = batch.reader.read(submission.path, slugs)
    boxes: list[dict] = []
    chapters, lost = {}, False
    for slug, ours in batch.references.items():
        theirs = said["chapters"].get(slug, {"problem": said["problem"], "answers": {}})
        one = _Chapter(ours, batch, boxes)
        try:
            rows = one.grade(theirs)
        except Lost:
            if not last:
                return Outcome(submission, {}, {}, lost=True)
            lost = True
            rows = [graded(e, INFRASTRUCTURE) for e in ours.record.exercises]
        chapters[slug] = {
            "title": ours.chapter.title,
            "file": theirs.get("file", ""),
            "problem": theirs["problem"],
            **_sums([asdict(row) for row in rows]),
            "exercises": [asdict(row) for row in rows],
        }
    verdict = {
        "id": submission.id,
        "digest": said["digest"],
        "problem": said["problem"],
        **_sums(chapters.values()),
        "chapters": chapters,
    }
    timing = {"seconds": round(sum(b["seconds"] for b in boxes), 3), "boxes": boxes}
    return Outcome(submission, verdict, timing, lost)


def _sums(rows: Iterable[dict]) -> dict[str, int]:
    rows = list(rows)
    return {name: sum(row[name] for row in rows) for name in ("points", "of", "independent")}


@dataclass
class _Chapter:
    """One chapter of one submission on its way to verdicts."""

    ours: Reference
    batch: Batch
    boxes: list[dict]
    ended: int = 0  # boxes that its answers brought down
    answers: dict[str, str] = field(default_factory=dict)

    def grade(self, theirs: dict) -> list[Graded]:
        record = self.ours.record
        found = {key: Answer(**answer) for key, answer in theirs["answers"].items()}
        rows = {e.key: self._without_running(e, found.get(e.key), theirs) for e in record.exercises}
        tried = [key for key, row in rows.items() if row is None]
        stubs = {key: source for kind, key, source in record.cells if kind == "answer"}
        self.answers = {k: found[k].source if k in tried else s for k, s in stubs.items()}
        ran, ending = self._run_all(tried)
        done = {key: row for key, row in rows.items() if row} | ran
        for exercise in record.exercises:
            if exercise.key in tried and done[exercise.key].status == FAILED:
                self._credit(exercise, done, ending)
        for key, answer in found.items():
            done[key].warnings = answer.warnings
            done[key].fingerprint = answer.fingerprint
            done[key].published = answer.fingerprint == self.ours.fingerprints[key]
        return [done[key] for key in record.keys]

    def _without_running(
        self, exercise: Recorded, answer: Answer | None, theirs: dict
    ) -> Graded | None:
        """The verdict of an exercise for which there is nothing to run, else None."""
        if exercise.key in self.ours.closed:
            return graded(exercise, UNCHECKABLE, self.ours.closed[exercise.key])
        if theirs["problem"]:
            return graded(exercise, FAILED, theirs["problem"])
        if answer is None:
            return graded(exercise, UNTRIED, "this chapter was not handed in")
        if answer.problem and answer.fingerprint:
            return graded(exercise, FAILED, answer.problem)
        return None if answer.tried else graded(exercise, UNTRIED, answer.problem)

    def _run_all(self, tried: list[str]) -> tuple[dict[str, Graded], set[str]]:
        """Verdicts of the first run, and which answers ended a box of their own.

        Where all together ended the process, each is judged in a box with those it needs alone. If
        it fails there, all that end no box join it: an import or a helper may stand in their cells.
        """
        if not tried:
            return {}, set()
        record = self.ours.record
        together = self._box("all", cells(record, self.answers, tried))
        if together.status == "ok":
            return {key: self._judge(key, together) for key in tried}, set()
        out: dict[str, Graded] = {}
        ending: set[str] = set()  # what needs one of these would only end another box
        for key in tried:
            boxed, needs = together, set(record.exercise(key).needs)
            if len(tried) > 1 and self.ended < MAX_ENDED and not needs & ending:
                boxed = self._box(key, cells(record, self.answers, [key], {key, *needs}))
                if boxed.status != "ok":
                    ending.add(key)
            out[key] = self._judge(key, boxed)
        for key in tried if len(tried) > 1 else ():
            lone = key not in ending and not {*record.exercise(key).needs} & ending
            if lone and out[key].status == FAILED and self.ended < MAX_ENDED:
                rest = {*tried} - ending
                boxed = self._box(f"{key} again", cells(record, self.answers, [key], rest))
                ending |= set() if boxed.status == "ok" else {key}
                out[key] = self._judge(key, boxed)
        return out, ending

    def _credit(self, exercise: Recorded, done: dict[str, Graded], ending: set[str]) -> None:
        """Run a failed exercise with our answers to what it needs and did not pass."""
        guilty = [k for k in exercise.needs if done[k].status != PASSED]
        if not guilty or self.ended >= MAX_ENDED:
            return
        answers = {**self.answers, **{key: self.ours.answers[key] for key in guilty}}
        only = {*answers} - ending | {exercise.key, *exercise.needs}
        boxed = self._box(
            f"{exercise.key} alone", cells(self.ours.record, answers, [exercise.key], only)
        )
        if self._judge(exercise.key, boxed).status == PASSED:
            row, names = done[exercise.key], ", ".join(f"`{key}`" for key in guilty)
            row.status, row.independent = BLOCKED, exercise.difficulty
            row.text = f"fails because of {names}; with ours it passes"
            row.mistake = row.hint = ""

    def _judge(self, key: str, boxed: Boxed) -> Graded:
        exercise = self.ours.record.exercise(key)
        if boxed.status != "ok":
            return graded(exercise, FAILED, ENDED.get(boxed.status, ENDED["died"]))
        return judge(exercise, self.ours.checks[key], boxed.checks.get(key))

    def _box(self, what: str, job: Cells) -> Boxed:
        boxed = self.batch.executor.run(job, self.batch.seed)
        self.boxes.append(
            {
                "chapter": self.ours.chapter.slug,
                "what": what,
                "status": boxed.status,
                "seconds": round(boxed.seconds, 3),
                "detail": boxed.detail[:200],
                # what the box claims, within what we saw
                "checks": {
                    key: round(min(max(0.0, ran.seconds), boxed.seconds), 3)
                    for key, ran in boxed.checks.items()
                },
            }
        )
        if boxed.status == "infrastructure":
            raise Lost(boxed.detail)
        self.ended += boxed.status != "ok"
        return boxed


def grade_all(submissions: Iterable[Submission], batch: Batch) -> Iterator[Outcome]:
    """Grade many at once, in any order; those that got lost again at the end, one by one.

    Only as many are in flight as the executor runs, so memory does not grow with the class.
    """
    again: list[Submission] = []
    for outcome in _in_threads(submissions, lambda one: grade(one, batch), batch.executor.width):
        if outcome.lost:
            again.append(outcome.submission)
        else:
            yield outcome
    for submission in again:
        yield grade(submission, batch, last=True)


def _in_threads(
    items: Iterable[Submission], work: Callable[[Submission], Outcome], width: int
) -> Iterator[Outcome]:
    """Results as they come. Daemon threads: when the grader is told to stop, nobody waits."""
    todo, lock = iter(items), threading.Lock()
    done: queue.Queue[Outcome | BaseException | None] = queue.Queue(maxsize=2 * width)

    def loop() -> None:
        try:
            while True:
                with lock:
                    item = next(todo, None)
                if item is None:
                    break
                done.put(work(item))
        except BaseException as problem:
            done.put(problem)
        done.put(None)

    for _ in range(width):
        threading.Thread(target=loop, daemon=True).start()
    running = width
    while running:
        result = done.get()
        if result is None:
            running -= 1
        elif isinstance(result, BaseException):
            raise result
        else:
            yield result
