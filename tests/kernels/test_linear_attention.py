"""Linear attention against float64, on shapes, layouts and options that break kernels."""

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.linear_attention import (
    LINEAR_CASES,
    PRODUCTION,
    STREAMING,
    Linear,
    linear_inputs,
    run,
)
from kernels.linear_attention import (
    _linear_output_kernel,
    _linear_state_kernel,
    chunk_linear_attention,
    chunk_linear_attention_ref,
)

ON_CPU = not torch.cuda.is_available()
# float32: a running sum of log decays around -60 is rounded to 2e-6
RMS_RATIO = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def fades(decay, B: int, T: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    """[B, H, T, T]: what token t keeps of token s; [B, H, T]: and of the state before."""
    keep = np.ones((B, H, T))
    if decay is not None:
        keep = decay.cpu().double().clamp(min=-60).expand(B, T, H).mT.exp().numpy()
    fade = np.zeros((B, H, T, T))
    for t in range(T):
        fade[..., t, t] = 1
        if t:
            fade[..., t, :t] = fade[..., t - 1, :t] * keep[..., t, None]
    return fade, np.cumprod(keep, -1)


def exact(inputs, strict=False, feature_map="elu", **_) -> tuple[torch.Tensor, ...]:
    """Out, S and z in float64: all pairs of tokens at once, no recurrence."""
    q, k, v = (x.cpu().double().transpose(1, 2).numpy() for x in inputs[:3])
    decay, state = inputs[3:]
    B, H, T, Dk = q.shape
    if feature_map == "elu":
        q, k = (np.where(x < 0, np.exp(np.minimum(x, 0)), 1 + x) for x in (q, k))
    fade, since = fades(decay, B, T, H)
    S, z = np.zeros((B, H, Dk, v.shape[-1])), np.zeros((B, H, Dk))
    if state is not None:
        S, z = (x.cpu().double().numpy() for x in state)
    weights = (q @ k.swapaxes(-1, -2)) * fade
    if strict:
        weights = weights * (1 - np.eye(T))
    out = weights @ v + since[..., None] * (q @ S)
    if feature_map == "elu":
        norm = weights.sum(-1) + since * (q @ z[..., None])[..., 0]
        out = np.divide(out, norm[..., None], where=norm[..., None] > 0, out=0 * out)
    rest = k * fade[..., -1, :, None]
    S = S * since[..., -1, None, None] + rest.swapaxes(-1, -2) @ v
    z = z * since[..., -1, None] + rest.sum(-2)
    return tuple(torch.from_numpy(x) for x in (out.swapaxes(1, 2), S, z))


def eager(inputs, strict=False, feature_map="elu", **_) -> tuple[torch.Tensor, ...]:
    """The same in torch, in the inputs' dtype."""
    q, k, v = (x.cpu().transpose(1, 2) for x in inputs[:3])
    decay, state = inputs[3:]
    B, H, T, Dk = q.shape
    dtype = q.dtype
    if feature_map == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    # As one does in torch: by differences of a running sum, with its rounding.
    c = torch.zeros(B, H, T)
    if decay is not None:
        c = decay.cpu().expand(B, T, H).mT.clamp(min=-60).cumsum(-1)
    fade = (c[..., None] - c[..., None, :]).exp().tril().nan_to_num().to(dtype)
    since = c.exp().to(dtype)
    S, z = q.new_zeros(B, H, Dk, v.shape[-1]), q.new_zeros(B, H, Dk)
    if state is not None:
        S, z = (x.cpu().to(dtype) for x in state)
    weights = ((q @ k.mT) * fade).tril(-1 if strict else 0)
    out = weights @ v + since[..., None] * (q @ S)
    if feature_map == "elu":
        out = out / (weights.sum(-1) + since * (q @ z[..., None])[..., 0])[..., None]
    rest = k * fade[..., -1, :, None]
    S = S * since[..., -1, None, None] + rest.mT @ v
    z = z * since[..., -1, None] + rest.sum(-2)
    return out.nan_to_num().transpose(1, 2), S, z


def assert_right(inputs, got, **options) -> None:
    """Out, S and z within twice the error of eager torch."""
    dtype = got[0].dtype
    assert dtype == inputs[0].dtype and got[1].dtype == got[2].dtype == torch.float32
    plain = eager(inputs, **options)
    for have, want, rough in zip(got, exact(inputs, **options), plain, strict=True):
        assert have.shape == want.shape
        error = (have.cpu().double() - want).abs()
        assert error.max().item() <= error_limit(want, rough, dtype)
        assert error.square().mean() <= (RMS_RATIO[dtype] ** 2) * want.square().mean()


def options_of(case: Linear) -> dict:
    return dict(strict=case.strict, feature_map=case.feature_map)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_matches_float64(case: Linear, device, running) -> None:
    inputs = linear_inputs(case, seeded(), device)
    with running():
        got = run(case, inputs)
    assert_right(inputs, got, **options_of(case))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("feature_map", ["elu", "identity"])
def test_the_reference_matches_float64(strict, feature_map, device) -> None:
    case = Linear(T=9, decay="token", state=True, strict=strict, feature_map=feature_map)
    for dtype in (torch.float32, torch.float16):
        inputs = linear_inputs(dataclasses.replace(case, dtype=dtype), seeded(), device)
        got = chunk_linear_attention_ref(*inputs, strict=strict, feature_map=feature_map)
        assert_right(inputs, got, **options_of(case))


def test_number_of_splits_does_not_matter(device, running) -> None:
    """Nor does it matter where an earlier call ended and handed over its state."""
    inputs = linear_inputs(Linear(T=55, H=1, decay="token", state=True), seeded(), device)
    q, k, v, decay, state = inputs
    with running():
        whole = chunk_linear_attention(*inputs, n_splits=1, return_state=True)
        for n_splits in (2, 3, 32):
            other = chunk_linear_attention(*inputs, n_splits=n_splits, return_state=True)
            for one, two in zip(whole, other, strict=True):
                torch.testing.assert_close(one, two, rtol=2e-6, atol=2e-5)
        for at in (0, 1, 16, 33, 55):
            first, *middle = chunk_linear_attention(
                q[:, :at], k[:, :at], v[:, :at], decay[:, :at], state, return_state=True
            )
            second, *end = chunk_linear_attention(
                q[:, at:], k[:, at:], v[:, at:], decay[:, at:], tuple(middle), return_state=True
            )
            halves = torch.cat([first, second], 1), *end
            for one, two in zip(whole, halves, strict=True):
                torch.testing.assert_close(one, two, rtol=2e-6, atol=2e-5)


def test_strict_leaves_out_the_token_itself(device, running) -> None:
    """Without normaliser the two differ by (q_t . k_t) v_t; the first token sees nothing."""
    inputs = linear_inputs(Linear(T=35, B=1, decay="head"), seeded(), device)
    q, k, v = inputs[:3]
    with running():
        full, strict = (
            chunk_linear_attention(*inputs, strict=s, feature_map="identity") for s in (False, True)
        )
        nothing = chunk_linear_attention(*inputs, strict=True)[:, 0]
    own = (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(full - strict, own, rtol=1e-5, atol=2e-5)
    assert not strict[:, 0].any() and not nothing.any()


def test_a_constant_decay_is_a_gate(device, running) -> None:
    inputs = linear_inputs(Linear(T=20, decay="head", B=2), seeded(), device)
    q, k, v, decay, _ = inputs
    with running():
        one = chunk_linear_attention(q, k, v, decay)
        two = chunk_linear_attention(q, k, v, decay.expand(2, 20, 2).contiguous())
    assert torch.equal(one, two)


def test_minus_infinity_begins_anew(device, running) -> None:
    q, k, v, *_ = linear_inputs(Linear(T=40), seeded(), device)
    decay = torch.zeros(1, 40, 2, device=device)
    decay[:, 21] = -math.inf
    with running():
        both = chunk_linear_attention(q, k, v, decay, n_splits=2)
        second = chunk_linear_attention(q[:, 21:], k[:, 21:], v[:, 21:])
    torch.testing.assert_close(both[:, 21:], second, rtol=2e-6, atol=2e-6)


def test_strong_decays_do_not_overflow(device, running) -> None:
    """exp(-c) alone would be infinite after two tokens."""
    q, k, v, *_ = inputs = linear_inputs(Linear(T=40), seeded(), device)
    decay = torch.full((2,), -60.0, device=device)
    inputs = q, k, v, decay, None
    with running():
        got = chunk_linear_attention(*inputs, return_state=True)
    assert_right(inputs, got)


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    case = Linear(T=40, dtype=torch.float16, decay="token", state=True, n_splits=2)
    inputs = linear_inputs(case, seeded(), device)
    flat = [*inputs[:4], *inputs[4]]
    before = [x.clone() for x in flat]
    with running():
        first, second = run(case, inputs), run(case, inputs)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, flat, before))


