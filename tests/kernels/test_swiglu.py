"""The gate against float64, on widths and layouts that break kernels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.swiglu import CASES, STREAMING, Gate, gate_inputs
from kernels.swiglu import _swiglu_kernel, swiglu, swiglu_ref

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
HALF = torch.float16


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(gate, up) -> torch.Tensor:
    """In float64, with the sigmoid as a hyperbolic tangent."""
    gate, up = (x.cpu().double().numpy() for x in (gate, up))
    return torch.from_numpy(gate * (1 + np.tanh(gate / 2)) / 2 * up)


def assert_right(gate, up, out) -> None:
    want = exact(gate, up)
    assert out.shape == gate.shape and out.dtype == gate.dtype and out.is_contiguous()
    error = (out.cpu().double() - want).abs()
    assert error.max().item() <= error_limit(want, (F.silu(gate) * up).cpu(), gate.dtype)
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[gate.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Gate, device, running) -> None:
    inputs = gate_inputs(case, seeded(), device)
    with running():
        assert_right(*inputs, swiglu(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16])
def test_the_reference_matches_float64(dtype, device) -> None:
    inputs = gate_inputs(Gate(4, 20, dtype), seeded(), device)
    assert_right(*inputs, swiglu_ref(*inputs))


def test_a_large_gate_is_open_or_shut(device, running) -> None:
    gate = torch.tensor([[65504.0, -65504.0, 0.0, -0.0, 20.0]], dtype=HALF, device=device)
    up = torch.full_like(gate, 0.5)
    with running():
        out = swiglu(gate, up)
    assert out[0, :4].tolist() == [32752.0, 0.0, 0.0, 0.0]
    assert_right(gate, up, out)


def test_what_is_not_finite_stays_where_it_is(device, running) -> None:
    gate, up = gate_inputs(Gate(2, 20), seeded(), device)
    want = swiglu_ref(gate, up)
    gate[0, 3], up[1, 5] = float("nan"), float("inf")
    with running():
        out = swiglu(gate, up)
    assert out[0, 3].isnan() and out[1, 5].isinf()
    out[0, 3], out[1, 5] = want[0, 3], want[1, 5]
    torch.testing.assert_close(out, want)


def test_inputs_stay(device, running) -> None:
    gate, up = gate_inputs(Gate(3, 20), seeded(), device)
    before = gate.clone(), up.clone()
    with running():
        assert torch.equal(swiglu(gate, up), swiglu(gate, up))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_empty_launches_nothing() -> None:
    from course.lab.meter import metered

    with metered() as meter:
        for shape in ((0, 4), (3, 0)):
            assert swiglu(torch.ones(shape), torch.ones(shape)).shape == shape
    assert meter.launches == 0


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_moves_each_byte_once() -> None:
    from course.lab.meter import metered

    gate, up = gate_inputs(Gate(4, 3000, HALF, "fused"), seeded())
    with metered() as meter, pretending("sm_90"):
        swiglu(gate, up)
    assert meter.loads == gate.nbytes + up.nbytes and meter.stores == gate.nbytes


@pytest.mark.parametrize("which", [0, 1])
def test_offsets_beyond_32_bits(which: int, device, running) -> None:
    inputs = list(gate_inputs(Gate(3, 16, HALF), seeded(), device))
    storage = torch.UntypedStorage(2 * (2**31 + 16), device=device)
    far = torch.empty(0, dtype=HALF, device=device).set_(storage)
    far = far.as_strided((3, 16), (2**30, 1)).copy_(inputs[which])
    want = swiglu_ref(*inputs)
    inputs[which] = far
    with running():
        torch.testing.assert_close(swiglu(*inputs), want)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_output() -> None:
    from course import lab

    gate, up = map(lab.guarded, gate_inputs(Gate(3, 20), seeded()))
    out = lab.guarded(lab.poisoned((3, 20), torch.float32))
    with lab.interpreted():
        _swiglu_kernel[(3, 2)](gate, up, out, 20, 20, 20, BLOCK=16)
    lab.check_guard("out", out)
    assert_right(gate, up, out)


X = torch.ones(2, 4)
BAD = {
    "gate: shape": (X[0], X),
    "gate: dtype": (X.long(), X),
    "gate: last stride": (torch.ones(2, 8)[:, ::2], X),
    "gate: 1048561 columns": (torch.ones(1, 1_048_561), torch.ones(1, 1_048_561)),
    "up: shape": (X, X[:1]),
    "up: dtype": (X, X.half()),
    "up: device": (X, X.to("meta")),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        swiglu(*BAD[start])


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_all_sizes_one_compile(target: str) -> None:
    one = torch.ones(1, 1)
    rows = table.build({"": lambda: swiglu(one, one)}, [target])
    assert len(rows) == 1 and table.complaints(rows, ()) == []
    wide = torch.ones(1, 64)
    assert len(compile_launches(lambda: swiglu(wide, wide), target)) == len(STREAMING)
