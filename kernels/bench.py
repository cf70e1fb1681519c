"""Time the kernels on a CUDA machine: `python -m kernels.bench`.

Each family is first held to its tests on the device, to its reference at real
sizes and to the interpreter at small ones; a family that fails is not timed.
Then its launches take turns with the compiled reference and the named peers,
over input buffers that rotate so that none is found in a cache, and the floor
is what the device's own copy bandwidth and matrix rate allow. The record goes
to book/results/<device>.json, from which the website draws ratios; that of
--quick goes to book/results/quick/<device>.json, which replaces no full one
and is not drawn.

Needs torch, Triton and NumPy alone; with pytest the tests run too.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from course.lab.launch import cdiv
from kernels.cases import Benchmark, families

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "book" / "results"
QUICK_SECONDS = 240
REPEATS = 30
GRAPH_SECONDS, GRAPH_CALLS = 2e-3, 64  # of one graph: whichever is sooner
SLEEP_CYCLES = 2_000_000  # 1 ms
CHUNK = 1 << 24  # numbers
OURS, COMPILED = "ours", "torch.compile"

Calls = list[Callable[[], Any]]
Run = Callable[[], float]  # one repeat; seconds a call
Stopwatch = Callable[[Calls], Run]

_half_captured: list[torch.cuda.CUDAGraph] = []


def cuda_stopwatch(calls: Calls) -> Run:
    """Capture the calls in one CUDA graph, to be timed as a whole.

    So Python and the launches of the host are in nobody's figure.

    Raises:
        Exception: what a call raises, or that it cannot be captured since the
            host would have to wait for the device.
    """
    # Leaving `stream` puts the old one back: `graph` does not if it fails.
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compile, and settle the allocator
            call()
        refuse_waiting(calls[0])
        try:
            with torch.cuda.graph(graph, stream=side):
                for call in calls:
                    call()
        except Exception:
            graph.reset()
            _half_captured.append(graph)  # the allocator still points to it
            raise
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()  # the first one uploads it
    torch.cuda.synchronize()

    def run() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While the device sleeps the host gets ahead of it; on an idle device
        # the launch of the graph would lie between the events.
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / len(calls)  # milliseconds

    return run


def refuse_waiting(call: Callable[[], Any]) -> None:
    """Call, with an error if torch lets the host wait, as `.item()` does.

    A capture that fails halfway leaves torch's allocator and its generator of
    random numbers in the midst of it: better to know before.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def take_turns(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Seconds a call, by name, for each repeat.

    Every other round goes backwards, so that nobody always follows another.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(REPEATS):
        order.reverse()
        for name in order:
            seconds[name].append(runs[name]())
    return seconds


def floors(stopwatch: Stopwatch, device: torch.device) -> dict[str, float]:
    """Bytes a second of a large copy, FLOPs a second of a large bf16 matmul.

    Measured here, since a data sheet's figures are reached by nobody.
    """
    size = 1 << 30 if device.type == "cuda" else 1 << 20
    n = 8192 if device.type == "cuda" else 128
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # random: a device runs faster on zeros, which cost it less power
    a, b = torch.randn(2, n, n, device=device).bfloat16().unbind()
    times = take_turns(
        {
            "copy": stopwatch([lambda: target.copy_(source)]),
            "matmul": stopwatch([lambda: a @ b]),
        }
    )
    return {
        "bytes_per_second": 2 * size / statistics.median(times["copy"]),
        "flops_per_second": 2 * n**3 / statistics.median(times["matmul"]),
    }


def tests_command(family: str) -> list[str]:
    """Runs a family's tests without the plugins of the other tests.

    What is compiled for other targets is left to the pinned compiler.
    """
    tests = ROOT / "tests" / "kernels"
    return [
        *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header"),
        *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)),
        *("--confcutdir", str(tests), "-m", "not aot"),
        str(tests / f"test_{family}.py"),
    ]