def test_largest_halves(device, running) -> None:
    """Scores, sums and products of 65504 overflow float16."""
    q, k, v, *_ = linear_inputs(Linear(T=40, B=1, dtype=torch.float16), seeded(), device)
    inputs = q.sign() * 65504, k.sign() * 65504, v.sign() * 65504, None, None
    with running():
        out = chunk_linear_attention(*inputs, n_splits=2)
    want = exact(inputs)[0]
    assert (out.cpu().double() - want).abs().max() <= 2**-11 * want.abs().max()


@pytest.mark.parametrize("low", [-200.0, -math.inf])
def test_a_query_without_features_gives_zero(low: float, device, running) -> None:
    q, k, v, *rest = linear_inputs(Linear(T=40, state=True), seeded(), device)
    clean = chunk_linear_attention_ref(q, k, v, *rest)[0]
    q[:, [3, 20]] = low
    k[:, 5] = low  # and such a key changes nothing
    want, *_ = chunk_linear_attention_ref(q, k, v, *rest)
    with running():
        out = chunk_linear_attention(q, k, v, *rest)
    assert not out[:, [3, 20]].any()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out[:, :3], clean[:, :3], rtol=1e-5, atol=2e-6)


def test_nan_reaches_later_tokens_of_its_head_only(device, running) -> None:
    q, k, v, *_ = linear_inputs(Linear(T=40, B=2), seeded(), device)
    clean = chunk_linear_attention_ref(q, k, v)[0]
    k[1, 18, 1] = math.nan
    q[0, 7, 0, 3] = math.nan
    with running():
        out = chunk_linear_attention(q, k, v, n_splits=2)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[1, 18:, 1] = bad[0, 7, 0] = True
    assert torch.equal(out.isnan(), bad)
    torch.testing.assert_close(out[~bad], clean[~bad], rtol=1e-5, atol=2e-6)


