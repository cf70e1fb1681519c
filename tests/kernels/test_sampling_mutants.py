"""Every automatic edit of the sampling family must be noticed.

A draw goes through five kernels, so a mutant of one is not run through all of them: its launches
are repeated with the arguments that the unchanged family gave them, and must leave the same bits.
"""

import contextlib
import functools
import math
from pathlib import Path
from types import ModuleType

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
}

# Binary temperature: weights are 2 ** logit, exactly.
BINARY = torch.tensor(1.4426950408889634).item()
LEVEL = [0.0] * 75
MIXED = [
    [-math.inf, math.nan, 2.0, math.inf, 1.5, *[0.5 * (i % 9) - 3 for i in range(66)]],
    [4.0, *[0.7 * (i % 7) - 9 * (i % 3) for i in range(70)]],
]
# Logits, uniform, temperature, top_k, top_p, min_p.
ROWS = {
    "two rows, three blocks": (MIXED[1:] * 2, 0.6, 0.9, 26, 0.95, 0.02),
    "the last tie of top-k": ([LEVEL[:20] + [-1.0, 1.0]], 1 - 2**-24, 1.0, 19, 1.0, 0.0),
    "the last tie of top-p": ([[-0.1, *LEVEL[:20], 2.0]], 1 - 2**-24, BINARY, 0, 0.5, 0.0),
    "min-p above the others": ([[0.1 * (i % 8) for i in range(20)]], 0.9, 1.0, 18, 0.9, 0.8),
    "min-p at the border": ([[0.0, 1.0, 0.0, 0.0, 0.0]], 1.0, BINARY, 4, 0.9, 0.5),
    "one of ties": ([[-1.0, 0.0, 0.0]], 1.0, BINARY, 1, 1.0, 0.0),
    "as many as there are": ([[-1.0, 0.0, -2.0, -41.0]], 0.5, BINARY, 3, 0.5, 0.0),
    "top-p of nearly all": ([[-40.0, 0.0, -39.0, -41.0]], 1.0, BINARY, 0, 1 - 2**-24, 0.0),
    "all": ([[-40.0, 0.0, -39.0, -41.0]], 0.0, BINARY, 0, 1.0, 0.0),
    "nothing": ([[-math.inf] * 3], 0.5, 1.0, 0, 1.0, 0.0),
    "special": (MIXED[:1], 0.5, 1.0, 0, 1.0, 0.0),
    "greedy": ([[1.0, 2.0, 2.0, *[0.0] * 37]], 0.5, 0.0, 0, 1.0, 0.0),
    "not greedy": ([[0.0, 2e-6]], 0.0, torch.tensor(1e-5).item(), 0, 1.0, 0.0),
}
# Appended to the family: its functions on numbers of our own.
PROBES = """

@triton.jit
def _probe_numbers_kernel(total, parts, add, top_p, shares, all_parts, N: tl.constexpr):
    o = tl.arange(0, N)
    share = _share(tl.load(total + o), tl.load(parts + o), tl.load(add + o))
    tl.store(shares + o, share)
    tl.store(all_parts + o, _parts(tl.load(top_p + o)))


@triton.jit
def _probe_search_kernel(weights, n, wanted, border, out, TILE: tl.constexpr):
    o = tl.arange(0, 8)
    for i in range(8):
        target = tl.load(wanted + i)
        tl.store(out + i, _reach(weights, n, target, target >= 0, False, 10, TILE))
        target = target * 1099511627776
        tl.store(out + 8 + i, _reach(weights, n, target, target >= 0, True, 10, TILE))
    above, mass, ties = _split(weights, n, border, TILE)
    tl.store(out + 16, above)
    tl.store(out + 17, mass)
    tl.store(out + 18, ties)
"""


def arguments(name: str) -> tuple[torch.Tensor, ...]:
    x, uniform, *filters = ROWS[name]
    wide = torch.full((len(x), len(x[0]) + 2), math.nan)
    wide[:, :-2] = torch.tensor(x)
    generator = torch.Generator().manual_seed(0)
    rest = vectors(len(x), tuple(filters), generator)[1:]
    return wide[:, :-2], torch.full((len(x),), uniform), *rest


@functools.cache
def recorded() -> dict[str, list[tuple]]:
    """Kernel -> (grid, arguments before, options, arguments after) of its launches."""
    found: dict[str, list[tuple]] = {name: [] for name in (MAX, BINS, CUT, GATHER, DRAW)}

    def launcher(kernel, grid):
        def launch(*args, **options):
            before = copies(args)
            interpret(kernel, grid, *args, **options)
            found[kernel.__name__].append((grid, before, options, copies(args)))

        return launch

    usual = KernelInterface.__getitem__
    KernelInterface.__getitem__ = launcher
    try:
        with poisoning():
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
        for grid, before, options, after in recorded()[name]:
            args = copies(before)
            with strictly():
                getattr(module, name)[grid](*args, **options)
            for have, want in zip(args, after, strict=True):
                if torch.is_tensor(have) and not same(have, want):
                    return True
    return False


