"""Answers that attack the run itself: floods, forged lines, dying kernels, Ctrl+C."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from course import check, compare, mutants
from course.catalog import ROOT
from course.shell import Worker
from tests.pipeline.conftest import FAST, RECORD, REFERENCE, answered, cell_of
from tests.pipeline.test_hostile_notebooks import good, instead
from tests.pipeline.test_pytest_nbval import light, run

DISPLAY = "from IPython.display import display; display({'%s': %s}, raw=True)"
LINE = "application/vnd.course.check+json"


def before(key: str, code: str) -> str:
    """The right answer to `key`, whose function first runs one line of ours."""
    head, body = good(key).rsplit('    """\n', 1)
    indent = re.match(r"\s*", body)[0]
    return f'{head}    """\n{indent}{code}\n{body}'


def test_lines_that_are_not_lines_and_errors_that_are_too_long(judge):
    """Forged display data of our type, 20 MB errors, enormous numbers: each one short verdict."""
    forged = [DISPLAY % (LINE, value) for value in ("{'x': 1}", "'word'", "{'name': 3}")]
    nb = answered(
        forward_positions=instead("forward_positions", f"{'; '.join(forged)}; return 10**400"),
        kv_bytes_per_token=instead("kv_bytes_per_token", "return 10**5000"),
        max_concurrency=instead("max_concurrency", "raise ValueError('x' * 20_000_000)"),
        attend=instead("attend", "raise Exception('a\\x1b[31mb\\x00')"),
    )
    verdicts = judge(nb)
    assert {k: verdicts[k].status for k in FAST} == dict.fromkeys(FAST, "failed") | {
        "LayerKV": "passed"
    }
    assert all(len(v.text) < 6_000 for v in verdicts.values())
    assert "got      1000000" in verdicts["forward_positions"].text
    assert "4300 digits" in verdicts["kv_bytes_per_token"].text
    assert "[... 20,000,000 characters]" in verdicts["max_concurrency"].text
    assert verdicts["attend"].text.startswith("Exception: ab")


def test_a_hundred_megabytes_are_cut_told_and_not_kept(tmp_path):
    """By print, by display and past Python: the checking process stays small."""
    flood = "[{} for _ in range(10)]"  # ten times 10 MB
    nb = answered(
        forward_positions=before("forward_positions", flood.format("print('x' * 10_000_000)")),
        kv_bytes_per_token=before(
            "kv_bytes_per_token", flood.format("__import__('os').write(1, b'x' * 10_000_000)")
        ),
        max_concurrency=before(
            "max_concurrency",
            DISPLAY.replace("; ", "; [", 1) % ("text/plain", "'x' * 10_000_000")
            + " for _ in range(10)]",
        ),
    )
    path = tmp_path / "learner.ipynb"
    nbformat.write(nb, path)
    code = (
        "import json, sys, pathlib; from course import catalog, check\n"
        "chapter, path = catalog.find('kv_cache'), pathlib.Path(sys.argv[1])\n"
        "found = check.check(chapter, path, set(sys.argv[2:]), 120)\n"
        "peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(json.dumps([[v.key, v.status, v.text] for v in found] + [int(peak.split()[1])]))"
    )
    keys = ("forward_positions", "kv_bytes_per_token", "max_concurrency")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), *keys],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0 and len(done.stdout) < 10_000, done.stderr[-2000:]
    *verdicts, peak = json.loads(done.stdout)
    assert [status for _, status, _ in verdicts] == ["passed"] * 3, verdicts
    assert "output was cut after 1,048,576 characters" in verdicts[0][2]
    assert peak < 400_000, f"{peak} kB"


