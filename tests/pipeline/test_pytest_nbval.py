"""`pytest --nbval NOTEBOOK` as it stands: ids, JUnit, xdist, selection, plain notebooks."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat

from course.catalog import ROOT
from tests.pipeline.conftest import RECORD, answered, cell_of

LIGHT = {  # keys whose checks need neither the model nor Triton
    "forward_positions",
    "kv_bytes_per_token",
    "LayerKV",
    "attend",
    "max_concurrency",
}


def light(nb: nbformat.NotebookNode, folder: Path) -> Path:
    """The notebook with the checks that need no model, written to `folder`."""
    heavy = set(RECORD.keys) - LIGHT
    nb.cells = [c for c in nb.cells if not any(f"# check: {key}" in c.source for key in heavy)]
    nb.metadata["course_checks"] = sorted(LIGHT)
    path = folder / "learner.ipynb"
    nbformat.write(nb, path)
    return path


def run(path: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "course.nbval_plugin"]
    done = subprocess.run(
        [*command, "--nbval-current-env", "--color=no", "-c", os.devnull, *options, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=path.parent,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    return done.returncode, done.stdout + done.stderr


def test_junit_names_the_exercise_and_stored_outputs_do_not_matter(tmp_path):
    nb = answered(attend="# answer: attend\ndef attend(q, K, V):\n    return q")
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    cell_of(nb, "check", "LayerKV").metadata["tags"] = ["nbval-skip"]
    report = tmp_path / "junit.xml"
    status, output = run(light(nb, tmp_path), f"--junitxml={report}")
    assert status == 1, output
    cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
    assert set(cases) == {f"check-{key}" for key in LIGHT}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {"check-attend"}
    assert "exercise attend" in output and "expected" in output
    named = cases["check-attend"].find("properties/property[@name='exercise']")
    assert named.get("value") == "attend"


def test_two_workers_and_selection(tmp_path):
    """xdist gives the same verdicts; one selected check still runs what it stands on."""
    path = light(answered(), tmp_path)
    status, output = run(path, "-n", "2", "--dist", "loadfile")
    assert status == 0 and "5 passed" in output, output
    status, output = run(path, "-k", "attend")
    assert status == 0 and "1 passed, 4 deselected" in output, output


def test_a_failure_can_be_run_again(tmp_path):
    path = light(answered(attend="# answer: attend\ndef attend(q, K, V):\n    return q"), tmp_path)
    assert run(path)[0] == 1
    status, output = run(path, "--lf")
    assert status == 1 and "1 failed" in output and "passed" not in output, output


def test_a_missing_check_is_an_error(tmp_path):
    nb = answered()
    nb.cells.remove(cell_of(nb, "check", "attend"))
    path = tmp_path / "learner.ipynb"
    nbformat.write(nb, path)
    status, output = run(path)
    assert status == 2 and "no check cell for attend" in output, output


def test_other_notebooks_are_left_to_plain_nbval(tmp_path):
    nb = nbformat.v4.new_notebook()
    good = nbformat.v4.new_code_cell("print(1)", execution_count=1)
    good.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    bad = nbformat.v4.new_code_cell("print(2)", execution_count=2)
    bad.outputs = [nbformat.v4.new_output("stream", name="stdout", text="3\n")]
    rich = nbformat.v4.new_code_cell(
        "from IPython.display import Latex, display\ndisplay(Latex('x'))", execution_count=3
    )
    data = {"text/plain": "<IPython.core.display.Latex object>", "text/latex": "x"}
    rich.outputs = [nbformat.v4.new_output("display_data", data)]
    nb.cells = [good, bad, rich]
    path = tmp_path / "plain.ipynb"
    nbformat.write(nb, path)
    status, output = run(path, "-v")
    assert status == 1 and "Cell 0 PASSED" in output and "Cell 1 FAILED" in output, output
    assert "Cell 2 PASSED" in output, output


def test_a_check_that_shows_nothing_fails(tmp_path):
    nb = answered()
    cell_of(nb, "check", "max_concurrency").source = "# check: max_concurrency\npass"
    status, output = run(light(nb, tmp_path), "-k", "max_concurrency")
    assert status == 1 and "nothing was shown" in output, output


def test_the_committed_notebook_in_the_checkout():
    """The documented command, with the checkout's own conftest and options: stubs fail."""
    command = ["--nbval", "--color=no", "notebooks/foundations/kv_cache.ipynb", "-k", "LayerKV"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 1 and "1 failed, " in done.stdout, done.stdout + done.stderr
    assert "exercise LayerKV: error\nNotImplementedError: " in done.stdout, done.stdout
