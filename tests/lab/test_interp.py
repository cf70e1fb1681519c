"""Kernels on CPU tensors: right results, errors that teach, nothing left behind."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction, KernelInterface

from course import lab
from course.lab.aot import compile_launches

SHIFT = tl.constexpr(3)


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _softmax(x, out, n, scale, s_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x + row * s_row + o, mask=o < n, other=-float("inf")) * scale
    p = tl.exp(b_x - tl.max(b_x, 0))
    tl.store(out + row * s_row + o, p / tl.sum(p, 0), mask=o < n)


@triton.jit
def _calls_helper(x, out):
    o = tl.arange(0, 8)
    tl.store(out + o, _twice(tl.load(x + o)) + SHIFT)


@triton.jit
def _without_other(x, out, n):
    o = tl.arange(0, 8)
    tl.store(out + o, tl.load(x + o, mask=o < n))


@triton.jit
def _offset(x, out, stride):
    row = tl.program_id(0)
    tl.store(out + row, tl.load(x + row * stride * 0))


@triton.jit
def _product(a, b, out):
    o = tl.arange(0, 8)
    tl.store(out + o, tl.load(a + o) * b)


@triton.jit
def _widen(out, n):
    tl.store(out, n.to(tl.int64))


@triton.jit
def _bits(out, scale):
    tl.store(out, scale.to(tl.float16))


def test_softmax_and_strides() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))[:, :7]
    out = torch.zeros(3, 10)[:, :7]
    with lab.interpreted():
        _softmax[(3,)](x, out, 7, 2.0, 10, BLOCK=8, num_warps=2)
    torch.testing.assert_close(out, (2 * x).softmax(-1))


def test_helpers_constants_and_closures() -> None:
    factor = tl.constexpr(5)

    @triton.jit
    def closed(x, out):
        o = tl.arange(0, 8)
        tl.store(out + o, tl.load(x + o) * factor)

    x, out = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    with lab.interpreted():
        _calls_helper[(1,)](x, out)
        assert out.tolist() == (2 * x + 3).tolist()
        closed[(1,)](x, out)
    assert out.tolist() == (5 * x).tolist()


def test_grids() -> None:
    out = torch.zeros(4)
    with lab.interpreted():
        _offset[lambda meta: (4,)](torch.ones(1), out, 2)
        assert out.tolist() == [1, 1, 1, 1]
        _offset[(0,)](torch.ones(1), torch.zeros(0), 2)
        with pytest.raises(lab.KernelError, match="grid axis 1 is 65,536; a GPU takes 0 to 65,535"):
            _offset[(1, 65_536)](torch.ones(1), out, 2)


def test_a_masked_load_without_other_is_not_zero() -> None:
    out = torch.zeros(8)
    with lab.interpreted():
        _without_other[(1,)](torch.ones(8), out, 5)
    assert out[:5].tolist() == [1.0] * 5 and out[5:].isnan().all()


def test_int32_overflow_is_an_error_that_names_the_line() -> None:
    with (
        lab.interpreted(),
        pytest.raises(lab.KernelError, match=r"program \(2, 0, 0\).*row \* stride.*int64"),
    ):
        _offset[(3,)](torch.ones(1), torch.zeros(3), 2**30)


def test_a_float_argument_is_a_float32_scalar_as_when_compiled() -> None:
    a = torch.full((8,), 1 / 3, dtype=torch.float16)
    out = torch.zeros(8)
    with lab.interpreted():
        _product[(1,)](a, 1 / 3, out)
        half = torch.zeros(1, dtype=torch.float16)
        _bits[(1,)](half, 0.1)
    assert torch.equal(out, a.float() * torch.tensor(1 / 3))
    assert half.item() == torch.tensor(0.1).half().item()


def test_an_integer_argument_of_one_is_a_constant_as_when_compiled() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    with lab.interpreted():
        _widen[(1,)](out, 2)
        assert out.item() == 2
        with pytest.raises(lab.KernelError):
            _widen[(1,)](out, 1)
    with pytest.raises(lab.KernelError):
        compile_launches(lambda: _widen[(1,)](out, 1), "sm_80")


def test_wrong_arguments_are_named() -> None:
    with lab.interpreted(), pytest.raises(lab.KernelError, match=r"_widen: .*'n'"):
        _widen[(1,)](torch.zeros(1))


def test_only_jit_functions_run() -> None:
    tuned = triton.heuristics({"n": lambda args: 2})(_widen)
    with lab.interpreted(), pytest.raises(lab.KernelError, match=r"@triton\.jit alone"):
        tuned[(1,)](torch.zeros(1))


def test_everything_is_restored_even_after_an_error() -> None:
    owners = (tl, tl.core, tl.tensor, tl.dtype, tl.math, JITFunction, KernelInterface)
    before = [dict(vars(owner)) for owner in owners]
    with lab.interpreted(), lab.interpreted():
        _calls_helper[(1,)](torch.ones(8), torch.zeros(8))
        with pytest.raises(lab.KernelError):
            _offset[(3,)](torch.ones(1), torch.zeros(3), 2**30)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not {"np", "math", "partial"} & set(globals())  # Triton's own leaves its names behind


def test_a_compiled_launch_works_after_an_interpreted_one() -> None:
    x, out = torch.ones(8), torch.zeros(8)
    with lab.interpreted():
        _calls_helper[(1,)](x, out)
    (kernel,) = compile_launches(lambda: _calls_helper[(1,)](x, out), "sm_80")
    assert "tt.load" in kernel.asm["ttir"]
