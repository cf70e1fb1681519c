"""`python -m course.bench.grading`: what grading costs, beside nbclient, nbgrader and otter.

Ratios within one run, one thread each, runs in turns where they are short. The peers are installed
on the fly, each into an environment of its own, with their own kernel; torch and the course come
from this one through a path file. They grade the same cells with the same comparison, written as
their own kind of test, and a peer that does not award full marks is left out rather than timed.
"""

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nbformat

from course import catalog, mutants, recordfile, solutions
from course.catalog import ROOT
from course.grade import cluster, report, results
from course.grade.box import Box, Boxed
from course.grade.grader import Batch, Cells, Reference, grade, grade_all, reference
from course.grade.reader import Reader
from course.grade.submissions import listed
from course.recordfile import Record

CHAPTER = catalog.find("kv_cache")
REPEATS = 3
FEW, MANY = 5, 20  # submissions whose times give the slope
CLASS = 30  # real submissions, once for one worker and once for two
QUEUE = (100, 1000)  # submissions through the queue, where memory is read
SEED = 1  # not 0, under which check cells speak on stderr, which nbgrader takes for an error
ENVIRONMENT = {
    "COURSE_SEED": str(SEED),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
Row = tuple[str, float | str, str]  # what, how much, the aim


@dataclass(frozen=True)
class Material:
    """The chapter's cells and right answers, and its reference under one seed."""

    record: Record
    answers: dict[str, str]
    reference: Reference
    box: Box


def main() -> None:
    os.environ |= ENVIRONMENT
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"grading {CHAPTER.slug}: {os.cpu_count()} cores, load {load}")
    record, box = recordfile.load(CHAPTER), Box()
    ours = reference(CHAPTER, box.run, SEED)
    material = Material(record, mutants.references(CHAPTER, record), ours, box)
    for measure in (queue, alone, workers, slopes):
        with tempfile.TemporaryDirectory(prefix="course-bench-") as name:
            for what, value, aim in measure(material, Path(name)):
                said = value if isinstance(value, str) else f"{value:6.2f}"
                print(f"{what:58} {said:>8}  {aim}", flush=True)


def queue(material: Material, folder: Path) -> Iterator[Row]:
    """Memory and report time of a large class, with boxes that only repeat the reference."""
    low, high = QUEUE
    _write(folder / "in", high, material)
    canned = _Canned(material.reference.checks)
    found, at = listed(folder / "in"), {}
    with _batch(material, canned) as batch, _kept(folder / "out") as kept:
        for count, outcome in enumerate(grade_all(found, batch), 1):
            kept.add(outcome)
            if count in QUEUE:
                at[count] = _rss()
        kept.close()
        seconds = _seconds(
            lambda: report.write(kept, [one.id for one in found], None, batch.references, [])
        )
    yield f"memory at {high:,} submissions / at {low:,}", at[high] / at[low], "aim 0.9 to 1.1"
    yield f"report on {high:,} submissions, seconds", seconds, "aim < 10"


