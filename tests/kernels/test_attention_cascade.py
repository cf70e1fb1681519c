"""Cascade attention against float64, and against plain decode over the concatenated keys."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.attention_cascade import (
    _cascade_attention_kernel,
    _merge_lse_kernel,
    cascade_decode_attention,
    cascade_decode_attention_ref,
    cascade_prefix_attention,
    cascade_prefix_attention_ref,
    merge_lse,
    merge_lse_ref,
)
from kernels.attention_decode import decode_attention
from kernels.cases import error_limit, pairwise, shifted
from kernels.cases.attention_cascade import (
    BENCHMARKS,
    CASCADE_CASES,
    STREAMING,
    Cascade,
    cascade_inputs,
)

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def concatenated(prefix_k, prefix_v, suffix_k, suffix_v, suffix_lens):
    """The keys and values of every sequence, [n, Hkv, D] each."""
    for b, n in enumerate(suffix_lens.tolist()):
        yield torch.cat([prefix_k, suffix_k[b, :n]]), torch.cat([prefix_v, suffix_v[b, :n]])


def exact(q, *keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, one query head at a time, without any parts."""
    B, H, D = q.shape
    out, lse = np.zeros((B, H, D)), np.full((B, H), -np.inf)
    for b, (k, v) in enumerate(concatenated(*keys)):
        k, v, query = (x.cpu().double().numpy() for x in (k, v, q[b]))
        group = H // k.shape[1]
        for h in range(H if len(k) else 0):
            scores = k[:, h // group] @ query[h] / math.sqrt(D)
            top = scores.max()
            weights = np.exp(scores - top)
            out[b, h] = weights @ v[:, h // group] / weights.sum()
            lse[b, h] = top + np.log(weights.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def eager(q, *keys) -> torch.Tensor:
    """Torch's own attention in the inputs' dtype."""
    out = torch.zeros_like(q)
    for b, (k, v) in enumerate(concatenated(*keys)):
        if len(k):
            query, k, v = (x.transpose(0, 1)[None] for x in (q[b : b + 1], k, v))
            out[b] = F.scaled_dot_product_attention(query, k, v, enable_gqa=True)[0, :, 0]
    return out


def assert_close(out: torch.Tensor, want: torch.Tensor, plain: torch.Tensor) -> None:
    dtype, out = out.dtype, out.cpu().double()
    assert (out - want).abs().max().item() <= error_limit(want, plain.cpu(), dtype)
    assert (out - want).square().mean().sqrt() <= RMS_RATIO[dtype] * want.square().mean().sqrt()


def assert_right(inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    want, want_lse = exact(*inputs)
    assert_close(out, want, eager(*inputs))
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse.cpu()), empty) and not out.cpu()[empty].any()
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASCADE_CASES, ids=str)
def test_matches_float64(case: Cascade, device, running) -> None:
    inputs = cascade_inputs(case, seeded(), device)
    with running():
        out, lse = cascade_decode_attention(*inputs, case.n_splits)
    assert out.shape == inputs[0].shape and out.dtype == case.dtype
    assert lse.shape == out.shape[:2] and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("dtype", RMS_RATIO)
def test_the_references_match_float64(dtype, device) -> None:
    inputs = cascade_inputs(Cascade((9, 0, 20), 20, 3, dtype=dtype), seeded(), device)
    assert_right(inputs, *cascade_decode_attention_ref(*inputs))
    q, prefix_k, prefix_v, *_ = inputs
    nothing = prefix_k.new_empty(3, 0, 2, 64), prefix_v.new_empty(3, 0, 2, 64)
    whole = q, prefix_k, prefix_v, *nothing, torch.zeros(3, dtype=torch.int32)
    assert_right(whole, *cascade_prefix_attention_ref(q, prefix_k, prefix_v))


@pytest.mark.parametrize("prefix, n_splits", [(0, 1), (1, 1), (15, 2), (33, 1), (33, 3)])
def test_the_prefix_alone(prefix: int, n_splits: int, device, running) -> None:
    inputs = cascade_inputs(Cascade((0, 0, 0), prefix, 7, 2, 20), seeded(), device)
    with running():
        out, lse = cascade_prefix_attention(*inputs[:3], n_splits)
    assert_right(inputs, out, lse)


@pytest.mark.parametrize(
    "batch, group, head_dim", [(1, 1, 1), (1, 5, 20), (3, 16, 33), (1, 17, 3), (9, 5, 16)]
)
def test_odd_heads_and_rows(batch, group, head_dim, device, running) -> None:
    """Queries that do not fill a tile of 16, fill one, or need several."""
    case = Cascade((15, 16, 0)[:batch] * (batch // 3 or 1), 17, group, 1, head_dim)
    inputs = cascade_inputs(case, seeded(), device)
    with running():
        out, lse = cascade_decode_attention(*inputs, n_splits=2)
    assert_right(inputs, out, lse)


def test_one_suffix_much_longer(device, running) -> None:
    case = Cascade((1, 70, 0), 5, 2, 1, 16, slots=70)
    inputs = cascade_inputs(case, seeded(), device)
    with running():
        out, lse = cascade_decode_attention(*inputs, n_splits=3)
    assert_right(inputs, out, lse)


def test_the_prefix_may_be_cut_anywhere(device, running) -> None:
    """At every boundary, the answer of plain decode over the concatenation."""
    q, prefix_k, prefix_v, suffix_k, suffix_v, lens = cascade_inputs(
        Cascade((5, 2), 33, 1, 1, 16, slots=5), seeded(), device
    )
    k, v = (
        torch.cat([shared.expand(2, -1, -1, -1), own], 1)
        for shared, own in ((prefix_k, suffix_k), (prefix_v, suffix_v))
    )
    with running():
        want = decode_attention(q, k, v, lens + 33, return_lse=True)
        for cut in range(34):
            cascade = q, k[0, :cut], v[0, :cut], k[:, cut:], v[:, cut:], lens + (33 - cut)
            got = cascade_decode_attention(*cascade, n_splits=2)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_number_of_splits_does_not_matter(device, running) -> None:
    inputs = cascade_inputs(Cascade((40, 33), 64, 4, 1, slots=40), seeded(), device)
    with running():
        whole = cascade_decode_attention(*inputs, n_splits=1)
        for n_splits in (None, 2, 3, 4):
            parts = cascade_decode_attention(*inputs, n_splits)
            torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    inputs = cascade_inputs(Cascade((17, 20), 33, 3, dtype=torch.float16), seeded(), device)
    before = [x.clone() for x in inputs]
    with running():
        first = cascade_decode_attention(*inputs, n_splits=2)
        second = cascade_decode_attention(*inputs, n_splits=2)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    for x, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("louder", ["prefix", "suffix"])
def test_parts_of_very_different_weight(louder: str, device, running) -> None:
    """Log-sum-exps hundreds apart: exp of their difference is 0 or overflows."""
    q, prefix_k, prefix_v, *own, lens = cascade_inputs(
        Cascade((20, 3), 17, 5, 1, 16), seeded(), device
    )
    scale = 40.0 if louder == "prefix" else 0.0
    inputs = q * 20, prefix_k * scale, prefix_v, own[0] * (40 - scale), own[1], lens
    with running():
        out, lse = cascade_decode_attention(*inputs, n_splits=2)
    assert_right(inputs, out, lse)
    assert lse.max() > 200


def test_largest_halves(device, running) -> None:
    """65504 * 65504 * 64 overflows float16 and not float32."""
    case = Cascade((4,), 20, 2, 1, 64, torch.float16)
    q, *keys, lens = cascade_inputs(case, seeded(), device)
    keys[0], keys[2] = keys[0].sign() * 65504, keys[2].sign() * 65504
    inputs = q.sign() * 65504, *keys, lens
    with running():
        out, _ = cascade_decode_attention(*inputs, n_splits=2)
    want, _ = exact(*inputs)
    assert (out.cpu().double() - want).abs().max() <= 2**-11 * want.abs().max()


def test_a_block_of_minus_infinity_has_no_weight(device, running) -> None:
    q, k, v, *rest = cascade_inputs(Cascade((4,), 40, 2, 1, 16), seeded(), device)
    q, k = q.abs(), k.clone()
    k[:32] = -math.inf  # the first two blocks, and with two splits one of them whole
    for n_splits in (1, 2):
        with running():
            out, lse = cascade_decode_attention(q, k, v, *rest, n_splits)
        assert_right((q, k[32:], v[32:], *rest), out, lse)


def test_nan_stays_where_it_is_read(device, running) -> None:
    """In the prefix: one KV head of all sequences. In a suffix: one KV head of one sequence."""
    inputs = cascade_inputs(Cascade((20, 20), 20, 3, 2, 16), seeded(), device)
    clean, _ = cascade_decode_attention_ref(*inputs)
    for place, hit in ((2, np.s_[:, 3:]), (4, np.s_[1:, :3])):
        broken = [x.clone() for x in inputs]
        if place == 2:
            broken[2][5, 1] = math.nan
        else:
            broken[4][1, 5, 0] = math.nan
        with running():
            out, _ = cascade_decode_attention(*broken, n_splits=2)
        assert out[hit].isnan().all()
        want = clean.clone()
        want[hit] = math.nan
        torch.testing.assert_close(out, want, equal_nan=True)


def test_nothing_to_do(device, running) -> None:
    with running():
        inputs = cascade_inputs(Cascade((), slots=8), seeded(), device)
        assert cascade_decode_attention(*inputs)[0].shape == (0, 2, 64)
        assert cascade_prefix_attention(*inputs[:3])[1].shape == (0, 2)
        inputs = cascade_inputs(Cascade((0, 0), 0, slots=0), seeded(), device)
        out, lse = cascade_decode_attention(*inputs)
        assert not out.any() and torch.isneginf(lse).all()
    if ON_CPU:
        with running() as meter:
            outs, lses = torch.ones(2, 0, 3, 4), torch.ones(2, 0, 3)
            assert merge_lse(outs, lses)[0].shape == (0, 3, 4)
            cascade_decode_attention(*cascade_inputs(Cascade((), slots=8), seeded()))
        assert meter.launches == 0


# Merge


def parts(n, dtype, layout, generator, device):
    """outs [n, 3, 4, D] and lses [n, 3, 4]; empty sets, with NaN for their averages."""
    outs = torch.randn(n, 3, 4, 20, generator=generator)
    lses = torch.randn(n, 3, 4, generator=generator) * 10
    lses[n // 2 :, 1] = -math.inf
    lses[:, 2, 1] = -math.inf
    outs[torch.isneginf(lses)] = math.nan
    outs, lses = outs.to(device, dtype), lses.to(device)
    if layout == "parts last":
        outs = outs.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
        lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "shared":  # strides of 0
        outs, lses = outs[:, :1].expand(-1, 3, -1, -1), lses[:, :1].expand(-1, 3, -1)
    elif layout == "shifted":
        outs, lses = shifted(outs), shifted(lses)
    return outs, lses


def exact_merge(outs, lses) -> tuple[torch.Tensor, torch.Tensor]:
    """As one softmax over the parts, in float64."""
    weights = lses.cpu().double().softmax(0).nan_to_num(0)[..., None]
    known = outs.cpu().double().nan_to_num(0)
    return (weights * known).sum(0), torch.logsumexp(lses.cpu().double(), 0)


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "n": (1, 2, 3, 17),
            "dtype": tuple(RMS_RATIO),
            "layout": ("dense", "parts last", "shared", "shifted"),
        }
    ),
    ids=str,
)
def test_merge_matches_float64(case, device, running) -> None:
    outs, lses = parts(**case, generator=seeded(), device=device)
    want, want_lse = exact_merge(outs, lses)
    weights = (lses - want_lse.to(device).clamp(min=-1e38)).exp()[..., None]
    plain = (weights.to(outs.dtype) * outs.nan_to_num(0)).sum(0)
    with running():
        merged = merge_lse(outs, lses)
    for out, lse in (merged, merge_lse_ref(outs, lses)):
        assert out.dtype == outs.dtype and out.is_contiguous()
        assert_close(out, want, plain)
        torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-6)


