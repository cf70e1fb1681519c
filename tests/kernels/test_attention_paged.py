"""Paged attention against float64: page sizes, tables and layouts that break kernels."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.attention_decode import decode_attention
from kernels.attention_paged import (
    _paged_decode_kernel,
    _paged_prefill_kernel,
    append_to_cache,
    append_to_cache_ref,
    paged_decode_attention,
    paged_decode_attention_ref,
    paged_prefill_attention,
    paged_prefill_attention_ref,
)
from kernels.cases import error_limit
from kernels.cases.attention_paged import (
    AXES,
    BENCHMARKS,
    DECODE_CASES,
    PREFILL_CASES,
    STREAMING,
    Paged,
    paged_inputs,
)

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
HALF, SINGLE = torch.float16, torch.float32


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def attend(inputs, *rest, **named):
    """Decode or prefill, by whether the inputs have offsets of queries."""
    launcher = paged_decode_attention if len(inputs) == 5 else paged_prefill_attention
    return launcher(*inputs, *rest, **named)


def reference(inputs):
    if len(inputs) == 5:
        return paged_decode_attention_ref(*inputs)
    return paged_prefill_attention_ref(*inputs)


def spans(inputs):
    """Per sequence: rows of q, and the page and slot of each of its tokens."""
    tables, lengths, P = inputs[3].tolist(), inputs[4].tolist(), inputs[1].shape[1]
    offsets = inputs[5].tolist() if len(inputs) == 6 else range(len(lengths) + 1)
    for b, n in enumerate(lengths):
        pages = [tables[b][t // P] for t in range(n)]
        yield range(offsets[b], offsets[b + 1]), pages, [t % P for t in range(n)]


def exact(inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, one query and head at a time, one token looked up at a time."""
    q, k, v = (x.cpu().double().numpy() for x in inputs[:3])
    group = q.shape[1] // k.shape[2]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for rows, pages, slots in spans(inputs):
        keys, values = k[pages, slots], v[pages, slots]
        for i in rows if pages else ():
            seen = len(pages) - (rows.stop - 1 - i)
            for h in range(q.shape[1]):
                scores = keys[:seen, h // group] @ q[i, h] / math.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[i, h] = weights @ values[:seen, h // group] / weights.sum()
                lse[i, h] = scores.max() + np.log(weights.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def eager(inputs) -> torch.Tensor:
    """Torch's own attention in the inputs' dtype."""
    q, k, v = inputs[:3]
    out = torch.zeros_like(q)
    for rows, pages, slots in spans(inputs):
        if pages and rows:
            n, m = len(pages), len(rows)
            mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
            keys, values = k[pages, slots], v[pages, slots]
            query = q[rows.start : rows.stop]
            out[rows.start : rows.stop] = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (query, keys, values)), mask, enable_gqa=True
            )[0].transpose(0, 1)
    return out


def assert_right(inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    want, want_lse = exact(inputs)
    assert out.shape == want.shape and lse.shape == want_lse.shape
    error = (out.cpu().double() - want).abs()
    assert error.max().item() <= error_limit(want, eager(inputs).cpu(), out.dtype)
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[out.dtype]
    empty = want_lse.isneginf()
    assert not out.cpu()[empty].any() and torch.equal(lse.cpu().isneginf(), empty)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", [*DECODE_CASES, *PREFILL_CASES], ids=str)
def test_matches_float64(case: Paged, device, running) -> None:
    inputs = paged_inputs(case, seeded(), device)
    with running():
        out, lse = attend(inputs, case.n_splits, return_lse=True)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [None, (9, 0, 2)])
def test_the_reference_matches_float64(queries, dtype, device) -> None:
    case = Paged((9, 0, 40), queries and (9, 0, 2), 3, dtype=dtype, page_size=5)
    inputs = paged_inputs(case, seeded(), device)
    assert_right(inputs, *reference(inputs))


