"""Attention over a KV cache that lies in pages, for decoding and for prefill.

Problem: the cache of a sequence is cut into pages of P tokens that lie anywhere
in a pool; block_tables[b, t // P] is the page that holds token t of sequence
b, at slot t % P. Sequence b has n = seq_lens[b] cached tokens and brings
queries at its last positions: one when decoding, a chunk of the prompt when
prefilling. Query head h reads KV head h // (H / Hkv), and a query at position
i sees the keys 0 to i:

    s = q[i, h] @ K[:i + 1, h_kv].T / sqrt(D)
    out[i, h] = softmax(s) @ V[:i + 1, h_kv]
    lse[i, h] = log(sum(exp(s)))

Through memory, decoding: K and V once, 2 * Hkv * D * sum(seq_lens) elements,
and 4 bytes of the table a page and KV head; that is H / Hkv FLOPs a byte at 16
bits, so the time is the time to read the cache. Prefill of n queries: the keys
once per tile of queries, mostly from the L2 cache, for 4 * H * D FLOPs per
query and key, so the tensor cores set the time. Appending: each new row is
read once and written once.

How it fills a GPU: a program takes all query heads of one KV head, so that a
key read serves the whole group; in prefill the rows of a tile are (query, head)
pairs. Where sequences and KV heads are too few programs, the keys are split
and the parts merged by their log-sum-exps. A tile of keys gathers its page
numbers token by token, so its size does not depend on P, and along D it loads
16 bytes at a time. A known bug that this avoids: masking by page instead of by
token, so that the unwritten slots of the last page, which may hold NaN, and
table entries beyond the sequence, which may hold anything, are read.
"""

import math

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_splits,
    check_tensor,
    check_values,
    next_power_of_2,
    processors,
    query_group,
    reads_values,
)
from kernels.attention_decode import merge_splits

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
MAX_GROUP = 64
MAX_SPLITS = 128


