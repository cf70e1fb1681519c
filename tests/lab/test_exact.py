"""bfloat16 and float8 in the interpreter, bit for bit against torch and by hand."""

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from course import lab
from course.lab.aot import compile_launches
from course.lab.exact import decode, encode

KINDS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


@triton.jit
def _cast(x, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty))


@triton.jit
def _arithmetic(a, b, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, tl.where(x > y, x * y - x, -y))


@triton.jit
def _matmul(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


def values() -> torch.Tensor:
    """Many magnitudes, halves between neighbours, subnormals, both signs."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    scaled = x * torch.logspace(-12, 2, 4096)
    by_hand = torch.tensor([1.97, 500.0, 0.001, 1 + 2**-8, 1 + 3 * 2**-8, 448.0, 464.0, 0.0, -0.0])
    return torch.cat([scaled[:-9], by_hand])


def launch_cast(x: torch.Tensor, out: torch.Tensor) -> None:
    _cast[(1,)](x, out, BLOCK=len(x))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(len(x), dtype=dtype)
    with lab.interpreted():
        launch_cast(x, out)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.uint8)


@pytest.mark.parametrize("dtype", KINDS.values(), ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_narrowing_rounds_to_nearest_even(source, dtype) -> None:
    x = values().to(source)
    largest = torch.finfo(dtype).max
    want = x.float().clamp(-largest, largest).to(dtype)
    assert torch.equal(bits(cast(x, dtype)), bits(want))


def test_compiled_conversions_round_to_nearest_even_and_saturate() -> None:
    for dtype in KINDS.values():
        x, out = torch.ones(256), torch.zeros(256, dtype=dtype)
        (kernel,) = compile_launches(partial(launch_cast, x, out), "sm_90")
        want = "cvt.rn.bf16" if dtype == torch.bfloat16 else "cvt.rn.satfinite.e"
        assert want in kernel.asm["ptx"]


def test_rounding_by_hand() -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.97, 500.0])
    assert cast(x[:2], torch.bfloat16).tolist() == [1.0, 1 + 2**-6]  # ties go to even
    assert cast(x[2:], torch.float8_e4m3fn).float().tolist() == [2.0, 448.0]  # carry; saturation


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_widening_and_back_is_the_identity(kind) -> None:
    dtype = KINDS[kind]
    every = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.int32)
    raw = every.to(torch.uint16 if dtype.itemsize == 2 else torch.uint8)
    narrow = raw.view(dtype)
    finite = narrow.float().isfinite().numpy()
    wide = decode(raw.numpy(), kind)
    np.testing.assert_array_equal(wide, narrow.float().numpy())
    np.testing.assert_array_equal(encode(wide, kind)[finite], raw.numpy()[finite])


def test_not_a_number_stays_so() -> None:
    x = torch.tensor([float("nan"), 1.0])
    for dtype in KINDS.values():
        assert cast(x, dtype).float().isnan().tolist() == [True, False]


def test_bfloat16_arithmetic_rounds_after_each_operation() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, generator=g).bfloat16() for _ in range(2))
    out = torch.zeros(256, dtype=torch.bfloat16)
    with lab.interpreted():
        _arithmetic[(1,)](a, b, out, BLOCK=256)
    assert torch.equal(out, torch.where(a > b, a * b - a, -b))


@pytest.mark.parametrize("dtype", KINDS.values(), ids=str)
def test_dot_multiplies_the_values(dtype) -> None:
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randn(16, 16, generator=g).to(dtype) for _ in range(2))
    out = torch.zeros(16, 16)
    with lab.interpreted():
        _matmul[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-5)
