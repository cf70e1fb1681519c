"""Wrong answers that the checks must reject, and the runs that prove it.

A chapter's `tests/mutants/<part>/<slug>.py` holds MUTANTS (edits of the reference), SHORTCUTS
(whole answers that call what is forbidden) and EQUIVALENT (automatic mutations that change
nothing, each with its reason); `tests/answers/<part>/<slug>.py` holds second correct answers.
"""

import ast
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from course import compare, solutions
from course.catalog import Chapter
from course.errors import CourseError
from course.recordfile import Record
from course.shell import Ran, Worker, WorkerLost

TIMEOUT = 30  # seconds for one wrong answer: an endless one counts as rejected


@dataclass(frozen=True)
class Mutant:
    """A wrong answer to one exercise."""

    key: str
    name: str
    source: str
    message: str
    shortcut: bool = False


def module(chapter: Chapter) -> SimpleNamespace:
    """The chapter's mutants file. CourseError if it is missing."""
    if not chapter.mutants.exists():
        raise CourseError(
            f"{chapter.mutants} does not exist: write at least two mutants per exercise"
        )
    try:
        return SimpleNamespace(**runpy.run_path(str(chapter.mutants)))
    except SyntaxError as problem:
        raise CourseError(f"{chapter.mutants}: line {problem.lineno}: {problem.msg}") from None


def written(chapter: Chapter) -> list[Mutant]:
    """The hand-written mutants and shortcuts, applied to the reference.

    Raises CourseError if an edit does not match exactly once.
    """
    loaded, out = module(chapter), []
    for key, edits in loaded.MUTANTS.items():
        source = solutions.from_file(chapter.solution, key)
        for name, old, new, message in edits:
            out.append(Mutant(key, name, _edited(source, key, name, old, new), message))
    for key, answers in loaded.SHORTCUTS.items():
        out += [Mutant(key, name, source, message, True) for name, source, message in answers]
    return out


def _edited(source: str, key: str, name: str, old: str, new: str) -> str:
    """`source` with the one occurrence of `old` that is not in a docstring replaced."""
    docstrings = [
        (node.body[0].lineno, node.body[0].end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    ]
    places = [
        found.start()
        for found in re.finditer(re.escape(old), source)
        if not any(
            first <= source.count("\n", 0, found.start()) + 1 <= last for first, last in docstrings
        )
    ]
    if len(places) != 1:
        hint = " (it ends in a line break, the reference does not)" if old.endswith("\n") else ""
        raise CourseError(
            f"mutant `{name}` of {key}: its old text matches {len(places)} times in the code of "
            f"the reference; it must match once{hint if not places else ''}"
        )
    return source[: places[0]] + new + source[places[0] + len(old) :]


def automatic(chapter: Chapter, key: str) -> Iterator[Mutant]:
    """Every mutation that the AST mutator makes of the reference answer to `key`."""
    from course.lab import mutate

    for mutation in mutate.mutations(solutions.from_file(chapter.solution, key)):
        yield Mutant(key, mutation.id, mutation.source, "")


def unequal(chapter: Chapter, key: str) -> int:
    """How many automatic mutations of an answer are not listed as equivalent."""
    return sum(1 for _ in automatic(chapter, key)) - len(module(chapter).EQUIVALENT.get(key, {}))


def cells(
    record: Record, answers: dict[str, str], only: str | None = None, light: bool = False
) -> list[tuple[str, str, str]]:
    """The recorded cells with `answers` in place.

    Args:
        only: one exercise: its checks, its answer and those it needs.
        light: leave out the check cells that run the real model.
    """
    wanted = {only, *record.exercise(only).needs} if only else set(record.keys)
    out = []
    for kind, key, source in record.cells:
        if kind == "setup":
            out.append((kind, key, source))
        elif kind == "answer" and key in wanted:
            out.append((kind, key, solutions.answer_cell(key, answers[key])))
        elif kind == "check" and only in (None, key) and not (light and "lm.load(" in source):
            out.append((kind, key, source))
    return out


def references(chapter: Chapter, record: Record) -> dict[str, str]:
    """The reference answer of every exercise."""
    return {key: solutions.from_file(chapter.solution, key) for key in record.keys}


def expected(record: Record) -> dict[str, dict]:
    """Every recorded line by name."""
    return {line["name"]: line for e in record.exercises for line in e.expected}


def attempt(
    worker: Worker,
    record: Record,
    answers: dict[str, str],
    mutant: Mutant,
    lines: dict[str, dict],
    seed: int = 0,
) -> Ran:
    """Run the check of the mutant's exercise until its first difference from `lines`.

    Under another seed than that of the recording the runs of the real model are left out.
    """
    job = cells(record, {**answers, mutant.key: mutant.source}, mutant.key, light=seed != 0)
    try:
        return worker.run(job, seed, expected=lines, timeout=TIMEOUT)[mutant.key]
    except WorkerLost as lost:
        return Ran([], f"WorkerLost: {lost}")


def rejected(ran: Ran, record: Record, key: str) -> bool:
    """Whether a check rejected an answer: it raised, differed, or showed too little."""
    from course.nbval_plugin import differences

    return bool(ran.error) or any(differences(record.exercise(key).expected, ran.shown))


def fingerprints(worker: Worker, chapter: Chapter, record: Record) -> dict[str, list[dict]]:
    """Exercise -> how its hand-written mutants look at seed 0, for naming mistakes.

    `seen` are the lines that a mutant showed before its check ended or three were wrong, `differs`
    the wrong ones, `error` how it ended (None where we stopped it). The runs of the real model are
    left out: they come last and are slow.
    """
    lines, answers = expected(record), references(chapter, record)
    known: dict[str, list[dict]] = {}
    for mutant in written(chapter):
        if mutant.shortcut:
            continue
        job = cells(record, {**answers, mutant.key: mutant.source}, mutant.key, light=True)
        try:
            ran = worker.run(job, expected=lines, enough=3, timeout=TIMEOUT)[mutant.key]
        except WorkerLost:
            continue  # an endless loop shows nothing to know it by
        wrong = [
            {"name": line["name"], "values": line["values"]}
            for line in ran.shown
            if line["name"] not in lines  # a loop of the check went on for longer
            or not compare.agree(lines[line["name"]]["values"], line["values"], line["tol"])
        ]
        known.setdefault(mutant.key, []).append(
            {
                "mutant": mutant.name,
                "message": mutant.message,
                "error": None if ran.error.startswith("Mismatch") else _said(ran.error),
                "seen": [line["name"] for line in ran.shown],
                "differs": wrong,
            }
        )
    return known


def _said(error: str) -> str:
    """An error as a verdict repeats it: a refusal of the check's own without its type."""
    return error.removeprefix("CheckFailed: ").removeprefix("KernelError: ")
