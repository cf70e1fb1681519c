"""The fused cross entropy against float64, on shapes and layouts that break kernels."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.cross_entropy import IGNORE, SCORING_CASES, STREAMING, Scoring, scoring_inputs
from kernels.cross_entropy import (
    _token_nll_gradient_kernel,
    _token_nll_kernel,
    _token_nll_merge_kernel,
    linear_token_nll,
    linear_token_nll_backward,
    linear_token_nll_backward_ref,
    linear_token_nll_ref,
)

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(hidden, weight, targets, grad_nll, ignore_index=IGNORE):
    """nll, lse, grad_hidden and grad_weight in float64, one token at a time."""
    h, w, g = (x.detach().cpu().double().numpy() for x in (hidden, weight, grad_nll))
    nll, lse = np.zeros(len(h)), np.zeros(len(h))
    grad_h, grad_w = np.zeros(h.shape), np.zeros(w.shape)
    with np.errstate(over="ignore"):
        for t, target in enumerate(targets.tolist()):
            z = w @ h[t]
            lse[t] = np.logaddexp.reduce(z)
            if target == ignore_index:
                continue
            odds = np.exp(np.delete(z, target) - z[target])  # of the others, against the target
            nll[t] = np.log1p(odds.sum()) if odds.sum() < 1e300 else lse[t] - z[target]
            dz = np.exp(z - lse[t])
            dz[target] = -(odds / (1 + odds.sum())).sum() if odds.sum() < 1e300 else dz[target] - 1
            dz *= g[t]
            grad_h[t] = dz @ w
            grad_w += np.outer(dz, h[t])
    return tuple(map(torch.from_numpy, (nll, lse, grad_h, grad_w)))


def eager(hidden, weight, targets, grad_nll):
    """Torch's own: values in float32, since ours are, gradients in the inputs' dtype."""
    logits = hidden.detach().float() @ weight.detach().float().T
    nll = F.cross_entropy(logits, targets, reduction="none")
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(h @ w.T, targets, reduction="none")
    gradients = torch.autograd.grad(loss, (h, w), grad_nll.to(loss.dtype))
    return nll, logits.logsumexp(-1), *gradients


def assert_right(inputs, grad_nll, *results: torch.Tensor) -> None:
    """Of nll and lse, and where given of the two gradients."""
    wanted, peers = exact(*inputs, grad_nll), eager(*inputs, grad_nll)
    for got, want, peer in zip(results, wanted, peers, strict=False):
        error = (got.cpu().double() - want).abs()
        assert error.max().item() <= error_limit(want, peer.cpu(), got.dtype)
        rms, scale = error.square().mean().sqrt(), want.square().mean().sqrt()
        assert rms <= RMS_RATIO[got.dtype] * scale
    ignored = (inputs[2] == IGNORE).cpu()
    assert not results[0].cpu()[ignored].any()
    for gradient in results[2:3]:
        assert not gradient.cpu()[ignored].any()


def gradient_of(T: int, device) -> torch.Tensor:
    return torch.randn(T, generator=seeded(7)).to(device)


def forward_and_backward(inputs, grad_nll, n_splits=None, chunk=None):
    nll, lse = linear_token_nll(*inputs, n_splits=n_splits)
    gradients = linear_token_nll_backward(grad_nll, *inputs, nll, lse, chunk=chunk)
    return nll, lse, *gradients


@pytest.mark.parametrize("case", SCORING_CASES, ids=str)
def test_matches_float64(case: Scoring, device, running) -> None:
    inputs = scoring_inputs(case, seeded(), device)
    grad_nll = gradient_of(case.tokens, device)
    chunk = case.pieces and math.ceil(case.words / case.pieces)
    with running():
        results = forward_and_backward(inputs, grad_nll, case.pieces, chunk)
    for result, like in zip(results[2:], inputs, strict=False):
        assert result.shape == like.shape and result.dtype == case.dtype
        assert result.is_contiguous()
    for result in results[:2]:
        assert result.shape == (case.tokens,) and result.dtype == torch.float32
    assert_right(inputs, grad_nll, *results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_references_match_float64(dtype, device) -> None:
    inputs = scoring_inputs(Scoring(dtype=dtype), seeded(), device)
    grad_nll = gradient_of(17, device)
    nll, lse = linear_token_nll_ref(*inputs)
    gradients = linear_token_nll_backward_ref(grad_nll, *inputs, nll, lse)
    assert_right(inputs, grad_nll, nll, lse, *gradients)


@pytest.mark.parametrize("words", [1000, 1024])
def test_many_words(words: int, device, running) -> None:
    inputs = scoring_inputs(Scoring(3, words, 8), seeded(), device)
    grad_nll = gradient_of(3, device)
    with running():
        results = forward_and_backward(inputs, grad_nll)
    assert_right(inputs, grad_nll, *results)


def test_number_of_splits_does_not_matter(device, running) -> None:
    inputs = scoring_inputs(Scoring(9, 160, 8), seeded(), device)
    with running():
        whole, lse = linear_token_nll(*inputs, n_splits=1)
        for n_splits in (2, 3, 5, 1024):
            nll, other = linear_token_nll(*inputs, n_splits=n_splits)
            torch.testing.assert_close(nll, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's blocks of 32 words make splits cheap")
@pytest.mark.parametrize("n_splits, runs", [(1024, 5), (4, 3), (3, 3), (2, 2)])
def test_no_split_is_empty(n_splits: int, runs: int, running) -> None:
    inputs = scoring_inputs(Scoring(3, 150, 4), seeded())
    with running() as meter:
        linear_token_nll(*inputs, n_splits=n_splits)
    assert meter.written["part_rest"] == runs * 3 * 4  # 150 words are five blocks


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    inputs = scoring_inputs(Scoring(17, 70, 20, torch.bfloat16, "sliced"), seeded(), device)
    grad_nll = gradient_of(17, device)
    before = [x.clone() for x in (*inputs, grad_nll)]
    with running():
        first = forward_and_backward(inputs, grad_nll, chunk=32)
        second = forward_and_backward(inputs, grad_nll, chunk=32)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    for x, copy in zip((*inputs, grad_nll), before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0)


def whole_numbers(z: torch.Tensor, dtype: torch.dtype):
    """hidden and weight whose logits are z [T, V] without rounding."""
    return torch.eye(len(z), dtype=dtype, device=z.device), z.T.to(dtype).contiguous()


# How far the target is ahead of a second word; a third is far behind.
AHEAD = (-90.0, -20.0, -4.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 40.0, 80.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sure_model_keeps_its_small_loss(dtype, device, running) -> None:
    """exp(-80) is a loss of 1e-35, not of 0, and its gradient is as small."""
    z = torch.zeros(len(AHEAD), 40, device=device) - 200.0
    z[:, 35] = torch.tensor(AHEAD, device=device)
    z[:, 2] = 0.0
    hidden, weight = whole_numbers(z, dtype)
    targets = torch.full((len(AHEAD),), 35, device=device)
    ones = torch.ones(len(AHEAD), device=device)
    with running():
        nll, lse, _, grad_weight = forward_and_backward((hidden, weight, targets), ones)
    want = exact(hidden, weight, targets, ones)
    # exp(-80) is off by 80 roundings where the exponent is multiplied by log2(e)
    torch.testing.assert_close(nll.cpu().double(), want[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(lse.cpu().double(), want[1], rtol=2e-6, atol=1e-7)
    rtol = 2e-5 if dtype == torch.float32 else 2**-8
    got = grad_weight.cpu().double()[[35, 2]]  # one dz each, hidden being one-hot
    torch.testing.assert_close(got, want[3][[35, 2]], rtol=rtol, atol=0)


def test_large_logits(device, running) -> None:
    hidden, weight, targets = scoring_inputs(Scoring(17, 70, 16), seeded(), device)
    inputs, grad_nll = (hidden * 1000, weight, targets), gradient_of(17, device)
    with running():
        results = forward_and_backward(inputs, grad_nll, 2, 32)
    assert_right(inputs, grad_nll, *results[:2])
    # 1e4 has steps of 1e-3 in float32, so the gradient is as good as that
    want = exact(*inputs, grad_nll)[2]
    assert (results[2].cpu() - want).abs().max() <= 4e-3 * want.abs().max()


def test_largest_halves(device, running) -> None:
    """65504 * 65504 * 16 overflows float16 and not float32."""
    case = Scoring(5, 40, 16, torch.float16)
    hidden, weight, targets = scoring_inputs(case, seeded(), device)
    inputs = hidden.sign() * 65504, weight.sign() * 65504, targets
    with running():
        nll, lse = linear_token_nll(*inputs)
    want = exact(*inputs, torch.ones(5))
    torch.testing.assert_close(nll.cpu().double(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), want[1], rtol=1e-6, atol=0)


def test_words_of_minus_infinity_have_no_weight(device, running) -> None:
    """A whole split of them, and one that is the target."""
    hidden, weight, _ = scoring_inputs(Scoring(4, 70, 16), seeded(), device)
    hidden, weight = hidden.abs(), weight.clone()
    weight[:64] = -math.inf
    targets = torch.tensor([69, 65, 3, IGNORE], device=device)
    seen = torch.where(targets > 63, targets - 64, IGNORE)
    for n_splits in (1, 3):
        with running():
            nll, lse = linear_token_nll(hidden, weight, targets, n_splits=n_splits)
        want = linear_token_nll_ref(hidden, weight[64:], seen)
        torch.testing.assert_close(lse, want[1], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(nll[:2], want[0][:2], rtol=2e-6, atol=2e-6)
        assert nll[2] == math.inf and nll[3] == 0


def test_nan_stays_in_its_own_token(device, running) -> None:
    hidden, weight, targets = scoring_inputs(Scoring(17, 70, 16), seeded(), device)
    grad_nll = gradient_of(17, device)
    clean = linear_token_nll_ref(hidden, weight, targets)
    broken = hidden.clone()
    broken[3, 5] = broken[4, 5] = math.nan
    assert targets[3] >= 0 and targets[4] == IGNORE
    with running():
        nll, lse, grad_hidden, _ = forward_and_backward((broken, weight, targets), grad_nll)
    rest = [t for t in range(17) if t not in (3, 4)]
    torch.testing.assert_close(nll[rest], clean[0][rest])
    torch.testing.assert_close(lse[rest], clean[1][rest])
    assert nll[3].isnan() and lse[3].isnan() and lse[4].isnan() and nll[4] == 0
    assert grad_hidden[3].isnan().all()
    assert not grad_hidden[4].any() and not grad_hidden[rest].isnan().any()


@pytest.mark.parametrize("ignore_index", [-100, -1, 2])
def test_all_ignored(ignore_index: int, device, running) -> None:
    """Also by the id of a word, which then is nobody's target but counts as a word."""
    hidden, weight, targets = scoring_inputs(Scoring(5, 40, 8), seeded(), device)
    targets = torch.full_like(targets, ignore_index)
    grad_nll = gradient_of(5, device)
    grad_nll[1] = math.nan  # of no consequence: the token has no loss
    with running():
        nll, lse = linear_token_nll(hidden, weight, targets, ignore_index)
        gradients = linear_token_nll_backward(
            grad_nll, hidden, weight, targets, nll, lse, ignore_index
        )
    assert not nll.any() and not any(gradient.any() for gradient in gradients)
    torch.testing.assert_close(lse, linear_token_nll_ref(hidden, weight, targets, ignore_index)[1])


