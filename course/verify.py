"""Everything that CI demands of one chapter, as a list of ticks."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from course import mistakes, mutants, notebook, record, recordfile, solutions
from course.catalog import ROOT, Chapter
from course.errors import CourseError
from course.nbval_plugin import differences
from course.recordfile import Record
from course.shell import Ran, Worker, WorkerLost

SEEDS = 20  # second answers must pass under this many
MODEL_SEEDS = 1  # and their runs of the real model under the first of them
OTHER_SEEDS = 2  # written mutants must fail under these too, since a grader's seed is secret
MIN_MUTANTS = 2
MAX_COLUMNS = 79
UNNAMED = 10  # at most one in so many known mistakes may go without its message
SLACK = 2  # machines differ; the budget is for the one that records
REFUSALS = ("CheckFailed", "KernelError")  # how `forbid` and the kernel rules say no


@dataclass(frozen=True)
class Tick:
    """One demand and whether it is met; `detail` says what to do, or what was counted."""

    name: str
    ok: bool
    detail: str = ""


def fix(chapter: Chapter) -> list[str]:
    """Regenerate the stubs of the chapter's .md from its solutions. Returns the keys changed."""
    text = chapter.md.read_text(encoding="utf-8")
    changed = []
    for cell in notebook.cells(notebook.read(chapter.md), chapter.md.name):
        if cell.kind != "answer":
            continue
        stub = solutions.answer_cell(cell.key, solutions.stub(chapter, cell.key))
        if notebook.clean(stub) != cell.source:
            if text.count(f"{cell.source}\n```") != 1:
                raise CourseError(f"{chapter.md.name}: cannot find the cell of {cell.key} to fix")
            text = text.replace(f"{cell.source}\n```", f"{stub}\n```")
            changed.append(cell.key)
    if changed:
        recordfile.write_text(chapter.md, text)
    return changed


def verify(
    chapter: Chapter, execute: bool = False, progress: Callable[[str], None] = lambda what: None
) -> Iterator[Tick]:
    """Yield one tick per demand.

    Args:
        execute: run the demos too and compare with what is recorded, instead of trusting the
            hash of what they depend on; and try written mutants under SEEDS other seeds.
    """
    try:
        nb = notebook.read(chapter.md)
        cells = notebook.cells(nb, chapter.md.name)
        fresh = record.skeleton(chapter, nb, cells)
        stored = recordfile.load(chapter)
    except CourseError as problem:
        yield Tick("cells, cards and solutions agree", False, str(problem))
        return
    yield Tick("cells, cards and solutions agree", True, f"{len(fresh.keys)} exercises")
    yield _stubs(chapter, cells)
    yield _pair(chapter)
    yield _record(chapter, fresh, stored)
    yield _style(chapter, nb, cells)
    yield _mistakes(stored)
    if execute:
        yield _executed(chapter, stored, progress)
    with Worker() as worker:
        yield from _runs(chapter, stored, worker, progress)
        spent = worker.seconds
        if execute:
            yield _seeded(chapter, stored, worker, progress, stored.keys, SEEDS)
    yield Tick(
        "checks, mutants and second answers within the budget",
        spent <= SLACK * chapter.seconds,
        f"{spent:.0f} of {chapter.seconds} worker-seconds",
    )


def exercise(
    chapter: Chapter, key: str, progress: Callable[[str], None] = lambda what: None
) -> Iterator[Tick]:
    """The runs of one exercise from the sources as they are: nothing is recorded, no demo runs.

    Raises CourseError if the chapter's sources do not fit together.
    """
    nb = notebook.read(chapter.md)
    fresh = record.skeleton(chapter, nb, notebook.cells(nb, chapter.md.name))
    if key not in fresh.keys:
        raise CourseError(f"{chapter.slug} has no exercise `{key}`: {', '.join(fresh.keys)}")
    with Worker() as worker:
        progress("reference")
        record.show_checks(chapter, fresh, worker, key)
        yield from _runs(chapter, fresh, worker, progress, key)
    yield Tick("time", True, f"{worker.seconds:.0f} worker-seconds")


def _stubs(chapter: Chapter, cells: list[notebook.Cell]) -> Tick:
    drifted = [
        cell.key
        for cell in cells
        if cell.kind == "answer"
        and notebook.clean(solutions.answer_cell(cell.key, solutions.stub(chapter, cell.key)))
        != cell.source
    ]
    advice = f"{', '.join(drifted)}: run `course verify {chapter.slug} --fix`" if drifted else ""
    return Tick("stubs are those of the solutions", not drifted, advice)