def alone(material: Material, folder: Path) -> Iterator[Row]:
    """One submission, box included, beside the same cells in a Jupyter kernel."""
    needed = max(
        material.record.keys, key=lambda k: sum(k in e.needs for e in material.record.exercises)
    )
    wrong = next(m.source for m in mutants.written(CHAPTER) if m.key == needed and not m.shortcut)
    solved = _write(folder / "solved", 1, material)
    broken = _write(
        folder / "wrong",
        1,
        replace(material, answers={**material.answers, needed: wrong}),
    )
    points: dict[Path, int] = {}

    def graded(place: Path) -> None:
        (one,) = listed(place)
        points[place] = grade(one, batch).verdict["points"]

    with _batch(material, cluster.Here(material.box)) as batch:
        runs: dict[str, Callable[[], object]] = {
            "nbclient": lambda: _nbclient(solved),
            "solved": lambda: graded(folder / "solved"),
            "one wrong answer": lambda: graded(folder / "wrong"),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(REPEATS):
            for name, run in runs.items():
                times[name].append(_seconds(run))
    of = sum(e.difficulty for e in material.record.exercises)
    if not points[broken.parent] < points[solved.parent] == of:
        raise RuntimeError(f"the submissions got {points}: not what is to be measured")
    medians = {name: statistics.median(t) for name, t in times.items()}
    yield "one solved submission / nbclient", medians["solved"] / medians["nbclient"], "aim <= 1.3"
    yield (
        f"one wrong answer ({needed}) / solved",
        medians["one wrong answer"] / medians["solved"],
        "aim <= 2",
    )


def workers(material: Material, folder: Path) -> Iterator[Row]:
    """Two local workers beside one, and what grading does to the client's memory."""
    _write(folder / "in", CLASS, material)
    found, times, grown = listed(folder / "in"), {}, 0

    def run() -> int:
        """Grade the class; KiB that this process grows by after the first submission."""
        held = []
        for outcome in grade_all(found, batch):
            if outcome.verdict["points"] != outcome.verdict["of"]:
                raise RuntimeError(f"{outcome.submission.id} did not pass: {outcome.timing}")
            held.append(_rss())
        return held[-1] - held[0]

    for count in (1, 2):
        with (
            cluster.executor(material.box, count) as executor,
            _batch(material, executor) as batch,
        ):
            start = time.perf_counter()
            grown += run()
            times[count] = time.perf_counter() - start
    yield "two workers / one, throughput", times[1] / times[2], "aim >= 1.7"
    yield f"memory, KiB per submission over {2 * CLASS}", grown / (2 * CLASS - 2), "reported"


def slopes(material: Material, folder: Path) -> Iterator[Row]:
    """Seconds per submission beyond what a batch costs at all, beside the peers', in turns."""
    runs: dict[str, Callable[[Path, int], None]] = {"course": partial(_course_grade, material)}
    for package, grader in (("nbgrader", _nbgrader), ("otter-grader", _otter)):
        try:
            runs[package] = partial(grader, material, _environment(folder / package, package))
        except LeftOut as reason:
            yield f"slope / {package}", "left out", str(reason)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for count in (FEW, MANY):
        for name, run in list(runs.items()):
            start = time.perf_counter()
            try:
                run(folder / f"{name}-{count}", count)
            except LeftOut as reason:
                if name == "course":
                    raise
                yield f"slope / {name}", "left out", str(reason)
                del runs[name], times[name]
            else:
                times[name].append(time.perf_counter() - start)
    slope = {name: (many - few) / (MANY - FEW) for name, (few, many) in times.items()}
    for name in list(runs)[1:]:
        ratio = slope["course"] / slope[name]
        yield f"slope from {FEW} to {MANY} submissions / {name}", ratio, "aim <= 0.6"


class LeftOut(Exception):
    """Why a peer is not measured."""


class _Canned:
    """An executor whose boxes show what the reference shows."""

    width = 2

    def __init__(self, checks: dict[str, Any]) -> None:
        self._checks = checks

    def run(self, cells: Cells, seed: int) -> Boxed:
        checked = {key for kind, key, _ in cells if kind == "check"}
        return Boxed("ok", {key: ran for key, ran in self._checks.items() if key in checked})


@contextmanager
def _batch(material: Material, executor: Any) -> Iterator[Batch]:
    with Reader() as reader:
        yield Batch(SEED, {CHAPTER.slug: material.reference}, reader, executor)


def _kept(folder: Path) -> Any:
    return results.opened(folder, False, SEED, {"chapters": [CHAPTER.slug], "unsafe": False})


def _notebook(material: Material, check: Callable[[str, str], str] | None = None) -> Any:
    """The solved chapter without prose and demos; `check(key, source)` rewrites check cells."""
    nb = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    )
    for kind, key, source in material.record.cells:
        if kind == "answer":
            source = solutions.answer_cell(key, material.answers[key])
        if kind == "check" and check:
            source = check(key, source)
        tags = [f"{kind}-{key}" if key else kind]
        nb.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    return nb


def _write(folder: Path, count: int, material: Material) -> Path:
    """A class of `count` equal submissions; returns the last one."""
    folder.mkdir()
    text = nbformat.writes(_notebook(material))
    for number in range(count):
        path = folder / f"s{number:04d}.ipynb"
        path.write_text(text, encoding="utf-8")
    return path


def _nbclient(path: Path) -> None:
    from nbclient import NotebookClient

    NotebookClient(nbformat.read(path, as_version=4), timeout=120).execute()


def _course_grade(material: Material, folder: Path, count: int) -> None:
    folder.mkdir()
    _write(folder / "in", count, material)
    command = [sys.executable, "-m", "course.cli", "grade", str(folder / "in")]
    _run([*command, "--out", str(folder / "out"), "--workers", "1"], folder)


def _environment(folder: Path, package: str) -> Path:
    """A virtual environment with one peer. LeftOut if it cannot be installed."""
    _run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    install = [str(folder / "bin" / "pip"), "install", "-q", package, "ipykernel"]
    _run([*install, "-c", str(ROOT / "constraints.txt")], folder, "it cannot be installed")
    python = str(folder / "bin" / "python")
    site = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    paths = [str(ROOT), *dict.fromkeys(sysconfig.get_path(n) for n in ("purelib", "platlib"))]
    (Path(site.strip()) / "course.pth").write_text("\n".join(paths) + "\n")
    return folder


