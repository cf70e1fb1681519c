"""The benchmark without its device: every launch agrees with what it is timed against."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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


class WithoutHost(TorchDispatchMode):
    """Refuses what no CUDA graph can hold: numbers from the host, and numbers for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select"), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_reference_can_be_captured(name: str) -> None:
    inputs = small(BENCHMARKS[name])
    with WithoutHost():
        BENCHMARKS[name].reference(*inputs)


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


def clock(calls: bench.Calls) -> bench.Run:
    """Stands in for the stopwatch of the device."""

    def run() -> float:
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start

    return run


RATES = {"bytes_per_second": 4e12, "flops_per_second": 7e14}
LAUNCH, KERNEL = 30e-6, 5e-6


class FakeCuda:
    """As much of `torch.cuda` as the benchmark touches, with the clocks of host and device.

    A capture that failed raises at its end, too, and then leaves its stream the current one;
    torch's generator is stuck from then on.
    """

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.current = self.default = SimpleNamespace(wait_stream=lambda other: None)
        self.capturing: Any = None
        self.spoilt = self.broken = self.dead = False
        self.sync = "default"
        self.eager = 0

    def kernel(self) -> None:
        """What a launcher does."""
        if self.capturing:
            self.capturing.calls += 1
        else:
            self.eager += 1

    def wait(self) -> None:
        """What `.item()` does."""
        if self.sync == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.covert_wait()

    def covert_wait(self) -> None:
        """The same by a library that torch knows nothing of."""
        if self.capturing:
            self.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(calls=0, reset=lambda: None)
        graph.replay = lambda: self.enqueue(LAUNCH, graph.calls * KERNEL)
        return graph

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any = None) -> Iterator[None]:
        before, self.current = self.current, stream or self.Stream()
        self.capturing, self.spoilt = graph, False
        try:
            yield
        finally:
            self.capturing = None
            if self.spoilt:
                self.broken = True
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            self.current = before

    def enqueue(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(synchronize=self.synchronize)

        def record() -> None:
            self.enqueue(2e-6, 0.0)
            event.at = self.device

        event.record = record
        event.elapsed_time = lambda other: 1000 * (other.at - event.at)
        return event

    def _sleep(self, cycles: int) -> None:
        self.enqueue(2e-6, cycles / 2e9)

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.host = max(self.host, self.device)

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync = mode

    def empty_cache(self) -> None:
        self.synchronize()

    def is_available(self) -> bool:
        return True


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name in dir(fake):
        if not name.startswith("__") and hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(bench, "_half_captured", [])
    return fake


def a_benchmark() -> Benchmark:
    return families()["attention_decode"].BENCHMARKS[1]


def in_torch(**changes: Any) -> Benchmark:
    """The same without a kernel: nothing to interpret."""
    one = a_benchmark()
    return dataclasses.replace(one, ours=one.reference, peers={}, **changes)


@pytest.fixture
def eager_compile(monkeypatch) -> None:
    """Without a C++ compiler's seconds, and few calls, since an interpreter runs them."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(bench, "GRAPH_CALLS", 2)
    monkeypatch.setattr(bench, "REPEATS", 2)


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
    assert record["interpreted_difference"] == 0.0
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
    line = bench.report("name", record)
    assert "% of the floor" in line and line.endswith(", no broken (no kernel image)")


def never(calls: bench.Calls) -> bench.Run:
    raise AssertionError("timed")


@pytest.mark.usefixtures("eager_compile")
def test_a_red_kernel_is_not_timed() -> None:
    wrong = dataclasses.replace(a_benchmark(), ours=lambda q, *rest: q * 0 + float("nan"))
    with pytest.raises(ArithmeticError, match="error nan against the reference"):
        bench.measure(wrong, never, {}, CPU)


@pytest.mark.usefixtures("eager_compile")
@pytest.mark.parametrize(("factor", "red"), [(1.03, False), (1.05, True), (float("nan"), True)])
def test_a_result_unlike_the_interpreters_is_not_timed(factor: float, red: bool) -> None:
    """Within twice the tolerance of 0.02, since each may be that far from the reference."""
    factors = [factor]  # of the small sizes, which the device computes first

    def ours(*inputs):
        result = a_benchmark().reference(*inputs).double()
        return result * (factors.pop() if factors else 1)

    benchmark = dataclasses.replace(in_torch(), ours=ours)
    with pytest.raises(ArithmeticError if red else AssertionError) as stopped:
        bench.measure(benchmark, never, RATES, CPU)
    assert ("against the interpreter exceeds 0.04" if red else "timed") in str(stopped.value)


@pytest.mark.usefixtures("eager_compile")
def test_where_the_interpreter_cannot_be_used_it_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "course.lab.interp", None)
    record = bench.measure(in_torch(), clock, RATES, CPU)
    assert record["interpreted_difference"].startswith("not compared: import of course.lab.")


def counted(cuda: FakeCuda, **changes: Any) -> Benchmark:
    """The same, of whose launches the fake knows."""
    one = in_torch(**changes)

    def call(*inputs):
        cuda.kernel()
        return one.reference(*inputs)

    return dataclasses.replace(one, ours=call, reference=call)


def on_fake(cuda: FakeCuda, **peers: Callable[..., Any]) -> dict[str, Any]:
    """A record of the stopwatch of the device, with these peers."""
    benchmark = dataclasses.replace(counted(cuda), peers=peers)
    return bench.measure(benchmark, bench.cuda_stopwatch, RATES, CPU)


@pytest.mark.usefixtures("eager_compile")
def test_only_the_device_is_in_a_time(cuda: FakeCuda) -> None:
    """Neither a graph's launch by the host, nor what the host does between two of them."""
    record = on_fake(cuda)
    assert record["left_out"] == {}
    for times in record["us"].values():
        assert times == pytest.approx(dict.fromkeys(("p20", "p50", "p80"), 1e6 * KERNEL))


@pytest.mark.usefixtures("eager_compile")
def test_a_peer_that_cannot_be_captured_loses_only_itself(cuda: FakeCuda) -> None:
    """Liger's fused loss calls `.item()`; the second waits where torch does not see it."""

    def waits(*inputs):
        cuda.wait()

    def waits_unseen(*inputs):
        cuda.covert_wait()

    record = on_fake(cuda, waits=waits)
    assert set(record["us"]) == {"ours", "torch.compile"}
    assert record["left_out"] == {"waits": "called a synchronizing CUDA operation"}
    assert not cuda.broken and cuda.sync == "default"

    record = on_fake(cuda, unseen=waits_unseen, last=lambda *inputs: cuda.kernel())
    assert set(record["us"]) == {"ours", "torch.compile", "last"}
    assert record["left_out"] == {"unseen": "CUDA error: operation failed due to a previous error"}
    assert cuda.broken and cuda.current is cuda.default
    assert len(bench._half_captured) == 1


@pytest.mark.usefixtures("eager_compile")
def test_what_cannot_be_captured_of_ours_is_an_error(cuda: FakeCuda, monkeypatch) -> None:
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(cuda.sync))
    benchmark = dataclasses.replace(
        in_torch(), ours=lambda *inputs: (cuda.wait(), a_benchmark().reference(*inputs))[1]
    )
    with pytest.raises(RuntimeError, match="synchronizing"):
        bench.measure(benchmark, bench.cuda_stopwatch, RATES, CPU)
    assert resets == ["default"]


