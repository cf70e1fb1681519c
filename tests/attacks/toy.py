"""A course with one tiny chapter, three graders that are too trusting, and the real one.

An attack counts as tried only if one of the trusting graders falls for it: plain nbval in a folder
that the learner owns, a naive grader that compares inside the learner's process and believes the
exit status, or `course grade --unsafe`.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jupytext

from course import compare
from course.catalog import ROOT
from course.grade import mounts
from course.grade.box import Box
from course.runtime import MIME

NBVAL, NAIVE, UNSAFE = "plain nbval", "naive grader", "course grade --unsafe"
PLACE = "work/toy.ipynb"  # where a submission holds its notebook
SECRET = "s3cret-of-the-grader"
SEED = 20_417
TARGET = "scale"  # the exercise that attacks try to pass, unless they say otherwise

SETUP = """\
# setup
import random

from course import forbid, require, show
from course.runtime import seed
"""
OURS = {
    "scale": "def scale(x):\n    return 3 * x + 1\n",
    "total": "def total(xs):\n    t = 0.0\n    for x in xs:\n        t += x\n    return t\n",
    "halved": "def halved(xs):\n    return [x / 2 for x in xs]\n",
}
CHECKS = {
    "scale": """\
# check: scale
draw = random.Random(f"{seed()}/scale")
show("scaled", [scale(draw.random()) for _ in range(3)])
show("scaled whole", scale(draw.randrange(10**6)))
""",
    "total": """\
# check: total
forbid(total, "sum", "math")
draw = random.Random(f"{seed()}/total")
show("summed", total([draw.random() for _ in range(9)]))
""",
    "halved": """\
# check: halved
draw = random.Random(f"{seed()}/halved")
values = [draw.random() for _ in range(3)]
kept, got = list(values), halved(values)
require(values == kept, "halved must not change its input")
show("halved", got)
""",
}
STUBS = {key: f"def {key}(x):\n    raise NotImplementedError('start')\n" for key in OURS}


def cell(source: str, tags: tuple[str, ...] = (), outputs: tuple[dict, ...] = ()) -> dict:
    return {
        "cell_type": "code",
        "execution_count": 1,
        "metadata": {"tags": list(tags)},
        "outputs": list(outputs),
        "source": source,
    }


def _shown(lines: list[dict]) -> tuple[dict, ...]:
    """Lines of `show` as a notebook stores them."""
    return tuple(
        {
            "output_type": "display_data",
            "metadata": {},
            "data": {
                "text/plain": compare.line(line["name"], line["values"]),
                MIME: {name: line[name] for name in ("name", "values", "tol")},
            },
        }
        for line in lines
    )


def job(answers: dict[str, str], keys: list[str] | None = None) -> list[tuple[str, str, str]]:
    """The cells that run, with stubs for what has no answer."""
    cells = [("setup", "", SETUP)]
    for key in OURS:
        cells.append(("answer", key, f"# answer: {key}\n{answers.get(key, STUBS[key])}"))
        if keys is None or key in keys:
            cells.append(("check", key, CHECKS[key]))
    return cells


def _recorded() -> dict[str, list[dict]]:
    """What our answers show at seed 0: everybody can read it in the notebook."""
    checks = Box(unsafe=True).run(job(OURS), 0).checks
    assert all(not ran.error for ran in checks.values()), checks
    return {key: ran.shown for key, ran in checks.items()}


class Toy:
    """The material of the tiny course and a checkout of it in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.recorded = _recorded()
        self.pristine = self.notebook({})
        self.port = 0  # of a listener on this machine

    def write(self) -> None:
        """Make the checkout: the real `course`, one chapter."""
        shutil.copytree(ROOT / "course", self.folder / "course")
        row = "{slug: toy, part: toys, title: Toy, sources: [], prerequisites: [], minutes: 5, "
        row += "seconds: 5, kernel: read, status: ready}"
        (self.folder / "course" / "catalog.yml").write_text(
            f"repository: https://localhost/toy\nparts: {{toys: Toys}}\nchapters:\n  - {row}\n"
        )
        place = self.folder / "notebooks" / "toys"
        place.mkdir(parents=True)
        (place / "toy.ipynb").write_text(json.dumps(self.pristine))
        (place / "toy.record.json").write_text(json.dumps(self._record()))
        answers = self.folder / "solutions" / "toys" / "toy.py"
        answers.parent.mkdir(parents=True)
        answers.write_text("\n\n".join(OURS.values()))

    def _record(self) -> dict:
        card = {"title": "Exercise", "difficulty": 1, "minutes": 1, "hint": "think", "needs": []}
        exercises = [
            {"key": key, "check": "x", "expected": lines, "known": []} | card
            for key, lines in self.recorded.items()
        ]
        return {"chapter": "toy", "depends": "", "cells": job({}), "exercises": exercises}

    def notebook(self, answers: dict[str, str]) -> dict:
        """The chapter's notebook, cut to some exercises, with the outputs of our answers."""
        keys = list(answers) or [TARGET]
        cells = [
            cell(
                source,
                (f"{kind}-{key}" if key else kind,),
                _shown(self.recorded[key]) if kind == "check" else (),
            )
            for kind, key, source in job(answers, keys)
            if kind != "answer" or key in keys
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        return {
            "cells": cells,
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 4,
        }

    def stored(self, key: str = TARGET) -> list:
        """The recorded values of an exercise, line by line."""
        return [line["values"] for line in self.recorded[key]]


@dataclass
class Desk:
    """Where one attack writes its submission."""

    toy: Toy
    folder: Path  # its own, in the folder of the class
    mark: Path  # a file outside: where an attack that gets out leaves its proof

    def put(self, nb: dict, name: str = PLACE) -> dict:
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(nb))
        return nb

    def answer(self, source: str, key: str = TARGET) -> dict:
        """Hand in the notebook with this answer, whatever it does."""
        return self.put(self.toy.notebook({key: textwrap.dedent(source).strip("\n") + "\n"}))

    def edited(self, *edits: Callable[[dict], object]) -> dict:
        """Hand in the unsolved notebook with an edited check cell."""
        nb = copy.deepcopy(self.toy.pristine)
        for edit in edits:
            edit(nb)
        return self.put(nb)