def test_no_tokens(device, running) -> None:
    inputs = scoring_inputs(Scoring(0, 40, 8), seeded(), device)
    with running() as meter:
        nll, lse, grad_hidden, grad_weight = forward_and_backward(inputs, gradient_of(0, device))
    assert nll.shape == lse.shape == (0,) and grad_hidden.shape == (0, 8)
    assert grad_weight.shape == (40, 8) and not grad_weight.any()
    assert meter is None or meter.launches == 0


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_offsets_beyond_32_bits(which: str, device, running) -> None:
    """The third row begins just beyond what 32 bits hold."""
    stride = 2**30
    assert 2 * stride == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (2 * stride + 16), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    spread = far.as_strided((3, 16), (stride, 1))
    hidden, weight, _ = scoring_inputs(Scoring(3, 3, 16, torch.float16), seeded(), device)
    targets = torch.tensor([2, 0, 1], device=device)
    near = (hidden, weight, targets)
    spread.copy_(hidden if which == "hidden" else weight)
    inputs = (spread, weight, targets) if which == "hidden" else (hidden, spread, targets)
    with running():
        nll, lse = linear_token_nll(*inputs)
        grad_hidden, _ = linear_token_nll_backward(torch.ones_like(nll), *inputs, nll, lse)
    assert_right(near, torch.ones_like(nll), nll, lse, grad_hidden)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_matrix_once_for_a_few_tokens() -> None:
    """At most 1.25 times the bytes of both operands, at the tile of a real GPU.

    Eight tokens fill a tile of sixteen rows, the fewest of a tensor core: twice the useful
    FLOPs, which take a tenth of the time of reading the matrix.
    """
    from course.lab.meter import metered

    T, V, D = 8, 49_152, 64
    hidden, weight, targets = scoring_inputs(Scoring(T, V, D, torch.float16), seeded())
    with metered() as meter, pretending("sm_90"):
        linear_token_nll(hidden, weight, targets)
    assert meter.read["weight"] == weight.nbytes
    assert meter.loads + meter.stores <= 1.25 * (hidden.nbytes + weight.nbytes)
    assert meter.flops == 2 * 2 * T * V * D


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_multiplies_little_more_than_asked() -> None:
    """Forward and the recomputation of backward, at the tile of a real GPU.

    torch.matmul does the two products of dz, 2 T V D FLOPs each without padding.
    """
    from course.lab.meter import metered

    T, V, D = 256, 1000, 128
    inputs = scoring_inputs(Scoring(T, V, D, torch.float16), seeded())
    with metered() as meter, pretending("sm_90"):
        nll, lse = linear_token_nll(*inputs)
        forward = meter.flops
        linear_token_nll_backward(nll, *inputs, nll, lse, chunk=500)
    useful = 2 * T * V * D
    assert forward == useful * 1024 / 1000
    assert meter.flops - forward == useful * 1024 / 1000
    assert meter.written["dz"] == 2 * T * V


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_idle_tiles_of_the_last_group_do_nothing(running) -> None:
    """17 tiles are groups of nine and eight; the eighteenth multiplies nothing."""
    inputs = scoring_inputs(Scoring(17 * 16, 32, 16), seeded())
    with running() as meter:
        linear_token_nll(*inputs)
    assert meter.flops == 2 * 17 * 16 * 32 * 16


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    T, V, D = 17, 70, 20
    inputs = scoring_inputs(Scoring(T, V, D), seeded())
    hidden, weight, targets = map(lab.guarded, inputs)
    shapes = {"part_rest": (T, 3), "chosen": (T,), "nll": (T,), "lse": (T,), "dz": (T, V)}
    outputs = {
        name: lab.guarded(lab.poisoned(shape, torch.float32)) for name, shape in shapes.items()
    }
    part_rest, chosen, nll, lse, dz = outputs.values()
    grad_nll = lab.guarded(gradient_of(T, "cpu"))
    tiles = dict(BLOCK_T=16, BLOCK_V=32, BLOCK_D=16)
    with lab.interpreted():
        _token_nll_kernel[(1, 3, 2)](
            *(hidden, weight, targets, part_rest, chosen),
            *(T, V, D, IGNORE, D, D),
            **tiles,
        )
        _token_nll_merge_kernel[(2,)](
            part_rest, chosen, targets, nll, lse, T, 3, IGNORE, BLOCK_N=4, BLOCK_T=16
        )
        _token_nll_gradient_kernel[(1, 3, 2)](
            *(grad_nll, hidden, weight, targets, nll, lse, dz),
            *(T, V, D, 0, IGNORE, D, D, V),
            **tiles,
        )
    for name, tensor in outputs.items():
        lab.check_guard(name, tensor)
    assert_right(inputs, grad_nll, nll, lse, dz @ weight, dz.T @ hidden)