@pytest.mark.usefixtures("eager_compile")
@pytest.mark.parametrize("problem", [AssertionError(), RuntimeError(" \n"), NotImplementedError()])
def test_a_mute_exception_gives_its_type(problem: Exception) -> None:
    def mute(*inputs):
        raise problem

    benchmark = dataclasses.replace(in_torch(), peers={"mute": mute})
    record = bench.measure(benchmark, clock, RATES, CPU)
    assert record["left_out"] == {"mute": type(problem).__name__}


@pytest.mark.parametrize("cache", [40, 50, 60, 126])
def test_no_cache_holds_the_inputs(monkeypatch, cache: int) -> None:
    """MiB of L2 of an A100, H100, H200 as torch reports it, and B200.

    Counted twice: by what must move, and by the tensors; peers' are among those.
    """
    device = SimpleNamespace(L2_cache_size=cache << 20, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: device)
    for name, benchmark in BENCHMARKS.items():
        with FakeTensorMode():
            inputs = benchmark.inputs(torch.Generator(), CPU)
            size = bench.nbytes(inputs)
            sets = bench.buffer_sets(benchmark, inputs, torch.device("cuda"))
        assert sets * benchmark.bytes > 2 * cache << 20, name
        assert sets * size > cache << 20, name
        assert sets == 1 or sets * size < device.total_memory // 2, name


def test_short_kernels_are_called_often_and_long_ones_are_not() -> None:
    assert bench.graph_calls(1e-9) == bench.graph_calls(20e-6) == 64
    assert bench.graph_calls(100e-6) == 20
    assert bench.graph_calls(6e-3) == 1


def test_difference() -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([1.0, -4.0, inf, nan])
    assert bench.difference(a, a) == 0
    assert bench.difference(a, torch.tensor([1.0, -2.0, inf, nan])) == 1.0
    assert bench.difference((a, a), (a, torch.tensor([1.0, -4.0, inf, 3.0]))) != 0
    assert bench.difference(torch.tensor([1, 2]), torch.tensor([1, 4])) == 0.5
    assert bench.difference(a[:0], a[:0]) == 0
    assert bench.difference(a, a[:, None]) == inf
    assert bench.difference(a[:2], -a[:2]) == 2
    assert bench.difference(a[3:], torch.zeros(1)) != 0