def run_tests(names: Sequence[str]) -> dict[str, str]:
    """Family -> "passed", "not run: why", or the last lines of a failure."""
    if importlib.util.find_spec("pytest") is None:
        return dict.fromkeys(names, "not run: pytest is not installed")

    def run(family: str) -> str:
        done = subprocess.run(
            tests_command(family), capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode == 0:
            return "passed"
        said = done.stdout.strip() or done.stderr.strip()
        lines = said.splitlines()[-5:]
        return "\n".join(lines) or f"ended with {done.returncode}"

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def measure(
    benchmark: Benchmark,
    stopwatch: Stopwatch,
    rates: Mapping[str, float],
    device: torch.device,
) -> dict[str, Any]:
    """Hold one benchmark to interpreter and reference, then time it.

    Raises:
        ArithmeticError: the result is further from one of them than the
            tolerance allows; nothing was timed.
    """
    interpreted = interpreted_difference(benchmark, device)
    # Each of two honest kernels may be the tolerance away from the reference:
    # their blocks differ, and with them the order of sums.
    if isinstance(interpreted, float):
        judge("the interpreter", interpreted, 2 * benchmark.tolerance)
    first = seeded_inputs(benchmark, 0, device)
    error = relative_error(benchmark, first)
    judge("the reference", error, benchmark.tolerance)

    sets = buffer_sets(benchmark, first, device)
    more = (seeded_inputs(benchmark, i, device) for i in range(1, sets))
    inputs = [first, *more]
    floor = max(
        benchmark.bytes / rates["bytes_per_second"],
        benchmark.flops / rates["flops_per_second"],
    )
    rounds = cdiv(graph_calls(floor), sets)
    candidates = {
        OURS: benchmark.ours,
        COMPILED: torch.compile(benchmark.reference),
        **benchmark.peers,
    }
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    try:
        for name, function in candidates.items():
            try:
                function(*first)
                calls: Calls = [partial(function, *x) for x in inputs]
                runs[name] = stopwatch(calls * rounds)
            except Exception as problem:
                if name == OURS:
                    raise
                absent = isinstance(problem, ImportError)
                left_out[name] = "not installed" if absent else reason(problem)
                if lost(device):
                    raise RuntimeError(f"{name}: {left_out[name]}") from None
        times = take_turns(runs)
    finally:
        torch._dynamo.reset()
    return {
        "bytes": benchmark.bytes,
        "flops": benchmark.flops,
        "bound": benchmark.bound,
        "interpreted_difference": interpreted,
        "error": error,
        "floor_us": 1e6 * floor,
        "us": {name: quantiles(t) for name, t in times.items()},
        "left_out": left_out,
    }


def judge(other: str, error: float, limit: float) -> None:
    """ArithmeticError if the error exceeds the limit or is NaN."""
    if not error <= limit:
        raise ArithmeticError(
            f"error {error:.2g} against {other} exceeds {limit:.2g}"
        )


def lost(device: torch.device) -> bool:
    """Whether an error, a wild address for one, has stopped the device.

    Until the process ends it then refuses everything, whoever asks.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def reason(problem: Exception) -> str:
    """First line of what an exception says; its type if it says nothing."""
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__


def graph_calls(floor: float) -> int:
    """How many calls of `floor` seconds a graph should hold.

    A short graph would be as long as what surrounds it; many calls of a long
    kernel would only take time.
    """
    return math.ceil(min(GRAPH_SECONDS / floor, GRAPH_CALLS))


def buffer_sets(
    benchmark: Benchmark, inputs: tuple, device: torch.device
) -> int:
    """How many sets of inputs it takes to be twice the size of the cache.

    Counted is what a call must move; a set may be larger, with what a peer
    wants besides, and all sets together fill a third of the memory at most.
    """
    if device.type != "cuda":
        return 2
    properties = torch.cuda.get_device_properties(device)
    wanted = 1 + cdiv(2 * properties.L2_cache_size, max(benchmark.bytes, 1))
    room = properties.total_memory // 3 // max(nbytes(inputs), 1)
    return max(1, min(wanted, room))


def nbytes(inputs: tuple) -> int:
    return sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))


def seeded_inputs(
    benchmark: Benchmark, seed: int, device: torch.device
) -> tuple:
    generator = torch.Generator(device).manual_seed(seed)
    make = benchmark.inputs if device.type == "cuda" else benchmark.small
    return make(generator, device)


def relative_error(benchmark: Benchmark, inputs: tuple) -> float:
    """Largest difference from the reference, by the reference's largest.

    Both get copies: an update in place must not reach the other.
    """
    ours = benchmark.ours(*copies(inputs))
    return difference(ours, benchmark.reference(*copies(inputs)))


def interpreted_difference(
    benchmark: Benchmark, device: torch.device
) -> float | str:
    """The same between the compiled kernel and the interpreter, small sizes.

    Where this Triton's interpreter cannot be used, a sentence says why.
    """
    host = torch.Generator().manual_seed(0)
    inputs = benchmark.small(host, torch.device("cpu"))
    there = tuple(
        x.to(device) if isinstance(x, torch.Tensor) else x
        for x in copies(inputs)
    )
    compiled = benchmark.ours(*there)
    try:
        from course.lab.interp import interpreted

        with interpreted():
            on_cpu = benchmark.ours(*inputs)
    except Exception as problem:
        return f"not compared: {reason(problem)}"
    return difference(compiled, on_cpu)


def copies(inputs: tuple) -> tuple:
    return tuple(
        x.clone() if isinstance(x, torch.Tensor) else x for x in inputs
    )


def difference(one: Any, two: Any) -> float:
    """Largest |one - two| over all outputs, each by two's largest value.

    Equal infinities do not differ; a NaN in one alone gives NaN, and another
    shape infinity. Piece by piece, where `one` lives: in float64 a large
    output is larger than the memory, and would take the host seconds.
    """
    if isinstance(one, torch.Tensor):
        one, two = (one,), (two,)
    worst = 0.0
    for a, b in zip(one, two, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = (x.detach().to(a.device).flatten() for x in (a, b))
        gap = scale = 0.0
        for start in range(0, a.numel(), CHUNK):
            x, y = (z[start : start + CHUNK].double() for z in (a, b))
            same = (x == y) | (x.isnan() & y.isnan())
            apart = torch.where(same, 0.0, (x - y).abs())
            if apart.isnan().any():
                return float("nan")
            gap = max(gap, apart.max().item())
            sized = torch.where(y.isfinite(), y.abs(), 0.0)
            scale = max(scale, sized.max().item())
        worst = max(worst, gap / (scale or 1.0))
    return worst


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in microseconds."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    named = {"p50": statistics.median(seconds), "p20": fifths[0]}
    return {k: 1e6 * v for k, v in (named | {"p80": fifths[3]}).items()}


def machine(device: torch.device) -> dict[str, str]:
    """What the times belong to."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        ).stdout.strip()
    except OSError:  # a bare machine may have no git
        commit = ""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "commit": commit or "unknown",
        "date": date.today().isoformat(),
    }