def notices_shares(module: ModuleType) -> bool:
    """Against Python's integers, where one unit more or less shows."""
    unit = 2**24
    rows = [(2**57 + 5, unit, 0), (2**57 + 2**24 + 1, unit - 1, 0), (1, 1, unit - 1)]
    rows += [(unit + 1, 1, unit - 1), (unit, 1, unit - 1), (3, unit // 2, 0), (3 * unit, 5, 0)]
    rows += [(0, unit, unit - 1)]
    total, parts, add = (torch.tensor(x) for x in zip(*rows, strict=True))
    top_p = torch.tensor([0, 2**-24, 2**-25, 1.0, 0.5, 1 - 2**-24, 1.5 * 2**-24, 0.25])
    shares, all_parts = torch.full((8,), -1), torch.full((8,), -1)
    with strictly():
        module._probe_numbers_kernel[(1,)](total, parts, add, top_p, shares, all_parts, N=8)
    return shares.tolist() != [(t * p + a) >> 24 for t, p, a in rows] or all_parts.tolist() != [
        *(1, 1, 1, unit, unit // 2, unit - 1, 2, unit // 4)
    ]


def notices_searches(module: ModuleType) -> bool:
    """Weights of 1, one unit less, thrice 0.5, 2 ** -40; in two tiles, shuffled."""
    weights = [1.0, 0.5, 1 - 2**-24, 0.5, 2.0**-40, 0.5]
    bits = torch.tensor(weights).view(torch.int32)
    # -1 searches nothing; the sum of the k largest weights exceeds these by at most a half
    wanted = torch.tensor([-1, 1, 2, 3, 4, 5, 6, 0])
    ordered = sorted(bits.tolist(), reverse=True)
    everything = 2**30 - 1  # what nothing reaches, and 0 wants
    counts = [0, *ordered, everything]
    sums = [
        max(
            b for b in (*ordered, -1) if sum(mass(c) for c in ordered if c >= b) >= t << 40 or b < 0
        )
        for t in wanted.tolist()
    ]
    out = torch.full((19,), -1)
    with strictly():
        module._probe_search_kernel[(1,)](bits, 6, wanted, bits[1].item(), out, TILE=4)
    found = out.tolist()
    reachable = [i for i, b in enumerate(sums) if b >= 0 and 0 < i < 7]
    return (
        found[:8] != counts
        or [found[8 + i] for i in reachable] != [sums[i] for i in reachable]
        or found[8] != 0
        or found[16:] != [2, mass(ordered[0]) + mass(ordered[1]), 3]
    )


def mass(bits: int) -> int:
    return int(torch.tensor(bits, dtype=torch.int32).view(torch.float32).item() * 2**40)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=0.125), two.nan_to_num(nan=0.125))


def notices_in_the_ir(module: ModuleType, kernels: list[str]) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    for name in kernels:
        _, args, options, _ = recorded()[name][0]
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
        logits = torch.empty(5, 4096 * 3, dtype=dtype, device=meta)
        asked = launches(lambda: module.sample_tokens(logits, *rest))  # noqa: B023
        blocks = dict(BLOCK=4096, num_warps=warps)
        if asked != [
            (MAX, (5, 3), blocks),
            (BINS, (5, 3), blocks | dict(BLOCK_N=4)),
            (CUT, (5,), dict(BLOCK_N=4, num_warps=8)),
            (GATHER, (5, 3), dict(BLOCK=4096, BLOCK_N=4, num_warps=8)),
            (DRAW, (5,), dict(DIGIT=2, TILE=512, num_warps=4)),
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
            swaps.append((": ", ones * most * 1.5))
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
    for name in ("two rows, three blocks", "all"):
        inputs = arguments(name)
        with metered():
            ids = module.sample_tokens(*inputs)
        if ids.tolist() != original.sample_tokens_ref(*inputs).tolist():
            return True
    return False


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    single, half = torch.float32, torch.float16
    want = {
        ("sm_80", single): (4096, 512, 2, {"num_warps": 4}),
        ("sm_90", half): (4096, 512, 2, {"num_warps": 2}),
        ("gfx942", single): (4096, 512, 2, {"num_warps": 2}),
        ("gfx942", torch.bfloat16): (4096, 512, 2, {"num_warps": 1}),
        ("cpu", single): (32, 16, 10, {}),
    }
    return any(module._configuration(*key) != value for key, value in want.items())


DETECTORS = {
    "_share": [notices_shares],
    "_parts": [notices_shares],
    "_reach": [notices_searches],
    "_split": [notices_searches],
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
    if name in ("_reach", "_split"):
        detectors = [*detectors, compiled]
    harmless = HARMLESS.get(name, {})
    assert_every_mutant_is_noticed(SOURCE + PROBES, name, harmless, detectors, tmp_path)