def _pair(chapter: Chapter) -> Tick:
    def content(path):
        return [
            (c.cell_type, notebook.clean(c.source), sorted(c.metadata.get("tags", [])))
            for c in notebook.read(path).cells
        ]

    same = content(chapter.md) == content(chapter.ipynb)
    advice = "" if same else f"they differ: run `course record {chapter.slug}`"
    return Tick(".md and .ipynb agree", same, advice)


def _record(chapter: Chapter, fresh: Record, stored: Record) -> Tick:
    same = fresh.depends == stored.depends and fresh.cells == stored.cells
    advice = "" if same else f"stale: run `course record {chapter.slug}`"
    return Tick("the record is of these sources", same, advice)


def _style(chapter: Chapter, nb, cells: list[notebook.Cell]) -> Tick:
    long = [
        f"cell {cell.index} line {number}"
        for cell in cells
        for number, line in enumerate(cell.source.split("\n"), 1)
        if len(line) > MAX_COLUMNS
    ]
    prose = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    problems = [f"over {MAX_COLUMNS} columns: {', '.join(long[:5])}"] if long else []
    if not re.search(r"^#+ .*claims", prose, re.IGNORECASE | re.MULTILINE):
        problems.append("no claims ledger")
    for path in (
        ROOT / "book" / "glossary" / f"{chapter.slug}.md",
        ROOT / "book" / "references" / f"{chapter.slug}.bib",
    ):
        if not path.exists():
            problems.append(f"{path.relative_to(ROOT)} is missing")
    return Tick("prose, ledger, glossary and references", not problems, "; ".join(problems))


def _mistakes(stored: Record) -> Tick:
    """Whether a learner who makes a known mistake reads that mistake's message."""
    confused, nameless, known = [], [], 0
    for exercise in stored.exercises:
        expected = {line["name"]: line["values"] for line in exercise.expected}
        for mistake in exercise.known:
            known += 1
            wrong = {line["name"]: line["values"] for line in mistake["differs"]}
            shown = [{"name": n, "values": wrong.get(n, expected.get(n))} for n in mistake["seen"]]
            said = mistakes.named(exercise, shown, mistake["error"])
            if not said:
                nameless.append(f"{exercise.key}: nothing gives `{mistake['mutant']}` away")
            elif said != mistake["message"]:
                confused.append(f"{exercise.key}: `{mistake['mutant']}` gets another's message")
    return Tick(
        "known mistakes are told apart",
        not confused and len(nameless) <= known // UNNAMED,
        "; ".join(confused + nameless) or f"{known} named",
    )


def _executed(chapter: Chapter, stored: Record, progress: Callable[[str], None]) -> Tick:
    try:
        _, again = record.build(chapter, progress)
    except CourseError as problem:
        return Tick("a fresh recording shows the same", False, str(problem))
    changes = [
        change
        for exercise in stored.exercises
        for change in differences(exercise.expected, again.exercise(exercise.key).expected)
    ]
    return Tick("a fresh recording shows the same", not changes, "; ".join(changes[:3]))


def _runs(
    chapter: Chapter,
    stored: Record,
    worker: Worker,
    progress: Callable[[str], None],
    only: str | None = None,
) -> Iterator[Tick]:
    """Everything that executes answers (of one exercise, with `only`), in one warm process."""
    keys = [only] if only else stored.keys
    answers = mutants.references(chapter, stored)
    lines = mutants.expected(stored)
    progress("reference")
    yield _reference(stored, answers, worker, only)
    progress("stubs")
    yield _stubs_fail(chapter, stored, answers, worker, lines, keys)
    yield from _written(chapter, stored, answers, worker, lines, progress, keys)
    yield _seeded(chapter, stored, worker, progress, keys, OTHER_SEEDS)
    yield from _automatic(chapter, stored, answers, worker, lines, progress, keys)
    yield _second(chapter, stored, answers, worker, progress, only)


def _reference(stored: Record, answers: dict[str, str], worker: Worker, only: str | None) -> Tick:
    ran = worker.run(mutants.cells(stored, answers, only), timeout=record.CELL_TIMEOUT)
    wrong = [f"{k}: {r.error or 'differs'}" for k, r in ran.items() if _fails(r, stored, k)]
    return Tick("the reference passes every check", not wrong, "; ".join(wrong))


def _fails(ran: Ran, stored: Record, key: str) -> bool:
    return mutants.rejected(ran, stored, key)


def _stubs_fail(
    chapter: Chapter,
    stored: Record,
    answers: dict[str, str],
    worker: Worker,
    lines: dict[str, dict],
    keys: list[str],
) -> Tick:
    survivors = []
    for key in keys:
        stub = mutants.Mutant(key, "stub", solutions.stub(chapter, key), "")
        if not _fails(mutants.attempt(worker, stored, answers, stub, lines), stored, key):
            survivors.append(key)
    return Tick("untouched stubs fail every check", not survivors, ", ".join(survivors))