def test_merge_of_nothing(device, running) -> None:
    with running():
        out, lse = merge_lse(torch.ones(0, 2, 3, 4, device=device), torch.ones(0, 2, 3).to(device))
    assert not out.any() and torch.isneginf(lse).all()


def test_merging_in_steps_gives_the_same(device, running) -> None:
    outs, lses = parts(5, torch.float32, "dense", seeded(), device)
    with running():
        want = merge_lse(outs, lses)
        front, back = merge_lse(outs[:2], lses[:2]), merge_lse(outs[2:], lses[2:])
        got = merge_lse(*(torch.stack(pair) for pair in zip(front, back, strict=True)))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_merge_of_infinity_and_nan(device, running) -> None:
    """A NaN log-sum-exp spoils its own head only; +inf is a part of infinite weight: NaN."""
    outs, lses = torch.ones(2, 1, 3, 4, device=device), torch.zeros(2, 1, 3, device=device)
    lses[0, 0, 0], lses[1, 0, 2] = math.nan, math.inf
    with running():
        out, lse = merge_lse(outs, lses)
    assert out[0, [0, 2]].isnan().all() and lse[0, [0, 2]].isnan().all()
    assert out[0, 1].eq(1).all() and lse[0, 1].item() == pytest.approx(math.log(2))


