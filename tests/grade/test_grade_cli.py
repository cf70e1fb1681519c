"""`course grade` as it is used: whole batches, resumed ones, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course.cli import app
from course.errors import CourseError
from course.grade import batch, results
from tests.grade import classes
from tests.grade.conftest import CannedBox


@pytest.fixture
def grade(monkeypatch, box):
    """Run the command with the canned box in place of the real one."""
    monkeypatch.setattr(batch, "Box", lambda limits, unsafe: box)

    def run(*arguments, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["grade", "--workers", "1", *map(str, arguments)])
        if isinstance(result.exception, CourseError):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return run


def verdicts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "verdicts").iterdir()}


def by_id(out: Path) -> dict[str, dict]:
    return {v["id"]: v for v in map(json.loads, verdicts(out).values())}


def handed(folder: Path, id: str, taught, **answers: str) -> None:
    place = folder / id / "work" / "kv_cache.ipynb"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(taught.notebook(answers)))


def test_a_class_with_every_kind_of_submission(tmp_path, taught, grade):
    built = classes.build(tmp_path / "class", 2 * len(classes.KINDS), taught)
    said = grade(tmp_path / "class", "--out", tmp_path / "out")
    found = by_id(tmp_path / "out")
    assert set(found) == {one.id for one in built}
    for one in built:
        states = classes.statuses(found[one.id])
        passed = {key for key, status in states.items() if status == "passed"}
        assert passed == (one.passes or set()), one
        if one.passes is None:
            assert set(states.values()) == {"failed"}
    unreadable = sum(one.passes is None for one in built)
    assert f"{len(built) - unreadable} graded, {unreadable} unreadable" in said
    state = json.loads((tmp_path / "out" / "batch.json").read_text())
    assert state["state"] == "closed" and state["chapters"] == ["kv_cache"]
    wanted = {"batch.json", "grades.csv", "moodle.csv", "github_classroom.csv", "junit.xml"}
    assert wanted <= {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"class", "out"}


def test_one_bad_submission_changes_no_other(tmp_path, taught, grade):
    built = classes.build(tmp_path / "class", len(classes.KINDS), taught)
    good = [one for one in built if one.kind in ("correct", "second", "wrong", "colab")]
    grade(tmp_path / "class", "--out", tmp_path / "all", "--seed", 5)
    for one in built:
        if one not in good:
            os.rename(tmp_path / "class" / one.path.relative_to(tmp_path / "class").parts[0],
                      tmp_path / one.id)  # fmt: skip
    grade(tmp_path / "class", "--out", tmp_path / "few", "--seed", 5)
    few = verdicts(tmp_path / "few")
    assert len(few) == len(good)
    assert {name: verdicts(tmp_path / "all")[name] for name in few} == few


def test_the_roster_adds_who_is_missing_and_tells_strangers(tmp_path, taught, grade):
    handed(tmp_path / "class", "anna", taught, **taught.ours)
    handed(tmp_path / "class", "eve", taught, **taught.ours)
    (tmp_path / "class" / "x\n::error::y\x9b2J\x1b[31m.txt").touch()
    (tmp_path / "roster.csv").write_text("id,name\nanna,Anna\nbob,Bob\n")
    said = grade(
        *(tmp_path / "class", "--out", tmp_path / "out", "--roster", tmp_path / "roster.csv")
    )
    assert "2 graded, 1 unreadable, 1 missing" in said and "eve is not on the roster" in said
    assert "x ::error::y.txt is not on the roster" in said and not {"\x1b", "\x9b"} & set(said)
    text = (tmp_path / "out" / "grades.csv").read_text()
    assert "bob,Bob,,0," in text and len(text.splitlines()) == 6  # one name has two


def test_resume_grades_only_what_is_missing(tmp_path, taught, grade, box):
    classes.build(tmp_path / "class", 8, taught)
    grade(tmp_path / "class", "--out", tmp_path / "whole", "--seed", 9)
    whole, full = verdicts(tmp_path / "whole"), len(box.jobs)
    kept = [0]

    class Stopped(Exception):
        pass

    original = results.Results.add

    def add(self, outcome):
        original(self, outcome)
        kept[0] += 1
        if kept[0] == 3:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(results.Results, "add", add)
        plan = batch.Plan(tmp_path / "class", tmp_path / "out", [], None, 9, 1, "", False, 120,
                          3 << 30, False)  # fmt: skip
        batch.run(plan)
    some = verdicts(tmp_path / "out")
    assert len(some) == 3 and json.loads((tmp_path / "out" / "batch.json").read_text())[
        "state"
    ] == ("open")
    (tmp_path / "out" / "verdicts" / sorted(some)[0]).write_text("{")  # cut by a full disk, say
    before = len(box.jobs)
    grade(tmp_path / "class", "--out", tmp_path / "out", "--resume")
    assert verdicts(tmp_path / "out") == whole
    assert len(box.jobs) - before < full
    before = len(box.jobs)
    grade(tmp_path / "class", "--out", tmp_path / "out", "--resume")  # reports alone
    assert len(box.jobs) - before == 1  # our own answers
    handed(tmp_path / "class", "late", taught)
    with pytest.raises(CourseError, match="closed and its seed is public"):
        grade(tmp_path / "class", "--out", tmp_path / "out", "--resume")


def test_what_got_lost_keeps_the_batch_open_until_it_is_graded(tmp_path, taught, grade, box):
    handed(tmp_path / "class", "anna", taught, **taught.ours)
    lost = {**taught.ours, "attend": taught.ours["attend"] + "  # lost"}
    handed(tmp_path / "class", "bob", taught, **lost)
    said = grade(tmp_path / "class", "--out", tmp_path / "out", code=1)
    assert "1 graded, 1 infrastructure error" in said and "--resume" in said
    assert set(by_id(tmp_path / "out")) == {"anna"}
    assert "bob" not in (tmp_path / "out" / "moodle.csv").read_text()
    assert json.loads((tmp_path / "out" / "batch.json").read_text())["state"] == "open"
    box._show = lambda answers, checked: CannedBox._show(
        box, {k: s.replace("  # lost", "") for k, s in answers.items()}, checked
    )
    said = grade(tmp_path / "class", "--out", tmp_path / "out", "--resume")
    assert "2 graded" in said and by_id(tmp_path / "out")["bob"]["points"] == 12
    assert json.loads((tmp_path / "out" / "batch.json").read_text())["state"] == "closed"


def test_chapters_are_those_handed_in_or_those_asked_for(tmp_path, taught, grade):
    handed(tmp_path / "class", "anna", taught)
    with pytest.raises(CourseError, match="no chapter is called"):
        grade(tmp_path / "class", "--out", tmp_path / "out", "--chapters", "kv_cash")
    (tmp_path / "none" / "anna").mkdir(parents=True)
    with pytest.raises(CourseError, match="holds no notebook of a chapter"):
        grade(tmp_path / "none", "--out", tmp_path / "out")
    said = grade(tmp_path / "none", "--out", tmp_path / "out", "--chapters", "kv_cache")
    assert "1 graded" in said  # nothing was handed in for it, so every exercise is not attempted
    assert set(classes.statuses(by_id(tmp_path / "out")["anna"]).values()) == {"not attempted"}


def test_it_does_not_start_where_the_box_has_an_open_door(tmp_path, taught, grade, box):
    from course.grade.box import Denial

    handed(tmp_path / "class", "anna", taught, **taught.ours)
    box.prove = lambda: [Denial("network", False, "a host answers")]
    with pytest.raises(CourseError, match=r"cannot grade safely.*network"):
        grade(tmp_path / "class", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    box.unsafe = True
    grade(tmp_path / "class", "--out", tmp_path / "out", "--unsafe")
    assert json.loads((tmp_path / "out" / "batch.json").read_text())["unsafe"] is True
    index = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "Graded with --unsafe" in index


def test_results_do_not_go_among_the_submissions(tmp_path, taught, grade):
    handed(tmp_path / "class", "anna", taught, **taught.ours)
    with pytest.raises(CourseError, match="must not be"):
        grade(tmp_path / "class", "--out", tmp_path / "class")
    grade(tmp_path / "class", "--out", tmp_path / "class" / "results")
    grade(tmp_path / "class", "--out", tmp_path / "class" / "results", "--resume")
    assert set(by_id(tmp_path / "class" / "results")) == {"anna"}


def test_a_link_to_itself_is_one_unreadable_submission(tmp_path, taught, grade):
    handed(tmp_path / "class", "anna", taught, **taught.ours)
    (tmp_path / "class" / "x.ipynb").symlink_to("x.ipynb")
    assert "1 graded, 1 unreadable" in grade(tmp_path / "class", "--out", tmp_path / "out")


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "course.cli", "grade", *map(str, arguments)]


def test_killed_and_resumed_ends_with_the_same_verdicts(tmp_path, taught):
    """The real thing without the box: kill -9 in the middle, no process left, then `--resume`."""
    folder, keys = tmp_path / "class", ("forward_positions", "kv_bytes_per_token")
    right = {key: taught.second[key] for key in keys}
    handed(folder, "a", taught, **right)
    handed(folder, "b", taught, **right | {keys[0]: f"def {keys[0]}(*a, **k): return 1.5"})
    slow = f"import time\n\ndef {keys[0]}(*a, **k):\n    time.sleep(60)\n"
    handed(folder, "c", taught, **right | {keys[0]: slow})
    handed(folder, "d", taught, **right)
    options = ("--workers", "1", "--unsafe", "--seed", "77", "--timeout", "200")
    killed = subprocess.Popen(command(folder, "--out", tmp_path / "out", *options))
    place = tmp_path / "out" / "verdicts"
    deadline = time.monotonic() + 240
    while not place.exists() or len(list(place.glob("*.json"))) < 2:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(killed.pid)], capture_output=True, text=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert children.stdout.split()
    (folder / "c" / "work" / "kv_cache.ipynb").write_text(json.dumps(taught.notebook(right)))
    before = verdicts(tmp_path / "out")
    done = subprocess.run(
        command(folder, "--out", tmp_path / "out", *options, "--resume"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    after = verdicts(tmp_path / "out")
    assert before.items() <= after.items() and len(after) == 4
    found = {id: classes.statuses(verdict) for id, verdict in by_id(tmp_path / "out").items()}
    assert {found[id][keys[0]] for id in "acd"} == {"passed"} and found["b"][keys[0]] == "failed"
    assert {found[id][keys[1]] for id in "abcd"} == {"passed"}
    for pid in map(int, children.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
