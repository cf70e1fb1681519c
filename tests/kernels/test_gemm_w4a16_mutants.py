"""Every automatic edit of the 4-bit linear layer must be noticed by the small cases below."""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.gemm_w4a16 as original
from course import lab
from course.lab.meter import metered
from kernels.cases.gemm_w4a16 import Linear, linear_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_evens_odds": {},
    "_w4a16_gemv_kernel": {},
    "_w4a16_gemm_kernel": {
        ".to#4: drop tl.int32": "the codes become the same floats, more slowly",
        ".to#7: drop tl.int64": "counts rows of the parts, which fit in 32 bits",
    },
    "_w4a16_sum_kernel": {},
    "w4a16_linear": {},
    "_configuration": {},
}

ONE_ROW = [
    # A single split of two steps writes the result itself; a full tile.
    Linear(1, 4, 64, 2, torch.float16, 1),
    # Padded outputs, a split that ends within a block of 64.
    Linear(1, 5, 32, 3, torch.bfloat16, 2, "sliced"),
]
MORE_ROWS = [
    Linear(17, 16, 64, 2, torch.float16, 1),
    Linear(3, 17, 32, 3, torch.bfloat16, 2, "sliced"),
]


@functools.cache
def inputs(case: Linear):
    x, codes, scales, zeros = linear_inputs(case, torch.Generator().manual_seed(1))
    if case.dtype == torch.bfloat16:  # products of scales and zeros beyond float16
        scales, zeros = 100 * scales, 1000 * zeros
    return x, codes, scales, zeros


@functools.cache
def expected(case: Linear) -> torch.Tensor:
    return original.w4a16_linear_ref(*inputs(case))


def differ(module: ModuleType, cases: list[Linear]) -> bool:
    for case in cases:
        with metered():
            y = module.w4a16_linear(*inputs(case), case.n_splits)
        tolerance = 2e-3 if case.dtype == torch.float16 else 1e-2
        want = expected(case)
        largest = want.abs().max().item()
        if y.dtype != want.dtype or not torch.allclose(y, want, 0, tolerance * largest):
            return True
    return False


def notices_one_row(module: ModuleType) -> bool:
    return differ(module, ONE_ROW)


def notices_more_rows(module: ModuleType) -> bool:
    return differ(module, MORE_ROWS)


def notices_long_rows(module: ModuleType) -> bool:
    """More columns than 31 * 32, whose words and row strides a wrong division miscounts."""
    return differ(module, [Linear(rows, 2, 1024, 1, n_splits=1) for rows in (1, 2)])


def notices_parts(module: ModuleType) -> bool:
    """Each of two splits does its part."""
    for rows, options in [(1, dict(STAGES=1)), (2, dict(BLOCK_M=16))]:
        x, codes, scales, zeros = linear_inputs(Linear(rows, 2, 64, 2), torch.Generator())
        part = torch.zeros(2, rows, 2)
        tiles = dict(GROUP=64, SEG=64, BLOCK_N=16, BLOCK_K=64)
        with metered():
            if rows == 1:
                module._w4a16_gemv_kernel[(1, 2)](
                    *(x, codes.view(torch.int32), scales, zeros, part, 2, 4, 4, 2, 2),
                    **(tiles | options),
                )
            else:
                module._w4a16_gemm_kernel[(1, 1, 2)](
                    *(x, codes, scales, zeros, part, 2, 2, 4, 128, 64, 2, 2),
                    **(tiles | options),
                )
        if not part[0].any() or not part[1].any():
            return True
    return False


def notices_sums(module: ModuleType) -> bool:
    part, out = torch.rand(2, 3, 20), torch.zeros(3, 20)
    with metered():
        module._w4a16_sum_kernel[(3, 2)](part, out, 20, 60, 2, BLOCK_N=16)
    return not torch.equal(out, part[0] + part[1])


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    half, part = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)
    codes = torch.ones(2, 48, dtype=torch.uint8)
    constants = dict(GROUP=48, SEG=16, BLOCK_N=16, BLOCK_K=64)
    found = [
        lab.check_jit(
            module._w4a16_gemv_kernel,
            args=(half, codes.view(torch.int32), half, half, part, 2, 3, 3, 2, 2),
            constexprs=constants | dict(STAGES=2),
        ),
        lab.check_jit(
            module._w4a16_gemm_kernel,
            args=(half, codes, half, half, part, 2, 2, 3, 96, 48, 2, 2),
            constexprs=constants | dict(BLOCK_M=16),
            needs=("load", "store", "dot"),
        ),
        lab.check_jit(
            module._w4a16_sum_kernel, args=(part, half, 2, 4, 2), constexprs=dict(BLOCK_N=16)
        ),
    ]
    return any(cost.int32_offsets for cost in found)


