"""Prefill attention against float64, on shapes and layouts that break kernels."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import cdiv, pretending
from kernels.attention_prefill import (
    _check_offsets,
    _prefill_attention_kernel,
    prefill_attention,
    prefill_attention_ref,
)
from kernels.cases import error_limit
from kernels.cases.attention_prefill import (
    BENCHMARKS,
    PREFILL_CASES,
    STREAMING,
    Prefill,
    offsets,
    prefill_inputs,
)

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def visible(inputs):
    """(row of q, first and last key that it sees and one behind), one query at a time."""
    *_, cu_q, cu_k, _, window = inputs
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        for row in range(q0, q1):
            end = k1 - (q1 - 1 - row)  # the last query stands at the last key
            yield row, max(k0, end - (window or end)), max(k0, end)


def exact(inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, one query and head at a time."""
    q, k, v = (x.cpu().double().numpy() for x in inputs[:3])
    Tq, H, D = q.shape
    group = H // k.shape[1]
    out, lse = np.zeros((Tq, H, D)), np.full((Tq, H), -np.inf)
    for row, start, end in visible(inputs):
        for h in range(H if end > start else 0):
            scores = k[start:end, h // group] @ q[row, h] / math.sqrt(D)
            top = scores.max()
            weights = np.exp(scores - top)
            out[row, h] = weights @ v[start:end, h // group] / weights.sum()
            lse[row, h] = top + np.log(weights.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def eager(inputs) -> torch.Tensor:
    """Torch's own attention in the inputs' dtype."""
    q, k, v = inputs[:3]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, start, end in visible(inputs):
        if end > start:
            keys, values = (x[start:end].transpose(0, 1)[None] for x in (k, v))
            attended = F.scaled_dot_product_attention(
                q[row, :, None][None], keys, values, enable_gqa=True
            )
            out[row] = attended[0, :, 0]
    return out


def assert_right(inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    want, want_lse = exact(inputs)
    dtype, empty = out.dtype, torch.isneginf(want_lse)
    error = (out.cpu().double() - want).abs()
    limit = error_limit(want, eager(inputs).cpu(), dtype)
    assert error.max().item() <= limit
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[dtype]

    assert torch.equal(out.cpu()[empty], torch.zeros_like(out.cpu()[empty]))
    assert torch.equal(torch.isneginf(lse.cpu()), empty)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_matches_float64(case: Prefill, device, running) -> None:
    inputs = prefill_inputs(case, seeded(), device)
    with running():
        out, lse = prefill_attention(*inputs, return_lse=True)
    assert out.shape == inputs[0].shape and out.dtype == case.dtype
    assert lse.shape == out.shape[:2] and lse.dtype == torch.float32
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_matches_float64(dtype, window, device) -> None:
    case = Prefill(((9, 9), (0, 2), (7, 5), (2, 40)), (6, 2), 20, dtype, window)
    *inputs, _, window = prefill_inputs(case, seeded(), device)
    assert_right((*inputs, 9, window), *prefill_attention_ref(*inputs, window))


@pytest.mark.parametrize("group, head_dim", [(1, 1), (1, 33), (5, 1), (5, 20), (16, 33)])
def test_odd_heads(group: int, head_dim: int, device, running) -> None:
    inputs = prefill_inputs(Prefill(((3, 18),), (group, 1), head_dim), seeded(), device)
    with running():
        out, lse = prefill_attention(*inputs, return_lse=True)
    assert_right(inputs, out, lse)


def test_a_window_of_one_returns_the_values(device, running) -> None:
    inputs = prefill_inputs(Prefill(((20, 37),), (1, 1), 16, window=1, spare=0), seeded(), device)
    with running():
        out = prefill_attention(*inputs)
    assert torch.equal(out, inputs[2][17:])


def test_a_window_as_long_as_the_sequence_changes_nothing(device, running) -> None:
    *inputs, longest, _ = prefill_inputs(Prefill(((20, 50),), (1, 1), 16), seeded(), device)
    with running():
        full = prefill_attention(*inputs, longest)
        assert torch.equal(prefill_attention(*inputs, longest, 50), full)
        assert not torch.equal(prefill_attention(*inputs, longest, 49), full)


@pytest.mark.parametrize("window", [None, 21])
def test_chunks_of_a_prompt_give_the_same_as_the_prompt(window, device, running) -> None:
    """Wherever a prompt is cut, the rest attends over the keys before it."""
    case = Prefill(((50, 50),), (1, 1), 16, window=window, spare=0)
    q, k, v, cu_q, cu_k, longest, _ = prefill_inputs(case, seeded(), device)
    with running():
        whole = prefill_attention(q, k, v, cu_q, cu_k, longest, window)
        for cut in (1, 16, 17, 49):
            rest = prefill_attention(q[cut:], k, v, cu_q - cu_q.sign() * cut, cu_k, 50, window)
            torch.testing.assert_close(rest, whole[cut:], rtol=1e-6, atol=1e-6)


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    case = Prefill(((33, 33), (4, 20)), (3, 1), 16, torch.float16, 20)
    inputs = prefill_inputs(case, seeded(), device)
    before = [x.clone() for x in inputs[:5]]
    with running():
        first = prefill_attention(*inputs)
        second = prefill_attention(*inputs)
    assert torch.equal(first, second)
    for x, copy in zip(inputs, before, strict=False):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


def test_a_longer_maximum_changes_nothing(device, running) -> None:
    case = Prefill(((20, 20), (0, 3), (1, 1)), (1, 1), 16)
    *inputs, longest, _ = prefill_inputs(case, seeded(), device)
    with running():
        assert torch.equal(prefill_attention(*inputs, 50), prefill_attention(*inputs, longest))


def test_keys_that_no_query_sees_are_never_read(device, running) -> None:
    """Of a chunk under a window: what lies before the first query's window."""
    *inputs, longest, window = prefill_inputs(
        Prefill(((20, 100),), (1, 1), 16, window=33), seeded(), device
    )
    with running():
        clean = prefill_attention(*inputs, longest, window)
        for x in inputs[1:3]:
            x[: 100 - 20 - 33 + 1] = math.nan
        assert torch.equal(prefill_attention(*inputs, longest, window), clean)


def test_large_scores(device, running) -> None:
    q, *rest = prefill_inputs(Prefill(((17, 40), (9, 9)), (5, 1), 16), seeded(), device)
    inputs = (q * 40, *rest)
    with running():
        out, lse = prefill_attention(*inputs, return_lse=True)
    assert_right(inputs, out, lse)


def test_largest_halves(device, running) -> None:
    """Products overflow float16 and not float32, which also holds their sums exactly.

    So equal scores stay equal, and a weight of exp2(rounding error of 1e10) would show.
    """
    case = Prefill(((5, 40),), (2, 1), 64, torch.float16)
    q, k, *rest = prefill_inputs(case, seeded(), device)
    inputs = (q.sign() * 65504, k.sign() * 32768, *rest)
    with running():
        out = prefill_attention(*inputs)
    want, _ = exact(inputs)
    assert (out.cpu().double() - want).abs().max() <= 2**-11 * want.abs().max()


def test_a_block_of_minus_infinity_has_no_weight(device, running) -> None:
    q, k, v, cu_q, cu_k, longest, _ = prefill_inputs(
        Prefill(((2, 70),), (2, 1), 16), seeded(), device
    )
    q = q.abs()
    k[:64] = -math.inf  # whole blocks
    with running():
        out, lse = prefill_attention(q, k, v, cu_q, cu_k, longest, return_lse=True)
        nothing, empty = prefill_attention(q, k, v, cu_q, cu_k - cu_k.sign() * 6, 2, None, True)
    tail = q, k[64:], v[64:], cu_q, cu_k - cu_k.sign() * 64, longest, None
    assert_right(tail, out, lse)
    assert not nothing.any() and torch.isneginf(empty).all()


def test_nan_stays_in_its_own_head_and_sequence(device, running) -> None:
    *inputs, longest, _ = prefill_inputs(
        Prefill(((20, 20), (20, 20), (1, 1)), (4, 2), 16), seeded(), device
    )
    clean = prefill_attention_ref(*inputs)[0]
    inputs[1][20, 1] = math.nan  # the first key of the second sequence
    with running():
        out = prefill_attention(*inputs, longest)
    assert out[20:40, 2:].isnan().all()
    clean[20:40, 2:] = math.nan
    torch.testing.assert_close(out, clean, equal_nan=True)


def test_empty_batches_and_caches(device, running) -> None:
    with running():
        for lengths in ((), ((0, 0),), ((0, 5), (0, 0))):
            inputs = prefill_inputs(Prefill(lengths), seeded(), device)
            assert prefill_attention(*inputs).shape == (0, 2, 64)
        inputs = prefill_inputs(Prefill(((3, 0), (2, 0)), spare=0), seeded(), device)
        out, lse = prefill_attention(*inputs, return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_nothing_to_do_launches_nothing(running) -> None:
    with running() as meter:
        prefill_attention(*prefill_inputs(Prefill(((0, 7),)), seeded()))
    assert meter.launches == 0


# Offsets inside a block of queries, of a later block, of a sequence and of a head, each just
# beyond what 32 bits hold.
FAR = [
    (((9, 9),), 1, 0, 2**28),
    (((17, 17),), 1, 0, 2**27),
    (((16, 16), (1, 1)), 1, 0, 2**27),
    (((1, 1),), 3, 1, 2**30),
]


@pytest.mark.parametrize("lengths, heads, axis, stride", FAR)
def test_offsets_beyond_32_bits(lengths, heads, axis, stride, device, running) -> None:
    case = Prefill(lengths, (heads, heads), 16, torch.float16, spare=0)
    *tensors, cu_q, cu_k, longest, _ = prefill_inputs(case, seeded(), device)
    strides, shape = [16, 16, 1], tensors[0].shape
    strides[axis] = stride
    furthest = (shape[axis] - 1) * stride
    assert furthest == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (furthest + heads * 16), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    want = prefill_attention_ref(*tensors, cu_q, cu_k)[0]
    for number, tensor in enumerate(tensors):
        spread = far.as_strided(shape, strides)
        spread.copy_(tensor)
        inputs = [*tensors[:number], spread, *tensors[number + 1 :]]
        with running():
            out = prefill_attention(*inputs, cu_q, cu_k, longest)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("window, H, most", [(None, 4, 1.13), (512, 1, 1.25)])
def test_work_that_the_masks_rule_out_is_skipped(window, H: int, most: float) -> None:
    """FLOPs and bytes at the tile of a real GPU, of one prompt: they grow with the prompts.

    Beyond the useful pairs only the padding of the blocks that the diagonal and the window's
    edge cut is computed, which the limit of 1.5 allows.
    """
    from course.lab.meter import metered

    S, D = 1024, 128
    case = Prefill(((S, S),), (H, 1), D, torch.float16, window, spare=0)
    q, k, v, *rest = prefill_inputs(case, seeded())
    with metered() as meter, pretending("sm_90"):
        out = prefill_attention(q, k, v, *rest)
    useful = sum(min(p + 1, window or S) for p in range(S))
    rows, step = 128, 64
    starts = range(0, S, rows)
    keys = [cdiv(m + rows - max(m + 1 - (window or S), 0), step) * step for m in starts]
    assert meter.flops == 4 * D * H * rows * sum(keys)  # nothing beyond blocks cut by a mask
    assert meter.flops <= most * 4 * D * H * useful
    assert meter.read["q"] == q.nbytes and meter.written["out"] == out.nbytes
    assert meter.written["lse"] == 4 * S * H
    seen = [m + rows - max(m + 1 - (window or S), 0) for m in starts]
    assert meter.read["k"] == meter.read["v"] == 2 * D * H * sum(seen)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    q, k, v, cu_q, cu_k, *_ = prefill_inputs(
        Prefill(((17, 19), (5, 3)), (3, 1), 20, window=12), seeded()
    )
    out = lab.guarded(lab.poisoned((22, 3, 20), torch.float32))
    lse = lab.guarded(lab.poisoned((22, 3), torch.float32))
    q, k, v, cu_q, cu_k = map(lab.guarded, (q, k, v, cu_q, cu_k))
    with lab.interpreted():
        _prefill_attention_kernel[(3, 2, 2)](
            *(q, k, v, cu_q, cu_k, out, lse, 20**-0.5, 3, 12),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
            **dict(HEAD_DIM=20, BLOCK_D=32, BLOCK_M=16, BLOCK_N=32, BLOCK_CUT=16),
        )
    for name, tensor in dict(out=out, lse=lse).items():
        lab.check_guard(name, tensor)
    assert_right((q, k, v, cu_q, cu_k, 17, 12), out, lse)


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "window")
    inputs = prefill_inputs(Prefill(((3, 3), (2, 4)), (4, 2), 16, spare=0), seeded())
    return dict(zip(names, inputs, strict=True)) | changes


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def heads(kv_heads: int, head_dim: int = 16) -> dict[str, torch.Tensor]:
    return {name: torch.ones(7, kv_heads, head_dim) for name in ("k", "v")}


BAD = {
    "q: shape": dict(q=torch.ones(1, 5, 4, 16)),
    "q: dtype": dict(q=torch.ones(5, 4, 16, dtype=torch.int32)),
    "q: last stride 2": dict(q=torch.ones(5, 4, 32)[..., ::2]),
    "q: head_dim 129": dict(q=torch.ones(5, 4, 129), **heads(2, 129)),
    "q: head_dim 0": dict(q=torch.ones(5, 4, 0), **heads(2, 0)),
    "k: shape": dict(k=torch.ones(7, 2, 17)),
    "k: dtype": dict(k=torch.ones(7, 2, 16, dtype=torch.float16)),
    "v: shape": dict(v=torch.ones(6, 2, 16)),
    "k: 3 KV heads": heads(3),
    "k: 0 KV heads": heads(0),
    "k: 8 KV heads": heads(8),
    "max_seqlen_q: -1": dict(max_seqlen_q=-1),
    "max_seqlen_q: 1048577": dict(max_seqlen_q=2**20 + 1),
    "max_seqlen_q: 5.0": dict(max_seqlen_q=5.0),
    "window: 0": dict(window=0),
    "window: 2.0": dict(window=2.0),
    "window: 1073741825": dict(window=2**30 + 1),
    "cu_seqlens_q: shape": dict(cu_seqlens_q=ints(0, 5)[None]),
    "cu_seqlens_q: dtype": dict(cu_seqlens_q=ints(0, 3, 5, dtype=torch.int64)),
    "cu_seqlens_q: last stride": dict(cu_seqlens_q=ints(0, 0, 3, 0, 5)[::2]),
    "cu_seqlens_q: -1 sequences": dict(cu_seqlens_q=ints()),
    "cu_seqlens_q: 65536 sequences": dict(cu_seqlens_q=torch.zeros(65537, dtype=torch.int32)),
    "cu_seqlens_k: shape": dict(cu_seqlens_k=ints(0, 3, 5, 7)),
    "cu_seqlens_k: dtype": dict(cu_seqlens_k=ints(0, 3, 7, dtype=torch.int64)),
    r"cu_seqlens_q: 1 at \[0\]": dict(cu_seqlens_q=ints(1, 3, 5)),
    r"cu_seqlens_q: 4 at \[0\]": dict(cu_seqlens_q=ints(0, 3, 4)),
    r"cu_seqlens_q: 6 at \[0\]": dict(cu_seqlens_q=ints(0, 3, 6)),
    r"cu_seqlens_q: length: -1 at \[1\]": dict(cu_seqlens_q=ints(0, 6, 5), max_seqlen_q=6),
    r"cu_seqlens_q: length: 3 at \[0\]": dict(max_seqlen_q=2),
    r"cu_seqlens_k: 1 at \[0\]": dict(cu_seqlens_k=ints(1, 3, 7)),
    r"cu_seqlens_k: 8 at \[0\]": dict(cu_seqlens_k=ints(0, 3, 8)),
    r"cu_seqlens_k: length: -2 at \[1\]": dict(cu_seqlens_k=ints(0, 5, 3)),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        prefill_attention(**changed(**BAD[start]))


def test_offsets_on_a_gpu_are_looked_at_in_debug_mode_only(monkeypatch) -> None:
    class OnGpu:  # has no values to look at
        device = torch.device("cuda")

    monkeypatch.delenv("COURSE_KERNEL_DEBUG", raising=False)
    _check_offsets("cu_seqlens_q", OnGpu(), 0, 0, 0)
    monkeypatch.setenv("COURSE_KERNEL_DEBUG", "1")
    with pytest.raises(TypeError):
        _check_offsets("cu_seqlens_q", OnGpu(), 0, 0, 0)


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    inputs = prefill_inputs(Prefill(((3, 5),), (20, 1), 128), seeded(), device)
    with running():
        out, lse = prefill_attention(*inputs[:6], window=2**30, return_lse=True)
    assert_right(inputs, out, lse)
    *inputs, _, _ = prefill_inputs(Prefill(((1, 1),) + ((0, 0),) * 65_534), seeded(), device)
    with pytest.raises(ValueError, match=r"^q: head_dim"):  # the batch was let through
        prefill_attention(torch.ones(1, 2, 129), *(torch.ones(4, 1, 129),) * 2, *inputs[3:], 1)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, cu_seqlens = torch.ones(1, 1, 1), offsets((1,))
    compiled = compile_launches(
        lambda: prefill_attention(one, one, one, cu_seqlens, cu_seqlens, 1, 1), target
    )
    assert [kernel.name for kernel in compiled] == ["_prefill_attention_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_tile_fits(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: head_dim 128, here of a model with odd groups."""
    q = torch.empty(256, 40, 128, dtype=dtype, device="meta")
    k = torch.empty(256, 8, 128, dtype=dtype, device="meta")
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta")
    launch = {"": lambda: prefill_attention(q, k, k, cu_seqlens, cu_seqlens, 256, 100)}
    rows = table.build(launch, [target])
    assert table.complaints(rows, STREAMING) == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_benchmarks_compare_the_same(benchmark, device, running) -> None:
    generator = torch.Generator(device).manual_seed(0)
    inputs = benchmark.small(generator, device)
    with running():
        ours = benchmark.ours(*inputs).double()
    for other in (benchmark.reference, *benchmark.peers.values()):
        try:
            theirs = other(*inputs).double()
        except ImportError:
            continue
        assert (ours - theirs).abs().max() <= benchmark.tolerance * theirs.abs().max()


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in PREFILL_CASES]
    axes = ("lengths", "heads", "head_dim", "dtype", "window", "layout")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
