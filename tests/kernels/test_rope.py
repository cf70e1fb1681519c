"""The rotary embedding against float64, and against the model's own."""

import numpy as np
import pytest
import torch

from course import lm
from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.rope import CASES, STREAMING, Rope, rope_inputs
from kernels.rope import _rope_kernel, apply_rope, apply_rope_ref

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
HALF = torch.float16


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(x, cos, sin) -> torch.Tensor:
    """In float64, as a product of complex numbers."""
    x, cos, sin = (t.cpu().double().numpy() for t in (x, cos, sin))
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
    return torch.from_numpy(np.concatenate([turned.real, turned.imag], -1))


def assert_right(x, cos, sin, out) -> None:
    want = exact(x, cos, sin)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    error = (out.cpu().double() - want).abs()
    eager = lm.rope(x, cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)).cpu()
    assert error.max().item() <= error_limit(want, eager, x.dtype)
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[x.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Rope, device, running) -> None:
    inputs = rope_inputs(case, seeded(), device)
    with running():
        assert_right(*inputs, apply_rope(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16])
def test_the_reference_matches_float64(dtype, device) -> None:
    inputs = rope_inputs(Rope(4, 3, 20, dtype), seeded(), device)
    assert_right(*inputs, apply_rope_ref(*inputs))


def test_a_turn_keeps_lengths_and_relative_positions(device, running) -> None:
    """The score of a rotated query and key depends on their distance alone."""
    q, k = torch.randn(2, 1, 1, 16, generator=seeded()).to(device).unbind()
    frequencies = 100.0 ** -(torch.arange(8, device=device) / 8)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = (position * frequencies)[None]
        return apply_rope(x, angles.cos(), angles.sin())

    with running():
        near, far = ((at(q, p + 5) * at(k, p)).sum() for p in (3, 40))
        other = (at(q, 6) * at(k, 3)).sum()
        torch.testing.assert_close(at(q, 9).norm(), q.norm())
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)
    assert (near - other).abs() > 0.1


def test_inputs_stay(device, running) -> None:
    inputs = rope_inputs(Rope(3, 3, 20), seeded(), device)
    before = [x.clone() for x in inputs]
    with running():
        assert torch.equal(apply_rope(*inputs), apply_rope(*inputs))
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)


def test_what_is_not_finite_stays_in_its_pair(device, running) -> None:
    x, cos, sin = rope_inputs(Rope(2, 2, 8), seeded(), device)
    want = apply_rope_ref(x, cos, sin)
    x[1, 0, 2] = float("nan")
    with running():
        out = apply_rope(x, cos, sin)
    assert out[1, 0, [2, 6]].isnan().all()
    out[1, 0, [2, 6]] = want[1, 0, [2, 6]]
    torch.testing.assert_close(out, want)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_empty_launches_nothing() -> None:
    from course.lab.meter import metered

    with metered() as meter:
        assert apply_rope(torch.ones(0, 3, 8), *torch.ones(2, 0, 4)).shape == (0, 3, 8)
        assert apply_rope(torch.ones(2, 0, 8), *torch.ones(2, 2, 4)).shape == (2, 0, 8)
    assert meter.launches == 0


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_moves_each_byte_once() -> None:
    from course.lab.meter import metered

    x, cos, sin = rope_inputs(Rope(4, 16, 128, HALF), seeded())
    with metered() as meter, pretending("sm_90"):
        apply_rope(x, cos, sin)
    assert meter.loads == x.nbytes + cos.nbytes + sin.nbytes
    assert meter.stores == x.nbytes


@pytest.mark.parametrize("axis", [0, 1])
def test_offsets_beyond_32_bits(axis: int, device, running) -> None:
    x, cos, sin = rope_inputs(Rope(3, 3, 16, HALF), seeded(), device)
    strides = (2**30, 16, 1) if axis == 0 else (16, 2**30, 1)
    storage = torch.UntypedStorage(2 * (2**31 + 1024), device=device)
    far = torch.empty(0, dtype=HALF, device=device).set_(storage)
    far = far.as_strided(x.shape, strides).copy_(x)
    with running():
        assert_right(x, cos, sin, apply_rope(far, cos, sin))


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_output() -> None:
    from course import lab

    x, cos, sin = map(lab.guarded, rope_inputs(Rope(3, 3, 20), seeded()))
    out = lab.guarded(lab.poisoned((3, 3, 20), torch.float32))
    with lab.interpreted():
        _rope_kernel[(3,)](x, cos, sin, out, 3, 60, 20, 10, 10, HALF=10, BLOCK_H=4, BLOCK_D=16)
    lab.check_guard("out", out)
    assert_right(x, cos, sin, out)


X, ANGLE = torch.ones(2, 3, 4), torch.ones(2, 2)
BAD = {
    "x: shape": (X[0], ANGLE, ANGLE),
    "x: dtype": (X.long(), ANGLE, ANGLE),
    "x: last stride": (torch.ones(2, 3, 8)[..., ::2], ANGLE, ANGLE),
    "x: head_dim 3": (X[..., :3], ANGLE, ANGLE),
    "x: head_dim 0": (X[..., :0], ANGLE, ANGLE),
    "x: head_dim 258": (torch.ones(2, 3, 258), ANGLE, ANGLE),
    "x: 129 heads": (torch.ones(2, 129, 4), ANGLE, ANGLE),
    "cos: shape": (X, torch.ones(2, 4), ANGLE),
    "cos: dtype": (X, ANGLE.half(), ANGLE.half()),
    "cos: device": (X, ANGLE.to("meta"), ANGLE),
    "sin: shape": (X, ANGLE, torch.ones(3, 2)),
    "sin: dtype": (X.half(), ANGLE, ANGLE.half()),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        apply_rope(*BAD[start])


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    x, angle = torch.ones(1, 1, 2), torch.ones(1, 1)
    assert len(compile_launches(lambda: apply_rope(x, angle, angle), target)) == 1


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_tile_fits(target: str) -> None:
    x = torch.empty(1, 128, 256, device="meta", dtype=HALF)
    angle = torch.empty(1, 128, device="meta")
    rows = table.build({"": lambda: apply_rope(x, angle, angle)}, [target])
    assert table.complaints(rows, STREAMING) == []
