"""What a learner reads after each known wrong answer, frozen; and the whole chapter solved."""

import os

import pytest

from course import check, mutants, nbval_plugin, recordfile
from course.catalog import ROOT
from course.shell import Worker
from tests.pipeline.conftest import CHAPTER, RECORD, REFERENCE, answered

SNAPSHOT = ROOT / "tests" / "snapshots" / "kv_cache.txt"


def told(mutant: mutants.Mutant, worker: Worker) -> str:
    """The text of the verdict: what differs, then the named mistake or the hint."""
    answers = {**REFERENCE, mutant.key: mutant.source}
    ran = worker.run(mutants.cells(RECORD, answers, mutant.key, light=True))[mutant.key]
    exercise = RECORD.exercise(mutant.key)
    text = ran.error.removeprefix("CheckFailed: ").removeprefix("KernelError: ")
    shown = {line["name"] for line in ran.shown}
    seen = [line for line in exercise.expected if line["name"] in shown]
    text = text or "\n".join(nbval_plugin.differences(seen, ran.shown))
    outcome = {"status": "error" if ran.error else "mismatch", "text": text, "shown": ran.shown}
    said = check.mistake_of(exercise, outcome)
    return f"{text}\n{'→ ' + said if said else 'hint: ' + exercise.hint}"


def test_messages_are_those_that_were_read():
    with Worker() as worker:
        blocks = [
            f"[{m.key}: {m.name}]\n{told(m, worker)}\n"
            for m in mutants.written(CHAPTER)
            if not m.shortcut
        ]
    text = "\n".join(blocks)
    if os.environ.get("COURSE_SNAPSHOT_UPDATE"):
        recordfile.write_text(SNAPSHOT, text)
    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_most_mistakes_are_named():
    """A mutant whose message never reaches the learner was written in vain."""
    blocks = SNAPSHOT.read_text(encoding="utf-8").split("\n[")
    unnamed = [block.split("]")[0] for block in blocks if "→" not in block]
    assert len(unnamed) <= len(blocks) // 10, unnamed


@pytest.mark.parametrize("key", RECORD.keys)
def test_no_two_mistakes_look_alike(key):
    """The same first difference with two messages would name the wrong one."""
    looks: dict[str, str] = {}
    for mistake in RECORD.exercise(key).known:
        look = f"{mistake.get('name')} {mistake.get('values')} {mistake.get('error')}"
        assert looks.setdefault(look, mistake["message"]) == mistake["message"], mistake["mutant"]


def test_the_solved_chapter_passes_whole(judge):
    verdicts = judge(answered(), RECORD.keys, timeout=120)
    assert {k: v.text for k, v in verdicts.items() if v.status != "passed"} == {}
    assert len(verdicts) == 7
