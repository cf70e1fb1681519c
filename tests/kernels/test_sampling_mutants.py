"""Every automatic edit of the sampling family must be noticed.

A draw goes through five kernels, so a mutant of one is not run through all of them: its launches
are repeated with the arguments that the unchanged family gave them, and must leave the same bits.
"""

import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.jit import KernelInterface

import kernels.sampling as original
from course import lab
from course.lab.interp import interpret
from course.lab.memory import poisoning
from course.lab.meter import metered
from kernels.cases.sampling import vectors
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
MAX, BINS = "_sample_max_kernel", "_sample_bins_kernel"
CUT, GATHER, DRAW = "_sample_cut_kernel", "_sample_gather_kernel", "_sample_draw_kernel"
USERS = {  # the kernels to repeat for a mutant of a function
    "_mass": [BINS, CUT],
    "_share": [DRAW],
    "_parts": [CUT, DRAW],
    "_block": [MAX, BINS],
    "_block_weights": [BINS],
    MAX: [MAX],
    BINS: [BINS],
    CUT: [CUT],
    GATHER: [GATHER],
    "_reach": [DRAW],
    "_split": [DRAW],
    DRAW: [DRAW],
    "sample_tokens": [],
    "_configuration": [],
}
HARMLESS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
}

LEVEL = [0.0] * 75
MIXED = [
    [-math.inf, math.nan, 2.0, math.inf, *[0.5 * (i % 9) - 3 for i in range(66)]],
    [1e38, *[0.7 * (i % 7) for i in range(69)]],
]
# Logits, uniform, temperature, top_k, top_p, min_p.
ROWS = {
    "two rows, three blocks": (MIXED, 0.6, 0.7, 9, 0.9, 0.02),
    "the last tie of top-k": ([LEVEL], 1.0, 1.0, 40, 1.0, 0.0),
    "the last tie of top-p": ([LEVEL[:40]], 1.0, 1.0, 0, 0.5, 0.0),
    "min-p above the others": ([[0.1 * (i % 8) for i in range(40)]], 0.9, 1.0, 30, 0.9, 0.8),
    "nothing": ([[-math.inf] * 3], 0.5, 1.0, 0, 1.0, 0.0),
    "all": ([[0.1 * (i % 11) for i in range(33)]], 0.5, 1.5, 0, 1.0, 0.0),
    "greedy": ([[1.0, 2.0, 2.0, *[0.0] * 37]], 0.5, 0.0, 0, 1.0, 0.0),
    "many": ([[-0.05 * i for i in range(40)]], 0.97, 1.0, 0, 0.8, 0.0),
}


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


def notices_numbers(module: ModuleType, kernels: list[str]) -> bool:
    for name in kernels:
        for grid, before, options, after in recorded()[name]:
            args = copies(before)
            with metered():
                getattr(module, name)[grid](*args, **options)
            for have, want in zip(args, after, strict=True):
                if torch.is_tensor(have) and not same(have, want):
                    return True
    return False


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
            (DRAW, (5,), dict(DIGIT=2, TILE=1024, BLOCK_N=4, num_warps=8)),
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
        ("sm_80", single): (4096, 1024, 2, {"num_warps": 4}),
        ("sm_90", half): (4096, 1024, 2, {"num_warps": 2}),
        ("gfx942", single): (4096, 1024, 2, {"num_warps": 2}),
        ("gfx942", torch.bfloat16): (4096, 1024, 2, {"num_warps": 1}),
        ("cpu", single): (32, 16, 10, {}),
    }
    return any(module._configuration(*key) != value for key, value in want.items())


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", USERS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    def numbers(module: ModuleType) -> bool:
        return notices_numbers(module, USERS[name])

    def intermediate(module: ModuleType) -> bool:
        return notices_in_the_ir(module, USERS[name])

    detectors = [numbers, intermediate]
    if not USERS[name]:
        detectors = [notices_configuration, notices_launches, notices_arguments, notices_results]
    assert_every_mutant_is_noticed(SOURCE, name, HARMLESS.get(name, {}), detectors, tmp_path)
