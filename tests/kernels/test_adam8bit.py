"""8-bit AdamW against float64, on states and lengths that break kernels."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.adam8bit import (
    _adam8bit_kernel,
    _tree,
    adam8bit_blockwise_step,
    adam8bit_blockwise_step_ref,
    dynamic_code,
)
from kernels.cases import error_limit
from kernels.cases.adam8bit import STEP_CASES, STREAMING, Step, step_inputs

ON_CPU = not torch.cuda.is_available()
SMALLEST = 1e-37  # the least divisor of the contract


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def copies(state):
    return [x.clone() for x in state]


def exact(state, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """Float64, a block at a time: p, and for m and v scales, indices and doubts.

    A doubt is how far a ratio may be moved by float32 rounding, beyond which its index is certain.
    """
    p, g, m_index, v_index, m_scale, v_scale, m_code, v_code = (
        x.detach().cpu().double().numpy() for x in state
    )
    new_p = np.empty_like(p)
    moments = [([], [], []), ([], [], [])]
    for block in range(len(m_scale)):
        at = slice(256 * block, 256 * block + 256)
        terms = [
            (beta1 * m_code[m_index[at].astype(int)] * m_scale[block], (1 - beta1) * g[at]),
            (beta2 * v_code[v_index[at].astype(int)] * v_scale[block], (1 - beta2) * g[at] ** 2),
        ]
        (m, v), codes = (a + b for a, b in terms), (m_code, v_code)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        new_p[at] = p[at] - lr * weight_decay * p[at] - lr * m_hat / (np.sqrt(v_hat) + eps)
        for (a, b), code, moment in zip(terms, codes, moments, strict=True):
            scale = np.abs(a + b).max()
            divisor = max(scale, SMALLEST)
            distance = np.abs((a + b)[:, None] / divisor - code[None, :])
            # rounding of both terms and of the quotient, and of numbers below 1e-38
            doubt = 2**-21 * (np.abs(a) + np.abs(b) + np.abs(a + b)) / divisor + 1e-7 * (
                scale < 1e-35
            )
            for part, value in zip(moment, (scale, distance, doubt), strict=True):
                part.append(value)
    return torch.from_numpy(new_p), moments


def assert_index(index: torch.Tensor, distances, doubts) -> int:
    """The nearest value everywhere but where rounding may decide; returns how many those are."""
    index = index.cpu().numpy().astype(int)
    distance, doubt = np.concatenate(distances), np.concatenate(doubts)
    nearest = distance.argmin(1)  # the first, so the lower one
    at = np.arange(len(index))
    lost = distance[at, index] - distance[at, nearest]
    unsure = np.partition(distance, 1, axis=1)
    unsure = unsure[:, 1] - unsure[:, 0] <= 2 * doubt
    assert (index[~unsure] == nearest[~unsure]).all()
    assert (lost <= 2 * doubt).all()
    return int(unsure.sum())


def assert_right(before, after, **rates) -> int:
    want, moments = exact(before, **rates)
    p = after[0].cpu()
    eager = copies(before)
    adam8bit_blockwise_step_ref(*eager, **rates)
    error = (p.double() - want).abs().max().item()
    assert error <= error_limit(want, eager[0].cpu(), p.dtype)
    unsure = 0
    for which, (scales, distances, doubts) in enumerate(moments):
        got = after[4 + which].cpu().double()
        torch.testing.assert_close(got, torch.tensor(scales).double(), rtol=5e-7, atol=2e-45)
        unsure += assert_index(after[2 + which], distances, doubts)
    return unsure


@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_matches_float64(case: Step, device, running) -> None:
    before = step_inputs(case, seeded(), device)
    after, kept = copies(before), before[1].clone()
    rates = dict(step=case.step, lr=1e-2, weight_decay=case.weight_decay)
    if case.layout == "shifted":
        after = list(step_inputs(case, seeded(), device))
    with running():
        adam8bit_blockwise_step(*after, **rates)
    unsure = assert_right(before, after, **rates)
    assert unsure <= 2 + 0.01 * case.n or case.gradients == "tiny"
    assert torch.equal(after[1], kept)
    if case.gradients == "zero" and case.state == "fresh":
        assert not after[4].any() and not after[5].any()


def test_the_reference_matches_float64(device) -> None:
    before = step_inputs(Step(1300, gradients="scales"), seeded(), device)
    after = copies(before)
    rates = dict(step=7, lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    adam8bit_blockwise_step_ref(*after, **rates)
    assert assert_right(before, after, **rates) <= 2


def test_other_rates(device, running) -> None:
    before = step_inputs(Step(300), seeded(), device)
    after = copies(before)
    rates = dict(step=7, lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.3)
    with running():
        adam8bit_blockwise_step(*after, **rates)
    assert assert_right(before, after, **rates) <= 2


def test_the_codes_are_those_of_the_paper() -> None:
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    for code in (signed, unsigned):
        assert code.dtype == torch.float32 and code.shape == (256,)
        assert (code.diff() > 0).all() and code[-1] == 1 and (code == 0).sum() == 1
    assert (unsigned >= 0).all() and (signed < 0).sum() == 127
    assert torch.equal(signed[:127], -signed[128:255].flip(0))
    # the ends of both codes: half a part above 1e-7, half a part below 1
    assert unsigned[1].item() == pytest.approx(3.25e-7, rel=1e-6)
    assert unsigned[254].item() == pytest.approx(1 - 0.45 / 128, rel=1e-6)
    assert signed[128].item() == pytest.approx(5.5e-7, rel=1e-6)
    assert signed[0].item() == pytest.approx(0.45 / 64 - 1, rel=1e-6)


@pytest.mark.parametrize("which, signed", [("m", True), ("v", False)])
def test_both_sides_of_every_middle(which: str, signed: bool, device, running) -> None:
    """Without memory (beta = 0) the moment is the gradient or its square."""
    code = dynamic_code(signed).double()
    middles = (code[1:] + code[:-1]) / 2
    ratios = torch.cat([middles * (1 - 1e-4), middles * (1 + 1e-4), code[1:]])
    want = torch.cat([torch.where(middles > 0, 0, 1), torch.where(middles > 0, 1, 0)])
    want = torch.cat([want + torch.arange(255).repeat(2), torch.arange(1, 256)])
    rows = torch.ones(math.ceil(len(ratios) / 255), 256, dtype=torch.float64)
    padded = torch.ones(rows[:, 1:].numel(), dtype=torch.float64)
    padded[: len(ratios)] = ratios
    rows[:, 1:] = padded.view(-1, 255)  # and a 1 in each block
    g = rows.view(-1) if signed else rows.view(-1).sqrt()
    n = g.numel()
    state = list(step_inputs(Step(n, state="fresh"), seeded(), device))
    state[1] = g.float().to(device)
    with running():
        adam8bit_blockwise_step(*state, step=1, lr=1e-3, beta1=0.0, beta2=0.0)
    got = state[2 if which == "m" else 3].cpu().view(-1, 256)[:, 1:].reshape(-1)
    assert torch.equal(got[: len(want)].long(), want)


def test_a_tie_goes_to_the_lower_value(device, running) -> None:
    """Of a code whose values and middles are exact: eighths."""
    state = list(step_inputs(Step(256, state="fresh"), seeded(), device))
    state[6] = torch.arange(-192.0, 64.0, device=device) / 64
    state[7] = torch.arange(256.0, device=device) / 64
    ratios = torch.tensor([1.0, 0.5, 0.5 - 2**-7, -0.5 + 2**-7, -0.25, 0.0, 2**-7])
    state[1] = torch.zeros(256, device=device)
    state[1][:7] = ratios.to(device)
    with running():
        adam8bit_blockwise_step(*state, step=1, lr=1e-3, beta1=0.0, beta2=0.0)
    assert state[2][:7].tolist() == [255, 224, 223, 160, 176, 192, 192]
    # squares: 63/64 squared is not a tie, 1/128 squared is nearest to 0
    assert state[3][:7].tolist() == [64, 16, 16, 16, 4, 0, 0]


def test_a_fresh_state_takes_any_indices(device, running) -> None:
    one = step_inputs(Step(600, state="fresh"), seeded(), device)
    two = copies(one)
    two[2].fill_(3)
    two[3].fill_(77)
    with running():
        adam8bit_blockwise_step(*one, step=1, lr=1e-2)
        adam8bit_blockwise_step(*two, step=1, lr=1e-2)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_the_same_bits_again(device, running) -> None:
    before = step_inputs(Step(1300, p_dtype=torch.bfloat16), seeded(), device)
    one, two = copies(before), copies(before)
    with running():
        adam8bit_blockwise_step(*one, step=3, lr=1e-2)
        adam8bit_blockwise_step(*two, step=3, lr=1e-2)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)
    for same in (1, 6, 7):  # the gradient and the codes are only read
        assert torch.equal(one[same], before[same])


def test_follows_float32_moments(device, running) -> None:
    """Five steps in blocks of different magnitude; a scale for all would lose the second."""
    state = step_inputs(Step(600, state="fresh"), seeded(), device)
    start, generator = state[0].clone(), seeded(3)
    p = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.0)
    magnitude = torch.tensor([1.0, 1e-3, 10.0])[torch.arange(600) // 256]
    for step in range(1, 6):
        sign = torch.where(torch.rand(600, generator=generator) < 0.5, -1, 1)
        g = sign * magnitude * (0.1 + torch.rand(600, generator=generator))
        state[1].copy_(g)
        p.grad = g.to(device)
        optimizer.step()
        with running():
            adam8bit_blockwise_step(*state, step=step, lr=1e-2)
    for block in range(3):
        at = slice(256 * block, 256 * block + 256)
        gap = (state[0][at] - p.detach()[at]).norm()
        assert gap <= 0.03 * (p.detach()[at] - start[at]).norm()


def test_large_gradients(device, running) -> None:
    before = list(step_inputs(Step(300), seeded(), device))
    before[1] = before[1].sign() * 65504
    after = copies(before)
    with running():
        adam8bit_blockwise_step(*after, step=2, lr=1e-2)
    assert_right(before, after, step=2, lr=1e-2)


def test_nan_stays_in_its_own_block(device, running) -> None:
    before = step_inputs(Step(700), seeded(), device)
    clean, broken = copies(before), copies(before)
    broken[1][300] = math.nan
    with running():
        adam8bit_blockwise_step(*clean, step=2, lr=1e-2)
        adam8bit_blockwise_step(*broken, step=2, lr=1e-2)
    assert broken[0][300].isnan() and broken[0].isnan().sum() == 1
    for which in (2, 3):
        rest = [*range(256), *range(512, 700)]
        assert torch.equal(broken[which][rest], clean[which][rest])
    for which in (4, 5):
        assert torch.equal(broken[which][[0, 2]], clean[which][[0, 2]])


def test_no_parameters(device, running) -> None:
    state = step_inputs(Step(0), seeded(), device)
    with running() as meter:
        adam8bit_blockwise_step(*state, step=1, lr=1e-2)
    assert meter is None or meter.launches == 0


@pytest.mark.skipif(not ON_CPU, reason="runs one program of millions")
@pytest.mark.parametrize("n", [2**31 + 256, 2**31 - 256])  # the second fits, n + 511 does not
def test_offsets_beyond_32_bits(n: int, running, monkeypatch) -> None:
    """The last block of that many parameters; storage of which a few pages are ever touched."""
    from course.lab import interp

    blocks = n // 256

    def lazily(count: int, dtype: torch.dtype) -> torch.Tensor:
        storage = torch.UntypedStorage(count * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(storage).as_strided((count,), (1,))

    half, byte = torch.bfloat16, torch.uint8
    dtypes = (half, half, byte, byte, torch.float32, torch.float32)
    sizes = (n, n, n, n, blocks, blocks)
    small = step_inputs(Step(256, p_dtype=half, g_dtype=half), seeded())
    state = [lazily(*row) for row in zip(sizes, dtypes, strict=True)]
    for far, near in zip(state, small, strict=False):
        far[-near.numel() :] = near
    last = (blocks + 1) // 2 - 1  # the interpreter's programs take two blocks
    only_last = SimpleNamespace(product=lambda *axes: [(last, 0, 0)])
    monkeypatch.setattr(interp, "itertools", only_last)
    monkeypatch.setattr("kernels.adam8bit.processors", lambda device: 2**23)
    with running():
        adam8bit_blockwise_step(*state, *small[6:], step=2, lr=1e-2)
    after = [far[-near.numel() :] for far, near in zip(state, small, strict=False)]
    assert_right(small, [*after, *small[6:]], step=2, lr=1e-2)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_every_byte_once(dtype: torch.dtype) -> None:
    """At most 1.25 times the compulsory bytes, at the tile of a real GPU."""
    from course.lab.meter import metered

    n = 64 * 1024
    state = step_inputs(Step(n, p_dtype=dtype, g_dtype=dtype), seeded())
    with metered() as meter, pretending("sm_90"):
        adam8bit_blockwise_step(*state, step=2, lr=1e-2)
    per_element = 3 * dtype.itemsize + 4
    compulsory = n * per_element + 16 * n // 256
    assert meter.read["g"] == meter.read["p"] == meter.written["p"] == n * dtype.itemsize
    assert meter.loads + meter.stores <= 1.02 * compulsory
    assert compulsory / n == per_element + 1 / 16


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
@pytest.mark.parametrize("n", [1, 300, 700])
def test_writes_nothing_around_its_outputs(n: int) -> None:
    from course import lab

    before = step_inputs(Step(n), seeded())
    after = [lab.guarded(x) for x in before]
    with lab.interpreted():
        _adam8bit_kernel[(2,)](
            *after,
            *(n, 0.9, 0.1, 0.999, 0.001, 1.0, 0.01 / (1 - 0.9**2), (1 - 0.999**2) ** -0.5, 1e-8),
            BLOCK=256,
            ROWS=2,
        )
    names = ("p", "g", "m_index", "v_index", "m_scale", "v_scale")
    for name, tensor in zip(names, after, strict=False):
        lab.check_guard(name, tensor)
    assert_right(before, after, step=2, lr=1e-2)


NAMES = ("p", "g", "m_index", "v_index", "m_scale", "v_scale", "m_code", "v_code")


@triton.jit
def _tree_kernel(code, out):
    o = tl.arange(0, 256)
    tl.store(out + o, _tree(tl.load(code + o)))


def test_nodes_of_one_depth_are_neighbours(device, running) -> None:
    """So that lanes at different nodes read different banks; sorted middles lie in one bank."""
    code = dynamic_code(True, device)
    tree = torch.empty_like(code)
    with running():
        _tree_kernel[(1,)](code, tree)
    middles = (code[1:] + code[:-1]) / 2
    for depth in range(8):
        first, step = 1 << depth, 256 >> depth
        assert torch.equal(tree[first : 2 * first], middles[step // 2 - 1 :: step])


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    state = dict(zip(NAMES, step_inputs(Step(300), seeded()), strict=True))
    return state | dict(step=1, lr=1e-3) | changes


BAD = {
    "p: shape": dict(p=torch.ones(3, 100)),
    "p: dtype": dict(p=torch.ones(300, dtype=torch.float16)),
    "p: last stride 2": dict(p=torch.ones(600)[::2]),
    "g: shape": dict(g=torch.ones(301)),
    "g: dtype": dict(g=torch.ones(300, dtype=torch.float64)),
    "g: last stride 0": dict(g=torch.ones(1).expand(300)),
    "m_index: dtype": dict(m_index=torch.ones(300, dtype=torch.int8)),
    "v_index: shape": dict(v_index=torch.ones(299, dtype=torch.uint8)),
    "m_scale: shape": dict(m_scale=torch.ones(3)),
    "v_scale: shape": dict(v_scale=torch.ones(1)),
    "v_scale: dtype": dict(v_scale=torch.ones(2, dtype=torch.bfloat16)),
    "m_code: shape": dict(m_code=torch.ones(255)),
    "v_code: dtype": dict(v_code=torch.ones(256, dtype=torch.float64)),
    "step: 0": dict(step=0),
    "step: 1.5": dict(step=1.5),
    "step: inf": dict(step=math.inf),
    "step: 2147483648": dict(step=2**31),
    "beta1: 1": dict(beta1=1.0),
    "beta1: -0.1": dict(beta1=-0.1),
    "beta2: 1.5": dict(beta2=1.5),
    "lr: -0.1": dict(lr=-0.1),
    "lr: nan": dict(lr=math.nan),
    "lr: inf": dict(lr=math.inf),
    "weight_decay: -1": dict(weight_decay=-1.0),
    "eps: 0": dict(eps=0.0),
    "eps: 1e-50": dict(eps=1e-50),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        adam8bit_blockwise_step(**changed(**BAD[start]))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    state = step_inputs(Step(1), seeded())
    compiled = compile_launches(lambda: adam8bit_blockwise_step(*state, step=1, lr=1e-3), target)
    assert [kernel.name for kernel in compiled] == ["_adam8bit_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_mixed_dtypes_fit(target: str) -> None:
    """The pair of dtypes that the committed table lacks."""
    n = 1 << 20
    p, g = torch.empty(n, dtype=torch.bfloat16, device="meta"), torch.empty(n, device="meta")
    index = torch.empty(n, dtype=torch.uint8, device="meta")
    scale, code = torch.empty(n // 256, device="meta"), torch.empty(256, device="meta")
    state = (p, g, index, index, scale, scale, code, code)
    rows = table.build({"": lambda: adam8bit_blockwise_step(*state, step=1, lr=1e-3)}, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in STEP_CASES]
    axes = [field.name for field in dataclasses.fields(Step)]
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
