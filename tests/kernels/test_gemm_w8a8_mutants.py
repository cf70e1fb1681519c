"""Every automatic edit of the 8-bit linear layer must be noticed by the small cases below."""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.gemm_w8a8 as original
from course import lab
from course.lab.meter import metered
from kernels.cases.gemm_w8a8 import Linear8, linear8_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_w8a8_gemm_kernel": {
        ".to#3: drop tl.int64": "counts rows of the parts, which fit in 32 bits",
    },
    "_w8a8_sum_kernel": {},
    "w8a8_linear": {},
    "_configuration": {},
}

CASES = [
    # A single split of two steps writes the result itself; a full tile.
    Linear8(16, 16, 128, torch.float16, 1),
    # Padded rows and outputs, a split that ends within a block of 64.
    Linear8(17, 18, 70, torch.float32, 2, "sliced"),
]


@functools.cache
def inputs(case: Linear8):
    return linear8_inputs(case, torch.Generator().manual_seed(1))


@functools.cache
def expected(case: Linear8) -> torch.Tensor:
    return original.w8a8_linear_ref(*inputs(case), case.dtype)


def notices_numbers(module: ModuleType) -> bool:
    for case in CASES:
        with metered():
            y = module.w8a8_linear(*inputs(case), case.dtype, case.n_splits)
        if y.dtype != case.dtype or not torch.equal(y, expected(case)):
            return True
    return False


def notices_parts(module: ModuleType) -> bool:
    """Each of two splits does its part."""
    x, x_scales, w, w_scales = linear8_inputs(Linear8(2, 2, 128), torch.Generator())
    part = torch.zeros(2, 2, 2, dtype=torch.int32)
    with metered():
        module._w8a8_gemm_kernel[(1, 1, 2)](
            *(x, x_scales, w, w_scales, part, 2, 2, 128, 128, 128),
            **dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=64, SCALED=False),
        )
    return not part[0].any() or not part[1].any()


def notices_sums(module: ModuleType) -> bool:
    part = torch.arange(120, dtype=torch.int32).view(2, 3, 20)
    x_scales, w_scales, out = torch.rand(3), torch.rand(20), torch.zeros(3, 20)
    with metered():
        module._w8a8_sum_kernel[(3, 2)](*(part, x_scales, w_scales, out, 20, 60, 2), BLOCK_N=16)
    return not torch.equal(out, part.sum(0).float() * x_scales[:, None] * w_scales)


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    codes, scales = torch.ones(2, 64, dtype=torch.int8), torch.ones(2)
    part, out = torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2).half()
    tiles = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=64)
    found = [
        lab.check_jit(
            module._w8a8_gemm_kernel,
            args=(codes, scales, codes, scales, target, 2, 2, 64, 64, 64),
            constexprs=dict(tiles, SCALED=scaled),
            needs=("load", "store", "dot"),
        )
        for target, scaled in [(part, False), (out, True)]
    ]
    found.append(
        lab.check_jit(
            module._w8a8_sum_kernel,
            args=(part, scales, scales, out, 2, 4, 2),
            constexprs=dict(BLOCK_N=16),
        )
    )
    return any(cost.int32_offsets for cost in found)


def notices_launches(module: ModuleType) -> bool:
    """One or two programs a processor, at most a split a block of columns, at most 32."""
    few = dict(BLOCK_M=16, BLOCK_N=64, BLOCK_K=256, num_warps=4, num_stages=4)
    middle = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4)
    large = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=3)
    for M, N, K, n_splits, processors, grid, options in [
        (1, 130, 2048, None, 6, (3, 1, 4), few),
        (1, 64, 520, None, 50, (1, 1, 3), few),
        (1, 64, 51_200, None, 50, (1, 1, 32), few),
        (16, 130, 2048, 2, 6, (3, 1, 2), few),
        (16, 640, 2048, None, 15, (10, 1, 3), few),
        (17, 640, 2048, None, 35, (10, 1, 3), middle),
        (64, 1025, 2048, None, 40, (17, 1, 2), middle),
        (64, 1024, 2048, None, 40, (16, 1, 2), middle),
        (65, 300, 2048, None, 1, (2, 1, 1), large),
        (300, 600, 2048, None, 19, (3, 3, 2), large),
    ]:
        meta = torch.device("meta")
        x = torch.empty(M, K, dtype=torch.int8, device=meta)
        w = torch.empty(N, K, dtype=torch.int8, device=meta)
        a, b = torch.empty(M, device=meta), torch.empty(N, device=meta)
        module.processors = lambda device, processors=processors: processors
        call = functools.partial(module.w8a8_linear, x, a, w, b, n_splits=n_splits)
        want = [("_w8a8_gemm_kernel", grid, options | dict(SCALED=grid[2] == 1))]
        if grid[2] > 1:
            blocks = (N + 1023) // 1024
            want.append(("_w8a8_sum_kernel", (M, blocks), dict(BLOCK_N=1024, num_warps=8)))
        if launches(call) != want:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    x, a, w, b = linear8_inputs(Linear8(1, 3, 8), torch.Generator())
    wide = torch.zeros(1, 131072, dtype=torch.int8)
    bad = [
        ("x: shape", (x[0], a, w, b)),
        ("x: 131072", (wide, a, wide, a)),
        ("x_scales: shape", (x, b, w, b)),
        ("w: shape", (x, a, w[:, 1:], b)),
        ("w_scales: shape", (x, a, w, a)),
        ("dtype: torch.int8 must be torch.float16 or", (x, a, w, b, torch.int8)),
        ("n_splits: 0", (x, a, w, b, torch.float16, 0)),
        ("n_splits: 33", (x, a, w, b, torch.float16, 33)),
    ]
    for start, arguments in bad:
        try:
            module.w8a8_linear(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    meta = wide[:, 1:].to("meta")
    scale = torch.empty(1, device="meta")
    launches(lambda: module.w8a8_linear(meta, scale, meta, scale))
    with metered() as meter:
        module.w8a8_linear(x, a, w, b, n_splits=32)
        module.w8a8_linear(x[:0], a[:0], w, b)
        module.w8a8_linear(x, a, w[:0], b[:0])
        nothing = module.w8a8_linear(x[:, :0], a, w[:, :0], b)
    return meter.launches != 1 or bool(nothing.any())


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    want = {
        ("sm_80", 1): (16, 64, 256, 4, 4),
        ("gfx942", 16): (16, 64, 256, 4, 2),
        ("sm_90", 17): (64, 64, 128, 4, 4),
        ("sm_90", 64): (64, 64, 128, 4, 4),
        ("sm_90", 65): (128, 256, 128, 8, 3),
        ("sm_80", 65): (128, 128, 128, 8, 4),
        ("gfx942", 65): (128, 128, 128, 8, 2),
    }
    for arguments, (block_m, block_n, block_k, warps, stages) in want.items():
        options = dict(num_warps=warps, num_stages=stages)
        if module._configuration(*arguments) != (block_m, block_n, block_k, options):
            return True
    return module._configuration("cpu", 1) != (16, 16, 64, {})


DETECTORS = [  # the cheap ones first
    notices_configuration,
    notices_launches,
    notices_sums,
    notices_arguments,
    notices_numbers,
    notices_in_the_ir,
    notices_parts,
]
FIRST = {"_w8a8_gemm_kernel": [notices_numbers, notices_in_the_ir]}  # know it best


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    first = FIRST.get(name, [])
    detectors = first + [d for d in DETECTORS if d not in first]
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors, tmp_path)
