"""Every automatic edit of the sampling family must be noticed.

A draw goes through five kernels, so a mutant of one is not run through all of them: its launches
are repeated with the arguments that the unchanged family gave them, and must leave the same bits.
"""

import contextlib
import functools
import math
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.jit import KernelInterface

import kernels.sampling as original
from course import lab
from course.lab.interp import BUILDER, interpret
from course.lab.memory import poisoning
from course.lab.meter import metered
from kernels.cases.sampling import vectors
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
MAX, BINS = "_sample_max_kernel", "_sample_bins_kernel"
CUT, GATHER, DRAW = "_sample_cut_kernel", "_sample_gather_kernel", "_sample_draw_kernel"
USERS: dict[str, list[str]] = {  # the kernels to repeat for a mutant of a function
    "_mass": [BINS],
    "_share": [],
    "_parts": [],
    "_block": [MAX],
    "_block_weights": [BINS],
    MAX: [MAX],
    BINS: [BINS],
    CUT: [CUT],
    GATHER: [GATHER],
    "_reach": [],
    "_split": [],
    DRAW: [DRAW],
    "sample_tokens": [],
    "_configuration": [],
}
HARMLESS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_block": {"compare#2: > to >=": "the least float stays the least float"},
    "_block_weights": {"constant#6: 0 to 1": "bits below LOWEST are in bin 0 and have no q"},
    "_reach": {"constant#11: 0 to 1": "padding of bits 1 has no q, and is below what n reach"},
    "_split": {"constant#3: 0 to 1": "padding of bits 1 has no q, and is no border"},
    "_sample_draw_kernel": {
        "tl.maximum#2: keep argument 1 only": "0 / 0 ties at a border of 0, where none are",
    },
}

