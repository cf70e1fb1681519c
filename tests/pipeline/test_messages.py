"""What a learner reads after each known wrong answer, frozen; and a whole chapter solved."""

import os

from course import catalog, check, mutants, nbval_plugin, recordfile
from course.catalog import ROOT
from course.recordfile import Record
from course.shell import Worker
from tests.pipeline.conftest import RECORD, answered

CHAPTER = catalog.find("kv_cache")  # for the form of messages one chapter is enough
SNAPSHOT = ROOT / "tests" / "snapshots" / "kv_cache.txt"


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


def test_messages_are_those_that_were_read():
    """After a change that was meant, COURSE_SNAPSHOT_UPDATE=1 writes them anew: read the diff."""
    record = recordfile.load(CHAPTER)
    answers = mutants.references(CHAPTER, record)
    with Worker() as worker:
        blocks = [
            f"[{m.key}: {m.name}]\n{told(m, record, answers, worker)}\n"
            for m in mutants.written(CHAPTER)
            if not m.shortcut
        ]
    text = "\n".join(blocks)
    if os.environ.get("COURSE_SNAPSHOT_UPDATE"):
        recordfile.write_text(SNAPSHOT, text)
    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_the_solved_chapter_passes_whole(judge):
    verdicts = judge(answered(), RECORD.keys, timeout=120)
    assert {k: v.text for k, v in verdicts.items() if v.status != "passed"} == {}
    assert len(verdicts) == 7