# Memory

# Offsets of one key, head, sequence, each just beyond what 32 bits hold.
FAR = [("prefix", 0, 17, 2**27), ("prefix", 1, 3, 2**30), ("suffix", 0, 3, 2**30)]
FAR += [("suffix", 1, 17, 2**27), ("suffix", 2, 3, 2**30)]


def spread(tensor: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """A copy with the given stride along one axis that others do not cross."""
    strides = [tensor.shape[-1]] * tensor.dim()
    strides[-1], strides[axis] = 1, stride
    furthest = (tensor.shape[axis] - 1) * stride
    assert furthest >= 2**31
    assert all(n == 1 for i, n in enumerate(tensor.shape[:-1]) if i != axis)
    # Gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(
        tensor.itemsize * (furthest + tensor.shape[-1]), device=tensor.device
    )
    far = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    return far.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("level, axis, size, stride", FAR)
def test_offsets_beyond_32_bits(level, axis, size, stride, device, running) -> None:
    """K, then V, then both from a launch whose keys lie gigabytes apart."""
    shape = {"prefix": [1, 1], "suffix": [1, 1, 1]}[level]
    shape[axis] = size
    keys, heads = shape[-2:]
    batch = shape[0] if level == "suffix" else 2
    case = Cascade(
        (keys if level == "suffix" else 0,) * batch,
        keys if level == "prefix" else 0,
        2,
        heads,
        16,
        torch.float16,
        slots=keys,
    )
    inputs = list(cascade_inputs(case, seeded(), device))
    want, _ = cascade_decode_attention_ref(*inputs)
    for place in (1, 2) if level == "prefix" else (3, 4):
        moved = list(inputs)
        moved[place] = spread(inputs[place], axis, stride)
        with running():
            out, _ = cascade_decode_attention(*moved, n_splits=1)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("axis, size, stride", [(0, 3, 2**30), (1, 3, 2**30), (2, 5, 2**29)])
