"""Attention of one new token over a contiguous KV cache, split along the keys.

Problem: each sequence b brings one query per head, and attends to the first
seq_lens[b] keys of its cache; query head h reads KV head h // (H / Hkv).

    s = q[b, h] @ k[b, :n, h_kv].T / sqrt(D),  n = seq_lens[b]
    out[b, h] = softmax(s) @ v[b, :n, h_kv]
    lse[b, h] = log(sum(exp(s)))

Through memory: K and V once, 2 * Hkv * D * sum(seq_lens) elements, which is
nearly all of it; q and out, 2 * B * H * D; the partials, B * H * n_splits *
(D + 1) floats, written once and read once. 4 * H * D FLOPs a key: at 16 bits
that is H / Hkv FLOPs a byte, so the time is the time to read the cache.

How it fills a GPU: one decode step has only B * Hkv independent pieces, so the
keys of a sequence are cut into splits (Flash-Decoding). A program takes all
query heads of one KV head, so that K and V are read once for the whole group,
and leaves a normalised average with its log-sum-exp; a second kernel weighs
the averages. A known bug that this avoids: masking the scores but not the load
of V, so that an unwritten cache slot holding NaN gives 0 * NaN = NaN.
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
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
MAX_GROUP = 64
MAX_SPLITS = 128


def decode_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in plain torch, in float32: the specification.

    Shapes as `decode_attention`. Returns out [B, H, D] in q's dtype and lse
    [B, H] float32, natural log.
    """
    B, H, D = q.shape
    group = H // k.shape[2]
    out = torch.zeros(B, H, D, device=q.device)
    lse = torch.full((B, H), -math.inf, device=q.device)
    for b, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        keys = k[b, :n].float().repeat_interleave(group, dim=1)  # [n, H, D]
        values = v[b, :n].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[b].float(), keys) / math.sqrt(D)
        lse[b] = scores.logsumexp(-1)
        out[b] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return out.to(q.dtype), lse


