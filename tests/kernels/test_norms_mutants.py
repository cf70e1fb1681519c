"""Every automatic edit of the norms must be noticed by the small cases below."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.norms as original
from course import lab
from course.lab.meter import metered
from kernels.cases.norms import Norm, norm_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {
    "_rms_norm_kernel": {},
    "rms_norm": {},
    "add_rms_norm": {},
    "_launch": {},
}
HALF = torch.float16


def notices_launches(module: ModuleType) -> bool:
    meta = torch.device("meta")
    for T, D, dtype, target, want in [
        (3, 576, torch.float32, "sm_90", (1024, 8)),
        (3, 4096, HALF, "sm_90", (4096, 16)),
        (3, 4096, HALF, "gfx942", (4096, 8)),
        (3, 5, HALF, "sm_80", (8, 1)),
    ]:
        x = torch.empty(T, D, dtype=dtype, device=meta)
        asked = launches(lambda x=x: module.rms_norm(x, x[0]), target)
        options = dict(BLOCK_D=want[0], num_warps=want[1])
        if asked != [("_rms_norm_kernel", (T,), options)]:
            return True
    return bool(launches(lambda: module.rms_norm(x[:0], x[0])))


def notices_numbers(module: ModuleType) -> bool:
    for number, case in enumerate(
        [Norm(3, 20, HALF, "sliced"), Norm(2, 16), Norm(1, 1), Norm(2, 5, torch.float32, "shared")]
    ):
        x, residual, weight = norm_inputs(case, torch.Generator().manual_seed(number))
        for eps in (None, 0.3):
            rest = () if eps is None else (eps,)
            total = residual.clone()
            if case.layout == "sliced":
                total = residual
            out, want_total = original.add_rms_norm_ref(x, total, weight, *rest)
            want = original.rms_norm_ref(x, weight, *rest)
            with metered() as meter:
                alone = module.rms_norm(x, weight, *rest)
                fused = module.add_rms_norm(x, total, weight, *rest)
            if meter.written["residual"] != x.nbytes or not torch.equal(total, want_total):
                return True
            for have, wanted in ((alone, want), (fused, out)):
                tolerance = 1e-3 if case.dtype == HALF else 1e-6
                if have.dtype != wanted.dtype or not torch.allclose(have, wanted, tolerance, 1e-6):
                    return True
    return notices_what_halves_hide(module)


def notices_what_halves_hide(module: ModuleType) -> bool:
    """Squares above 65504; a sum that is normalised as it is rounded."""
    ones = torch.ones(8, dtype=HALF)
    with metered():
        large = module.rms_norm(torch.full((1, 8), 3e4, dtype=HALF), ones)
        x = torch.full((1, 8), 2.0**-11, dtype=HALF)
        residual = torch.ones(1, 8, dtype=HALF)
        residual[0, 0] = 1000
        total = module.add_rms_norm(x, residual, torch.full((8,), 1000.0, dtype=HALF))
    want = original.rms_norm_ref(residual, torch.full((8,), 1000.0, dtype=HALF))
    return not torch.equal(large, ones[None]) or not torch.equal(total, want)


def notices_in_the_ir(module: ModuleType) -> bool:
    x = torch.ones(3, 20)
    cost = lab.check_jit(
        module._rms_norm_kernel,
        args=(x, x, x[0], x, 0.1, 20, 21, 22),
        constexprs=dict(BLOCK_D=32),
    )
    return bool(cost.int32_offsets)


def notices_arguments(module: ModuleType) -> bool:
    x, w = torch.ones(2, 4), torch.ones(4)
    wide = torch.ones(1, 16_385)
    bad = [
        ("x: shape", x[0], None, w),
        ("x: row of 0", x[:, :0], None, w[:0]),
        ("x: row of 16385", wide, None, wide[0]),
        ("weight: shape", x, None, w[:3]),
        ("residual: shape", x, x[:1], w),
        ("residual: outer stride 3", x, torch.ones(7).as_strided((2, 4), (3, 1)), w),
        ("eps: 9e-39", x, None, w, 9e-39),
    ]
    for start, x_, residual, weight, *eps in bad:
        try:
            if residual is None:
                module.rms_norm(x_, weight, *eps)
            else:
                module.add_rms_norm(x_, residual, weight, *eps)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    with metered():  # the edges of what is allowed
        module.rms_norm(wide[:, :-1], wide[0, :-1])
        module.rms_norm(x, w, 1e-38)
        module.add_rms_norm(x, torch.ones(2, 4), w)
        module.add_rms_norm(x[:1], torch.ones(4).as_strided((1, 4), (1, 1)), w)
        pair = torch.ones(2, 4)
        module.add_rms_norm(pair, torch.ones(1, 4).expand(1, 4).repeat(2, 1), w)
    return False


DETECTORS = [notices_launches, notices_numbers, notices_in_the_ir, notices_arguments]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS, tmp_path)