# Binary temperature: weights are 2 ** logit, exactly.
BINARY = torch.tensor(1.4426950408889634).item()
LEVEL = [0.0] * 75
SPECIAL = [-math.inf, math.nan, 2.0, math.inf, 1.5, *[0.5 * (i % 9) - 3 for i in range(66)]]
ONE = [0.0, 1.0, *[0.7 * (i % 7) - 9 * (i % 3) for i in range(40)], 5.0, *[0.1] * 28]
NEARLY = 1 - 2**-24
# Logits, uniform, temperature, top_k, top_p, min_p; first those that notice most.
ROWS = {
    "min-p alone": ([[0.0, 1.0, 1.0]], 0.9, BINARY, 0, 1.0, 1.0),
    "as many as there are": ([[-1.0, 0.0, -2.0, -41.0]], 0.5, BINARY, 3, 0.5, 0.0),
    "two rows": ([[3.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], 0.7, BINARY, 3, 0.9, 0.0),
    "one of ties": ([[-1.0, 0.0, 0.0]], 1.0, BINARY, 1, 1.0, 0.0),
    "the last tie of top-p": ([[*[0.0] * 20, -0.1, 2.0]], 0.7, BINARY, 0, 0.5, 0.0),
    "top-p rounds up": ([[0.0, 0.0, -40.0]], NEARLY, BINARY, 0, 0.5, 0.0),
    "nothing": ([[-math.inf] * 70], 0.5, 1.0, 0, 1.0, 0.0),
    "a cut that just misses": ([[*[0.0] * 10, *[-1.0] * 17]], 0.5, BINARY, 0, 0.5, 0.0),
    "one": ([[0.0, 3.0, 1.0]], 1.0, BINARY, 1, 1.0, 0.0),
    "the draw is rounded down": ([[-40.0, 0.0, 0.0]], 0.5, BINARY, 0, 1.0, 0.0),
    "a tie beyond top-k before a larger": ([[0.0, 0.0, 0.0, 1.0]], 0.5, BINARY, 3, 1.0, 0.0),
    "min-p at the border": ([[0.0, 1.0, 0.0, 0.0, 0.0]], 1.0, BINARY, 4, 0.9, 0.5),
    "min-p above the others": ([[0.1 * (i % 8) for i in range(20)]], 0.9, 1.0, 18, 0.9, 0.8),
    "not greedy": ([[0.0, 2e-6]], 0.0, torch.tensor(1e-5).item(), 0, 1.0, 0.0),
    "greedy": ([[1.0, 2.0, 2.0, 0.0]], 0.5, 0.0, 0, 1.0, 0.0),
    "top-p of nothing": ([[0.0, 1.0]], 0.5, BINARY, 0, 0.0, 0.0),
    "two rows, three blocks": ([ONE, ONE[::-1]], 0.6, 0.9, 26, 0.95, 0.02),
    "special": ([SPECIAL], 0.5, 1.0, 0, 1.0, 0.0),
    "temperature NaN": ([[0.0, 1.0]], 0.5, math.nan, 0, 1.0, 0.0),
    "min-p NaN": ([[0.0, 1.0]], 0.5, BINARY, 0, 1.0, math.nan),
}
# Appended to the family: its functions on numbers of our own.
PROBES = """

@triton.jit
def _probe_numbers_kernel(total, parts, x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, _share(tl.load(total + o), tl.load(parts + o), True))
    tl.store(out + N + o, _share(tl.load(total + o), tl.load(parts + o), False))
    tl.store(out + 2 * N + o, _parts(tl.load(x + o), True))
    tl.store(out + 3 * N + o, _parts(tl.load(x + o), False))


@triton.jit
def _probe_reach_kernel(weights, n, counts, masses, out, N: tl.constexpr, TILE: tl.constexpr):
    for i in range(N):
        count, mass = tl.load(counts + i), tl.load(masses + i)
        tl.store(out + i, _reach(weights, n, count, count >= 0, False, 3, 10, TILE))
        tl.store(out + N + i, _reach(weights, n, mass, mass >= 0, True, 3, 10, TILE))


@triton.jit
def _probe_split_kernel(weights, n, border, out, TILE: tl.constexpr):
    above, mass, ties = _split(weights, n, border, TILE)
    tl.store(out, above)
    tl.store(out + 1, mass)
    tl.store(out + 2, ties)
"""


def arguments(name: str) -> tuple[torch.Tensor, ...]:
    x, uniform, *filters = ROWS[name]
    dtype = torch.bfloat16 if name == "special" else torch.float32
    wide = torch.full((len(x), len(x[0]) + 2), math.nan, dtype=dtype)
    wide[:, :-2] = torch.tensor(x)
    generator = torch.Generator().manual_seed(0)
    rest = vectors(len(x), tuple(filters), generator)[1:]
    return wide[:, :-2], torch.full((len(x),), uniform), *rest


@functools.cache
def recorded() -> dict[str, list[tuple]]:
    """Kernel -> (grid, arguments, options, arguments after, bytes moved) of its launches."""
    found: dict[str, list[tuple]] = {name: [] for name in (MAX, BINS, CUT, GATHER, DRAW)}

    def launcher(kernel, grid):
        def launch(*args, **options):
            before = copies(args)
            with metered() as meter:
                interpret(kernel, grid, *args, **options)
            moved = meter.loads, meter.stores
            found[kernel.__name__].append((grid, before, options, copies(args), moved))

        return launch

    usual = KernelInterface.__getitem__
    KernelInterface.__getitem__ = launcher
    try:
        # Some rows break rules that a GPU does not check.
        with poisoning(), mock.patch.object(original, "check_values"):
            for name in ROWS:
                inputs = arguments(name)
                ids = original.sample_tokens(*inputs)
                assert ids.tolist() == original.sample_tokens_ref(*inputs).tolist()
    finally:
        KernelInterface.__getitem__ = usual
    return found


def copies(args) -> list:
    return [a.clone() if torch.is_tensor(a) and a.is_contiguous() else a for a in args]


@contextlib.contextmanager
def strictly():
    """Metered, and lanes without mask and `other` hold large numbers, as on a GPU they may."""
    undefined = BUILDER._undefined

    def large(pointers):
        handle = undefined(pointers)
        handle.data.view(np.uint8)[...] = 0x7E
        return handle

    BUILDER._undefined = large
    try:
        with metered() as meter:
            yield meter
    finally:
        del BUILDER._undefined


def notices_numbers(module: ModuleType, kernels: list[str]) -> bool:
    for name in kernels:
        # A token without `other` would be a large one, which does not matter; -1 does.
        running = metered if name == DRAW else strictly
        for grid, before, options, after, moved in recorded()[name]:
            args = copies(before)
            with running() as meter:
                getattr(module, name)[grid](*args, **options)
            if (meter.loads, meter.stores) != moved:
                return True
            for have, want in zip(args, after, strict=True):
                if torch.is_tensor(have) and not same(have, want):
                    return True
    return False


def notices_shares(module: ModuleType) -> bool:
    """Against Python's integers, where one unit more or less shows."""
    unit = 2**24
    rows = [(2**57 + 5, unit), (2**57 + 2**24 + 1, unit - 1), (1, 1), (unit + 1, 1), (unit, 1)]
    rows += [(3, unit // 2), (3 * unit, 5), (0, unit)]
    total, parts = (torch.tensor(x) for x in zip(*rows, strict=True))
    x = torch.tensor([0, 2**-24, 2**-25, 1.0, 0.5, 1 - 2**-24, 1.5 * 2**-24, 0.25])
    out = torch.full((32,), -1)
    with strictly():
        module._probe_numbers_kernel[(1,)](total, parts, x, out, N=8)
    return out.tolist() != [
        *(-(-t * p // unit) for t, p in rows),
        *(t * p // unit for t, p in rows),
        *(1, 1, 1, unit, unit // 2, unit - 1, 2, unit // 4),
        *(0, 1, 0, unit - 1, unit // 2, unit - 1, 1, unit // 4),
    ]


# Two tiles of four; adjacent floats, ties, a weight of one unit.
WEIGHTS = torch.tensor([1.0, 0.5, 1 - 2**-24, 0.5, 2.0**-40, 0.5]).view(torch.int32)


def notices_searches(module: ModuleType) -> bool:
    """The k-th largest weight, and the one at which the sum of the largest reaches a target."""
    ordered = sorted(WEIGHTS.tolist(), reverse=True)
    reached = [sum(mass(b) for b in ordered if b >= c) for c in ordered]
    counts, masses = [-1, 2, 5], [-1, reached[0] + 1, reached[5]]
    out = torch.full((6,), -1)
    with strictly():
        targets = torch.tensor(counts), torch.tensor(masses)
        module._probe_reach_kernel[(1,)](WEIGHTS, 6, *targets, out, N=3, TILE=4)
    return out.tolist() != [0, ordered[1], ordered[4], 0, ordered[1], ordered[5]]


def notices_splits(module: ModuleType) -> bool:
    out = torch.full((3,), -1)
    with strictly():
        module._probe_split_kernel[(1,)](WEIGHTS, 6, WEIGHTS[1].item(), out, TILE=4)
    return out.tolist() != [2, mass(WEIGHTS[0].item()) + mass(WEIGHTS[2].item()), 3]


def mass(bits: int) -> int:
    return int(torch.tensor(bits, dtype=torch.int32).view(torch.float32).item() * 2**40)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """To the bit."""
    if one.dtype == torch.float32:
        one, two = one.view(torch.int32), two.view(torch.int32)
    return one.dtype == torch.bfloat16 or torch.equal(one, two)  # bfloat16: logits, unchanged


def size(args: list) -> int:
    return sum(a.numel() for a in args if torch.is_tensor(a))


def notices_in_the_ir(module: ModuleType, kernels: list[str]) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    for name in kernels:
        _, args, options, *_ = max(recorded()[name], key=lambda record: size(record[1]))
        constexprs = {key: value for key, value in options.items() if key.isupper()}
        found = lab.check_jit(getattr(module, name), args=args, constexprs=constexprs)
        if found.int32_offsets:
            return True
    return False


def notices_launches(module: ModuleType) -> bool:
    """Grids and options, on tensors without memory."""
    meta = torch.device("meta")
    rest = [x.to(meta) for x in vectors(5, (1.0, 0, 1.0, 0.0), torch.Generator())]
    for dtype, warps in ((torch.float32, 4), (torch.bfloat16, 2)):
        logits = torch.empty(5, 4096 * 2 + 1, dtype=dtype, device=meta)
        asked = launches(lambda: module.sample_tokens(logits, *rest))  # noqa: B023
        blocks = dict(BLOCK=4096, num_warps=warps)
        if asked != [
            (MAX, (5, 3), blocks),
            (BINS, (5, 3), blocks | dict(BLOCK_N=4)),
            (CUT, (5,), dict(BLOCK_N=4, num_warps=8)),
            (GATHER, (5, 3), dict(BLOCK=4096, BLOCK_N=4, num_warps=8)),
            (DRAW, (5,), dict(STEPS=15, DIGIT=2, TILE=512, num_warps=4)),
        ]:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    logits, *rest = arguments("two rows, three blocks")
    names = ("uniform", "temperature", "top_k", "top_p", "min_p")
    wide = torch.empty(2, 2**18 + 1, device="meta")
    calls = [("logits: shape", (logits[0], *rest)), ("logits: 262145", (wide, *rest))]
    for i, (name, most) in enumerate(zip(names, (1, 1e5, 2**31 - 1, 1, 1), strict=True)):
        ones = torch.ones_like(rest[i])
        swaps = [(": shape", rest[i][:1]), (": dtype", rest[i].double()), (": -1", -ones)]
        if i != 2:
            swaps.append((": ", ones * most + 0.5))
            calls.append(("", (logits, *rest[:i], ones * most, *rest[i + 1 :])))
        calls += [(name + end, (logits, *rest[:i], bad, *rest[i + 1 :])) for end, bad in swaps]
    for start, args in calls:
        try:
            launches(lambda: module.sample_tokens(*args))  # noqa: B023
        except ValueError as error:
            if start and str(error).startswith(start):
                continue
            return True
        if start:
            return True
    largest = [x.to("meta") for x in (wide[:, :-1], *rest)]
    if len(launches(lambda: module.sample_tokens(*largest))) != 5:
        return True
    with metered() as meter:
        for B, V in ((0, 5), (2, 0)):
            nothing = torch.empty(B, V), *(x[:B] for x in rest)
            ids = module.sample_tokens(*nothing)
            if ids.tolist() != [-1] * B or ids.dtype != torch.int64:
                return True
    return meter.launches != 0


def notices_results(module: ModuleType) -> bool:
    for name in ("two rows, three blocks", "greedy"):
        inputs = arguments(name)
        with metered():
            ids = module.sample_tokens(*inputs)
        if ids.tolist() != original.sample_tokens_ref(*inputs).tolist():
            return True
    return False


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    single, half = torch.float32, torch.float16
    search = dict(STEPS=15, DIGIT=2, TILE=512, num_warps=4)
    want = {
        ("sm_80", single): (4096, {"num_warps": 4}, search),
        ("sm_90", half): (4096, {"num_warps": 2}, search),
        ("gfx942", single): (4096, {"num_warps": 2}, search),
        ("gfx942", torch.bfloat16): (4096, {"num_warps": 1}, search),
        ("cpu", single): (32, {}, dict(STEPS=3, DIGIT=10, TILE=16)),
    }
    return any(module._configuration(*key) != value for key, value in want.items())


DETECTORS = {
    "_share": [notices_shares],
    "_parts": [notices_shares],
    "_reach": [notices_searches],
    "_split": [notices_splits],
    "_configuration": [notices_configuration],
    "sample_tokens": [notices_launches, notices_arguments, notices_results],
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", USERS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    kernels = USERS[name]
    numbers = functools.partial(notices_numbers, kernels=kernels)
    compiled = functools.partial(notices_in_the_ir, kernels=kernels or [DRAW])
    for part in (numbers, compiled):
        part.__name__ = part.func.__name__
    detectors = DETECTORS.get(name, [numbers, compiled])
    if name in ("_parts", "_reach", "_split"):
        detectors = [*detectors, compiled]
    harmless = HARMLESS.get(name, {})
    assert_every_mutant_is_noticed(SOURCE + PROBES, name, harmless, detectors, tmp_path)