def report(name: str, record: Mapping[str, Any]) -> str:
    """A line of the terminal: percent of the floor, ratio to each peer.

    Peers that are installed and yet were not timed say why.
    """
    ours = record["us"][OURS]["p50"]
    peers = [
        f"{peer} {times['p50'] / ours:.2f}x"
        for peer, times in record["us"].items()
        if peer != OURS
    ] + [
        f"no {peer} ({why})"
        for peer, why in record["left_out"].items()
        if why != "not installed"
    ]
    floor = 100 * record["floor_us"] / ours
    return f"  {name}: {ours:.1f} us, {floor:.0f}% of the floor; " + (
        ", ".join(peers)
    )


def save(path: Path, family: str, entry: Mapping[str, Any]) -> None:
    """Put a family's entry into the record of a device, whole or not at all."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[family] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a family failed, 2 without a GPU or if misused."""
    known = families()
    parser = argparse.ArgumentParser("kernels.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=known, default=[*known])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one size a family, comparisons instead of the tests, "
        "no family begun that would end after 4 minutes",
    )
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return 2

    start, device = time.monotonic(), torch.device("cuda")
    here = machine(device)
    # That it does not see every wait is why a failed capture is caught too.
    warnings.filterwarnings("ignore", "Synchronization debug mode")
    rates = floors(cuda_stopwatch, device)
    torch.cuda.empty_cache()  # the tests want memory too
    print(
        f"{here['device']}: copies {rates['bytes_per_second'] / 1e12:.2f} "
        f"TB/s, bf16 matmul {rates['flops_per_second'] / 1e12:.0f} TFLOP/s"
    )
    tests = (
        dict.fromkeys(chosen.only, "not run: --quick")
        if chosen.quick
        else run_tests(chosen.only)
    )
    slug = re.sub(r"\W+", "-", here["device"]).strip("-").lower()
    folder = RESULTS / "quick" if chosen.quick else RESULTS
    failed, longest = [], 0.0
    for family in chosen.only:
        # The next one may take as long as the longest so far.
        began = time.monotonic()
        if chosen.quick and began - start + longest > QUICK_SECONDS:
            print(f"{family}: no time left")
            continue
        print(f"{family}: tests {tests[family]}")
        runs: dict[str, Any] = {}
        benchmarks = known[family].BENCHMARKS
        if not tests[family].startswith(("passed", "not run")):
            failed.append(family)
            benchmarks = []
        for benchmark in benchmarks[:1] if chosen.quick else benchmarks:
            try:
                record = measure(benchmark, cuda_stopwatch, rates, device)
                print(report(benchmark.name, record), flush=True)
            except Exception as problem:
                failed.append(family)
                record = {"failed": reason(problem)}
                print(f"  {benchmark.name}: FAILED, {record['failed']}")
            runs[benchmark.name] = record
            if lost(device):
                break
            gc.collect()  # the memory of a failure hangs on its traceback
            torch.cuda.empty_cache()
        entry = {"floors": rates, "tests": tests[family], "runs": runs}
        save(folder / f"{slug}.json", family, {**here, **entry})
        if lost(device):
            print("the device takes no more work: the rest was not run")
            return 1
        longest = max(longest, time.monotonic() - began)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
