"""Every automatic edit of the 8-bit optimizer must be noticed by the small cases below.

The cases are few, since 200 mutants run them; each has a reason.
"""

import functools
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kernels.adam8bit as original
from course import lab
from course.lab import interp
from course.lab.meter import metered
from kernels.cases.adam8bit import Step, step_inputs
from tests.kernels.mutants import Detector, assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "dynamic_code": {},
    "_spread": {},
    "_tree": {"constant#4: 8 to 9": "no node is 256 or above"},
    "_nearest": {},
    "_adam8bit_kernel": {
        "tl.load#1: drop other": "the moments are set to 0 past the end",
        "constant#7: 0.0 to 1.0": "the moments are set to 0 past the end",
        ".to#1: drop tl.int32": "the compiler widens the index of a gather, without a sign",
        ".to#2: drop tl.int32": "the compiler widens the index of a gather, without a sign",
        ".to#3: drop tl.int32": "64 bits count the same tiles, in more registers",
    },
    "adam8bit_blockwise_step": {},
    "_configuration": {},
}

RATES: dict = dict(step=3, lr=0.3, beta1=0.8, beta2=0.95, eps=0.01, weight_decay=0.3)


def copies(state):
    return [x.clone() for x in state]


@functools.cache
def inputs():
    """Five blocks of different scale, one of them zero, the last short and with small moments."""
    state = list(step_inputs(Step(1100), torch.Generator().manual_seed(1)))
    state[1] *= torch.tensor([1.0, 1e-3, 0.0, 10.0, 0.1])[torch.arange(1100) // 256]
    for scale in state[4:6]:
        scale *= torch.tensor([1.0, 1e-3, 0.0, 10.0, 10.0])
    state[2][1024:] = 140
    state[3][1024:] = 110
    return state


@functools.cache
def expected():
    state = copies(inputs())
    original.adam8bit_blockwise_step_ref(*state, **RATES)
    return state


def differs(state) -> bool:
    for got, want in zip(state[:6], expected(), strict=False):
        if got.dtype == torch.uint8:
            if not torch.equal(got, want):
                return True
        elif not torch.allclose(got, want, 1e-6, 5e-7):
            return True
    return False


def notices_numbers(module: ModuleType) -> bool:
    """Of three tiles that go round two programs."""
    state = copies(inputs())
    corrections = (1 - 0.3 * 0.3, 0.3 / (1 - 0.8**3), (1 - 0.95**3) ** -0.5, 0.01)
    with metered():
        module._adam8bit_kernel[(2,)](
            *(*state, 1100, 0.8, 0.2, 0.95, 0.05, *corrections), BLOCK=256, ROWS=2
        )
    return differs(state)


def notices_rates(module: ModuleType) -> bool:
    state = copies(inputs())
    with metered():
        module.adam8bit_blockwise_step(*state, **RATES)
    return differs(state)


@functools.cache
def middles(signed: bool):
    """Ratios on both sides of every middle, a 1 in each block, and the places they belong to."""
    code = original.dynamic_code(signed).double()
    between = (code[1:] + code[:-1]) / 2
    ratios = torch.stack([between * (1 - 1e-4), between * (1 + 1e-4)], 1)
    places = torch.arange(255)[:, None] + torch.tensor([0, 1])
    places = torch.where(between[:, None] < 0, places.flip(1), places)
    ratios, places = (torch.nn.functional.pad(x.view(2, 255), (1, 0)) for x in (ratios, places))
    ratios[:, 0], places[:, 0] = 1, 255
    return ratios.view(-1), places.view(-1)


def notices_middles(module: ModuleType) -> bool:
    for signed in (True, False):
        ratios, places = middles(signed)
        state = list(step_inputs(Step(512, state="fresh"), torch.Generator().manual_seed(2)))
        state[1] = (ratios if signed else ratios.sqrt()).float()
        with metered():
            module.adam8bit_blockwise_step(*state, step=1, lr=1e-3, beta1=0.0, beta2=0.0)
        if not torch.equal(state[2 if signed else 3].long(), places):
            return True
    return False


def notices_ties(module: ModuleType) -> bool:
    """And a block that float32 hardly holds: its ratios are against the least divisor."""
    state = list(step_inputs(Step(259, state="fresh"), torch.Generator().manual_seed(2)))
    state[1] = torch.zeros(259)
    state[1][:3] = torch.tensor([1.0, 2**-7, -(2**-7)])
    state[1][256:] = torch.tensor([5e-38, 0.5e-37, 0.0]).sqrt()
    state[6] = torch.arange(-192.0, 64.0) / 64
    want = copies(state)
    rates = dict(step=1, lr=1e-3, beta1=0.0, beta2=0.0)
    original.adam8bit_blockwise_step_ref(*want, **rates)
    with metered():
        module.adam8bit_blockwise_step(*state, **rates)
    if state[2][:3].tolist() != [255, 192, 191]:
        return True
    return any(not torch.equal(state[i], want[i]) for i in (2, 3, 4, 5))


def notices_far_offsets(module: ModuleType) -> bool:
    return any(notices_the_last_block(module, 2**31 + more) for more in (256, -256))


def notices_the_last_block(module: ModuleType, n: int) -> bool:
    """Of that many parameters, in storage that is hardly touched; the -256 fit in 32 bits."""
    blocks = n // 256

    def lazily(count: int, dtype: torch.dtype) -> torch.Tensor:
        storage = torch.UntypedStorage(count * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(storage).as_strided((count,), (1,))

    half, byte = torch.bfloat16, torch.uint8
    near = step_inputs(Step(256, p_dtype=half, g_dtype=half), torch.Generator().manual_seed(3))
    dtypes = (half, half, byte, byte, torch.float32, torch.float32)
    far = [lazily(*row) for row in zip((n, n, n, n, blocks, blocks), dtypes, strict=True)]
    for one, two in zip(far, near, strict=False):
        one[-two.numel() :] = two
    module.processors = lambda device: 2**23
    before = interp.itertools
    interp.itertools = SimpleNamespace(product=lambda *axes: [((blocks - 1) // 2, 0, 0)])
    try:
        with metered():
            module.adam8bit_blockwise_step(*far, *near[6:], step=2, lr=0.1, weight_decay=0.7)
    finally:
        interp.itertools = before
    original.adam8bit_blockwise_step_ref(*near, step=2, lr=0.1, weight_decay=0.7)
    return any(
        not torch.allclose(one[-two.numel() :].float(), two.float(), 1e-6)
        for one, two in zip(far, near, strict=False)
    )


def notices_in_the_ir(module: ModuleType) -> bool:
    state = inputs()
    found = lab.check_jit(
        module._adam8bit_kernel,
        args=(*state, 1100, 0.9, 0.1, 0.99, 0.01, 1.0, 0.1, 2.0, 0.01),
        constexprs=dict(BLOCK=256, ROWS=2),
        needs=("load", "store", "reduce"),
    )
    return bool(found.int32_offsets)


def notices_launches(module: ModuleType) -> bool:
    """Sixteen blocks a tile, four programs a processor."""
    meta = torch.device("meta")
    for n, processors, programs in [
        (1, 3, 1),
        (4096, 3, 1),
        (4097, 3, 2),
        (4096 * 12 + 1, 3, 12),
    ]:
        index = torch.empty(n, dtype=torch.uint8, device=meta)
        row, scale = torch.empty(n, device=meta), torch.empty((n + 255) // 256, device=meta)
        code = torch.empty(256, device=meta)
        module.processors = lambda device, count=processors: count
        state = (row, row, index, index, scale, scale, code, code)
        asked = launches(lambda s=state: module.adam8bit_blockwise_step(*s, step=1, lr=0.1))
        options = dict(BLOCK=256, ROWS=16, num_warps=8)
        if asked != [("_adam8bit_kernel", (programs,), options)]:
            return True
    return False


def notices_code(module: ModuleType) -> bool:
    """The values of the paper's figure, written down another way: edges, then middles."""
    for signed in (True, False):
        values = {0.0, 1.0}
        for decade in range(7):
            edges = torch.linspace(0.1, 1, 2**decade * (2 - signed) + 1, dtype=torch.float64)
            for middle in ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist():
                values |= {middle, -middle} if signed else {middle}
        want = torch.tensor(sorted(values), dtype=torch.float64).float()
        got = module.dynamic_code(signed)
        if got.dtype != torch.float32 or not torch.allclose(got, want, 2e-7, 0):
            return True
        if got.shape != (256,) or module.dynamic_code(signed, "meta").device.type != "meta":
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    names = ("p", "g", "m_index", "v_index", "m_scale", "v_scale", "m_code", "v_code")
    valid = dict(zip(names, copies(inputs()), strict=True)) | dict(step=1, lr=0.1)
    bad = [(f"{name}: shape", {name: valid[name][1:]}) for name in names[1:]]
    bad += [(f"{name}: dtype", {name: valid[name].double()}) for name in names]
    bad += [
        ("p: shape", dict(p=valid["p"][None])),
        ("step: 0", dict(step=0)),
        ("step: 2147483648", dict(step=2**31)),
        ("beta1: 1", dict(beta1=1.0)),
        ("beta2: -0.1", dict(beta2=-0.1)),
        ("lr: -1", dict(lr=-1.0)),
        ("lr: inf", dict(lr=math.inf)),
        ("weight_decay: -1", dict(weight_decay=-1.0)),
        ("eps: 9e-39", dict(eps=9e-39)),
    ]
    for start, changes in bad:
        try:
            module.adam8bit_blockwise_step(**valid | changes)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    empty = step_inputs(Step(0), torch.Generator().manual_seed(0))
    one = step_inputs(Step(1), torch.Generator().manual_seed(0))
    edges = dict(lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, eps=1e-38)
    with metered() as meter:
        module.adam8bit_blockwise_step(*empty, step=1, lr=0.1)
        module.adam8bit_blockwise_step(*one, step=1, **edges)
        module.adam8bit_blockwise_step(*one, step=2**31 - 1, **edges)
    return meter.launches != 2


def notices_defaults(module: ModuleType) -> bool:
    """With gradients so small that eps counts."""
    one = list(step_inputs(Step(9, state="fresh"), torch.Generator().manual_seed(4)))
    one[1] *= 1e-7
    two = copies(one)
    with metered():
        module.adam8bit_blockwise_step(*one, step=2, lr=0.1)
    original.adam8bit_blockwise_step_ref(*two, step=2, lr=0.1)
    return not torch.allclose(one[0], two[0], 1e-6, 5e-7)


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    want = {"sm_90": (16, 8), "sm_100": (16, 8), "gfx942": (16, 4)}
    for target, (rows, warps) in want.items():
        if module._configuration(target) != (rows, {"num_warps": warps}):
            return True
    return module._configuration("cpu") != (2, {})


JIT = [
    notices_ties,
    notices_middles,
    notices_numbers,
    notices_in_the_ir,
    notices_far_offsets,
]
HOST = [
    notices_configuration,
    notices_code,
    notices_launches,
    notices_arguments,
    notices_defaults,
    notices_rates,
]


def detectors(name: str) -> list[Detector]:
    """The cheap ones first."""
    return JIT if f"@triton.jit\ndef {name}(" in SOURCE else HOST


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors(name), tmp_path)