def test_parts_and_queries_beyond_32_bits(axis, size, stride, device, running) -> None:
    shape = [1, 1, 1, 8]
    shape[axis] = size
    outs = torch.randn(shape, generator=seeded()).to(device, torch.float16)
    lses = torch.randn(shape[:-1], generator=seeded(1)).to(device)
    want = merge_lse_ref(outs, lses)[0]
    with running():
        out, _ = merge_lse(spread(outs, axis, stride), lses)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        if axis == 0:
            out, _ = merge_lse(outs, spread(lses, axis, stride))
            torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        else:
            k = torch.randn(3, 1, 8, generator=seeded(2)).to(device, torch.float16)
            q = outs[0]
            got, _ = cascade_prefix_attention(spread(q, axis - 1, stride), k, k)
            want, _ = cascade_prefix_attention_ref(q, k, k)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_prefix_once() -> None:
    """Once for the batch, not once a sequence, at the tile of a real GPU."""
    from course.lab.meter import metered

    case = Cascade((64,) * 4, 1024, 4, 1, 128, torch.float16, slots=64)
    q, prefix_k, prefix_v, suffix_k, suffix_v, lens = cascade_inputs(case, seeded())
    with metered() as meter, pretending("sm_90"):
        cascade_decode_attention(q, prefix_k, prefix_v, suffix_k, suffix_v, lens, n_splits=4)
    assert meter.read["k"] == prefix_k.nbytes + suffix_k.nbytes
    assert meter.read["v"] == prefix_v.nbytes + suffix_v.nbytes
    needed = 2 * (prefix_k.nbytes + suffix_k.nbytes) + q.nbytes
    assert meter.loads <= 1.25 * needed
    a_sequence_at_a_time = 2 * (4 * prefix_k.nbytes + suffix_k.nbytes)
    assert a_sequence_at_a_time > 3 * meter.loads
    # 16 rows fill a tile over the prefix; over the suffixes four fill a quarter of one.
    assert meter.flops == 4 * 128 * 16 * (1024 + 4 * 64)
    assert meter.read["outs"] == meter.written["part_out"] == 5 * 16 * 128 * 4


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("batch, tiles, rows", [(16, 1, 64), (33, 2, 128)])
def test_a_tile_of_rows_reads_the_prefix_once(batch: int, tiles: int, rows: int) -> None:
    from course.lab.meter import metered

    case = Cascade((0,) * batch, 64, 4, 1, 128, torch.bfloat16, slots=0)
    q, k, v, *_ = cascade_inputs(case, seeded())
    with metered() as meter, pretending("sm_90"):
        cascade_prefix_attention(q, k, v, n_splits=1)
    assert meter.read["k"] == tiles * k.nbytes and meter.read["v"] == tiles * v.nbytes
    assert meter.flops == tiles * 4 * 128 * rows * 64


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    q, k, v, *_ = cascade_inputs(Cascade((0,) * 3, 33, 3, 2, 20), seeded())
    part_out = lab.guarded(lab.poisoned((2, 3, 6, 20), torch.float32))
    part_lse = lab.guarded(lab.poisoned((2, 3, 6), torch.float32))
    out = lab.guarded(lab.poisoned((3, 6, 20), torch.float32))
    lse = lab.guarded(lab.poisoned((3, 6), torch.float32))
    q, k, v = map(lab.guarded, (q, k[None], v[None]))
    with lab.interpreted():
        _cascade_attention_kernel[(1, 2, 2)](
            *(q, k, v, None, part_out, part_lse, 3, 33, 3, 20**-0.5),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
            **dict(HEAD_DIM=20, GROUP=3, BLOCK_D=32, BLOCK_M=16, BLOCK_T=16),
        )
        _merge_lse_kernel[(3, 6)](
            *(part_out, part_lse, out, lse, 2),
            *(*part_out.stride()[:3], *part_lse.stride()[:2]),
            **dict(HEAD_DIM=20, BLOCK_D=32, BLOCK_N=4),
        )
    for name, tensor in dict(part_out=part_out, part_lse=part_lse, out=out, lse=lse).items():
        lab.check_guard(name, tensor)
    want, want_lse = cascade_prefix_attention_ref(q, k[0], v[0])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