def test_nothing_to_do(device, running) -> None:
    """No tokens, sequences or heads: no launch, and the state is handed on."""
    with running() as meter:
        for B, T, H in [(2, 0, 2), (0, 5, 2), (2, 5, 0)]:
            case = Linear(B=B, T=T, H=H, Dv=8, state=True)
            q, k, v, decay, state = linear_inputs(case, seeded(), device)
            assert chunk_linear_attention(q, k, v).shape == (B, T, H, 8)
            out, S, z = run(case, (q, k, v, decay, state))
            assert out.shape == (B, T, H, 8) and S is not state[0] and z is not state[1]
            assert torch.equal(S, state[0]) and torch.equal(z, state[1])
            out, S, z = run(case, (q, k, v, decay, None))
            assert S.shape == (B, H, 32, 8) and z.shape == (B, H, 32)
            assert not S.any() and not z.any()
    assert not ON_CPU or meter.launches == 0


# Offsets of one sequence, token and head, each just beyond what 32 bits hold.
FAR = [(3, 1, 1, 0, 2**30), (1, 33, 1, 1, 2**26), (1, 1, 3, 2, 2**30)]


@pytest.mark.parametrize("B, T, H, axis, stride", FAR)
def test_offsets_beyond_32_bits(B, T, H, axis, stride, device, running) -> None:
    case = Linear(B=B, T=T, H=H, Dk=16, Dv=16, dtype=torch.float16, n_splits=2)
    inputs = linear_inputs(case, seeded(), device)
    strides = [16, 16, 16, 1]
    strides[axis] = stride
    furthest = ((B, T, H)[axis] - 1) * stride
    assert furthest == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (furthest + 16), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    spread = far.as_strided((B, T, H, 16), strides)
    want = chunk_linear_attention_ref(*inputs)
    for place in range(3):
        moved = [*inputs]
        spread.copy_(inputs[place])
        moved[place] = spread
        with running():
            got = run(case, tuple(moved))
        for have, good in zip(got, want, strict=True):
            torch.testing.assert_close(have, good, rtol=3e-3, atol=3e-3)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_everything_once() -> None:
    """At the tile of a real GPU; cut in four, K and V but for the last part twice."""
    from course.lab.meter import metered

    case = Linear(B=4, T=1024, H=1, Dk=128, Dv=128, dtype=torch.float16)
    q, k, v, *_ = linear_inputs(case, seeded())
    compulsory = q.nbytes + k.nbytes + 2 * v.nbytes
    with metered() as meter, pretending("sm_90"):
        chunk_linear_attention(q, k, v, n_splits=1)
    assert meter.loads + meter.stores == compulsory
    # The half of A above the diagonal is computed and thrown away: 1.2 times the useful FLOPs.
    # It is padding of the tile, and the time is the time to read.
    assert meter.flops == 4 * 1024 * (4 * 128 * 128 + 4 * 64 * 128)
    assert meter.flops <= 1.2 * 4 * 1024 * (4 * 128 * 128 + 2 * 64 * 128)
    with metered() as meter, pretending("sm_90"):
        chunk_linear_attention(q[:1], k[:1], v[:1], n_splits=4)
    part = 4 * 128 * (128 + 1) + 4  # bytes of a state in float32 and its decay
    assert meter.read["k"] + meter.read["v"] == 1.75 * (k[:1].nbytes + v[:1].nbytes)
    parts = ("part_S", "part_z", "part_g")
    assert sum(meter.written[x] for x in parts) == 3 * part
    assert sum(meter.read[x] for x in parts) == (1 + 2 + 3) * part


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    B, T, H, Dk, Dv = 1, 37, 2, 20, 40
    case = Linear(T, Dk, Dv, B=B, H=H, decay="token", state=True)
    q, k, v, decay, state = inputs = linear_inputs(case, seeded())
    outputs = {
        name: lab.guarded(lab.poisoned(shape, torch.float32))
        for name, shape in {
            "part_S": (2, 1, Dk, Dv),
            "part_z": (2, 1, Dk),
            "part_g": (2, 1),
            "out": (B, T, H, Dv),
            "last_S": (B, H, Dk, Dv),
            "last_z": (B, H, Dk),
        }.items()
    }
    part_S, part_z, part_g, out, last_S, last_z = outputs.values()
    q, k, v, decay, *state = map(lab.guarded, (q, k, v, decay, *state))
    strides = *k.stride()[:3], *v.stride()[:3], *decay.stride()[:2]
    tiles = dict(DIM_K=Dk, DIM_V=Dv, BLOCK_K=32, BLOCK_V=32, BLOCK_T=16, ELU=True)
    sizes = T, H, 32
    with lab.interpreted():
        _linear_state_kernel[(2, 2, 1)](
            *(k, v, decay, part_S, part_z, part_g, *sizes, *strides), **tiles
        )
        _linear_output_kernel[(2, 2, 2)](
            *(q, k, v, decay, *state, part_S, part_z, part_g, out, last_S, last_z),
            *(*sizes, *q.stride()[:3], *strides),
            **tiles,
            STRICT=False,
        )
    for name, tensor in outputs.items():
        lab.check_guard(name, tensor)
    assert_right(inputs, (out, last_S, last_z))


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    case = Linear(T=4, B=2, H=2, Dk=16, Dv=8, decay="token", state=True)
    names = ("q", "k", "v", "decay", "state")
    return dict(zip(names, linear_inputs(case, seeded()), strict=True)) | changes


