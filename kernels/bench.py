"""Time the kernels on a CUDA machine: `python -m kernels.bench`.

Each family is first held to its tests on the device, to its reference at real
sizes and to the interpreter at small ones; a family that fails is not timed.
Then its launches take turns with the compiled reference and the named peers,
over input buffers that rotate so that none is found in a cache, and the floor
is what the device's own copy bandwidth and matrix rate allow. The record goes
to book/results/<device>.json, from which the website draws ratios.

Needs torch, Triton and NumPy alone; with pytest the tests run too.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
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
QUICK_SECONDS = 225
REPEATS = 30
OURS, COMPILED = "ours", "torch.compile"

Calls = list[Callable[[], Any]]
Timer = Callable[[Mapping[str, Calls], int], dict[str, list[float]]]


def cuda_timer(
    calls: Mapping[str, Calls], repeats: int
) -> dict[str, list[float]]:
    """Seconds a call, by name, for each repeat; the names take turns.

    The calls of a name are captured in one CUDA graph, so that the time of
    Python and of a launch is in nobody's figure.
    """
    graphs = {}
    for name, sequence in calls.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in sequence:  # compile, and settle the allocator
                call()
        torch.cuda.current_stream().wait_stream(side)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in sequence:
                call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        order.reverse()
        for name in order:
            start, end = (
                torch.cuda.Event(enable_timing=True) for _ in range(2)
            )
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) / 1000  # from milliseconds
            seconds[name].append(elapsed / len(calls[name]))
    return seconds


def floors(timer: Timer, device: torch.device) -> dict[str, float]:
    """Bytes a second of a large copy, FLOPs a second of a large bf16 matmul.

    Measured here, since a data sheet's figures are reached by nobody.
    """
    size = 1 << 30 if device.type == "cuda" else 1 << 20
    n = 8192 if device.type == "cuda" else 128
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # random: a device runs faster on zeros, which cost it less power
    a, b = torch.randn(2, n, n, device=device).bfloat16().unbind()
    times = timer(
        {"copy": [lambda: target.copy_(source)], "matmul": [lambda: a @ b]},
        REPEATS,
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
        return "\n".join(done.stdout.strip().splitlines()[-5:])

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def measure(
    benchmark: Benchmark,
    timer: Timer,
    rates: Mapping[str, float],
    device: torch.device,
) -> dict[str, Any]:
    """Hold one benchmark to its reference, then time it.

    Raises:
        ArithmeticError: the result is further from the reference than its
            tolerance; nothing was timed.
    """
    record: dict[str, Any] = {
        "bytes": benchmark.bytes,
        "flops": benchmark.flops,
        "bound": benchmark.bound,
        "interpreted_difference": interpreted_difference(benchmark, device),
    }
    sets = buffer_sets(benchmark, device)
    inputs = [seeded_inputs(benchmark, i, device) for i in range(sets)]
    error = relative_error(benchmark, inputs[0])
    record["error"] = error
    if not error <= benchmark.tolerance:  # also if it is NaN
        raise ArithmeticError(
            f"error {error:.2g} against the reference exceeds "
            f"{benchmark.tolerance:.2g}"
        )

    candidates = {
        OURS: benchmark.ours,
        COMPILED: torch.compile(benchmark.reference),
        **benchmark.peers,
    }
    calls: dict[str, Calls] = {}
    left_out: dict[str, str] = {}
    for name, function in candidates.items():
        try:
            function(*inputs[0])
            if device.type == "cuda":
                torch.cuda.synchronize()
        except ImportError:
            left_out[name] = "not installed"
            continue
        except Exception as problem:
            if name == OURS:
                raise
            left_out[name] = str(problem).strip().splitlines()[0][:200]
            continue
        calls[name] = [
            partial(function, *x)
            for _ in range(cdiv(16, sets))
            for x in inputs
        ]
    times = timer(calls, REPEATS)
    torch._dynamo.reset()
    record["floor_us"] = 1e6 * max(
        benchmark.bytes / rates["bytes_per_second"],
        benchmark.flops / rates["flops_per_second"],
    )
    record["us"] = {name: quantiles(t) for name, t in times.items()}
    record["left_out"] = left_out
    return record


def buffer_sets(benchmark: Benchmark, device: torch.device) -> int:
    """How many sets of inputs it takes to be twice the size of the cache."""
    if device.type != "cuda":
        return 2
    properties = torch.cuda.get_device_properties(device)
    wanted = 1 + cdiv(2 * properties.L2_cache_size, max(benchmark.bytes, 1))
    room = properties.total_memory // 3 // max(benchmark.bytes, 1)
    return max(1, min(wanted, room, 64))


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
        return f"not compared: {str(problem).strip().splitlines()[0][:200]}"
    return difference(compiled, on_cpu)


def copies(inputs: tuple) -> tuple:
    return tuple(
        x.clone() if isinstance(x, torch.Tensor) else x for x in inputs
    )


def difference(one: Any, two: Any) -> float:
    """Largest |one - two| over all outputs, each by two's largest value.

    Equal infinities do not differ; a NaN in one alone gives NaN.
    """
    if isinstance(one, torch.Tensor):
        one, two = (one,), (two,)
    worst = 0.0
    for a, b in zip(one, two, strict=True):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs())
        if gap.isnan().any():
            return float("nan")
        finite = b[b.isfinite()].abs()
        scale = finite.max().item() if finite.numel() else 1.0
        if gap.numel():
            worst = max(worst, gap.max().item() / (scale or 1.0))
    return worst


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in microseconds."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    named = {"p50": statistics.median(seconds), "p20": fifths[0]}
    return {k: 1e6 * v for k, v in (named | {"p80": fifths[3]}).items()}


def machine(device: torch.device) -> dict[str, str]:
    """What the times belong to."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.strip()
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
    """A line of the terminal: percent of the floor, ratio to each peer."""
    ours = record["us"][OURS]["p50"]
    peers = [
        f"{peer} {times['p50'] / ours:.2f}x"
        for peer, times in record["us"].items()
        if peer != OURS
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
        "at most 4 minutes",
    )
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return 2

    start, device = time.monotonic(), torch.device("cuda")
    here = machine(device)
    rates = floors(cuda_timer, device)
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
    failed = []
    for family in chosen.only:
        print(f"{family}: tests {tests[family]}")
        runs: dict[str, Any] = {}
        benchmarks = known[family].BENCHMARKS
        if not tests[family].startswith(("passed", "not run")):
            failed.append(family)
            benchmarks = []
        for benchmark in benchmarks[:1] if chosen.quick else benchmarks:
            if chosen.quick and time.monotonic() - start > QUICK_SECONDS:
                print(f"  {benchmark.name}: no time left")
                continue
            try:
                record = measure(benchmark, cuda_timer, rates, device)
                print(report(benchmark.name, record), flush=True)
            except Exception as problem:
                failed.append(family)
                record = {"failed": str(problem).strip().splitlines()[0]}
                print(f"  {benchmark.name}: FAILED, {record['failed']}")
            runs[benchmark.name] = record
            torch.cuda.empty_cache()
        entry = {"floors": rates, "tests": tests[family], "runs": runs}
        save(RESULTS / f"{slug}.json", family, {**here, **entry})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
