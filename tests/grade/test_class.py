"""A class of 60 with everything in it, twice: a worker is killed in the middle, the grader too.

By default the class of the attacks' tiny chapter; `make test-all` grades one of kv_cache as well.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from course.catalog import ROOT
from course.grade.child import descendants
from tests.attacks import toy as toys
from tests.grade import classes

pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
COUNT = 60
SECOND = {
    "scale": "def scale(x):\n    return x + 2 * x + 1",
    "total": "def total(xs):\n    return xs[0] + total(xs[1:]) if xs else 0.0",
    "halved": "def halved(xs):\n    return list(map(lambda x: 0.5 * x, xs))",
}
WRONG = {
    "scale": ["def scale(x):\n    return 3 * x", "def scale(x):\n    return x / 0"],
    "total": ["def total(xs):\n    return xs[0]", "def total(xs):\n    return sum(xs)"],
    "halved": ["def halved(xs):\n    xs[:] = [x / 2 for x in xs]\n    return xs"],
}


class Tiny(classes.School):
    """The tiny chapter as material for `classes.build`."""

    def __init__(self, toy: toys.Toy):
        exercises = [SimpleNamespace(key=key, needs=[]) for key in toys.OURS]
        self.chapter = SimpleNamespace(slug="toy", part="toys", ipynb=toy.folder / "toy.ipynb")
        self.record = SimpleNamespace(keys=list(toys.OURS), cells=toys.job({}), exercises=exercises)
        self.ours, self.second = toys.OURS, SECOND
        self.wrong = [
            SimpleNamespace(key=key, source=source) for key in WRONG for source in WRONG[key]
        ]


@pytest.fixture(params=["toy", *(["kv_cache"] if os.environ.get("COURSE_TEST_ALL") else [])])
def course(request, tmp_path) -> tuple[Path, classes.School]:
    """A checkout and the material of the chapter that is graded in it."""
    if request.param != "toy":
        return ROOT, classes.school(request.param)
    toy = toys.Toy(tmp_path / "course-of-toys")
    toy.write()
    return toy.folder, Tiny(toy)


class Grading:
    """One `course grade` while it runs, and every process that it ever had."""

    def __init__(self, checkout: Path, taught: classes.School, folder: Path, out: Path, *more: str):
        self.place, self.seen = out / "verdicts", set[tuple[int, str]]()
        command = [sys.executable, "-m", "course.cli", "grade", str(folder), "--out", str(out)]
        command += ["--chapters", taught.chapter.slug, "--seed", "77", "--workers", "2", *more]
        self.log = (out.parent / f"{out.name}.log").open("ab")
        self.process = subprocess.Popen(
            command,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=self.log,
            stderr=self.log,
        )

    def until(self, verdicts: int) -> None:
        """Wait for this many verdict files, or for the end."""
        while self.process.poll() is None and len(list(self.place.glob("*.json"))) < verdicts:
            self._look()
            time.sleep(0.05)

    def _look(self) -> None:
        self.seen |= {(pid, began(pid)) for pid in descendants(self.process.pid)}

    def kill_a_worker(self) -> None:
        """End a worker in whose hands a box is."""
        while self.process.poll() is None:
            for pid in list(descendants(self.process.pid))[1:]:
                if b"spawn_main" in said(pid, "cmdline") and any(
                    said(child, "comm") == b"bwrap\n" for child in descendants(pid)
                ):
                    self._look()
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError("the class was graded before a worker could be killed")

    def end(self, code: int) -> None:
        self.until(COUNT + 1)
        assert self.process.wait(60) == code, Path(self.log.name).read_text()[-2000:]

    def nothing_left(self) -> None:
        deadline = time.monotonic() + 30
        while left := [pid for pid, start in self.seen if start and began(pid) == start]:
            assert time.monotonic() < deadline, [said(pid, "cmdline") for pid in left]
            time.sleep(0.1)

    def verdicts(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.place.glob("*.json")}


def said(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def began(pid: int) -> str:
    """When a running process began, in clock ticks; empty for one that has ended."""
    fields = said(pid, "stat").decode("utf-8", "replace").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def test_a_class_of_sixty_twice(tmp_path, course):
    checkout, taught = course
    folder = tmp_path / "class"
    handed = classes.build(folder, COUNT, taught)
    assert {one.kind for one in handed} == set(classes.KINDS)

    first = Grading(checkout, taught, folder, tmp_path / "first")
    first.until(COUNT // 4)
    first.kill_a_worker()
    first.end(0)
    first.nothing_left()

    killed = Grading(checkout, taught, folder, tmp_path / "second")
    killed.until(random.Random(taught.chapter.slug).randrange(COUNT // 4, COUNT // 2))
    killed.process.kill()
    killed.end(-signal.SIGKILL)
    some = killed.verdicts()
    assert 0 < len(some) < COUNT
    resumed = Grading(checkout, taught, folder, tmp_path / "second", "--resume")
    resumed.end(0)
    killed.nothing_left()  # at the latest when somebody grades again
    resumed.nothing_left()

    assert first.verdicts() == resumed.verdicts() and len(first.verdicts()) == COUNT
    assert some.items() <= resumed.verdicts().items()
    found = {v["id"]: v for v in map(json.loads, first.verdicts().values())}
    for one in handed:
        states = classes.statuses(found[one.id], taught.chapter.slug)
        passed = {key for key, status in states.items() if status == "passed"}
        assert (passes := one.passes or set()) <= passed <= passes | one.may, (one, states)