HEAD = torch.ones(2, 4, 2, 16)
BAD = {
    "q: shape": dict(q=torch.ones(2, 4, 16)),
    "q: dtype": dict(q=HEAD.int()),
    "q: last stride 2": dict(q=torch.ones(2, 4, 2, 32)[..., ::2]),
    "q: head_dim 129": dict(q=torch.ones(2, 4, 2, 129), k=torch.ones(2, 4, 2, 129)),
    "q: head_dim 0": dict(q=torch.ones(2, 4, 2, 0), k=torch.ones(2, 4, 2, 0)),
    "v: head_dim 129": dict(v=torch.ones(2, 4, 2, 129)),
    "v: head_dim 0": dict(v=torch.ones(2, 4, 2, 0)),
    "k: shape": dict(k=torch.ones(2, 5, 2, 16)),
    "k: dtype": dict(k=HEAD.half()),
    "v: shape": dict(v=torch.ones(2, 4, 1, 16)),
    "decay: shape": dict(decay=torch.zeros(2, 4)),
    "decay: dtype": dict(decay=torch.zeros(2, dtype=torch.float64)),
    "decay: 0.5": dict(decay=torch.tensor([-1.0, 0.5])),
    r"state\[0\]: shape": dict(state=(torch.ones(2, 2, 16, 9), torch.ones(2, 2, 16))),
    r"state\[1\]: shape": dict(state=(torch.ones(2, 2, 16, 8), torch.ones(2, 2, 8))),
    r"state\[0\]: dtype": dict(state=(torch.ones(2, 2, 16, 8).half(), torch.ones(2, 2, 16))),
    "state: strides": dict(state=(torch.ones(2, 2, 16, 9)[..., :8], torch.ones(2, 2, 16))),
    "state: strides .* must be dense": dict(
        state=(torch.ones(2, 2, 16, 8), torch.ones(2, 2, 17)[..., :16])
    ),
    "feature_map: 'relu'": dict(feature_map="relu"),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 33": dict(n_splits=33),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        chunk_linear_attention(**changed(**BAD[start]))


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    case = Linear(T=3, B=1, H=1, Dk=128, Dv=128, n_splits=32)
    inputs = linear_inputs(case, seeded(), device)
    with running():
        got = run(case, inputs)
    assert_right(inputs, got)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one = torch.ones(1, 1, 1, 1)
    state = one, one[0]
    compiled = compile_launches(
        lambda: chunk_linear_attention(one, one, one, -one[0], state, return_state=True), target
    )
    assert [kernel.name for kernel in compiled] == ["_linear_output_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_tile_fits(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: heads of 128, with a gate and a state."""
    launch = next(iter(PRODUCTION.values()))
    *sizes, _, gated = launch.args
    rows = table.build({"": lambda: launch.func(*sizes, dtype, gated)}, [target])
    assert len(rows) == 2 and table.complaints(rows, STREAMING) == []


@pytest.mark.aot
@pytest.mark.parametrize(
    "feature_map, gate, return_state",
    [("elu", (2, 8192, 8), True), ("identity", None, True), ("identity", (8,), False)],
)
def test_variants_fit_beside_their_stages(feature_map, gate, return_state) -> None:
    """Those that need most registers on sm_90."""
    x = torch.empty(2, 8192, 8, 128, dtype=torch.bfloat16, device="meta")
    decay = torch.empty(*gate, device="meta") if gate else None
    rest = dict(feature_map=feature_map, return_state=return_state, n_splits=2)
    launch = partial(chunk_linear_attention, x, x, x, decay, **rest)
    rows = table.build({"": launch}, ["sm_90"])
    assert table.complaints(rows, STREAMING) == []
    assert {row["stages"] for row in rows} == {3 if feature_map == "elu" else 2}


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes, in each of the two tables."""
    tables = [
        (LINEAR_CASES[:25], ("T", "Dk", "Dv", "dtype", "layout", "B")),
        (LINEAR_CASES[25:], ("n_splits", "decay", "state", "strict", "feature_map")),
    ]
    for cases, axes in tables:
        rows = [dataclasses.asdict(case) for case in cases]
        for one, two in itertools.combinations(axes, 2):
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
