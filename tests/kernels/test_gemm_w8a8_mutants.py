"""Every automatic edit of the int8 product must be noticed by the small cases below."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.gemm_w8a8 as original
from course import lab
from course.lab.meter import metered
from kernels.cases.gemm_w8a8 import Product, product_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {
    "_w8a8_linear_kernel": {},
    "w8a8_linear": {},
    "_configuration": {},
}


def notices_launches(module: ModuleType) -> bool:
    meta = torch.device("meta")
    for M, N, target, grid, tile, options in [
        (1, 100, "sm_90", (1, 4), (16, 32, 256), (4, 4)),
        (16, 33, "gfx942", (1, 2), (16, 32, 256), (4, 4)),
        (17, 129, "sm_80", (1, 2), (128, 128, 128), (8, 3)),
        (129, 128, "gfx942", (2, 1), (128, 128, 128), (8, 2)),
        (17, 20, "cpu", (2, 2), (16, 16, 32), None),
    ]:
        x = torch.empty(M, 8, dtype=torch.int8, device=meta)
        w = torch.empty(N, 8, dtype=torch.int8, device=meta)
        scales = torch.empty(max(M, N), device=meta)
        asked = launches(
            lambda x=x, w=w, s=scales: module.w8a8_linear(
                x, s[: len(x)], w, s[: len(w)], torch.bfloat16
            ),
            target,
        )
        want = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
        if options:
            want |= dict(zip(("num_warps", "num_stages"), options, strict=True))
        if asked != [("_w8a8_linear_kernel", grid, want)]:
            return True
    nothing = launches(lambda: module.w8a8_linear(x[:0], scales[:0], w, scales))
    return bool(nothing)


def notices_numbers(module: ModuleType) -> bool:
    for number, case in enumerate(
        [
            Product(17, 20, 40, torch.float16, "sliced"),
            Product(3, 5, 70, torch.float32, "sliced"),
            Product(1, 1, 1),
        ]
    ):
        inputs = product_inputs(case, torch.Generator().manual_seed(number))
        want = original.w8a8_linear_ref(*inputs, case.dtype)
        with metered():
            y = module.w8a8_linear(*inputs, case.dtype)
        tolerance = 1e-3 if case.dtype == torch.float16 else 1e-6
        if y.dtype != case.dtype or not torch.allclose(y, want, tolerance, tolerance):
            return True
    with metered():
        return module.w8a8_linear(*inputs).dtype != torch.float16


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and a program number that they could not."""
    x, scales = torch.ones(3, 40, dtype=torch.int8), torch.ones(3)
    cost = lab.check_jit(
        module._w8a8_linear_kernel,
        args=(x, scales, x, scales, torch.ones(3, 3), 3, 3, 40, 41, 42),
        constexprs=dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32),
        needs=("load", "store", "dot"),
    )
    return bool(cost.int32_offsets)


def notices_arguments(module: ModuleType) -> bool:
    x, s = torch.ones(2, 4, dtype=torch.int8), torch.ones(2)
    long, many = torch.ones(1, 2**17, dtype=torch.int8), 2**20
    bad = [
        ("x: shape", x[0], s, x, s),
        ("x: 131072 columns", long, s[:1], long, s[:1]),
        ("x_scales: shape", x, s[:1], x, s),
        ("w: shape", x, s, x[:, :3], s),
        ("w: 1048577 rows", x, s, x[:1].expand(many + 1, 4), torch.ones(many + 1)),
        ("w_scales: shape", x, s, x, s[:1]),
        ("dtype: torch.float64", x, s, x, s, torch.float64),
    ]
    for start, *arguments in bad:
        try:
            module.w8a8_linear(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    meta = torch.empty(2, 2**17 - 1, dtype=torch.int8, device="meta")
    scales = torch.empty(many, device="meta")
    wide = meta[:1].expand(many, 2**17 - 1)
    return len(launches(lambda: module.w8a8_linear(meta, scales[:2], wide, scales))) != 1


DETECTORS = [notices_launches, notices_numbers, notices_in_the_ir, notices_arguments]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS, tmp_path)