# Arguments


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("q", "prefix_k", "prefix_v", "suffix_k", "suffix_v", "suffix_lens")
    inputs = cascade_inputs(Cascade((3, 4), 5, 2, 2, 16, slots=4), seeded())
    return dict(zip(names, inputs, strict=True)) | dict(n_splits=1) | changes


BAD = {
    "q: shape": dict(q=torch.ones(2, 1, 4, 16)),
    "q: dtype": dict(q=torch.ones(2, 4, 16, dtype=torch.int32)),
    "q: last stride 2": dict(q=torch.ones(2, 4, 32)[..., ::2]),
    "q: head_dim 129": dict(
        q=torch.ones(2, 4, 129), **dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(5, 2, 129))
    ),
    "q: head_dim 0": dict(
        q=torch.ones(2, 4, 0), **dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(5, 2, 0))
    ),
    "prefix_k: shape": dict(prefix_k=torch.ones(5, 2, 8)),
    "prefix_k: dtype": dict(prefix_k=torch.ones(5, 2, 16, dtype=torch.float16)),
    "prefix_v: shape": dict(prefix_v=torch.ones(4, 2, 16)),
    "prefix_k: 3 KV heads": dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(5, 3, 16)),
    "prefix_k: 0 KV heads": dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(5, 0, 16)),
    "prefix_k: 1 KV heads": dict(
        q=torch.ones(2, 65, 16), **dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(5, 1, 16))
    ),
    "suffix_k: shape": dict(suffix_k=torch.ones(3, 4, 2, 16)),
    "suffix_k: dtype": dict(suffix_k=torch.ones(2, 4, 2, 16, dtype=torch.float16)),
    "suffix_v: shape": dict(suffix_v=torch.ones(2, 5, 2, 16)),
    "suffix_lens: shape": dict(suffix_lens=torch.ones(3, dtype=torch.int32)),
    "suffix_lens: dtype": dict(suffix_lens=torch.ones(2, dtype=torch.int64)),
    "suffix_lens: last stride": dict(suffix_lens=torch.ones(4, dtype=torch.int32)[::2]),
    "suffix_lens: -1": dict(suffix_lens=torch.tensor([3, -1], dtype=torch.int32)),
    "suffix_lens: 5": dict(suffix_lens=torch.tensor([5, 4], dtype=torch.int32)),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 129": dict(n_splits=129),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        cascade_decode_attention(**changed(**BAD[start]))