def changed(**changes):
    """Arguments of a small valid backward call with some replaced."""
    hidden, weight, targets = scoring_inputs(Scoring(4, 6, 8), seeded())
    row = torch.zeros(4)
    arguments = dict(hidden=hidden, weight=weight, targets=targets)
    return arguments | dict(grad_nll=row, nll=row, lse=row) | changes


BAD = {
    "hidden: shape": dict(hidden=torch.ones(4, 1, 8)),
    "hidden: dtype": dict(hidden=torch.ones(4, 8, dtype=torch.int32)),
    "hidden: last stride 2": dict(hidden=torch.ones(4, 16)[:, ::2]),
    "weight: shape": dict(weight=torch.ones(6, 9)),
    "weight: dtype": dict(weight=torch.ones(6, 8, dtype=torch.float16)),
    r"weight: shape \[0, 8\]": dict(weight=torch.ones(0, 8)),
    r"weight: shape \[6, 0\]": dict(hidden=torch.ones(4, 0), weight=torch.ones(6, 0)),
    "targets: shape": dict(targets=torch.zeros(5, dtype=torch.int64)),
    "targets: dtype": dict(targets=torch.zeros(4, dtype=torch.int32)),
    "targets: last stride": dict(targets=torch.zeros(1, dtype=torch.int64).expand(4)),
    "targets: 6": dict(targets=torch.tensor([0, 5, 6, 0])),
    "targets: -1 ": dict(targets=torch.tensor([0, 5, -100, -1])),
    "grad_nll: shape": dict(grad_nll=torch.ones(5)),
    "nll: dtype": dict(nll=torch.ones(4, dtype=torch.float64)),
    "lse: shape": dict(lse=torch.ones(4, 1)),
    "chunk: 0": dict(chunk=0),
    "chunk: 1.0": dict(chunk=1.0),
    "ignore_index: -100.0": dict(ignore_index=-100.0),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    arguments = changed(**BAD[start])
    with pytest.raises(ValueError, match=f"^{start}"):
        linear_token_nll_backward(**arguments)
    if start.startswith(("hidden", "weight", "targets")):
        forward = {name: arguments[name] for name in ("hidden", "weight", "targets")}
        with pytest.raises(ValueError, match=f"^{start}"):
            linear_token_nll(**forward)


@pytest.mark.parametrize("n_splits", [0, 1025])
def test_bad_splits_are_named(n_splits: int) -> None:
    inputs = scoring_inputs(Scoring(4, 6, 8), seeded())
    with pytest.raises(ValueError, match=f"^n_splits: {n_splits}"):
        linear_token_nll(*inputs, n_splits=n_splits)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, row = torch.ones(1, 1), torch.ones(1)
    target_ids = torch.zeros(1, dtype=torch.int64)

    def launch() -> None:
        linear_token_nll(one, one, target_ids)
        linear_token_nll_backward(row, one, one, target_ids, row, row)

    assert [kernel.name for kernel in compile_launches(launch, target)] == [
        "_token_nll_kernel",
        "_token_nll_merge_kernel",
        "_token_nll_gradient_kernel",
    ]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens, dtype", [(64, torch.bfloat16), (4096, torch.float16)])
def test_the_tiles_fit(tokens: int, dtype: torch.dtype, target: str) -> None:
    """Those that the committed table lacks; the number of words and their width are free."""
    hidden = torch.empty(tokens, 512, dtype=dtype, device="meta")
    weight = torch.empty(1024, 512, dtype=dtype, device="meta")
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    row = torch.empty(tokens, device="meta")

    def launch() -> None:
        linear_token_nll(hidden, weight, targets)
        linear_token_nll_backward(row, hidden, weight, targets, row, row)

    assert table.complaints(table.build({"": launch}, [target]), STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in SCORING_CASES]
    axes = ("tokens", "words", "width", "dtype", "layout", "pieces")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