def find(nb: dict, kind: str, key: str = "") -> dict:
    """A cell of the toy notebook by its tag."""
    tag = f"{kind}-{key}" if key else kind
    return next(c for c in nb["cells"] if tag in c["metadata"]["tags"])


def if_it_can(attempt: str) -> str:
    """An answer that is right once `attempt` (statements that raise when denied) has worked."""
    body = textwrap.indent(textwrap.dedent(attempt).strip("\n"), "    ")
    return f"def scale(x):\n{body}\n    return 3 * x + 1\n"


# --- trusting graders ---------------------------------------------------------------------------

_NAIVE = """
import json, linecache, sys
job = json.load(open(sys.argv[1]))
sys.argv = sys.argv[:1]
from course.runtime import STATE
space = {"__name__": "__main__"}
for kind, key, source in job["cells"]:
    STATE.shown = []
    name = f"{kind}-{key}"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), space)
    if kind == "check":
        for want, line in zip(job["expected"][key], STATE.shown, strict=True):
            for a, b in zip(want["values"], line["values"], strict=True):
                assert a == b or abs(a - b) <= want["tol"], f"{key} differs"
"""


@dataclass
class Ended:
    """How a trusting grader ended: passed, failed, hangs, or crashes over the file itself."""

    how: str
    said: str = ""


