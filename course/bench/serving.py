"""`python -m course.bench.serving`: the eight requests of the chapter "Serving", timed.

The page counts the steps of three policies on one model; this takes the real seconds of the same
runs. It executes the page's own cells with the reference answers in them, so that there is nothing
to keep in step. The machine is shared and noisy: the policies take turns, the order is reversed
every other time, and the ratio is the median over turns.
"""

import os
import statistics
import time

from course import catalog, mutants, notebook, recordfile, solutions
from course.shell import execute, make_shell

POLICIES = ("static", "continuous", "chunked")
REPEATS = 7
DEMOS = ("class Engine:", "def trace(")  # what the cells define that the runs need


def main() -> None:
    os.environ["COURSE_SEED"] = "1"  # not 0, under which a chapter compares and comments
    trace = _cells()["trace"]  # defining it has run each policy once
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    order = list(POLICIES)
    for _ in range(REPEATS):
        order.reverse()
        for policy in order:
            start = time.perf_counter()
            trace(policy)
            times[policy].append(time.perf_counter() - start)
    for policy, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["static"], strict=True))
        print(f"eight requests, {policy:10} {ratio:5.2f} x static")


def _cells() -> dict:
    """The names that the chapter defines with the reference answers in it, `trace` among them."""
    chapter = catalog.find("serving")
    answers = mutants.references(chapter, recordfile.load(chapter))
    shell = make_shell()
    for cell in notebook.cells(notebook.read(chapter.md), chapter.md.name):
        source = cell.source
        if cell.kind == "answer":
            source = solutions.answer_cell(cell.key, answers[cell.key])
        elif cell.kind != "setup" and not any(name in source for name in DEMOS):
            continue
        if error := execute(shell, source):
            raise RuntimeError(f"{chapter.md.name}, cell {cell.index}: {error}")
    return shell.user_ns


if __name__ == "__main__":
    main()
