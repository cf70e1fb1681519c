"""Every automatic edit of the gate must be noticed by the small cases below."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.swiglu as original
from course import lab
from course.lab.meter import metered
from kernels.cases.swiglu import Gate, gate_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {"_swiglu_kernel": {}, "swiglu": {}, "_block": {}}
HALF = torch.float16


def notices_launches(module: ModuleType) -> bool:
    meta = torch.device("meta")
    for T, F, dtype, target, block in [
        (3, 1536, torch.float32, "sm_90", 512),
        (2, 1025, HALF, "sm_100", 1024),
        (1, 4096, torch.bfloat16, "gfx942", 2048),
        (5, 1, HALF, "cpu", 16),
    ]:
        x = torch.empty(T, F, dtype=dtype, device=meta)
        asked = launches(lambda x=x: module.swiglu(x, x), target)
        grid = (T, -(-F // block))
        if asked != [("_swiglu_kernel", grid, dict(BLOCK=block, num_warps=4))]:
            return True
    return bool(launches(lambda: module.swiglu(x[:0], x[:0])))


def notices_numbers(module: ModuleType) -> bool:
    for number, case in enumerate([Gate(3, 20, HALF, "fused"), Gate(2, 33), Gate(1, 1)]):
        gate, up = gate_inputs(case, torch.Generator().manual_seed(number))
        if number == 1:
            up = torch.cat((up, up), 1)[:, :33]  # a stride of its own
        want = original.swiglu_ref(gate, up)
        with metered():
            out = module.swiglu(gate, up)
        tolerance = 1e-3 if case.dtype == HALF else 1e-6
        if out.dtype != case.dtype or not torch.allclose(out, want, tolerance, 1e-6):
            return True
    # what is exact in float32 and not in float16
    gate = torch.full((1, 16), 12.0, dtype=HALF)
    up = torch.full((1, 16), 1 + 2**-10, dtype=HALF)
    low = torch.full((1, 16), -15.0, dtype=HALF)
    with metered():
        return not torch.equal(
            module.swiglu(gate, up), original.swiglu_ref(gate, up)
        ) or not torch.equal(module.swiglu(low, up * 1000), original.swiglu_ref(low, up * 1000))


def notices_in_the_ir(module: ModuleType) -> bool:
    x = torch.ones(3, 20)
    cost = lab.check_jit(
        module._swiglu_kernel,
        args=(x, x, x, 20, 21, 22),
        constexprs=dict(BLOCK=16),
    )
    return bool(cost.int32_offsets)


def notices_arguments(module: ModuleType) -> bool:
    x = torch.ones(2, 4)
    widest = torch.empty(1, 16 * 65_535, device="meta")
    bad = [
        ("gate: shape", x[0], x[0]),
        ("gate: 1048561 columns must be at most 1048560", *torch.ones(2, 1, 1_048_561)),
        ("up: shape", x, x[:1]),
    ]
    for start, *arguments in bad:
        try:
            module.swiglu(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    launches(lambda: module.swiglu(widest, widest), "cpu")
    with metered() as meter:
        module.swiglu(x[:, :0], x[:, :0])
    return bool(meter.launches)


DETECTORS = [notices_launches, notices_numbers, notices_in_the_ir, notices_arguments]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS, tmp_path)
