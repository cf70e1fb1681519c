"""The norms against float64, on rows and layouts that break kernels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.norms import CASES, STREAMING, Norm, norm_inputs
from kernels.norms import _rms_norm_kernel, add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
HALF = torch.float16


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(x, weight, eps=1e-5) -> torch.Tensor:
    """In float64, as a vector of unit mean square."""
    x, weight = x.cpu().double().numpy(), weight.cpu().double().numpy()
    norms = np.linalg.norm(x, axis=1, keepdims=True) ** 2 / x.shape[1]
    return torch.from_numpy(x / np.sqrt(norms + eps) * weight)


def assert_right(x, weight, out, eps=1e-5) -> None:
    want = exact(x, weight, eps)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    error = (out.cpu().double() - want).abs()
    eager = F.rms_norm(x, weight.shape, weight, eps).cpu()
    assert error.max().item() <= error_limit(want, eager, x.dtype)
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[x.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Norm, device, running) -> None:
    x, residual, weight = norm_inputs(case, seeded(), device)
    with running():
        out = rms_norm(x, weight)
        assert_right(x, weight, out)
        # the sum is exact to the last bit of its dtype, and what is normalised
        before = residual.clone()
        out = add_rms_norm(x, residual, weight)
    assert torch.equal(residual, (x.double() + before.double()).to(case.dtype))
    assert_right(residual, weight, out)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16])
def test_the_references_match_float64(dtype, device) -> None:
    x, residual, weight = norm_inputs(Norm(4, 100, dtype), seeded(), device)
    assert_right(x, weight, rms_norm_ref(x, weight))
    out, total = add_rms_norm_ref(x, residual, weight)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert_right(total, weight, out)


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 4.0])
def test_eps(eps, device, running) -> None:
    x, _, weight = norm_inputs(Norm(2, 33), seeded(), device)
    x[0] = 0
    with running():
        out = rms_norm(x * 0.01, weight, eps)
    assert_right(x * 0.01, weight, out, eps)
    assert not out[0].any()


def test_the_least_eps_is_no_division_by_0(device, running) -> None:
    with running():
        out = rms_norm(torch.zeros(1, 4, device=device), torch.ones(4, device=device), 1e-38)
    assert not out.any()


def test_the_largest_halves_do_not_overflow(device, running) -> None:
    x = torch.full((2, 40), 65504.0, dtype=HALF, device=device)
    x[1, ::2] *= -1
    weight = torch.ones(40, dtype=HALF, device=device)
    with running():
        assert torch.equal(rms_norm(x, weight), x.sign())


def test_subnormals(device, running) -> None:
    x = torch.full((1, 16), 2**-24, dtype=HALF, device=device)  # the smallest half
    with running():
        out = rms_norm(x, torch.ones(16, dtype=HALF, device=device), 1e-20)
    assert out.float().sub(1).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float, device, running) -> None:
    x, _, weight = norm_inputs(Norm(3, 20), seeded(), device)
    want = rms_norm_ref(x, weight)
    x[1, 4] = bad
    with running():
        out = rms_norm(x, weight)
    assert out[1, 4].isnan()
    torch.testing.assert_close(out[[0, 2]], want[[0, 2]])


def test_inputs_stay_and_no_residual_is_written_without_one(device, running) -> None:
    inputs = norm_inputs(Norm(3, 20), seeded(), device)
    before = [t.clone() for t in inputs]
    x, residual, weight = inputs
    with running():
        assert torch.equal(rms_norm(x, weight), rms_norm(x, weight))
        add_rms_norm(x, residual, weight)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[2])


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_empty_launches_nothing() -> None:
    from course.lab.meter import metered

    x, weight = torch.ones(0, 8), torch.ones(8)
    with metered() as meter:
        assert rms_norm(x, weight).shape == (0, 8)
        assert add_rms_norm(x, x, weight).shape == (0, 8)
    assert meter.launches == 0


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_moves_each_byte_once() -> None:
    """At 8 rows of 49,152 bytes: the weight is the rest, and lies in the cache."""
    from course.lab.meter import metered

    x, residual, weight = norm_inputs(Norm(8, 12_288, HALF), seeded())
    with metered() as meter, pretending("sm_90"):
        rms_norm(x, weight)
    assert meter.read["x"] == x.nbytes and meter.stores == x.nbytes
    assert meter.read["weight"] == 8 * weight.nbytes  # once a row
    with metered() as meter, pretending("sm_90"):
        add_rms_norm(x, residual, weight)
    assert meter.read["x"] + meter.read["residual"] == 2 * x.nbytes
    assert meter.stores == 2 * x.nbytes


def test_offsets_beyond_32_bits(device, running) -> None:
    x, _, weight = norm_inputs(Norm(3, 16, HALF), seeded(), device)
    storage = torch.UntypedStorage(2 * (2**31 + 16), device=device)
    far = torch.empty(0, dtype=HALF, device=device).set_(storage)
    far = far.as_strided((3, 16), (2**30, 1)).copy_(x)
    with running():
        out = rms_norm(far, weight)
        zeros = torch.zeros_like(x)
        again = add_rms_norm(zeros, far, weight)
    assert_right(x, weight, out)
    assert torch.equal(again, out) and torch.equal(far, x)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    x, residual, weight = map(lab.guarded, norm_inputs(Norm(3, 20), seeded()))
    out = lab.guarded(lab.poisoned((3, 20), torch.float32))
    with lab.interpreted():
        _rms_norm_kernel[(3,)](x, residual, weight, out, 1e-5, 20, 20, 20, BLOCK_D=32)
    lab.check_guard("out", out)
    lab.check_guard("residual", residual)
    assert_right(residual, weight, out)


X = torch.ones(2, 4)
BAD = {
    "x: shape": (torch.ones(4), None, torch.ones(4)),
    "x: dtype": (X.long(), None, torch.ones(4)),
    "x: last stride": (torch.ones(2, 8)[:, ::2], None, torch.ones(4)),
    "x: row of 0": (X[:, :0], None, torch.ones(0)),
    "x: row of 16385": (torch.ones(1, 16_385), None, torch.ones(16_385)),
    "weight: shape": (X, None, torch.ones(5)),
    "weight: dtype": (X, None, torch.ones(4).half()),
    "weight: device": (X, None, torch.ones(4, device="meta")),
    "residual: shape": (X, torch.ones(3, 4), torch.ones(4)),
    "residual: dtype": (X, X.half(), torch.ones(4)),
    "residual: outer stride 0": (X, torch.ones(1, 4).expand(2, 4), torch.ones(4)),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    x, residual, weight = BAD[start]
    with pytest.raises(ValueError, match=f"^{start}"):
        rms_norm(x, weight) if residual is None else add_rms_norm(x, residual, weight)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), 9e-39])
def test_eps_must_be_positive_in_float32(eps: float) -> None:
    with pytest.raises(ValueError, match=r"^eps: .* must be at least 1e-38"):
        rms_norm(X, torch.ones(4), eps)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    one = torch.ones(1, 1)
    assert len(compile_launches(lambda: rms_norm(one, one[0]), target)) == 1
    assert len(compile_launches(lambda: add_rms_norm(one, one, one[0]), target)) == 1


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_longest_row_fits(target: str) -> None:
    x = torch.empty(1, 16_384, device="meta")
    rows = table.build({"": lambda: add_rms_norm(x, x, x[0])}, [target])
    assert table.complaints(rows, STREAMING) == []
