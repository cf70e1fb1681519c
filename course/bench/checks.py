"""How long a learner waits: `course check` against plain `pytest --nbval`, and `course watch`.

Ratios within one run, interleaved, medians: the machine is shared and noisy.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat

from course import catalog, check, mutants, nbval_plugin, notebook, recordfile, solutions
from course.catalog import ROOT, Chapter

REPEATS = 3
WATCHED = "forward_positions"  # an exercise that does not run the model


def main() -> None:
    chapter = catalog.find("kv_cache")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        solved = _solved(chapter, folder / "solved.ipynb")
        wrong = _solved(chapter, folder / "wrong.ipynb", WATCHED)
        runs: dict[str, Callable[[], object]] = {
            "pytest --nbval, solved": lambda: _pytest(solved),
            "course check, solved": lambda: _check(solved),
            "course check, one wrong answer": lambda: _check(wrong),
            "course check, untouched": lambda: _check(chapter.ipynb),
        }
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(REPEATS):
            for label, run in runs.items():
                times[label].append(_seconds(run))
        medians = {label: statistics.median(t) for label, t in times.items()}
        base = medians["pytest --nbval, solved"]
        for label, median in medians.items():
            print(f"{label:32} {median / base:5.2f} x pytest --nbval")
        print(
            f"{'course watch, one save':32} {_watch(chapter, solved) / base:5.2f} x pytest --nbval"
        )


def _solved(chapter: Chapter, path: Path, broken: str = "") -> Path:
    """The notebook with the reference answers; `broken` gets its first mutant instead."""
    record = recordfile.load(chapter)
    answers = mutants.references(chapter, record)
    if broken:
        answers[broken] = next(m.source for m in mutants.written(chapter) if m.key == broken)
    nb = notebook.read(chapter.ipynb)
    for cell in nb.cells:
        where = notebook.mark(cell.source) if cell.cell_type == "code" else None
        if where and where[0] == "answer":
            cell.source = solutions.answer_cell(where[1], answers[where[1]])
    nbformat.write(nb, path)
    return path


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _pytest(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "-p", "course.nbval_plugin"]
    subprocess.run(
        [*command, "--nbval-current-env", "-c", os.devnull, str(path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )


def _check(path: Path) -> None:
    command = [sys.executable, "-m", "course.cli", "check", "kv_cache", "--notebook", str(path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)


def _watch(chapter: Chapter, path: Path) -> float:
    """Median seconds from a save to the verdict, the file's notice not included."""
    kernel = nbval_plugin.warm_kernel()
    try:
        check.check(chapter, path, {WATCHED}, kernel=kernel)
        return statistics.median(
            _seconds(lambda: check.check(chapter, path, {WATCHED}, kernel=kernel))
            for _ in range(REPEATS)
        )
    finally:
        kernel.stop()


if __name__ == "__main__":
    main()