@pytest.mark.parametrize("group, head_dim", [(1, 33), (5, 20), (17, 1)])
def test_odd_heads(group: int, head_dim: int, device, running) -> None:
    for queries in (None, (2, 3)):
        case = Paged((17, 3), queries, group, 1, head_dim, page_size=7)
        inputs = paged_inputs(case, seeded(), device)
        with running():
            out, lse = attend(inputs, n_splits=2, return_lse=True)
        assert_right(inputs, out, lse)


TILE = (64, 16) if ON_CPU else (128, 64)  # queries of one head, keys


@pytest.mark.parametrize("queries", [TILE[0] - 1, TILE[0], TILE[0] + 1])
@pytest.mark.parametrize("cached", [0, 1, TILE[1] - 1, TILE[1], TILE[1] + 1])
def test_chunk_and_prefix_around_a_tile(queries: int, cached: int, device, running) -> None:
    case = Paged((cached + queries,), (queries,), 1, 1, 16, page_size=5)
    inputs = paged_inputs(case, seeded(), device)
    with running():
        out, lse = attend(inputs, return_lse=True)
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("length", [0, 1, TILE[1] - 1, TILE[1], TILE[1] + 1, 3 * TILE[1] + 7])
def test_length_around_a_block(length: int, device, running) -> None:
    inputs = paged_inputs(Paged((length, 2), None, 1, 1, 16, page_size=5), seeded(), device)
    with running():
        for n_splits in (1, 2):
            out, lse = attend(inputs, n_splits, return_lse=True)
            assert_right(inputs, out, lse)