def paged_decode_attention_ref(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding is prefill with one query a sequence: the specification."""
    cu_seqlens_q = torch.arange(len(q) + 1)
    return paged_prefill_attention_ref(
        q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q
    )


def paged_prefill_attention_ref(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in plain torch, in float32: the specification.

    Shapes as `paged_prefill_attention`. Returns out [T, H, D] in q's dtype and
    lse [T, H] float32, natural log.
    """
    T, H, D = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    out = torch.zeros(T, H, D, device=q.device)
    lse = torch.full((T, H), -math.inf, device=q.device)
    starts = cu_seqlens_q.tolist()
    for b, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        rows = slice(starts[b], starts[b + 1])
        pages = block_tables[b, : cdiv(n, page_size)].long()
        keys = k_pages[pages].flatten(0, 1)[:n].float()  # [n, Hkv, D]
        values = v_pages[pages].flatten(0, 1)[:n].float()
        keys = keys.repeat_interleave(H // kv_heads, dim=1)  # [n, H, D]
        values = values.repeat_interleave(H // kv_heads, dim=1)
        scores = torch.einsum("qhd,nhd->qhn", q[rows].float(), keys)
        position = torch.arange(n, device=q.device)
        of_query = position[n - scores.shape[0] :, None, None]
        scores = scores / math.sqrt(D)
        scores = scores.masked_fill(position > of_query, -math.inf)
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("qhn,nhd->qhd", scores.softmax(-1), values)
    return out.to(q.dtype), lse


def append_to_cache_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The same in plain torch: the specification."""
    page_size = k_pages.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_pages[slot // page_size, slot % page_size] = k[t]
            v_pages[slot // page_size, slot % page_size] = v[t]


@triton.jit
def _paged_decode_kernel(
    q,  # [B, H, D]
    k_pages,  # [N, P, Hkv, D]
    v_pages,  # [N, P, Hkv, D]
    block_tables,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    part_out,  # [B, H, n_splits, D], dense
    part_lse,  # [B, H, n_splits] float32, dense
    scale,  # 1 / sqrt(D)
    s_qb,
    s_qh,
    s_kn,
    s_kp,
    s_kh,
    s_vn,
    s_vp,
    s_vh,
    s_tb,
    HEAD_DIM: tl.constexpr,  # D
    GROUP: tl.constexpr,  # query heads per KV head
    PAGE_SIZE: tl.constexpr,  # P; a constant, since it divides
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_G: tl.constexpr,  # power of two, at least GROUP and 16 (tl.dot)
    BLOCK_T: tl.constexpr,  # keys per step
    BLOCK_P: tl.constexpr,  # power of two, at least the pages per step
):
    """Attention of one group of query heads over one split of its keys.

    Grid (B, Hkv, n_splits). The keys of sequence b are dealt to the splits in
    equal runs of whole blocks; the last runs may be short or empty. Writes the
    split's own softmax average to part_out and its log-sum-exp (natural log)
    to part_lse; an empty split writes 0 and -inf.
    """
    b = tl.program_id(0).to(tl.int64)
    h_kv = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)

    o_d = tl.arange(0, BLOCK_D)
    o_g = tl.arange(0, BLOCK_G)
    m_d = o_d < HEAD_DIM
    m_g = o_g < GROUP
    m_gd = m_g[:, None] & m_d[None, :]

    h = h_kv * GROUP + o_g  # [G], the query heads that share this KV head
    q_tile = q + b * s_qb + h[:, None] * s_qh + o_d[None, :]
    b_q = tl.load(q_tile, mask=m_gd, other=0.0)  # [G, D]

    length = tl.load(seq_lens + b)
    per_split = tl.cdiv(length, n_splits * BLOCK_T) * BLOCK_T
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_G], -1e38, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for t in range(start, end, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T)
        m_t = o_t < end
        # The pages that this tile touches, one or many, dealt to its tokens.
        o_p = t // PAGE_SIZE + tl.arange(0, BLOCK_P)
        m_p = o_p * PAGE_SIZE < end
        b_p = tl.load(block_tables + b * s_tb + o_p, mask=m_p)
        page = tl.gather(b_p, o_t // PAGE_SIZE - t // PAGE_SIZE, 0)  # [T]
        page = page.to(tl.int64)
        slot = (o_t % PAGE_SIZE).to(tl.int64)
        k_row = k_pages + page * s_kn + slot * s_kp + h_kv * s_kh
        v_row = v_pages + page * s_vn + slot * s_vp + h_kv * s_vh

        k_tile = k_row[None, :] + o_d[:, None]
        b_k = tl.load(k_tile, mask=m_t[None, :] & m_d[:, None], other=0.0)
        # Base 2: exp2 is one instruction, so log2(e) goes into the scale.
        s = tl.dot(b_q, b_k, input_precision="ieee")  # [G, T]
        s = s * (scale * 1.4426950408889634)
        s = tl.where(m_t[None, :], s, -float("inf"))

        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None])
        rescale = tl.exp2(high - new_high)
        total = total * rescale + tl.sum(p, 1)
        v_tile = v_row[:, None] + o_d[None, :]
        b_v = tl.load(v_tile, mask=m_t[:, None] & m_d[None, :], other=0.0)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee")
        high = new_high

    row = (b * tl.num_programs(1) * GROUP + h) * n_splits + split
    # The largest score adds exp2(0), so only an empty split is below 1.
    average = acc / tl.maximum(total, 1.0)[:, None]
    out_tile = part_out + row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(out_tile, average, mask=m_gd)
    lse = (high + tl.log2(total)) * 0.6931471805599453
    tl.store(part_lse + row, lse, mask=m_g)


@triton.jit
def _paged_prefill_kernel(
    q,  # [T, H, D]
    k_pages,  # [N, P, Hkv, D]
    v_pages,  # [N, P, Hkv, D]
    block_tables,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    cu_seqlens_q,  # [B + 1] int32
    part_out,  # [T, H, n_splits, D], dense
    part_lse,  # [T, H, n_splits] float32, dense
    batch,  # B
    scale,  # 1 / sqrt(D)
    s_qt,
    s_qh,
    s_kn,
    s_kp,
    s_kh,
    s_vn,
    s_vp,
    s_vh,
    s_tb,
    HEAD_DIM: tl.constexpr,  # D
    GROUP: tl.constexpr,  # query heads per KV head
    PAGE_SIZE: tl.constexpr,  # P
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_M: tl.constexpr,  # rows of a tile: (query, head of the group)
    BLOCK_T: tl.constexpr,  # keys per step
    BLOCK_P: tl.constexpr,  # power of two, at least the pages per step
    BLOCK_B: tl.constexpr,  # sequences per step of finding one's own
):
    """Attention of a tile of queries over one split of the keys they see.

    Grid (T // queries per tile + B, Hkv, n_splits): sequence b has the tiles
    from cu_seqlens_q[b] // queries + b on, as many as its queries can need,
    and the rest do nothing. Splits, partials and empty splits as in
    `_paged_decode_kernel`.
    """
    # The last tiles see the most keys: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h_kv = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    QUERIES: tl.constexpr = BLOCK_M // GROUP

    # Count the sequences whose first tile is not later: one wait for memory,
    # where a binary search has log2(B). The end, repeated, is never counted.
    begun = tl.full([], 0, tl.int32)
    for i in range(0, batch, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        begin = tl.load(cu_seqlens_q + tl.minimum(o_b, batch)) // QUERIES + o_b
        begun += tl.sum((begin <= tile).to(tl.int32), 0)
    b = (begun - 1).to(tl.int64)
    row_0 = tl.load(cu_seqlens_q + b)
    queries = tl.load(cu_seqlens_q + b + 1) - row_0
    query_0 = (tile - (row_0 // QUERIES + begun - 1)) * QUERIES
    query_end = tl.minimum(query_0 + QUERIES, queries)
    if query_0 >= query_end:
        return

    o_d = tl.arange(0, BLOCK_D)
    o_m = tl.arange(0, BLOCK_M)
    query = query_0 + o_m // GROUP  # [M]
    h = h_kv * GROUP + o_m % GROUP  # [M]
    m_d = o_d < HEAD_DIM
    m_m = query < query_end
    m_md = m_m[:, None] & m_d[None, :]
    o_row = (row_0 + query).to(tl.int64)  # [M], rows of q
    q_tile = q + (o_row * s_qt + h * s_qh)[:, None] + o_d[None, :]
    b_q = tl.load(q_tile, mask=m_md, other=0.0)  # [M, D]

    cached = tl.load(seq_lens + b) - queries  # keys before the first query
    position = (cached + query)[:, None]
    seen = cached + query_end  # by the last query of the tile
    per_split = tl.cdiv(seen, n_splits * BLOCK_T) * BLOCK_T
    start = split * per_split
    end = tl.minimum(start + per_split, seen)
    # Whole blocks that the first query sees need no mask, nor does any row.
    unmasked = (cached + query_0 + 1) // BLOCK_T * BLOCK_T
    middle = tl.maximum(tl.minimum(unmasked, end), start)

    base_2 = scale * 1.4426950408889634  # exp2 is one instruction
    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        first = middle if masked else start
        last = end if masked else middle
        for t in range(first, last, BLOCK_T):
            o_t = t + tl.arange(0, BLOCK_T)
            m_t = o_t < end
            o_p = t // PAGE_SIZE + tl.arange(0, BLOCK_P)
            m_p = o_p * PAGE_SIZE < end
            b_p = tl.load(block_tables + b * s_tb + o_p, mask=m_p)
            page = tl.gather(b_p, o_t // PAGE_SIZE - t // PAGE_SIZE, 0)  # [T]
            page = page.to(tl.int64)
            slot = (o_t % PAGE_SIZE).to(tl.int64)
            k_row = k_pages + page * s_kn + slot * s_kp + h_kv * s_kh
            v_row = v_pages + page * s_vn + slot * s_vp + h_kv * s_vh

            k_tile = k_row[None, :] + o_d[:, None]
            m_k = m_t[None, :] & m_d[:, None]
            b_k = tl.load(k_tile, mask=m_k, other=0.0)  # [D, T]
            s = tl.dot(b_q, b_k, input_precision="ieee")  # [M, T]
            if masked:
                s = tl.where(o_t[None, :] <= position, s, -float("inf"))

            # Subtract, then scale: fused, s * base_2 - high * base_2 leaves
            # a rounding error in the exponent, by which a largest score
            # beyond 1e9 would weigh 0 or infinity, not 1.
            new_high = tl.maximum(high, tl.max(s, 1))
            p = tl.exp2((s - new_high[:, None]) * base_2)
            rescale = tl.exp2((high - new_high) * base_2)
            total = total * rescale + tl.sum(p, 1)
            v_tile = v_row[:, None] + o_d[None, :]
            m_v = m_t[:, None] & m_d[None, :]
            b_v = tl.load(v_tile, mask=m_v, other=0.0)  # [T, D]
            acc = acc * rescale[:, None]
            acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee")
            high = new_high

    row = (o_row * tl.num_programs(1) * GROUP + h) * n_splits + split
    # The largest score adds exp2(0), so only a row without keys is below 1.
    average = acc / tl.maximum(total, 1.0)[:, None]
    out_tile = part_out + row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(out_tile, average, mask=m_md)
    lse = high * scale + tl.log(total)
    tl.store(part_lse + row, lse, mask=m_m)


@triton.jit
def _append_kernel(
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    k_pages,  # [N, P, Hkv, D]
    v_pages,  # [N, P, Hkv, D]
    slot_mapping,  # [T] int64
    kv_heads,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    s_kn,
    s_kp,
    s_kph,
    s_vn,
    s_vp,
    s_vph,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads per program
):
    """Copy some heads of one token to its slot. Grid (T, Hkv / BLOCK_H)."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    h = h[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slot_mapping + t)
    if slot < 0:  # a row of padding
        return
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    m_hd = (h < kv_heads) & (o_d < HEAD_DIM)
    b_k = tl.load(k + t * s_kt + h * s_kh + o_d, mask=m_hd)
    b_v = tl.load(v + t * s_vt + h * s_vh + o_d, mask=m_hd)
    k_tile = k_pages + page * s_kn + place * s_kp + h * s_kph + o_d
    v_tile = v_pages + page * s_vn + place * s_vp + h * s_vph + o_d
    tl.store(k_tile, b_k, mask=m_hd)
    tl.store(v_tile, b_v, mask=m_hd)


def paged_decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    n_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One step of decode attention over a paged cache.

    Args:
        q: [B, H, D], float16, bfloat16 or float32, D <= 128.
        k_pages, v_pages: [N, P, Hkv, D], q's dtype: N pages of P tokens, any
            P; H is a multiple of Hkv, at most 64 times it. Outer strides are
            free, the last one is 1.
        block_tables: [B, max_blocks] int32, the pages of each sequence in
            order. Entries from ceil(seq_lens[b] / P) on may hold anything.
            Sequences may share pages.
        seq_lens: [B] int32, dense; 0 <= seq_lens[b] <= max_blocks * P. Slots
            from there on are never read.
        n_splits: pieces per sequence, at most 128; by default enough to give
            every processor two programs. Never more than max_blocks * P keys
            have blocks.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [B, H, D] in q's dtype, dense; with return_lse also lse [B, H]
        float32, natural log. An empty sequence gives 0 and -inf. Scores, sums
        and partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above. On a GPU, page
            numbers and lengths are checked in debug mode only.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; Flash-Decoding,
    https://pytorch.org/blog/flash-decoding/.
    """
    check_tensor("q", q, ("B", "H", "D"), DTYPES, q.device)
    B, H, D = q.shape
    group = _check_cache(q, k_pages, v_pages, n_splits)
    page_size, kv_heads = k_pages.shape[1:3]
    _check_sequences(block_tables, seq_lens, B, k_pages)

    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    block_t, options = _decode_configuration(arch(q.device), D, group, q.dtype)
    blocks = cdiv(block_tables.shape[1] * page_size, block_t)
    n_splits = _splits(n_splits, B * kv_heads, blocks, q.device)
    part_out, part_lse = _partials(out, lse, n_splits)
    _paged_decode_kernel[(B, kv_heads, n_splits)](
        q,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        part_out,
        part_lse,
        1 / math.sqrt(D),
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        block_tables.stride(0),
        HEAD_DIM=D,
        GROUP=group,
        PAGE_SIZE=page_size,
        BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_T=block_t,
        BLOCK_P=next_power_of_2(cdiv(block_t - 1, page_size) + 1),
        **options,
    )
    if n_splits > 1:
        merge_splits(part_out, part_lse, out, lse)
    return (out, lse) if return_lse else out


def paged_prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    n_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last queries of each sequence, cache in pages.

    For a chunk of a long prompt, or a prompt whose beginning is cached. The
    keys of the queries themselves must be in the cache already
    (`append_to_cache`).

    Args:
        q: [T, H, D], the queries of all sequences one after another; float16,
            bfloat16 or float32, D <= 128.
        k_pages, v_pages, block_tables: as `paged_decode_attention`. A value
            that is infinite or NaN may reach queries up to a tile before it.
        seq_lens: [B] int32, dense, cached tokens including the queries' own:
            sequence b's n queries are its tokens seq_lens[b] - n and on.
        cu_seqlens_q: [B + 1] int32, dense: sequence b's queries are rows
            cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. Starts with 0, ends
            with T; a sequence may have no query.
        n_splits: pieces that the keys of a tile are cut into, at most 128; by
            default enough to give every processor two programs, which for all
            but the shortest chunks is one.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [T, H, D] in q's dtype, dense; with return_lse also lse [T, H]
        float32, natural log. Scores, sums and partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above. On a GPU, page
            numbers, lengths and offsets are checked in debug mode only.

    Source: chunked prefill, https://arxiv.org/abs/2403.02310; FlashAttention-2,
    https://arxiv.org/abs/2307.08691.
    """
    check_tensor("q", q, ("T", "H", "D"), DTYPES, q.device)
    T, H, D = q.shape
    group = _check_cache(q, k_pages, v_pages, n_splits)
    page_size, kv_heads = k_pages.shape[1:3]
    _check_sequences(block_tables, seq_lens, "B", k_pages)
    B = len(block_tables)
    capacity = block_tables.shape[1] * page_size
    check_tensor(
        "cu_seqlens_q", cu_seqlens_q, (B + 1,), (torch.int32,), q.device
    )
    check_values("cu_seqlens_q", cu_seqlens_q[:1], 0, 0)
    check_values("cu_seqlens_q", cu_seqlens_q[-1:], T, T)
    if reads_values(q.device):
        queries = cu_seqlens_q.diff()
        check_values("cu_seqlens_q: difference", queries, 0, T)
        cached = seq_lens - queries
        check_values("seq_lens: less queries", cached, 0, capacity)

    out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    block_m, block_t, block_b, options = _prefill_configuration(
        arch(q.device), D, q.dtype
    )
    tiles = T // (block_m // group) + B
    blocks = cdiv(capacity, block_t)
    n_splits = _splits(n_splits, tiles * kv_heads, blocks, q.device)
    part_out, part_lse = _partials(out, lse, n_splits)
    _paged_prefill_kernel[(tiles, kv_heads, n_splits)](
        q,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        part_out,
        part_lse,
        B,
        1 / math.sqrt(D),
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        block_tables.stride(0),
        HEAD_DIM=D,
        GROUP=group,
        PAGE_SIZE=page_size,
        BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        BLOCK_P=next_power_of_2(cdiv(block_t - 1, page_size) + 1),
        BLOCK_B=block_b,
        **options,
    )
    if n_splits > 1:
        merge_splits(part_out, part_lse, out, lse)
    return (out, lse) if return_lse else out


def append_to_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write new keys and values to their slots in the pages, in place.

    Args:
        k, v: [T, Hkv, D], float16, bfloat16 or float32, D <= 128. Outer
            strides are free, the last one is 1.
        k_pages, v_pages: [N, P, Hkv, D], k's dtype, written; strides too are
            free.
        slot_mapping: [T] int64, dense: row t goes to page slot // P, place
            slot % P; -1 skips the row. No slot may occur twice.

    Raises:
        ValueError: an argument breaks one of the rules above. On a GPU the
            slots are checked in debug mode only.

    Source: https://github.com/vllm-project/vllm, reshape_and_cache.
    """
    check_tensor("k", k, ("T", "Hkv", "D"), DTYPES, k.device)
    check_tensor("v", v, k.shape, (k.dtype,), k.device)
    T, kv_heads, D = k.shape
    pages = ("N", "P", kv_heads, D)
    check_tensor("k_pages", k_pages, pages, (k.dtype,), k.device)
    check_tensor("v_pages", v_pages, k_pages.shape, (k.dtype,), k.device)
    check_tensor("slot_mapping", slot_mapping, (T,), (torch.int64,), k.device)
    page_size = k_pages.shape[1]
    slots = k_pages.shape[0] * page_size
    check_values("slot_mapping", slot_mapping, -1, slots - 1)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"k: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    if k.numel() == 0 or slots == 0:
        return
    # One warp moves 8 heads of K and of V: 4 KiB in flight at 16 bits.
    block_h = min(8, next_power_of_2(kv_heads))
    _append_kernel[(T, cdiv(kv_heads, block_h))](
        k,
        v,
        k_pages,
        v_pages,
        slot_mapping,
        kv_heads,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        HEAD_DIM=D,
        PAGE_SIZE=page_size,
        BLOCK_D=next_power_of_2(D),
        BLOCK_H=block_h,
        num_warps=1,
    )


def _check_cache(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    n_splits: int | None,
) -> int:
    """Check what both attentions share; returns query heads per KV head."""
    H, D = q.shape[1:]
    pages = ("N", "P", "Hkv", D)
    check_tensor("k_pages", k_pages, pages, (q.dtype,), q.device)
    check_tensor("v_pages", v_pages, k_pages.shape, (q.dtype,), q.device)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    if k_pages.shape[0] * k_pages.shape[1] == 0:
        raise ValueError(
            f"k_pages: shape {list(k_pages.shape)} must have a page of a slot"
        )
    kv_heads = k_pages.shape[2]
    group = query_group("k_pages", H, kv_heads, MAX_GROUP)
    check_splits(n_splits, MAX_SPLITS)
    return group


def _check_sequences(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    batch: int | str,
    k_pages: torch.Tensor,
) -> None:
    """Check lengths, and page numbers as far as a sequence uses them."""
    N, page_size = k_pages.shape[:2]
    device, int32 = k_pages.device, (torch.int32,)
    check_tensor("seq_lens", seq_lens, (batch,), int32, device)
    tables = (len(seq_lens), "max_blocks")
    check_tensor("block_tables", block_tables, tables, int32, device)
    max_blocks = block_tables.shape[1]
    check_values("seq_lens", seq_lens, 0, max_blocks * page_size)
    if reads_values(device):
        first = torch.arange(max_blocks, device=device) * page_size
        used = torch.where(first < seq_lens[:, None], block_tables, 0)
        check_values("block_tables", used, 0, N - 1)


def _splits(
    n_splits: int | None, programs: int, blocks: int, device: torch.device
) -> int:
    """Pieces of the keys: as asked or two programs a processor, if so many."""
    if n_splits is None:
        n_splits = cdiv(2 * processors(device), programs)
    return max(1, min(n_splits, blocks, MAX_SPLITS))


def _partials(
    out: torch.Tensor, lse: torch.Tensor, n_splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the splits go; a single one is the whole answer."""
    if n_splits == 1:
        return out, lse
    shape = (*lse.shape, n_splits)
    part_out = lse.new_empty(*shape, out.shape[-1])
    return part_out, lse.new_empty(shape)


def _decode_configuration(
    target: str, head_dim: int, group: int, dtype: torch.dtype
) -> tuple[int, dict[str, int]]:
    """Keys per step and launch options.

    Chosen so that no target spills, shared memory fits (64 KiB on AMD) and a
    thread loads 16 bytes at a time, at the sizes of the committed table and at
    the edge of what we claim.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, {}
    amd = target.startswith("gfx")
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        block_t, warps = 32, (4 if amd else 8 if head_dim <= 64 else 16)
    else:
        block_t, warps = (32 if amd else 64), (4 if amd or group <= 16 else 8)
        if head_dim <= 64:
            block_t *= 2  # the same bytes in flight
    # Page numbers take every other stage: five stages keep two tiles of keys
    # in flight, three would let go of the only one before asking for the next.
    return block_t, {"num_warps": warps, "num_stages": 2 if amd else 5}


def _prefill_configuration(
    target: str, head_dim: int, dtype: torch.dtype
) -> tuple[int, int, int, dict[str, int]]:
    """Rows of a tile, keys and sequences per step, and launch options."""
    if target == "cpu":
        return 64, 16, 4, {}
    amd = target.startswith("gfx")
    if dtype == torch.float32 and amd:
        block_m, block_t, warps, stages = 64, 32, 4, 2
    elif dtype == torch.float32:
        block_m, stages = 64, 2
        block_t, warps = (32, 8) if head_dim <= 64 else (64, 16)
    elif amd:
        block_m, block_t, warps, stages = 64, 64, 4, 2
    else:  # on sm_80, 64 keys of a wide head would spill
        large = head_dim > 64 and target not in ("sm_90", "sm_100")
        block_m, block_t, warps, stages = 128, (32 if large else 64), 8, 5
    options = {"num_warps": warps, "num_stages": stages}
    return block_m, block_t, 128, options