@triton.jit
def _decode_attention_kernel(
    q,  # [B, H, D]
    k,  # [B, S, Hkv, D]
    v,  # [B, S, Hkv, D]
    seq_lens,  # [B] int32
    part_out,  # [B, H, n_splits, D], dense
    part_lse,  # [B, H, n_splits] float32, dense
    scale,  # 1 / sqrt(D)
    s_qb,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_vb,
    s_vt,
    s_vh,
    HEAD_DIM: tl.constexpr,  # D
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_G: tl.constexpr,  # power of two, at least GROUP and 16 (tl.dot)
    BLOCK_T: tl.constexpr,  # keys per step
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
    k_row = k + b * s_kb + h_kv * s_kh
    v_row = v + b * s_vb + h_kv * s_vh

    length = tl.load(seq_lens + b)
    per_split = tl.cdiv(length, n_splits * BLOCK_T) * BLOCK_T
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_G], -1e38, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for t in range(start, end, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T).to(tl.int64)
        m_t = o_t < end
        k_tile = k_row + o_t[None, :] * s_kt + o_d[:, None]
        b_k = tl.load(k_tile, mask=m_t[None, :] & m_d[:, None], other=0.0)
        # Base 2: exp2 is one instruction, so log2(e) goes into the scale.
        s = tl.dot(b_q, b_k, input_precision="ieee")  # [G, T]
        s = s * (scale * 1.4426950408889634)
        s = tl.where(m_t[None, :], s, -float("inf"))

        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None])
        rescale = tl.exp2(high - new_high)
        total = total * rescale + tl.sum(p, 1)
        v_tile = v_row + o_t[:, None] * s_vt + o_d[None, :]
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
def _decode_merge_kernel(
    part_out,  # [rows, n_splits, D] float32, dense; rows = B * H
    part_lse,  # [rows, n_splits] float32, dense
    out,  # [rows, D], dense
    lse,  # [rows] float32, dense
    n_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two, at least n_splits
):
    """Weigh the splits of one query head by exp(lse). Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < n_splits
    m_d = o_d < HEAD_DIM

    part = row * n_splits + o_n
    b_lse = tl.load(part_lse + part, mask=m_n, other=-float("inf"))
    high = tl.maximum(tl.max(b_lse, 0), -1e38)
    weight = tl.exp(b_lse - high)  # [N]
    total = tl.sum(weight, 0)

    part_tile = part_out + part[:, None] * HEAD_DIM + o_d[None, :]
    b_out = tl.load(part_tile, mask=m_n[:, None] & m_d[None, :], other=0.0)
    merged = tl.sum(b_out * weight[:, None], 0) / tl.maximum(total, 1.0)
    tl.store(out + row * HEAD_DIM + o_d, merged, mask=m_d)
    tl.store(lse + row, high + tl.log(total))


def merge_splits(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge partial attentions over disjoint keys, for launchers that split.

    Args:
        part_out: [B, H, n_splits, D], normalised averages.
        part_lse: [B, H, n_splits] float32, their log-sum-exps, natural log;
            -inf marks a split without keys.
        out: [B, H, D], written. lse: [B, H] float32, written.

    All dense; not checked. Where all splits are empty: 0 and -inf.
    """
    B, H, n_splits, D = part_out.shape
    _decode_merge_kernel[(B * H,)](
        part_out,
        part_lse,
        out,
        lse,
        n_splits,
        HEAD_DIM=D,
        BLOCK_D=next_power_of_2(D),
        BLOCK_N=next_power_of_2(n_splits),
        num_warps=4,
    )


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    n_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One step of decode attention over a contiguous cache.

    Args:
        q: [B, H, D], float16, bfloat16 or float32, D <= 128.
        k, v: [B, S, Hkv, D], q's dtype; H is a multiple of Hkv, at most 64
            times it. Outer strides are free, the last one is 1.
        seq_lens: [B] int32, dense; 0 <= seq_lens[b] <= S, which on a GPU is
            checked in debug mode only. Slots from seq_lens[b] on are never
            read.
        n_splits: pieces per sequence, at most 128; by default enough to give
            every processor two programs. Never more than S has blocks.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [B, H, D] in q's dtype, dense; with return_lse also lse [B, H]
        float32, natural log. An empty sequence gives 0 and -inf. Scores, sums
        and partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
    """
    check_tensor("q", q, ("B", "H", "D"), DTYPES, q.device)
    B, H, D = q.shape
    check_tensor("k", k, (B, "S", "Hkv", D), (q.dtype,), q.device)
    S, kv_heads = k.shape[1:3]
    check_tensor("v", v, (B, S, kv_heads, D), (q.dtype,), q.device)
    check_tensor("seq_lens", seq_lens, (B,), (torch.int32,), q.device)
    check_values("seq_lens", seq_lens, 0, S)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    group = query_group("k", H, kv_heads, MAX_GROUP)
    check_splits(n_splits, MAX_SPLITS)

    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    block_t, options = _configuration(arch(q.device), D, q.dtype)
    if n_splits is None:
        n_splits = cdiv(2 * processors(q.device), B * kv_heads)
    n_splits = max(1, min(n_splits, cdiv(S, block_t), MAX_SPLITS))
    part_out, part_lse = out, lse  # a single split is the whole answer
    if n_splits > 1:
        part_out = out.new_empty(B, H, n_splits, D, dtype=torch.float32)
        part_lse = lse.new_empty(B, H, n_splits)

    block_d = max(16, next_power_of_2(D))
    _decode_attention_kernel[(B, kv_heads, n_splits)](
        q,
        k,
        v,
        seq_lens,
        part_out,
        part_lse,
        1 / math.sqrt(D),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        HEAD_DIM=D,
        GROUP=group,
        BLOCK_D=block_d,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_T=block_t,
        **options,
    )
    if n_splits > 1:
        merge_splits(part_out, part_lse, out, lse)
    return (out, lse) if return_lse else out


def _configuration(
    target: str, head_dim: int, dtype: torch.dtype
) -> tuple[int, dict[str, int]]:
    """Keys per step and launch options.

    Chosen so that no target spills, shared memory fits (64 KiB on AMD) and a
    thread loads 16 bytes at a time, for every head and group that we claim.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, {}
    is_amd = target.startswith("gfx")
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        block_t, warps = (16 if head_dim > 64 else 32), 8
    else:
        block_t, warps = (32 if is_amd else 64), 4
    # On NVIDIA two stages are one buffer, which cannot be filled and read.
    return block_t, {"num_warps": warps, "num_stages": 2 if is_amd else 3}