def naive(toy: Toy, path: Path, key: str, seconds: float) -> Ended:
    """Read what is there, run it, compare in the same process, believe the exit status."""
    try:
        source = _naive_source(path, key)
    except (RecursionError, UnicodeError) as problem:  # one file ends the whole class
        return Ended("crashes", repr(problem)[:200])
    cells = [("setup", "", SETUP), ("answer", key, source), ("check", key, CHECKS[key])]
    asked = toy.folder.parent / f"{path.name}.job"
    asked.write_text(json.dumps({"cells": cells, "expected": toy.recorded}))
    place = path if path.is_dir() else path.parent
    env = {**os.environ, "PYTHONPATH": f"{place}:{toy.folder}", "COURSE_SEED": "0"}
    command = [sys.executable, "-c", _NAIVE, str(asked)]
    child = subprocess.Popen(
        command,
        env=env,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.communicate()
        return Ended("hangs")
    finally:
        asked.unlink()
    return Ended("failed" if child.returncode else "passed", said.decode("utf-8", "replace"))


def _naive_source(path: Path, key: str) -> str:
    """The last cell that says it answers `key`, from wherever the notebook is."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(PLACE).decode()
    else:
        found = next(p for p in (path / PLACE, path / "work/toy.md") if p.exists())
        if found.suffix == ".md":
            nb = jupytext.read(found)
            return next(c.source for c in nb.cells if c.source.startswith(f"# answer: {key}"))
        text = found.read_text()
    sources = [c["source"] for c in json.loads(text)["cells"]]
    return next(s for s in reversed(sources) if s.startswith(f"# answer: {key}"))


def nbval(toy: Toy, folders: list[Path], own: Path | None = None) -> dict[str, bool]:
    """Plain nbval over notebooks, as the learners' checkout runs it: submission -> passed.

    Args:
        own: run in this folder with its own pytest.ini and profile, as a learner could.
    """
    report = toy.folder.parent / f"nbval-{folders[0].name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "-p", "no:randomly", "--nbval-cell-timeout", "10"]
    command += [f"--junitxml={report}", "--color=no"]
    command += [] if own else ["--rootdir", str(folders[0].parent), "-c", os.devnull]
    command += [str(folder / PLACE) for folder in folders]
    env = {**os.environ, "PYTHONPATH": str(toy.folder), "COURSE_SEED": "0"}
    env.pop("PYTEST_ADDOPTS", None)
    if own:
        env |= {"IPYTHONDIR": str(own / ".ipython"), "JUPYTER_PATH": str(own / ".jupyter")}
    ran = subprocess.run(
        command, env=env, cwd=own or folders[0].parent, capture_output=True, text=True
    )
    assert report.exists(), ran.stdout + ran.stderr
    passed = {}
    for folder in folders:
        cases = [
            case
            for case in ET.parse(report).iter("testcase")
            if f"{folder.name}." in f"{case.get('classname')}." or len(folders) == 1
        ]
        bad = [case for case in cases if case.find("failure") is not None]
        bad += [case for case in cases if case.find("error") is not None]
        passed[folder.name] = bool(cases) and not bad
    return passed


# --- the real one -------------------------------------------------------------------------------

_WATCHED = """
import ctypes, json, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what loses its parent becomes our child
ran = subprocess.run(sys.argv[1:], capture_output=True, text=True)
time.sleep(0.2)
left = []
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        fields = open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            left.append(open(f"/proc/{name}/cmdline").read().replace(chr(0), " "))
    except OSError:
        pass
print(json.dumps({"code": ran.returncode, "said": ran.stdout + ran.stderr, "left": left}))
"""


@dataclass
class Graded:
    """What `course grade` did with a class."""

    out: Path
    code: int
    said: str
    left: list[str]  # processes that outlived it
    home: Path  # its HOME and TMPDIR, empty before

    def verdicts(self) -> dict[str, dict]:
        return {id: json.loads(data) for id, data in self.files().items()}

    def statuses(self, id: str) -> dict[str, str]:
        """Exercise -> status of one submission."""
        rows = self.verdicts()[id]["chapters"]["toy"]["exercises"]
        return {row["key"]: row["status"] for row in rows}

    def files(self) -> dict[str, bytes]:
        """Verdict files by the id in them."""
        data = [file.read_bytes() for file in (self.out / "verdicts").iterdir()]
        return {json.loads(one)["id"]: one for one in data}


def grade(toy: Toy, submissions: Path, out: Path, *options: str) -> Graded:
    """Run the command in the toy checkout, with a home of its own, and watch what it leaves."""
    home = out.with_name(f"{out.name}-home")
    home.mkdir()
    command = [sys.executable, "-c", _WATCHED, sys.executable, "-m", "course.cli", "grade"]
    command += [str(submissions), "--out", str(out), "--chapters", "toy", "--seed", str(SEED)]
    command += ["--timeout", "6", "--memory", "1", "--workers", "1", *options]
    env = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": str(toy.folder),
        "COURSE_CACHE": str(mounts.model()),
        "GRADER_TOKEN": SECRET,
    }
    ran = subprocess.run(command, env=env, cwd=toy.folder, capture_output=True, text=True)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (out / "verdicts").is_dir(), told["said"]
    return Graded(out, told["code"], told["said"], told["left"], home)


@dataclass
class Attack:
    """One module of this folder."""

    name: str
    module: ModuleType

    @property
    def against(self) -> str:
        return self.module.FIRES_AGAINST

    @property
    def target(self) -> str:
        return getattr(self.module, "TARGET", TARGET)
