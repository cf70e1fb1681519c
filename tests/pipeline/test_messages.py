"""What a learner reads after each known wrong answer, frozen; and a whole chapter solved."""

import os
from pathlib import Path

import pytest

from course import catalog, check, mutants, nbval_plugin, recordfile
from course.catalog import ROOT
from course.recordfile import Record
from course.shell import Worker
from tests.pipeline.conftest import RECORD, answered

READY = [c for c in catalog.chapters() if c.status == "ready"]
each_chapter = pytest.mark.parametrize("chapter", READY, ids=lambda chapter: chapter.slug)


def snapshot(chapter: catalog.Chapter) -> Path:
    return ROOT / "tests" / "snapshots" / f"{chapter.slug}.txt"


def told(mutant: mutants.Mutant, record: Record, answers: dict[str, str], worker: Worker) -> str:
    """The text of the verdict: what differs, then the named mistake or the hint."""
    job = mutants.cells(record, {**answers, mutant.key: mutant.source}, mutant.key, light=True)
    ran = worker.run(job)[mutant.key]
    exercise = record.exercise(mutant.key)
    text = ran.error.removeprefix("CheckFailed: ").removeprefix("KernelError: ")
    shown = {line["name"] for line in ran.shown}
    seen = [line for line in exercise.expected if line["name"] in shown]
    text = text or "\n".join(nbval_plugin.differences(seen, ran.shown))
    outcome = {"status": "error" if ran.error else "mismatch", "text": text, "shown": ran.shown}
    said = check.mistake_of(exercise, outcome)
    return f"{text}\n{'→ ' + said if said else 'hint: ' + exercise.hint}"


@each_chapter
def test_messages_are_those_that_were_read(chapter):
    """After a change that was meant, COURSE_SNAPSHOT_UPDATE=1 writes them anew: read the diff."""
    record = recordfile.load(chapter)
    answers = mutants.references(chapter, record)
    with Worker() as worker:
        blocks = [
            f"[{m.key}: {m.name}]\n{told(m, record, answers, worker)}\n"
            for m in mutants.written(chapter)
            if not m.shortcut
        ]
    text = "\n".join(blocks)
    if os.environ.get("COURSE_SNAPSHOT_UPDATE"):
        recordfile.write_text(snapshot(chapter), text)
    assert text == snapshot(chapter).read_text(encoding="utf-8")


@each_chapter
def test_most_mistakes_are_named(chapter):
    """A mutant whose message never reaches the learner was written in vain."""
    blocks = snapshot(chapter).read_text(encoding="utf-8").split("\n[")
    unnamed = [block.split("]")[0] for block in blocks if "→" not in block]
    assert len(unnamed) <= len(blocks) // 10, unnamed


@each_chapter
def test_no_two_mistakes_look_alike(chapter):
    """The same lines with two messages would name the wrong one."""
    for exercise in recordfile.load(chapter).exercises:
        looks: dict[str, str] = {}
        for mistake in exercise.known:
            look = f"{mistake['seen']} {mistake['differs']} {mistake['error']}"
            message = looks.setdefault(look, mistake["message"])
            assert message == mistake["message"], (exercise.key, mistake["mutant"])


def test_the_solved_chapter_passes_whole(judge):
    verdicts = judge(answered(), RECORD.keys, timeout=120)
    assert {k: v.text for k, v in verdicts.items() if v.status != "passed"} == {}
    assert len(verdicts) == 7