def launches_of(module: ModuleType, M: int, N: int, K: int, group: int, n_splits, processors: int):
    """Grids and options that the launcher asks for, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scales, codes = empty(N, K // group), empty(N, K // 2, dtype=torch.uint8)
    module.processors = lambda device: processors
    return launches(lambda: module.w4a16_linear(empty(M, K), codes, scales, scales, n_splits))


def notices_launches(module: ModuleType) -> bool:
    """One or two programs a processor, at most a split a block of columns, at most 32."""
    few = dict(num_warps=4, num_stages=3)
    gemv = dict(BLOCK_N=16, BLOCK_K=2048, num_warps=4, STAGES=3)
    skinny = dict(BLOCK_M=16, BLOCK_N=128, BLOCK_K=128, **few)
    middle = dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, **few)
    large = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3, maxnreg=128)
    for M, N, K, group, n_splits, processors, grid, options in [
        (1, 30, 20_000, 32, None, 5, (2, 5), gemv | dict(GROUP=32, SEG=32)),
        (1, 30, 4096, 4096, None, 99, (2, 2), gemv | dict(GROUP=4096, SEG=2048)),
        (1, 30, 20_480, 128, 3, 99, (2, 3), gemv | dict(GROUP=128, SEG=128)),
        (1, 16, 204_800, 128, None, 99, (1, 32), gemv | dict(GROUP=128, SEG=128)),
        (1, 300, 4032, 96, None, 3, (19, 1), gemv | dict(GROUP=96, SEG=32)),
        (2, 129, 4032, 96, None, 3, (2, 1, 3), skinny | dict(GROUP=96, SEG=32)),
        (16, 1280, 1024, 256, None, 30, (10, 1, 6), skinny | dict(GROUP=256, SEG=128)),
        (17, 1025, 4096, 128, None, 27, (9, 1, 3), middle | dict(GROUP=128, SEG=64)),
        (64, 1024, 4096, 128, None, 72, (8, 1, 9), middle | dict(GROUP=128, SEG=64)),
        (65, 128, 4096, 128, None, 1, (1, 1, 1), large | dict(GROUP=128, SEG=64)),
        (300, 300, 4096, 128, None, 30, (3, 3, 3), large | dict(GROUP=128, SEG=64)),
    ]:
        asked = launches_of(module, M, N, K, group, n_splits, processors)
        name = "_w4a16_gemv_kernel" if M == 1 else "_w4a16_gemm_kernel"
        want = [(name, grid, options)]
        if grid[-1] > 1:
            blocks = (N + 1023) // 1024
            want.append(("_w4a16_sum_kernel", (M, blocks), dict(BLOCK_N=1024, num_warps=4)))
        if asked != want:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    x, codes, scales, zeros = linear_inputs(Linear(1, 3, 32, 3), torch.Generator())
    room = torch.zeros(4, 64, dtype=torch.uint8)
    bad = [
        ("x: shape", x[0], codes, scales, zeros, 1),
        ("codes: shape", x, codes[:, 16:], scales, zeros, 1),
        (
            "codes: row stride 56",
            x,
            room[:, :56].reshape(-1)[:168].view(3, 56)[:, :48],
            scales,
            zeros,
            1,
        ),
        ("codes: row stride 64 and offset 8", x, room[:3, 8:56], scales, zeros, 1),
        ("scales: shape", x, codes, scales[1:], zeros, 1),
        ("zeros: shape", x, codes, scales, zeros[:, 1:], 1),
        ("scales: 0 groups", x, codes, scales[:, :0], zeros[:, :0], 1),
        ("scales: 2 groups", x, codes, scales[:, :2], zeros[:, :2], 1),
        ("n_splits: 0", x, codes, scales, zeros, 0),
        ("n_splits: 33", x, codes, scales, zeros, 33),
    ]
    for start, *arguments in bad:
        try:
            module.w4a16_linear(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    with metered() as meter:
        module.w4a16_linear(x, codes, scales, zeros, 32)
        module.w4a16_linear(x[:0], codes, scales, zeros)
        module.w4a16_linear(x, codes[:0], scales[:0], zeros[:0])
    return meter.launches != 2


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    want = {
        ("sm_80", 1): (1, 16, 2048, dict(num_warps=4, STAGES=3)),
        ("gfx942", 1): (1, 16, 2048, dict(num_warps=4, STAGES=2)),
        ("sm_100", 2): (16, 128, 128, dict(num_warps=4, num_stages=3)),
        ("gfx942", 16): (16, 128, 128, dict(num_warps=4, num_stages=2)),
        ("sm_90", 17): (64, 128, 64, dict(num_warps=4, num_stages=3)),
        ("sm_90", 64): (64, 128, 64, dict(num_warps=4, num_stages=3)),
        ("sm_90", 65): (128, 128, 64, dict(num_warps=8, num_stages=3, maxnreg=128)),
        ("sm_80", 65): (128, 128, 64, dict(num_warps=8, num_stages=3)),
        ("gfx942", 65): (128, 128, 64, dict(num_warps=8, num_stages=2)),
        ("cpu", 1): (1, 4, 64, dict(num_warps=4, STAGES=3)),
        ("cpu", 2): (16, 16, 64, {}),
    }
    return any(module._configuration(*arguments) != result for arguments, result in want.items())


DETECTORS = [  # the cheap ones first
    notices_configuration,
    notices_launches,
    notices_one_row,
    notices_more_rows,
    notices_in_the_ir,
    notices_arguments,
    notices_parts,
    notices_sums,
    notices_long_rows,
]


FIRST = {  # those that know a function best
    "_w4a16_gemv_kernel": [notices_one_row, notices_in_the_ir, notices_parts, notices_long_rows],
    "_w4a16_gemm_kernel": [notices_more_rows, notices_in_the_ir, notices_parts, notices_long_rows],
    "_w4a16_sum_kernel": [notices_sums],
    "w4a16_linear": [notices_configuration, notices_launches, notices_arguments],
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    first = FIRST.get(name, [])
    detectors = first + [d for d in DETECTORS if d not in first]
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors, tmp_path)
