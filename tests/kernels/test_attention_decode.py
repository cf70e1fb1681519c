"""Decode attention against float64, on shapes and layouts that break kernels."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.attention_decode import (
    _decode_attention_kernel,
    _decode_merge_kernel,
    decode_attention,
    decode_attention_ref,
)
from kernels.cases import error_limit
from kernels.cases.attention_decode import DECODE_CASES, STREAMING, Decode, decode_inputs

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(q, k, v, seq_lens) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, one query head at a time."""
    B, H, D = q.shape
    group = H // k.shape[2]
    out, lse = np.zeros((B, H, D)), np.full((B, H), -np.inf)
    q, k, v = (x.cpu().double().numpy() for x in (q, k, v))
    for b, n in enumerate(seq_lens.tolist()):
        for h in range(H if n else 0):
            scores = k[b, :n, h // group] @ q[b, h] / math.sqrt(D)
            top = scores.max()
            weights = np.exp(scores - top)
            out[b, h] = weights @ v[b, :n, h // group] / weights.sum()
            lse[b, h] = top + np.log(weights.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def eager(q, k, v, seq_lens) -> torch.Tensor:
    """Torch's own attention in the inputs' dtype."""
    out = torch.zeros_like(q)
    for b, n in enumerate(seq_lens.tolist()):
        if n:
            keys, values = k[b, :n].transpose(0, 1), v[b, :n].transpose(0, 1)
            query = q[b, :, None]
            attended = F.scaled_dot_product_attention(
                query[None], keys[None], values[None], enable_gqa=True
            )
            out[b] = attended[0, :, 0]
    return out


def assert_right(inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    want, want_lse = exact(*inputs)
    dtype, empty = out.dtype, (inputs[3] == 0).cpu()
    error = (out.cpu().double() - want).abs()
    limit = error_limit(want, eager(*inputs).cpu(), dtype)
    assert error.max().item() <= limit
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[dtype]

    assert torch.equal(out.cpu()[empty], torch.zeros_like(out.cpu()[empty]))
    assert torch.equal(torch.isneginf(lse.cpu()), empty[:, None].expand_as(lse))
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_matches_float64(case: Decode, device, running) -> None:
    inputs = decode_inputs(case, seeded(), device)
    with running():
        out, lse = decode_attention(*inputs, case.n_splits, return_lse=True)
    assert out.shape == inputs[0].shape and out.dtype == case.dtype
    assert lse.shape == out.shape[:2] and lse.dtype == torch.float32
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_matches_float64(dtype, device) -> None:
    inputs = decode_inputs(Decode((9, 0, 40), 3, dtype=dtype), seeded(), device)
    assert_right(inputs, *decode_attention_ref(*inputs))


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [1, 20, 33])
def test_odd_heads(group: int, head_dim: int, device, running) -> None:
    inputs = decode_inputs(Decode((17, 2), group, 1, head_dim), seeded(), device)
    with running():
        out, lse = decode_attention(*inputs, n_splits=2, return_lse=True)
    assert_right(inputs, out, lse)


def test_number_of_splits_does_not_matter(device, running) -> None:
    inputs = decode_inputs(Decode((64, 50), 4, 1, slots=64), seeded(), device)
    with running():
        whole, lse = decode_attention(*inputs, n_splits=1, return_lse=True)
        for n_splits in (2, 3, 4):
            out, other = decode_attention(*inputs, n_splits, return_lse=True)
            torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other, lse, rtol=1e-6, atol=1e-6)


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    inputs = decode_inputs(Decode((33, 20), 3, dtype=torch.float16), seeded(), device)
    before = [x.clone() for x in inputs]
    with running():
        first = decode_attention(*inputs, n_splits=2)
        second = decode_attention(*inputs, n_splits=2)
    assert torch.equal(first, second)
    for x, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's blocks of 16 keys make splits cheap")
def test_splits_are_capped_by_the_blocks_of_the_cache(running) -> None:
    inputs = decode_inputs(Decode((33,), kv_heads=1, slots=40), seeded())
    with running() as meter:
        decode_attention(*inputs, n_splits=100)
    assert meter.written["part_lse"] == 3 * 4  # 40 slots are three blocks


def test_large_scores(device, running) -> None:
    q, k, v, seq_lens = decode_inputs(Decode((40, 17), 5, 1, 16), seeded(), device)
    inputs = (q * 40, k, v, seq_lens)
    with running():
        out, lse = decode_attention(*inputs, n_splits=2, return_lse=True)
    assert_right(inputs, out, lse)


def test_largest_halves(device, running) -> None:
    """65504 * 65504 * 64 overflows float16 and not float32."""
    case = Decode((20,), 2, 1, 64, torch.float16)
    q, k, v, seq_lens = decode_inputs(case, seeded(), device)
    inputs = (q.sign() * 65504, k.sign() * 65504, v, seq_lens)
    with running():
        out = decode_attention(*inputs, n_splits=2)
    want, _ = exact(*inputs)
    assert (out.cpu().double() - want).abs().max() <= 2**-11 * want.abs().max()


def test_a_block_of_minus_infinity_has_no_weight(device, running) -> None:
    q, k, v, seq_lens = decode_inputs(Decode((40,), 2, 1, 16), seeded(), device)
    q, k = q.abs(), k.clone()
    k[:, :32] = -math.inf  # the first two blocks, and with two splits one of them whole
    tail = q, k[:, 32:], v[:, 32:], seq_lens - 32
    for n_splits in (1, 2):
        with running():
            out, lse = decode_attention(q, k, v, seq_lens, n_splits, return_lse=True)
        assert_right(tail, out, lse)


def test_nan_stays_in_its_own_head(device, running) -> None:
    q, k, v, seq_lens = decode_inputs(Decode((20, 20), 3, 2, 16), seeded(), device)
    clean = decode_attention_ref(q, k, v, seq_lens)[0]
    k[1, 3, 1] = math.nan
    with running():
        out = decode_attention(q, k, v, seq_lens, n_splits=2)
    assert out[1, 3:].isnan().all()
    torch.testing.assert_close(out[0], clean[0])
    torch.testing.assert_close(out[1, :3], clean[1, :3])


def test_empty_batch_and_empty_cache(device, running) -> None:
    with running():
        q, k, v, seq_lens = decode_inputs(Decode((), slots=8), seeded(), device)
        assert decode_attention(q, k, v, seq_lens).shape == (0, 2, 64)
        q, k, v, seq_lens = decode_inputs(Decode((0, 0), slots=0), seeded(), device)
        out, lse = decode_attention(q, k, v, seq_lens, return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


# Offsets of one sequence, key and head, each just beyond what 32 bits hold.
FAR = [(3, 1, 1, 0, 2**30), (1, 17, 1, 1, 2**27), (1, 1, 3, 2, 2**30)]


@pytest.mark.parametrize("batch, keys, heads, axis, stride", FAR)
def test_offsets_beyond_32_bits(batch, keys, heads, axis, stride, device, running) -> None:
    small = decode_inputs(
        Decode((keys,) * batch, 2, heads, 16, torch.float16, slots=keys), seeded(), device
    )
    strides = [16, 16, 16, 1]
    strides[axis] = stride
    shape = (batch, keys, heads, 16)
    furthest = (shape[axis] - 1) * stride
    assert furthest == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (furthest + 16), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    q, k, v, seq_lens = small
    spread = far.as_strided(shape, strides)
    spread.copy_(k)
    with running():
        out = decode_attention(q, spread, v, seq_lens, n_splits=1)
        swapped = decode_attention(q, k, spread, seq_lens, n_splits=1)
    torch.testing.assert_close(out, decode_attention_ref(q, k, v, seq_lens)[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(
        swapped, decode_attention_ref(q, k, k, seq_lens)[0], rtol=0, atol=2e-3
    )


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_cache_once() -> None:
    """At most 1.25 times the bytes of K and V, at the tile of a real GPU."""
    from course.lab.meter import metered

    case = Decode((1024,) * 4, group=4, kv_heads=1, head_dim=128, dtype=torch.float16, slots=1024)
    q, k, v, seq_lens = decode_inputs(case, seeded())
    with metered() as meter, pretending("sm_90"):
        decode_attention(q, k, v, seq_lens, n_splits=4)
    assert meter.read["k"] == k.nbytes and meter.read["v"] == v.nbytes
    assert meter.loads <= 1.25 * (k.nbytes + v.nbytes)
    useful = 4 * 4 * 4 * 1024 * 128
    assert meter.flops == useful * 16 // 4  # four query heads fill a tile of sixteen rows


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    q, k, v, seq_lens = decode_inputs(Decode((17, 5), 3, 2, 20), seeded())
    part_out = lab.guarded(lab.poisoned((2, 6, 2, 20), torch.float32))
    part_lse = lab.guarded(lab.poisoned((2, 6, 2), torch.float32))
    out = lab.guarded(lab.poisoned((2, 6, 20), torch.float32))
    lse = lab.guarded(lab.poisoned((2, 6), torch.float32))
    q, k, v, seq_lens = map(lab.guarded, (q, k, v, seq_lens))
    with lab.interpreted():
        _decode_attention_kernel[(2, 2, 2)](
            *(q, k, v, seq_lens, part_out, part_lse, 20**-0.5),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
            **dict(HEAD_DIM=20, GROUP=3, BLOCK_D=32, BLOCK_G=16, BLOCK_T=16),
        )
        _decode_merge_kernel[(12,)](
            part_out, part_lse, out, lse, 2, HEAD_DIM=20, BLOCK_D=32, BLOCK_N=4
        )
    for name, tensor in dict(part_out=part_out, part_lse=part_lse, out=out, lse=lse).items():
        lab.check_guard(name, tensor)
    assert_right((q, k, v, seq_lens), out, lse)


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    q, k, v, seq_lens = decode_inputs(Decode((3, 4), 2, 2, 16, slots=4), seeded())
    return dict(q=q, k=k, v=v, seq_lens=seq_lens, n_splits=1) | changes


BAD = {
    "q: shape": dict(q=torch.ones(2, 1, 4, 16)),
    "q: dtype": dict(q=torch.ones(2, 4, 16, dtype=torch.int32)),
    "q: last stride 2": dict(q=torch.ones(2, 4, 32)[..., ::2]),
    "q: head_dim 129": dict(
        q=torch.ones(2, 4, 129), k=torch.ones(2, 4, 2, 129), v=torch.ones(2, 4, 2, 129)
    ),
    "q: head_dim 0": dict(
        q=torch.ones(2, 4, 0), k=torch.ones(2, 4, 2, 0), v=torch.ones(2, 4, 2, 0)
    ),
    "k: shape": dict(k=torch.ones(3, 4, 2, 16)),
    "k: dtype": dict(k=torch.ones(2, 4, 2, 16, dtype=torch.float16)),
    "v: shape": dict(v=torch.ones(2, 5, 2, 16)),
    "k: 3 KV heads": dict(k=torch.ones(2, 4, 3, 16), v=torch.ones(2, 4, 3, 16)),
    "k: 0 KV heads": dict(k=torch.ones(2, 4, 0, 16), v=torch.ones(2, 4, 0, 16)),
    "k: 1 KV heads": dict(
        q=torch.ones(2, 65, 16), k=torch.ones(2, 4, 1, 16), v=torch.ones(2, 4, 1, 16)
    ),
    "seq_lens: shape": dict(seq_lens=torch.ones(3, dtype=torch.int32)),
    "seq_lens: dtype": dict(seq_lens=torch.ones(2, dtype=torch.int64)),
    "seq_lens: last stride": dict(seq_lens=torch.ones(4, dtype=torch.int32)[::2]),
    "seq_lens: -1": dict(seq_lens=torch.tensor([3, -1], dtype=torch.int32)),
    "seq_lens: 5": dict(seq_lens=torch.tensor([5, 4], dtype=torch.int32)),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 129": dict(n_splits=129),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        decode_attention(**changed(**BAD[start]))


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    case = Decode((5,), group=64, kv_heads=1, head_dim=128, slots=8)
    inputs = decode_inputs(case, seeded(), device)
    with running():
        out, lse = decode_attention(*inputs, n_splits=128, return_lse=True)
    assert_right(inputs, out, lse)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, lengths = torch.ones(1, 1, 1, 1), torch.ones(1, dtype=torch.int32)
    compiled = compile_launches(lambda: decode_attention(one[0], one, one, lengths), target)
    assert [kernel.name for kernel in compiled] == ["_decode_attention_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_tile_fits(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: head_dim 128 and 64 query heads a KV head."""
    q = torch.empty(1, 64, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 256, 1, 128, dtype=dtype, device="meta")
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    rows = table.build({"": lambda: decode_attention(q, k, k, lengths, 1)}, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in DECODE_CASES]
    axes = ("group", "head_dim", "dtype", "n_splits", "layout")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