def _run(command: list[str], folder: Path, what: str = "") -> str:
    """Run a command and return its output. LeftOut with the last line of what it said."""
    bin_ = Path(command[0]).parent
    env = os.environ | {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "?").splitlines()[-1]
        raise LeftOut(f"{what or Path(command[0]).name + ' failed'}: {said[:150]}")
    return done.stdout


def _compared(material: Material, part: dict[str, int], key: str, source: str) -> str:
    """A check cell that fails unless it shows what the reference shows.

    Args:
        part: how many check cells of each exercise came before; counted up here.
    """
    recorded = material.record.exercise(key).expected
    names = [line["name"] for line in recorded if line["part"] == part.setdefault(key, 0)]
    part[key] += 1
    want = [line for line in material.reference.checks[key].shown if line["name"] in names]
    return (
        f"{source}\n"
        "from course import compare as _compare, runtime as _runtime\n"
        f"_want = {want!r}\n"
        "for _w, _g in zip(_want, _runtime.STATE.shown[-len(_want):], strict=True):\n"
        "    assert _w['name'] == _g['name']\n"
        "    assert _compare.agree(_w['values'], _g['values'], _w['tol'])\n"
    )


def _nbgrader(material: Material, env: Path, folder: Path, count: int) -> None:
    """The assignment with locked tests: released, handed in by all, graded."""
    nb = _notebook(material, partial(_compared, material, {}))
    for number, cell in enumerate(nb.cells):
        kind = cell.metadata["tags"][0].split("-")[0]
        if kind != "setup":
            test = kind == "check"
            cell.metadata["nbgrader"] = {
                **{"schema_version": 3, "grade_id": f"cell{number}", "task": False},
                **{"grade": test, "locked": test, "solution": not test},
                **({"points": 1} if test else {}),
            }
    text = nbformat.writes(nb)
    places = [folder / "source" / "a"]
    places += [folder / "submitted" / f"s{number}" / "a" for number in range(count)]
    for place in places:
        place.mkdir(parents=True)
        (place / "a.ipynb").write_text(text, encoding="utf-8")
    nbgrader = [str(env / "bin" / "nbgrader")]
    _run([*nbgrader, "generate_assignment", "a", "--create", "--force"], folder)
    _run([*nbgrader, "autograde", "a"], folder)
    _run([*nbgrader, "export"], folder)
    rows = [line.split(",") for line in (folder / "grades.csv").read_text().splitlines()]
    score, most = rows[0].index("score"), rows[0].index("max_score")
    if len(rows) != count + 1 or any(float(row[score]) != float(row[most]) for row in rows[1:]):
        raise LeftOut("it did not award full marks")


_OTTER = """
import json, sys
from otter.api import grade_submission
for path in sys.argv[2:]:
    said = grade_submission(path, sys.argv[1], quiet=True)
    assert said.total == said.possible > 0, said.summary()
"""


def _otter(material: Material, env: Path, folder: Path, count: int) -> None:
    """The assignment with tests in a zip; its local runner in one process for all."""
    folder.mkdir()
    part: dict[str, int] = {}
    checks: dict[str, str] = {}  # all cells of one exercise: a test sees no names of another
    for kind, key, source in material.record.cells:
        if kind == "check":
            checks[key] = checks.get(key, "") + _compared(material, part, key, source)
    tests = {}
    for key, source in checks.items():
        case = {"code": f">>> exec({source!r}, globals())", "hidden": False, "locked": False}
        suite = {"cases": [case], "scored": True, "setup": "", "teardown": "", "type": "doctest"}
        test = {"name": key, "points": 1, "suites": [suite]}
        tests[f"tests/{key}.py"] = f"OK_FORMAT = True\ntest = {test!r}\n"
    with zipfile.ZipFile(folder / "autograder.zip", "w") as archive:
        archive.writestr("otter_config.json", json.dumps({"pdf": False}))
        for name, text in tests.items():
            archive.writestr(name, text)
    nb = _notebook(material)
    nb.cells = [cell for cell in nb.cells if not cell.metadata["tags"][0].startswith("check")]
    paths = [str(folder / f"s{number}.ipynb") for number in range(count)]
    for path in paths:
        nbformat.write(nb, path)
    _run([str(env / "bin" / "python"), "-c", _OTTER, "autograder.zip", *paths], folder)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _rss() -> int:
    """KiB of memory that this process holds (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


if __name__ == "__main__":
    main()