def test_bad_arguments_of_the_prefix_are_named() -> None:
    q, k, v, *_ = changed().values()
    for start, arguments in {
        "k: shape": (q, k[0], v),
        "v: shape": (q, k, v[1:]),
        "k: 1 KV": (torch.ones(2, 65, 16), k[:, :1], v[:, :1]),
    }.items():
        with pytest.raises(ValueError, match=f"^{start}"):
            cascade_prefix_attention(*arguments)


BAD_MERGES = {
    "outs: shape": (torch.ones(2, 3, 4), torch.ones(2, 3, 4)),
    "outs: dtype": (torch.ones(2, 3, 4, 5).double(), torch.ones(2, 3, 4)),
    "outs: last stride": (torch.ones(2, 3, 4, 10)[..., ::2], torch.ones(2, 3, 4)),
    "outs: head_dim 129": (torch.ones(1, 1, 1, 129), torch.ones(1, 1, 1)),
    "outs: head_dim 0": (torch.ones(1, 1, 1, 0), torch.ones(1, 1, 1)),
    "outs: 257 parts": (torch.ones(257, 1, 1, 1), torch.ones(257, 1, 1)),
    "lses: shape": (torch.ones(2, 3, 4, 5), torch.ones(2, 4, 3)),
    "lses: dtype": (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4).half()),
    "lses: last stride": (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 8)[..., ::2]),
}


@pytest.mark.parametrize("start", BAD_MERGES)
def test_bad_parts_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        merge_lse(*BAD_MERGES[start])


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    case = Cascade((5,), 5, group=64, kv_heads=1, head_dim=128, slots=8)
    inputs = cascade_inputs(case, seeded(), device)
    outs = torch.randn(256, 1, 1, 128, generator=seeded()).to(device)
    lses = torch.randn(256, 1, 1, generator=seeded(1)).to(device)
    with running():
        out, lse = cascade_decode_attention(*inputs, n_splits=128)
        merged = merge_lse(outs, lses)
    assert_right(inputs, out, lse)
    torch.testing.assert_close(merged, merge_lse_ref(outs, lses))


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, lengths = torch.ones(1, 1, 1, 1), torch.ones(1, dtype=torch.int32)
    compiled = compile_launches(
        lambda: cascade_decode_attention(one[0], one[0], one[0], one, one, lengths), target
    )
    kernels = ["_cascade_attention_kernel"] * 2 + ["_merge_lse_kernel"]
    assert [kernel.name for kernel in compiled] == kernels
    compile_launches(lambda: merge_lse(one, one[0]), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_tile_fits(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: head_dim 128, rows for the largest tile, 256 parts."""
    q = torch.empty(2, 64, 128, dtype=dtype, device="meta")
    k = torch.empty(128 * 64, 1, 128, dtype=dtype, device="meta")
    parts = torch.empty(256, 2, 64, 128, dtype=dtype, device="meta")
    lses = torch.empty(256, 2, 64, device="meta")
    launches = {
        "prefix": lambda: cascade_prefix_attention(q, k, k, 1),
        "merge": lambda: merge_lse(parts, lses),
    }
    assert table.complaints(table.build(launches, [target]), STREAMING) == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_benchmarks_compare_like_with_like(benchmark, device, running) -> None:
    generator = torch.Generator(device).manual_seed(0)
    inputs = benchmark.small(generator, device)
    with running():
        ours = benchmark.ours(*inputs)
    want = benchmark.reference(*inputs)
    for have, reference in zip(ours, want, strict=True):
        limit = benchmark.tolerance * reference.abs().max()
        assert have.shape == reference.shape and have.dtype == reference.dtype
        assert (have.float() - reference.float()).abs().max() <= limit
    for name, peer in benchmark.peers.items():
        if name.startswith("torch"):
            assert (peer(*inputs) - want[0]).abs().max() <= benchmark.tolerance * want[
                0
            ].abs().max()


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in CASCADE_CASES]
    axes = ("prefix", "group", "head_dim", "dtype", "n_splits", "layout")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
