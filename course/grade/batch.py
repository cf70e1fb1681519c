"""One batch from the command line to the reports."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from course import catalog
from course.catalog import Chapter
from course.errors import CourseError
from course.grade import cluster, report, results, submissions
from course.grade.box import Box, Limits
from course.grade.grader import Batch, Outcome, Reference, grade_all, reference
from course.grade.reader import Reader
from course.grade.submissions import Student, Submission
from course.text import line

Progress = Callable[[str, int, int | None, str], None]  # what, how many are done, of, remark


@dataclass(frozen=True)
class Plan:
    """What the user asked for: the options of `course grade`. `memory` is in bytes."""

    submissions: Path
    out: Path
    chapters: list[str]
    roster: Path | None
    seed: int | None
    workers: int | None
    scheduler: str
    resume: bool
    seconds: float
    memory: int
    unsafe: bool


@dataclass(frozen=True)
class Summary:
    """What to tell the user. `lost` submissions are those that the infrastructure kept."""

    line: str
    warnings: list[str]
    lost: int


def run(plan: Plan, progress: Progress = lambda *_: None) -> Summary:
    """Grade a batch and write its reports.

    Raises CourseError for whatever keeps the whole batch from being graded; a bad submission never
    does.
    """
    out, place = (os.path.realpath(path) for path in (plan.out, plan.submissions))
    with Reader() as reader:
        found = submissions.listed(plan.submissions, reader.present)
        found = [one for one in found if os.path.realpath(one.path) != out]
        students = submissions.roster(plan.roster) if plan.roster else None
        if out == place:
            raise CourseError("`--out` must not be the folder of submissions: name another")
        # an endless loop must cost its own cell before it costs the whole run
        limits = Limits(seconds=plan.seconds, cell_seconds=plan.seconds / 4, memory=plan.memory)
        box = Box(limits, plan.unsafe)
        _prove(box, progress)
        chapters = _chapters(plan, found, reader)
        wanted = {
            "chapters": [chapter.slug for chapter in chapters],
            "unsafe": plan.unsafe,
            "seconds": plan.seconds,
            "memory": plan.memory,
        }
        with results.opened(plan.out, plan.resume, plan.seed, wanted) as kept:
            ours = {}
            for number, chapter in enumerate(chapters):
                progress("our own answers", number, len(chapters), chapter.slug)
                ours[chapter.slug] = reference(chapter, box.run, kept.seed)
            _grade(plan, found, kept, box, reader, ours, progress)
            return _report(found, kept, students, ours, box, progress)


def _prove(box: Box, progress: Progress) -> None:
    """No box, no grading; `--unsafe` says on every report that there was none."""
    if not box.unsafe:
        progress("proving the box", 0, None, "")
        fault = cluster.unproven(box.prove())
        if fault:
            raise CourseError(f"this machine cannot grade safely, {fault}: grade in CI instead")


def _chapters(plan: Plan, found: list[Submission], reader: Reader) -> list[Chapter]:
    """The chapters to grade: those asked for, else those of which anybody has a notebook."""
    names = plan.chapters or (plan.resume and results.chapters(plan.out))
    if names:
        return list(dict.fromkeys(catalog.ready(name) for name in names))
    ready = [c for c in catalog.chapters() if c.status == "ready"]
    slugs = [chapter.slug for chapter in ready]
    there: set[str] = set()
    for one in found:
        if not one.problem and len(there) < len(slugs):
            there |= set(reader.present(one.path, [s for s in slugs if s not in there]))
    if not there:
        raise CourseError(
            f"{plan.submissions} holds no notebook of a chapter where one belongs: work/SLUG.ipynb "
            f"or notebooks/PART/SLUG.ipynb, or say `--chapters`"
        )
    return [chapter for chapter in ready if chapter.slug in there]


def _grade(
    plan: Plan,
    found: list[Submission],
    kept: results.Results,
    box: Box,
    reader: Reader,
    ours: dict[str, Reference],
    progress: Progress,
) -> None:
    todo = [one for one in found if not kept.has(one.id)]
    if not todo:
        return
    if kept.closed:
        raise CourseError(
            f"the batch in {kept.folder} is closed and its seed is public: grade late submissions "
            f"into a new folder"
        )
    workers = min(plan.workers or _cores(), len(todo))
    progress("starting workers", 0, None, "")
    with cluster.executor(box, workers, plan.scheduler) as executor:
        _grade_all(todo, Batch(kept.seed, ours, reader, executor), kept, progress, len(found))


def _grade_all(
    todo: list[Submission], batch: Batch, kept: results.Results, progress: Progress, total: int
) -> None:
    done, full, lost = total - len(todo), 0, 0
    progress("grading", done, total, "")
    for outcome in grade_all(todo, batch):
        kept.add(outcome)
        done, lost, full = done + 1, lost + outcome.lost, full + _full(outcome)
        remark = f"{full} with full points" + (f", {lost} lost" if lost else "")
        progress("grading", done, total, remark)


def _full(outcome: Outcome) -> bool:
    return 0 < outcome.verdict["of"] == outcome.verdict["points"]


def _report(
    found: list[Submission],
    kept: results.Results,
    students: list[Student] | None,
    ours: dict[str, Reference],
    box: Box,
    progress: Progress,
) -> Summary:
    progress("reports", 0, None, "")
    ids = [one.id for one in found]
    lost = sum(not kept.has(id) for id in ids)
    if not lost and not kept.closed:
        kept.close()
    total = report.write(kept, ids, students, ours, box.guarantees())
    states = [row.state for row in total.rows]
    parts = [f"{states.count('graded')} graded"]
    for state in ("unreadable", "missing", "infrastructure error"):
        if states.count(state):
            parts.append(f"{states.count(state)} {state}")
    warnings = [f"{line(row.id)} is not on the roster" for row in total.rows if row.stranger]
    warnings += box.guarantees()
    for slug, chapter in ours.items():
        warnings += [f"{slug}/{key} is {why}" for key, why in chapter.closed.items()]
    if lost:
        warnings.append(f"{lost} without a final verdict: say `--resume` to grade them")
    return Summary(", ".join(parts), warnings, lost)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says what this process may use
        return os.cpu_count() or 1