def test_a_prompt_in_chunks_is_the_prompt(device, running) -> None:
    """Cut at and around boundaries; a last chunk of one token is a decode step."""
    case = Paged((19,), (19,), 2, 1, 16, page_size=4)
    q, k, v, tables, lengths, offsets = paged_inputs(case, seeded(), device)
    with running():
        whole = attend((q, k, v, tables, lengths, offsets), n_splits=1)
        for cut in (1, 15, 16, 18):
            both = []
            for first, last in ((0, cut), (cut, 19)):
                length, rows = lengths - 19 + last, offsets.clamp(max=last - first)
                both.append(attend((q[first:last], k, v, tables, length, rows)))
            torch.testing.assert_close(torch.cat(both), whole, rtol=1e-6, atol=1e-6)
        last = attend((q[18:], k, v, tables, lengths))
    torch.testing.assert_close(last, whole[18:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("queries", [None, (4, 6)])
def test_number_of_splits_does_not_matter(queries, device, running) -> None:
    inputs = paged_inputs(Paged((64, 50), queries, 4, 1, 16, page_size=6), seeded(), device)
    with running():
        whole, lse = attend(inputs, n_splits=1, return_lse=True)
        for n_splits in (2, 3, 4):
            out, other = attend(inputs, n_splits, return_lse=True)
            torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("queries", [None, (4, 6)])
def test_where_pages_lie_does_not_matter(queries, device, running) -> None:
    """Permuted pages give the same bits."""
    case = Paged((37, 20), queries, 3, 2, 16, torch.bfloat16, page_size=8)
    q, k, v, tables, *rest = paged_inputs(case, seeded(), device)
    order = torch.randperm(len(k), generator=seeded(1)).to(device)
    with running():
        out = attend((q, k, v, tables, *rest), n_splits=2)
        place = order.argsort().int()
        moved = torch.where((tables >= 0) & (tables < len(k)), place[tables % len(k)], tables)
        same = attend((q, k[order], v[order], moved, *rest), n_splits=2)
    assert not torch.equal(tables, moved) and torch.equal(out, same)


def test_pages_of_one_are_a_contiguous_cache(device, running) -> None:
    """And so is one page a sequence."""
    g = seeded()
    q, (k, v) = torch.randn(2, 6, 20, generator=g), torch.randn(2, 2, 40, 2, 20, generator=g)
    q, k, v = q.to(device), k.to(device), v.to(device)
    lengths = torch.tensor([33, 40], dtype=torch.int32, device=device)
    steps = torch.arange(80, dtype=torch.int32, device=device)
    with running():
        want = decode_attention(q, k, v, lengths, n_splits=2)
        for P in (40, 1):
            pages = (x.reshape(80 // P, P, 2, 20) for x in (k, v))
            tables = steps[: 80 // P].view(2, 40 // P)
            got = paged_decode_attention(q, *pages, tables, lengths, n_splits=2)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_two_sequences_share_a_page(device, running) -> None:
    """A common prefix of 8 tokens, stored once."""
    case = Paged((13, 13), (2, 3), 2, 1, 16, page_size=4)
    q, k, v, tables, lengths, offsets = paged_inputs(case, seeded(), device)
    tables[1, :2] = tables[0, :2]
    inputs = (q, k, v, tables, lengths, offsets)
    with running():
        out, lse = attend(inputs, return_lse=True)
        assert_right(inputs, out, lse)
        out, lse = attend((q[:2], *inputs[1:5]), return_lse=True)
    assert_right((q[:2], *inputs[1:5]), out, lse)


@pytest.mark.parametrize("queries", [None, (3, 5)])
def test_twice_gives_the_same_bits_and_leaves_the_inputs(queries, device, running) -> None:
    inputs = paged_inputs(Paged((33, 20), queries, 3, dtype=HALF), seeded(), device)
    before = [x.clone() for x in inputs]
    with running():
        first = attend(inputs, n_splits=2)
        second = attend(inputs, n_splits=2)
    assert torch.equal(first, second)
    for x, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's blocks of 16 keys make splits cheap")
@pytest.mark.parametrize("queries", [None, (1,)])
def test_splits_are_capped_by_the_blocks_of_keys(queries, running) -> None:
    inputs = paged_inputs(Paged((30,), queries, kv_heads=1, page_size=10), seeded())
    with running() as meter:
        attend(inputs, n_splits=100)
    assert meter.written["part_lse"] == 3 * 4  # 4 pages of 10 slots are three blocks


@pytest.mark.parametrize("queries", [None, (9, 4)])
def test_large_scores(queries, device, running) -> None:
    inputs = paged_inputs(Paged((40, 17), queries, 5, 1, 16, page_size=9), seeded(), device)
    inputs = (inputs[0] * 40, *inputs[1:])
    with running():
        out, lse = attend(inputs, n_splits=2, return_lse=True)
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("queries", [None, (4,)])
def test_largest_halves(queries, device, running) -> None:
    """65504 * 32768 * 64 overflows float16 and is exact in float32.

    Unsplit: beside such scores a log-sum-exp in float32 cannot tell one key from two.
    """
    case = Paged((20,), queries, 2, 1, 64, HALF, page_size=6)
    q, k, v, *rest = paged_inputs(case, seeded(), device)
    inputs = (q.sign() * 65504, k.sign() * 32768, v, *rest)
    with running():
        out = attend(inputs, n_splits=1)
    want, _ = exact(inputs)
    assert (out.cpu().double() - want).abs().max() <= 2**-11 * want.abs().max()


@pytest.mark.parametrize("queries", [None, (3,)])
def test_a_block_of_minus_infinity_has_no_weight(queries, device, running) -> None:
    case = Paged((40,), queries, 2, 1, 16, page_size=8)
    q, k, v, tables, lengths, *offsets = paged_inputs(case, seeded(), device)
    q = q.abs()
    k[tables[0, :4].long()] = -math.inf  # two blocks, and with two splits one of them whole
    tail = (q, k, v, tables[:, 4:], lengths - 32, *offsets)
    for n_splits in (1, 2):
        with running():
            inputs = (q, k, v, tables, lengths, *offsets)
            out, lse = attend(inputs, n_splits, return_lse=True)
        assert_right(tail, out, lse)


@pytest.mark.parametrize("queries", [None, (1, 2)])
def test_nan_stays_in_its_own_head_and_future(queries, device, running) -> None:
    """A key that is NaN reaches the queries of its KV head that see it, and no other."""
    case = Paged((20, 20), queries, 3, 2, 16, page_size=8)
    inputs = paged_inputs(case, seeded(), device)
    clean = reference(inputs)[0]
    k, tables = inputs[1], inputs[3]
    k[tables[1, 2].item(), 3, 1] = math.nan  # the last token: position 19
    with running():
        out = attend(inputs, n_splits=2)
    assert out[-1, 3:].isnan().all()
    clean[-1, 3:] = out[-1, 3:] = 0
    torch.testing.assert_close(out, clean)


def test_nothing_to_do(device, running) -> None:
    with running() as meter:
        for queries in (None, ()):
            inputs = paged_inputs(Paged((), queries), seeded(), device)
            assert attend(inputs).shape == (0, 2, 64)
        inputs = paged_inputs(Paged((5,), (0,)), seeded(), device)
        assert attend(inputs).shape == (0, 2, 64)
        inputs = paged_inputs(Paged((3,), kv_heads=0), seeded(), device)
        assert attend(inputs).shape == (1, 0, 64)
        _, k, v, *_ = inputs = paged_inputs(Paged((5,)), seeded(), device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        append_to_cache(k[0, :0], v[0, :0], k, v, none)
        assert meter is None or meter.launches == 0

        inputs = paged_inputs(Paged((0, 0)), seeded(), device)
        out, lse = attend((*inputs[:3], inputs[3][:, :0], inputs[4]), return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


# Offsets of one page, slot and head, each just beyond what 32 bits hold.
FAR = [(3, 1, 1, 0, 2**30), (1, 17, 1, 1, 2**27), (1, 1, 3, 2, 2**30)]


@pytest.mark.parametrize("pages, page_size, heads, axis, stride", FAR)
def test_offsets_beyond_32_bits(pages, page_size, heads, axis, stride, device, running) -> None:
    """Read and written, K and V in turn."""
    strides, shape = [16, 16, 16, 1], (pages, page_size, heads, 16)
    strides[axis] = stride
    furthest = (shape[axis] - 1) * stride
    assert furthest == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (furthest + 16), device=device)
    far = torch.empty(0, dtype=HALF, device=device).set_(storage).as_strided(shape, strides)
    g, T = seeded(), pages * page_size
    rows = torch.randn(2, T, heads, 16, generator=g).to(device, HALF)
    q = torch.randn(1, heads * 2, 16, generator=g).to(device, HALF)
    tables = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([T], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    slots = torch.arange(T, device=device)
    near = torch.zeros(shape, dtype=HALF, device=device)
    for k, v in ((far, near), (near, far)):
        with running():
            append_to_cache(*rows, k, v, slots)
            inputs = (q, k, v, tables, lengths)
            out = attend(inputs, n_splits=1)
            chunk = attend((*inputs, offsets), n_splits=1)
        dense = (q, *(x.reshape(shape) for x in rows), tables, lengths)
        want = paged_decode_attention_ref(*dense)[0]
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(chunk, want, rtol=0, atol=2e-3)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("batch, page_size", [(4, 16), (1, 24)])
def test_decoding_reads_the_cache_once(batch: int, page_size: int) -> None:
    """At most 1.25 times the bytes of K and V, at the tile of a real GPU."""
    from course.lab.meter import metered

    case = Paged((1024,) * batch, None, 4, 1, 128, HALF, page_size)
    inputs = paged_inputs(case, seeded())
    used = batch * 1024 * 128 * 2
    with metered() as meter, pretending("sm_90"):
        paged_decode_attention(*inputs, n_splits=4)
    assert meter.read["k_pages"] == meter.read["v_pages"] == used
    assert meter.loads <= 1.25 * 2 * used
    useful = 4 * 4 * batch * 1024 * 128
    assert meter.flops == useful * 16 // 4  # four query heads fill a tile of sixteen rows


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_prefill_multiplies_little_in_vain() -> None:
    """The last 256 of 1,024 tokens: at most 1.1 times the useful FLOPs, masked ones included."""
    from course.lab.meter import metered

    n, S, group, D = 256, 1024, 4, 128
    cached = S - n
    inputs = paged_inputs(Paged((S,), (n,), group, 1, D, HALF), seeded())
    with metered() as meter, pretending("sm_90"):
        paged_prefill_attention(*inputs, n_splits=1)
    useful = 4 * group * D * sum(range(cached + 1, S + 1))
    assert useful < meter.flops <= 1.1 * useful
    tiles = n * group // 128
    assert meter.read["k_pages"] == meter.read["v_pages"]
    # Each tile of queries reads the keys that it sees once.
    seen = sum(cached + (i + 1) * n // tiles for i in range(tiles))
    assert meter.read["k_pages"] == seen * D * 2
    assert meter.read["q"] == meter.written["part_out"] == inputs[0].nbytes


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_appending_moves_each_row_once() -> None:
    from course.lab.meter import metered

    k, v, k_pages, v_pages, slots = BENCHMARKS[-1].small(seeded(), torch.device("cpu"))
    slots[3] = -1
    with metered() as meter:
        append_to_cache(k, v, k_pages, v_pages, slots)
    moved = 2 * k[1:].nbytes
    assert meter.stores == moved and meter.loads == moved + slots.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size, heads, head_dim", [(1, 1, 1), (3, 9, 20), (16, 2, 64)])
def test_append(page_size, heads, head_dim, dtype, device, running) -> None:
    """Bit for bit, from fused rows into fused pages; all other slots stay as they were."""
    g, T, N = seeded(), 7, 12 // page_size + 7
    rows = torch.randn(T, 2, heads, head_dim, generator=g).to(device, dtype)
    rows[0, 0, 0], rows[1, 1, 0] = math.nan, -math.inf
    before = torch.randn(N * page_size, 2, heads, head_dim, generator=g).to(device, dtype)
    slots = torch.randperm(N * page_size, generator=g)[:T].to(device)
    slots[2] = slots[5] = -1
    want = before.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            want[slot] = row
    for append in (append_to_cache, append_to_cache_ref):
        pages = before.clone().unflatten(0, (N, page_size))
        fused = (rows[:, 0], rows[:, 1], pages[:, :, 0], pages[:, :, 1], slots)
        with running():
            append(*fused)
            append(*fused)  # writing the same again changes nothing
        torch.testing.assert_close(pages.flatten(0, 1), want, rtol=0, atol=0, equal_nan=True)


def test_append_then_decode(device, running) -> None:
    """The cache grown token by token, across a page boundary, is the cache."""
    case = Paged((9,), None, 2, 1, 16, page_size=4)
    q, k, v, tables, lengths = paged_inputs(case, seeded(), device)
    grown_k, grown_v = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    with running():
        for t in range(9):
            page, slot = tables[0, t // 4].item(), t % 4
            where = torch.tensor([page * 4 + slot], device=device)
            append_to_cache(k[page, slot][None], v[page, slot][None], grown_k, grown_v, where)
        want = attend((q, k, v, tables, lengths))
        assert torch.equal(attend((q, grown_k, grown_v, tables, lengths)), want)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
@pytest.mark.parametrize("queries", [None, (3, 5)])
def test_attention_writes_nothing_around_its_outputs(queries) -> None:
    from course import lab

    inputs = paged_inputs(Paged((17, 5), queries, 3, 2, 20, page_size=6), seeded())
    inputs = tuple(map(lab.guarded, inputs))
    q, k, v, tables, *rest = inputs
    out = lab.guarded(lab.poisoned(q.shape, torch.float32))
    lse = lab.guarded(lab.poisoned(q.shape[:2], torch.float32))
    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], tables.stride(0))
    sizes = dict(HEAD_DIM=20, GROUP=3, PAGE_SIZE=6, BLOCK_D=32, BLOCK_T=16, BLOCK_P=4)
    with lab.interpreted():
        if queries is None:
            _paged_decode_kernel[(2, 2, 1)](
                *(q, k, v, tables, *rest, out, lse, 20**-0.5, *strides), **sizes, BLOCK_G=16
            )
        else:
            _paged_prefill_kernel[(8 // 5 + 2, 2, 1)](
                *(q, k, v, tables, *rest, out, lse, 2, 20**-0.5, *strides),
                **(sizes | dict(BLOCK_M=16, BLOCK_B=2)),
            )
    lab.check_guard("part_out", out)
    lab.check_guard("part_lse", lse)
    assert_right(inputs, out, lse)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_append_writes_nothing_around_the_pages() -> None:
    from course import lab

    k = lab.guarded(torch.randn(3, 3, 20, generator=seeded()))
    pages = [lab.guarded(torch.zeros(2, 3, 5, 32)[:, :, :3, :20]) for _ in range(2)]
    with lab.interpreted():
        append_to_cache(k, k, *pages, torch.tensor([0, 5, -1]))
    for page in pages:
        lab.check_guard("pages", page)
        assert torch.equal(page[0, 0], k[0]) and torch.equal(page[1, 2], k[1])


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_entries_beyond_a_sequence_are_not_checked() -> None:
    """`paged_inputs` fills them with what is no page; those in use must be pages."""
    inputs = paged_inputs(Paged((5, 4), None, 1, 1, 16, page_size=4), seeded())
    _, k, _, tables, _ = inputs
    assert tables[0, 2] == -1 and tables[1, 1] == 2**31 - 1 and len(k) == 6
    for b, entry, page in ((0, 1, -1), (0, 1, 6), (1, 0, 6)):
        wrong = tables.clone()
        wrong[b, entry] = page
        message = rf"^block_tables: {page} at \[{b}, {entry}\] must be 0 to 5"
        with pytest.raises(ValueError, match=message):
            paged_decode_attention(*inputs[:3], wrong, inputs[4])


def pages(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Both caches, [3, 4, 2, 16] by default."""
    tensor = torch.ones(shape or (3, 4, 2, 16), dtype=dtype)
    return dict(k_pages=tensor, v_pages=tensor)


ATTENTION = dict(
    q=torch.ones(2, 4, 16),
    **pages(),
    block_tables=int32([0, 1], [2, -1]),
    seq_lens=int32(7, 3),
    n_splits=1,
)
BAD_ATTENTION = {
    "q: shape": dict(q=torch.ones(2, 1, 4, 16)),
    "q: dtype": dict(q=torch.ones(2, 4, 16, dtype=torch.int32)),
    "q: last stride 2": dict(q=torch.ones(2, 4, 32)[..., ::2]),
    "q: head_dim 129": dict(q=torch.ones(2, 4, 129), **pages(3, 4, 2, 129)),
    "q: head_dim 0": dict(q=torch.ones(2, 4, 0), **pages(3, 4, 2, 0)),
    "k_pages: shape": dict(k_pages=torch.ones(3, 4, 2, 8)),
    "k_pages: dtype": pages(dtype=HALF),
    "v_pages: shape": dict(v_pages=torch.ones(4, 4, 2, 16)),
    "v_pages: dtype": dict(v_pages=torch.ones(3, 4, 2, 16, dtype=HALF)),
    "k_pages: shape [0, 4": pages(0, 4, 2, 16),
    "k_pages: shape [3, 0": pages(3, 0, 2, 16),
    "k_pages: 3 KV heads": pages(3, 4, 3, 16),
    "k_pages: 0 KV heads": pages(3, 4, 0, 16),
    "k_pages: 1 KV heads": dict(q=torch.ones(2, 65, 16), **pages(3, 4, 1, 16)),
    "block_tables: shape": dict(block_tables=int32(0, 1)),
    "block_tables: dtype": dict(block_tables=torch.zeros(2, 2, dtype=torch.int64)),
    "block_tables: last stride": dict(block_tables=torch.zeros(2, 2, dtype=torch.int32).T),
    "block_tables: 3": dict(block_tables=int32([0, 3], [1, 1])),
    "seq_lens: dtype": dict(seq_lens=torch.ones(2, dtype=torch.int64)),
    "seq_lens: last stride": dict(seq_lens=torch.ones(4, dtype=torch.int32)[::2]),
    "seq_lens: -1": dict(seq_lens=int32(3, -1)),
    "seq_lens: 9": dict(seq_lens=int32(9, 3)),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 129": dict(n_splits=129),
}
BAD_PREFILL = {
    "cu_seqlens_q: shape": dict(cu_seqlens_q=int32(0, 2)),
    "cu_seqlens_q: dtype": dict(cu_seqlens_q=torch.tensor([0, 1, 2])),
    "cu_seqlens_q: 1 at [0] must be 0 to 0": dict(cu_seqlens_q=int32(1, 1, 2)),
    "cu_seqlens_q: 3 at [0] must be 2 to 2": dict(cu_seqlens_q=int32(0, 1, 3)),
    "cu_seqlens_q: difference: -1": dict(cu_seqlens_q=int32(0, -1, 2)),
    "seq_lens: less queries: -1 at [1]": dict(q=torch.ones(5, 4, 16), cu_seqlens_q=int32(0, 1, 5)),
}
APPEND = dict(
    k=torch.ones(2, 2, 16), v=torch.ones(2, 2, 16), **pages(), slot_mapping=torch.tensor([3, -1])
)
BAD_APPEND = {
    "k: shape": dict(k=torch.ones(2, 16)),
    "k: dtype": dict(k=torch.ones(2, 2, 16, dtype=torch.int32)),
    "v: shape": dict(v=torch.ones(2, 3, 16)),
    "v: dtype": dict(v=torch.ones(2, 2, 16, dtype=HALF)),
    "k: head_dim 129": dict(
        k=torch.ones(2, 2, 129), v=torch.ones(2, 2, 129), **pages(3, 4, 2, 129)
    ),
    "k: head_dim 0": dict(k=torch.ones(2, 2, 0), v=torch.ones(2, 2, 0), **pages(3, 4, 2, 0)),
    "k_pages: shape": pages(3, 4, 1, 16),
    "k_pages: dtype": pages(dtype=HALF),
    "v_pages: shape": dict(v_pages=torch.ones(2, 4, 2, 16)),
    "v_pages: dtype": dict(v_pages=torch.ones(3, 4, 2, 16, dtype=HALF)),
    "slot_mapping: shape": dict(slot_mapping=torch.tensor([3])),
    "slot_mapping: dtype": dict(slot_mapping=int32(3, -1)),
    "slot_mapping: 12": dict(slot_mapping=torch.tensor([3, 12])),
    "slot_mapping: -2": dict(slot_mapping=torch.tensor([-2, 3])),
    "slot_mapping: 0 at": pages(0, 4, 2, 16) | dict(slot_mapping=torch.tensor([0, -1])),
}
OFFSETS = dict(cu_seqlens_q=int32(0, 1, 2))
BAD = [
    *((paged_decode_attention, ATTENTION, *bad) for bad in BAD_ATTENTION.items()),
    *((paged_prefill_attention, ATTENTION | OFFSETS, *bad) for bad in BAD_ATTENTION.items()),
    *((paged_prefill_attention, ATTENTION | OFFSETS, *bad) for bad in BAD_PREFILL.items()),
    *((append_to_cache, APPEND, *bad) for bad in BAD_APPEND.items()),
]


@pytest.mark.parametrize(
    "launcher, good, start, changes", BAD, ids=[f"{b[0].__name__}-{b[2]}" for b in BAD]
)
def test_bad_arguments_are_named(launcher, good, start: str, changes) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(start)}"):
        launcher(**(good | changes))


def test_good_arguments_are_not_refused(device, running) -> None:
    """Those that the bad ones were made of, at the edge of what is allowed."""
    edge = ATTENTION | dict(seq_lens=int32(8, 4), n_splits=128)
    edge, append = (
        {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        for given in (edge | OFFSETS, APPEND)
    )
    offsets = edge.pop("cu_seqlens_q")
    with running():
        assert paged_decode_attention(**edge).eq(1).all()
        assert paged_prefill_attention(**edge, cu_seqlens_q=offsets).eq(1).all()
        append_to_cache(**append)
        none = append | pages(0, 4, 2, 16) | dict(slot_mapping=append["slot_mapping"].clamp(max=-1))
        append_to_cache(**{name: x.to(device) for name, x in none.items()})


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    for queries in (None, (2,)):
        case = Paged((5,), queries, group=64, kv_heads=1, head_dim=128, page_size=3)
        inputs = paged_inputs(case, seeded(), device)
        with running():
            out, lse = attend(inputs, n_splits=128, return_lse=True)
        assert_right(inputs, out, lse)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.name)
def test_a_benchmark_compares_the_same_things(benchmark, device, running) -> None:
    inputs = benchmark.small(torch.Generator(device).manual_seed(0), device)
    want = benchmark.reference(*(x.clone() for x in inputs))
    with running():
        got = benchmark.ours(*(x.clone() for x in inputs))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)
    for name in {"contiguous", "gather, then SDPA"} & set(benchmark.peers):
        with running():
            got = benchmark.peers[name](*inputs)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-2)


@pytest.mark.aot
@pytest.mark.parametrize("queries", [None, (3,)])
def test_no_rounding_error_reaches_an_exponent(queries) -> None:
    """A multiply-add, which the interpreter does not fuse, would be score minus rounded score."""
    inputs = paged_inputs(Paged((20,), queries, 2, 1, 64, HALF), seeded())
    ptx = compile_launches(lambda: attend(inputs, n_splits=1), "sm_90")[0].asm["ptx"]
    exponents = set(re.findall(r"ex2\.approx\S*\s+%r\d+, (%r\d+);", ptx))
    assert exponents and not exponents & set(re.findall(r"fma\.rn\.f32\s+(%r\d+),", ptx))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, zero = torch.ones(1, 1, 1, 1), int32([0])

    def launch() -> None:
        inputs = (one[0], one, one, zero, int32(1))
        paged_decode_attention(*inputs)
        paged_prefill_attention(*inputs, int32(0, 1))
        append_to_cache(one[0], one[0], one, one, torch.tensor([0]))

    names = [kernel.name for kernel in compile_launches(launch, target)]
    assert names == ["_paged_decode_kernel", "_paged_prefill_kernel", "_append_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_tiles_fit(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: head_dim 128 and 64 query heads a KV head, pages of one token."""
    q = torch.empty(1, 64, 128, dtype=dtype, device="meta")
    k = torch.empty(256, 1, 1, 128, dtype=dtype, device="meta")
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    tables, offsets = lengths.new_empty(1, 256), lengths.new_empty(2)
    launches = {
        "decode": lambda: paged_decode_attention(q, k, k, tables, lengths, 1),
        "prefill": lambda: paged_prefill_attention(q, k, k, tables, lengths, offsets, 1),
    }
    assert table.complaints(table.build(launches, [target]), STREAMING) == []


@pytest.mark.parametrize("cases", [DECODE_CASES, PREFILL_CASES])
def test_cases_cover_every_pair(cases) -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in cases]
    for one, two in itertools.combinations(AXES, 2):
        pairs = {(row[one], row[two]) for row in rows}
        assert len(pairs) == len(AXES[one]) * len(AXES[two])
