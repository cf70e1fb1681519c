"""The benchmark without its device: every launch agrees with what it is timed against."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from course.lab.interp import interpreted
from kernels import bench
from kernels.cases import Benchmark, families

CPU = torch.device("cpu")
BENCHMARKS = {
    f"{family}: {benchmark.name}": benchmark
    for family, cases in families().items()
    for benchmark in cases.BENCHMARKS
}


def small(benchmark: Benchmark) -> tuple:
    return benchmark.small(torch.Generator().manual_seed(0), CPU)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_ours_and_the_peers_agree_with_the_reference(name: str) -> None:
    """The peers in their first output: most leave out the log-sum-exp."""
    benchmark = BENCHMARKS[name]
    inputs = small(benchmark)
    want = first(benchmark.reference(*bench.copies(inputs)))
    with interpreted():
        assert bench.relative_error(benchmark, inputs) <= benchmark.tolerance
        for peer, function in benchmark.peers.items():
            try:
                got = first(function(*bench.copies(inputs)))
            except ImportError:
                continue  # an optional library
            assert got.shape == want.shape
            if benchmark.deterministic:
                assert bench.difference(got, want) <= benchmark.tolerance, peer


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_reference_compiles_in_one_piece(name: str) -> None:
    """Else `torch.compile` would be timed with holes in it."""
    benchmark = BENCHMARKS[name]
    torch._dynamo.reset()
    whole = torch.compile(benchmark.reference, backend="eager", fullgraph=True)
    want = benchmark.reference(*bench.copies(small(benchmark)))
    assert bench.difference(whole(*bench.copies(small(benchmark))), want) <= 1e-6


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wrong_result_is_refused(name: str) -> None:
    """The tolerance would notice the result of other inputs."""
    benchmark = BENCHMARKS[name]
    other = benchmark.small(torch.Generator().manual_seed(1), CPU)
    ours, theirs = benchmark.reference(*other), benchmark.reference(*small(benchmark))
    assert not bench.difference(ours, theirs) <= benchmark.tolerance
    assert benchmark.bytes > 0 and benchmark.flops >= 0


def clock(calls: dict[str, bench.Calls], repeats: int) -> dict[str, list[float]]:
    """Stands in for the timer of the device, two repeats at most."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(min(repeats, 2)):
        for name, sequence in calls.items():
            start = time.perf_counter()
            sequence[0]()
            times[name].append(time.perf_counter() - start)
    return times


def a_benchmark() -> Benchmark:
    return families()["attention_decode"].BENCHMARKS[1]


@pytest.fixture
def eager_compile(monkeypatch) -> None:
    """Without a C++ compiler's seconds."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.usefixtures("eager_compile")
def test_a_record_holds_times_floor_and_what_was_left_out() -> None:
    def absent(*inputs):
        import surely_not_installed  # noqa: F401

    def broken(*inputs):
        raise RuntimeError("no kernel image\nmore")

    sdpa = a_benchmark().peers["SDPA"]
    peers = {"SDPA": sdpa, "absent": absent, "broken": broken}
    benchmark = dataclasses.replace(a_benchmark(), peers=peers)
    rates = bench.floors(clock, CPU)
    with interpreted():
        record = bench.measure(benchmark, clock, rates, CPU)
    assert set(record["us"]) == {"ours", "torch.compile", "SDPA"}
    assert record["left_out"] == {"absent": "not installed", "broken": "no kernel image"}
    assert record["interpreted_difference"] == 0
    assert 0 < record["error"] <= benchmark.tolerance
    assert record["floor_us"] == pytest.approx(
        1e6
        * max(
            benchmark.bytes / rates["bytes_per_second"],
            benchmark.flops / rates["flops_per_second"],
        )
    )
    for times in record["us"].values():
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    assert "% of the floor" in bench.report("name", record)


@pytest.mark.usefixtures("eager_compile")
def test_a_red_kernel_is_not_timed() -> None:
    def never(calls, repeats):
        raise AssertionError("timed")

    wrong = dataclasses.replace(a_benchmark(), ours=lambda q, *rest: q * 0 + float("nan"))
    with pytest.raises(ArithmeticError, match="error nan against the reference"):
        bench.measure(wrong, never, {}, CPU)


def test_difference() -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([1.0, -4.0, inf, nan])
    assert bench.difference(a, a) == 0
    assert bench.difference(a, torch.tensor([1.0, -2.0, inf, nan])) == 1.0
    assert bench.difference((a, a), (a, torch.tensor([1.0, -4.0, inf, 3.0]))) != 0
    assert bench.difference(torch.tensor([1, 2]), torch.tensor([1, 4])) == 0.5
    assert bench.difference(a[:0], a[:0]) == 0


def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert capsys.readouterr().err == "no CUDA device here: nothing was measured\n"


def test_an_unknown_family_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--only", "nothing"])
    assert stopped.value.code == 2 and "nothing" in capsys.readouterr().err


def test_results_of_other_families_are_kept(tmp_path) -> None:
    path = tmp_path / "results" / "device.json"
    bench.save(path, "one", {"tests": "passed"})
    bench.save(path, "two", {"tests": "passed"})
    bench.save(path, "one", {"tests": "red"})
    assert json.loads(path.read_text()) == {"one": {"tests": "red"}, "two": {"tests": "passed"}}
    assert [p.name for p in path.parent.iterdir()] == ["device.json"]


def test_it_collects_the_tests_on_a_bare_machine() -> None:
    """Which has pytest, but none of the packages that the rest of the course needs."""
    absent = ("typer", "rich", "nbval", "nbformat", "jupytext", "yaml", "matplotlib", "IPython")
    program = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
import pytest, kernels.bench as bench
tests = [arg for name in bench.families() for arg in bench.tests_command(name)[-1:]]
raise SystemExit(pytest.main(bench.tests_command("attention_decode")[3:-1] + tests
                             + ["--collect-only", "-qq"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        cwd=bench.ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_attention_decode.py" in done.stdout


def test_a_failing_test_makes_a_family_red(tmp_path, monkeypatch) -> None:
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    for name, line in dict(good="pass", bad="assert 1 == 2").items():
        path = tmp_path / "tests" / "kernels" / f"test_{name}.py"
        path.write_text(f"def test_it():\n    {line}\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    results = bench.run_tests(["good", "bad"])
    assert results["good"] == "passed"
    assert "1 failed" in results["bad"] and "passed" not in results["bad"].split("\n")[-1]