def _written(
    chapter: Chapter,
    stored: Record,
    answers: dict[str, str],
    worker: Worker,
    lines: dict[str, dict],
    progress: Callable[[str], None],
    keys: list[str],
) -> Iterator[Tick]:
    wrong = [mutant for mutant in mutants.written(chapter) if mutant.key in keys]
    few = [key for key in keys if sum(m.key == key and not m.shortcut for m in wrong) < MIN_MUTANTS]
    yield Tick(f"at least {MIN_MUTANTS} mutants per exercise", not few, ", ".join(few))
    survivors = []
    for mutant in wrong:
        progress(f"{mutant.key}: {mutant.name}")
        ran = mutants.attempt(worker, stored, answers, mutant, lines)
        if not _fails(ran, stored, mutant.key):
            survivors.append(f"{mutant.key}: {mutant.name}")
        elif mutant.shortcut and not ran.error.startswith(REFUSALS):
            survivors.append(
                f"{mutant.key}: {mutant.name} fails, but not as forbidden: {ran.error}"
            )
    detail = "; ".join(survivors) or f"{len(wrong)} rejected"
    yield Tick("every written mutant and shortcut is rejected", not survivors, detail)


def _seeded(
    chapter: Chapter,
    stored: Record,
    worker: Worker,
    progress: Callable[[str], None],
    keys: list[str],
    seeds: int,
) -> Tick:
    """Written mutants fail whatever the check draws; only runs of the real model are left out."""
    answers, survivors = mutants.references(chapter, stored), []
    wrong = [m for m in mutants.written(chapter) if m.key in keys and not m.shortcut]
    for seed in range(1, seeds + 1):
        progress(f"written mutants, seed {seed}")
        want = worker.run(mutants.cells(stored, answers, light=True), seed, timeout=120)
        lines = {line["name"]: line for ran in want.values() for line in ran.shown}
        for mutant in list(wrong):
            ran = mutants.attempt(worker, stored, answers, mutant, lines, seed)
            if ran.error.startswith("WorkerLost"):
                wrong.remove(mutant)  # an endless loop: once is enough
            elif not ran.error and not any(differences(want[mutant.key].shown, ran.shown)):
                survivors.append(f"{mutant.key}: {mutant.name}, seed {seed}")
    name = f"written mutants are rejected under {seeds} other seeds"
    return Tick(name, not survivors, "; ".join(survivors))


def _automatic(
    chapter: Chapter,
    stored: Record,
    answers: dict[str, str],
    worker: Worker,
    lines: dict[str, dict],
    progress: Callable[[str], None],
    keys: list[str],
) -> Iterator[Tick]:
    equivalent = mutants.module(chapter).EQUIVALENT
    tried, survivors, stale = 0, [], []
    for key in keys:
        reasons = dict(equivalent.get(key, {}))
        for mutant in mutants.automatic(chapter, key):
            tried += 1
            progress(f"{key}: {mutant.name}")
            known = reasons.pop(mutant.name, None)
            if known is None and not _fails(
                mutants.attempt(worker, stored, answers, mutant, lines), stored, key
            ):
                survivors.append(f"{key}: {mutant.name}")
        stale += [f"{key}: {name}" for name in reasons]
    listed = sum(len(equivalent.get(key, {})) for key in keys)
    yield Tick(
        "every automatic mutant is killed or listed as equivalent",
        not survivors and not stale,
        "; ".join([f"survives: {s}" for s in survivors] + [f"listed, but gone: {s}" for s in stale])
        or f"{tried} tried, {listed} equivalent",
    )


def _second(
    chapter: Chapter,
    stored: Record,
    answers: dict[str, str],
    worker: Worker,
    progress: Callable[[str], None],
    only: str | None,
) -> Tick:
    """A second correct answer to each exercise passes under many seeds."""
    keys = [only] if only else stored.keys
    path = chapter.second_answers
    name = f"second answers pass under {SEEDS} seeds"
    try:
        others = {key: solutions.from_file(path, key) for key in stored.keys}
    except (CourseError, FileNotFoundError) as problem:
        return Tick(name, False, str(problem))
    wrong = []
    for seed in range(1, SEEDS + 1):
        progress(f"second answers, seed {seed}")
        try:
            light = seed > MODEL_SEEDS
            want = worker.run(mutants.cells(stored, answers, only, light), seed, timeout=120)
            got = worker.run(mutants.cells(stored, others, only, light), seed, timeout=120)
        except WorkerLost as lost:
            return Tick(name, False, f"seed {seed}: {lost}")
        for key in keys:
            change = next(differences(want[key].shown, got[key].shown), got[key].error)
            if change:
                wrong.append(f"{key}, seed {seed}: {change}")
    return Tick(name, not wrong, "; ".join(wrong[:3]))