@pytest.mark.parametrize(
    "death",
    [
        "import os; os._exit(0)",  # in the answer cell itself, not in a check
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_an_answer_cell_that_ends_the_kernel_is_the_one_that_failed(judge, death):
    verdicts = judge(answered(attend=f"{good('attend')}\n{death}"), timeout=300)
    assert verdicts["attend"].status == "failed"
    assert "the kernel died" in verdicts["attend"].text
    assert {verdicts[k].status for k in FAST if k not in ("attend", "max_concurrency")} == {
        "passed"
    }
    assert verdicts["max_concurrency"].status == "blocked"
    assert "answer: attend" in verdicts["max_concurrency"].text


def test_a_stopped_kernel_is_ended(judge):
    """SIGSTOP: alive for the system, deaf to interrupts."""
    stop = instead("LayerKV", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    verdicts = judge(answered(LayerKV=stop), ["LayerKV", "max_concurrency"], timeout=10)
    assert verdicts["LayerKV"].status == "failed"
    assert "still running after 10 s" in verdicts["LayerKV"].text
    assert verdicts["max_concurrency"].status == "blocked"
    assert "could not be stopped" in verdicts["max_concurrency"].text


def test_ctrl_c_ends_a_check_without_a_verdict(tmp_path):
    marker, path = tmp_path / "pid", tmp_path / "learner.ipynb"
    body = f"import os; open({str(marker)!r}, 'w').write(str(os.getpid()))\n    while True: pass"
    nbformat.write(answered(kv_bytes_per_token=instead("kv_bytes_per_token", body)), path)
    command = ["check", "kv_cache", "--exercise", "kv_bytes_per_token", "--notebook", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "course.cli", *command, "--timeout", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        # a shell's background job, as CI may be, starts with Ctrl+C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    kernel = int(_soon(lambda: marker.exists() and marker.read_text()))
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "passed" not in said and "failed" not in said and "Traceback" not in complaint
    _soon(lambda: not Path(f"/proc/{kernel}").exists())


def _soon(happened, seconds: float = 60):
    """What `happened` returns once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := happened():
            return found
        time.sleep(0.1)
    raise AssertionError("it never happened")


def test_pytest_nbval_is_as_hard_to_fool(tmp_path):
    """Tags, stored outputs and demos change nothing; a death and a loop cost only themselves."""
    demo = nbformat.v4.new_code_cell(f"# demo\nopen({str(tmp_path / 'ran')!r}, 'w')\n1 / 0")
    die = "import os; os.kill(os.getpid(), 9)"
    nb = answered(
        forward_positions=instead("forward_positions", "return 1"),
        kv_bytes_per_token=instead("kv_bytes_per_token", "while True: pass"),
        attend=instead("attend", die),
    )
    nb.cells.insert(1, demo)
    for key in ("forward_positions", "kv_bytes_per_token"):
        check_cell = cell_of(nb, "check", key)
        tags = ["raises-exception", "nbval-skip", "nbval-ignore-output"]
        check_cell.metadata["tags"] = [f"check-{key}", *tags]
        check_cell.source = f"{check_cell.source}\n# NBVAL_SKIP"
    status, output = run(light(nb, tmp_path), "--nbval-cell-timeout", "4", "-v")
    found = dict(re.findall(r"::check-(\w+) (PASSED|FAILED|SKIPPED|XFAIL|XPASS)", output))
    assert found == dict.fromkeys(FAST, "FAILED") | {"LayerKV": "PASSED"}, output
    assert status == 1 and not (tmp_path / "ran").exists()
    assert "exercise kv_bytes_per_token: timeout" in output
    assert "exercise attend: died" in output
    assert "exercise max_concurrency: blocked" in output


def test_nbval_and_the_plain_shell_show_equal_lines():
    """Recording, mutants and grading run in a shell, learners in a kernel: one truth."""
    nb = check._notebook(
        RECORD,
        {key: f"# answer: {key}\n{source}" for key, source in REFERENCE.items()},
        RECORD.keys,
    )
    by_nbval = check.run(nb, 120)
    with Worker() as worker:
        by_shell = worker.run(mutants.cells(RECORD, REFERENCE), timeout=300)
    assert list(by_nbval) == list(by_shell) == RECORD.keys
    for key in RECORD.keys:
        one, two = by_nbval[key]["shown"], by_shell[key].shown
        assert [line["name"] for line in one] == [line["name"] for line in two]
        for a, b in zip(one, two, strict=True):
            assert compare.agree(a["values"], b["values"], 1e-6), (key, a, b)
