"""Every automatic edit of the rotary embedding must be noticed by the small cases below."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.rope as original
from course import lab
from course.lab.meter import metered
from kernels.cases.rope import Rope, rope_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {"_rope_kernel": {}, "apply_rope": {}}
HALF = torch.float16


def notices_launches(module: ModuleType) -> bool:
    meta = torch.device("meta")
    for T, H, D, dtype, target, warps in [
        (3, 9, 64, torch.float32, "sm_90", 4),
        (3, 32, 128, HALF, "sm_90", 8),
        (3, 32, 128, HALF, "gfx942", 4),
        (2, 1, 2, HALF, "sm_80", 1),
    ]:
        x = torch.empty(T, H, D, dtype=dtype, device=meta)
        angle = torch.empty(T, D // 2, device=meta)
        asked = launches(lambda x=x, a=angle: module.apply_rope(x, a, a), target)
        block_h = 1 << (H - 1).bit_length()
        options = dict(HALF=D // 2, BLOCK_H=block_h, BLOCK_D=D // 2, num_warps=warps)
        if asked != [("_rope_kernel", (T,), options)]:
            return True
    return bool(launches(lambda: module.apply_rope(x[:0], angle[:0], angle[:0])))


def notices_numbers(module: ModuleType) -> bool:
    for number, case in enumerate(
        [
            Rope(3, 3, 20, HALF, "fused", exact_angles=False),
            Rope(2, 3, 6, torch.float32, "heads first"),
            Rope(1, 1, 2),
        ]
    ):
        x, cos, sin = rope_inputs(case, torch.Generator().manual_seed(number))
        wide = torch.cat((cos, sin, sin), 1)  # strides of their own
        cos, sin = wide[:, : cos.shape[1]], sin.clone()
        want = original.apply_rope_ref(x, cos, sin)
        with metered():
            out = module.apply_rope(x, cos, sin)
        tolerance = 1e-3 if case.dtype == HALF else 1e-6
        if out.dtype != case.dtype or not torch.allclose(out, want, tolerance, tolerance):
            return True
    return notices_overflow(module)


def notices_overflow(module: ModuleType) -> bool:
    """Of a product in float16, and of the offset of a head in 32 bits."""
    x = torch.full((1, 1, 2), 60_000, dtype=HALF)
    one, more = torch.ones(1, 1, dtype=HALF), torch.full((1, 1), 1.5, dtype=HALF)
    with metered():
        if module.apply_rope(x, more, one)[0, 0, 0] != 30_000:
            return True
        if module.apply_rope(x, one, more)[0, 0, 0] != -30_000:
            return True
    storage = torch.UntypedStorage(2 * (2**31 + 2))
    far = torch.empty(0, dtype=HALF).set_(storage).as_strided((1, 3, 2), (2, 2**30, 1))
    far.fill_(2.0)
    with metered():
        out = module.apply_rope(far, one, one)
    return out[0, :, 1].tolist() != [4.0] * 3


def notices_in_the_ir(module: ModuleType) -> bool:
    x, angle = torch.ones(3, 3, 20), torch.ones(3, 10)
    cost = lab.check_jit(
        module._rope_kernel,
        args=(x, angle, angle, x, 3, 61, 21, 11, 12),
        constexprs=dict(HALF=10, BLOCK_H=4, BLOCK_D=16),
    )
    return bool(cost.int32_offsets)


def notices_arguments(module: ModuleType) -> bool:
    x, angle = torch.ones(2, 3, 4), torch.ones(2, 2)
    wide = torch.ones(1, 128, 256)
    bad = [
        ("x: shape", x[0], angle, angle),
        ("x: head_dim 3", x[..., :3], angle, angle),
        ("x: head_dim 0", x[..., :0], angle[:, :0], angle[:, :0]),
        ("x: head_dim 258", torch.ones(1, 1, 258), *torch.ones(2, 1, 129)),
        ("x: 129 heads", torch.ones(2, 129, 4), angle, angle),
        ("cos: shape", x, angle[:, :1], angle),
        ("cos: dtype", x, angle.half(), angle.half()),
        ("sin: shape", x, angle, angle[:1]),
        ("sin: dtype", x.half(), angle, angle.half()),
    ]
    for start, *arguments in bad:
        try:
            module.apply_rope(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    with metered():
        module.apply_rope(wide, *torch.ones(2, 1, 128))
        module.apply_rope(x.half(), angle, angle)
        if module.apply_rope(x[:, :0], angle, angle).shape != (2, 0, 4):
            return True
    return False


DETECTORS = [notices_launches, notices_numbers, notices_in_the_ir, notices_arguments]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS, tmp_path)