def test_difference_of_several_pieces(monkeypatch) -> None:
    monkeypatch.setattr(bench, "CHUNK", 3)
    a = torch.arange(10.0).view(2, 5)
    assert bench.difference(a + (a == 1), a) == 1 / 9
    assert bench.difference(a.T, a.T.contiguous()) == 0


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


@pytest.fixture
def at_home(cuda, eager_compile, tmp_path, monkeypatch) -> Callable[..., None]:
    """Lets `main` run on the fake, with the families it is told and their small sizes."""
    real = bench.measure
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "machine", lambda device: {"device": "A GPU"})
    monkeypatch.setattr(bench, "floors", lambda stopwatch, device: RATES)
    monkeypatch.setattr(bench, "run_tests", lambda names: dict.fromkeys(names, "passed"))
    monkeypatch.setattr(bench, "measure", lambda one, timer, *rest: real(one, timer, RATES, CPU))

    def families(**known: list[Benchmark]) -> None:
        cases = {name: SimpleNamespace(BENCHMARKS=list_) for name, list_ in known.items()}
        monkeypatch.setattr(bench, "families", lambda: cases)

    return families


def test_a_quick_run_leaves_the_full_record(at_home, cuda: FakeCuda, tmp_path) -> None:
    """And the website draws the files of that folder only, not those of its folders."""
    at_home(one=[counted(cuda), counted(cuda, name="larger")])
    assert bench.main([]) == 0
    full = (tmp_path / "a-gpu.json").read_text()
    assert list(json.loads(full)["one"]["runs"]) == [a_benchmark().name, "larger"]
    assert bench.main(["--quick"]) == 0
    assert (tmp_path / "a-gpu.json").read_text() == full
    assert [path.name for path in tmp_path.glob("*.json")] == ["a-gpu.json"]
    quick = json.loads((tmp_path / "quick" / "a-gpu.json").read_text())
    assert quick["one"]["tests"] == "not run: --quick"
    assert list(quick["one"]["runs"]) == [a_benchmark().name]


def test_a_mute_failure_of_ours_is_recorded(at_home, cuda: FakeCuda, tmp_path) -> None:
    def mute(*inputs):
        raise AssertionError

    at_home(bad=[dataclasses.replace(in_torch(), ours=mute)], good=[counted(cuda)])
    assert bench.main([]) == 1
    record = json.loads((tmp_path / "a-gpu.json").read_text())
    assert record["bad"]["runs"] == {a_benchmark().name: {"failed": "AssertionError"}}
    assert record["good"]["runs"][a_benchmark().name]["us"]["ours"]["p50"] == pytest.approx(5)


def test_a_dead_device_condemns_nobody_else(at_home, cuda, tmp_path, capsys, monkeypatch) -> None:
    """After a wild address the process gets nothing but errors: who comes later is not to blame."""

    def kills(*inputs):
        cuda.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    at_home(bad=[dataclasses.replace(in_torch(), ours=kills)] * 2, good=[counted(cuda)])
    assert bench.main([]) == 1
    assert list(json.loads((tmp_path / "a-gpu.json").read_text())) == ["bad"]
    assert "the rest was not run" in capsys.readouterr().out

    cuda.dead = False
    one = dataclasses.replace(counted(cuda), peers={"wild": kills})
    monkeypatch.setattr(bench, "lost", lambda device: cuda.dead)  # also of the CPU
    at_home(one=[one])
    assert bench.main([]) == 1
    record = json.loads((tmp_path / "a-gpu.json").read_text())["one"]["runs"]
    assert record[one.name]["failed"].startswith("wild: CUDA error")


def test_a_quick_run_begins_nothing_that_would_end_late(at_home, tmp_path, monkeypatch) -> None:
    now = [0.0]

    def slow(*arguments):
        now[0] += 50
        return {"us": {"ours": {"p50": 1}}, "floor_us": 1, "left_out": {}}

    monkeypatch.setattr(bench, "measure", slow)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    at_home(**{name: [a_benchmark()] * 2 for name in "abcdefg"})
    assert bench.main(["--quick"]) == 0
    assert now[0] == 200 <= bench.QUICK_SECONDS
    assert list(json.loads((tmp_path / "quick" / "a-gpu.json").read_text())) == list("abcd")


def test_a_machine_without_git(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench.machine(CPU)["commit"] == "unknown"


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


def test_tests_that_end_without_a_word_are_red(monkeypatch) -> None:
    """A segmentation fault leaves neither output nor a verdict."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(bench, "tests_command", lambda family: [sys.executable, "-c", program])
    assert bench.run_tests(["one"]) == {"one": "ended with -9"}
