"""Causal attention of many new tokens at once (prefill), without its matrix.

Problem: sequences of different lengths lie packed one after the other. The
n_q queries of a sequence stand at the last of its n_k positions, so a whole
prompt (n_q = n_k) and a chunk over what is cached already (n_q < n_k) are the
same call. The query at position p sees keys max(0, p - window + 1) to p; query
head h reads KV head h // (H / Hkv).

    s[i, j] = q[i, h] @ k[j, h_kv] / sqrt(D),  j seen by p = n_k - n_q + i
    out[i, h] = softmax(s[i]) @ v[:, h_kv]
    lse[i, h] = log(sum(exp(s[i])))

Through memory: q and out, 2 * Tq * H * D elements; K and V, 2 * Tk * Hkv * D,
once if the L2 cache holds them between the blocks of queries; lse. The scores,
n_q * n_k a head, never leave the chip. 4 * D FLOPs for each pair of a query
head and a key that it sees, n * (n + 1) / 2 pairs for a prompt of n: hundreds
of FLOPs a byte, so the time is that of the tensor cores.

How it fills a GPU: a program takes one block of queries of one head and walks
over their keys in blocks, holding a running maximum and sum (FlashAttention).
It skips the blocks that no query of it sees, and masks only those that the
diagonal or the window's edge cuts. Late queries see most keys, so programs
start with them and the short ones even out the end; heads come first in the
grid, so that the group of a KV head reads it from the cache. A known bug that
this avoids: a row whose first block is masked whole has the maximum -inf, and
exp(-inf - -inf) = NaN stays in its sum; here the maximum has a finite floor.
"""

import itertools
import math

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_int,
    check_tensor,
    check_values,
    next_power_of_2,
    reads_values,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
MAX_SEQLEN = 2**20  # queries; the grid's second axis ends at 65,535 blocks
MAX_BATCH = 65_535  # the grid's third axis
MAX_WINDOW = 2**30  # more than any sequence has
WIDE = ("sm_90", "sm_100")  # 227 KiB of shared memory and large products


def prefill_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in plain torch, in float32: the specification.

    Shapes as `prefill_attention`. Returns out [Tq, H, D] in q's dtype and lse
    [Tq, H] float32, natural log.
    """
    Tq, H, D = q.shape
    group = H // k.shape[1]
    out = torch.zeros(Tq, H, D, device=q.device)
    lse = torch.full((Tq, H), -math.inf, device=q.device)
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    for (q0, k0), (q1, k1) in itertools.pairwise(starts):
        keys = k[k0:k1].float().repeat_interleave(group, dim=1)  # [n_k, H, D]
        values = v[k0:k1].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->qhk", q[q0:q1].float(), keys)
        o_q = torch.arange(q1 - q0, device=q.device) + (k1 - k0) - (q1 - q0)
        back = o_q[:, None] - torch.arange(k1 - k0, device=q.device)
        seen = (back >= 0) & (back < (window or MAX_WINDOW))  # [n_q, n_k]
        scores = (scores / math.sqrt(D)).where(seen[:, None], -math.inf)
        lse[q0:q1] = scores.logsumexp(-1)
        weights = scores.softmax(-1).where(seen[:, None], 0)
        out[q0:q1] = torch.einsum("qhk,khd->qhd", weights, values)
    return out.to(q.dtype), lse


@triton.jit
def _attend_block(
    high,  # [M] float32, largest score so far, not scaled
    total,  # [M] float32, sum of the weights so far
    acc,  # [M, D] float32, sum of weight * value so far
    b_q,  # [M, D]
    k_row,  # k at the sequence's first key, [n_k, D]
    v_row,  # v at the sequence's first key, [n_k, D]
    s_kt,
    s_vt,
    t,  # first key of the block
    end,  # no query of the tile sees a key from here on
    o_q,  # [M], positions of the queries
    window,
    scale,  # log2(e) / sqrt(D)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CUT: tl.constexpr,  # some query does not see some key
):
    """One step of the online softmax: add BLOCK_N keys to the sums."""
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    m_nd = o_d[None, :] < HEAD_DIM  # [1, D], or [N, D] where cut
    if IS_CUT:
        m_nd = m_nd & (o_n[:, None] < end - t)
    # Only t moves from step to step: the offsets around it are computed once.
    o_row = o_n.to(tl.int64)[:, None]
    k_tile = k_row + t.to(tl.int64) * s_kt + (o_row * s_kt + o_d[None, :])
    v_tile = v_row + t.to(tl.int64) * s_vt + (o_row * s_vt + o_d[None, :])

    b_k = tl.load(k_tile, mask=m_nd, other=0.0)  # [N, D]
    s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [M, N]
    if IS_CUT:
        own = (o_q - t)[:, None]  # the query's own key, counted from t
        seen = (o_n[None, :] <= own) & (o_n[None, :] > own - window)
        s = tl.where(seen, s, -float("inf"))
    new_high = tl.maximum(high, tl.max(s, 1))
    # Subtract, then scale: s * scale - high * scale is fused into one step and
    # leaves the rounding error of high * scale in the exponent, by which a
    # largest score beyond 1e9 would weigh 0 or infinity, not 1.
    p = tl.exp2((s - new_high[:, None]) * scale)
    rescale = tl.exp2((high - new_high) * scale)
    total = total * rescale + tl.sum(p, 1)
    b_v = tl.load(v_tile, mask=m_nd, other=0.0)  # [N, D]
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee")
    return new_high, total, acc


@triton.jit
def _prefill_attention_kernel(
    q,  # [Tq, H, D]
    k,  # [Tk, Hkv, D]
    v,  # [Tk, Hkv, D]
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    out,  # [Tq, H, D], dense
    lse,  # [Tq, H] float32, dense
    scale,  # 1 / sqrt(D)
    group,  # query heads per KV head
    window,  # keys that a query sees, itself included
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    HEAD_DIM: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # power of two, at least D and 16 (tl.dot)
    BLOCK_M: tl.constexpr,  # queries per program
    BLOCK_N: tl.constexpr,  # keys per step where every query sees all
    BLOCK_CUT: tl.constexpr,  # and where masks cut them: they cost registers
):
    """Attention of one block of queries of one head.

    Grid (H, blocks of the longest sequence, B); the blocks of a sequence are
    taken from its end, and programs that it has no block for do nothing.
    Writes out and lse (natural log) of its queries; 0 and -inf where a query
    sees no key.
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(2)
    n_heads = tl.num_programs(0)
    q_start = tl.load(cu_seqlens_q + b)
    k_start = tl.load(cu_seqlens_k + b)
    n_q = tl.load(cu_seqlens_q + b + 1) - q_start
    n_k = tl.load(cu_seqlens_k + b + 1) - k_start
    m = (tl.cdiv(n_q, BLOCK_M) - 1 - tl.program_id(1)) * BLOCK_M
    if m < 0:
        return

    o_d = tl.arange(0, BLOCK_D)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < n_q - m
    m_md = m_m[:, None] & (o_d[None, :] < HEAD_DIM)
    row, o_row = (q_start + m).to(tl.int64), o_m.to(tl.int64)
    q_row = q + row * s_qt + h * s_qh
    q_tile = q_row + o_row[:, None] * s_qt + o_d[None, :]
    b_q = tl.load(q_tile, mask=m_md, other=0.0)  # [M, D]
    k_row = k + k_start.to(tl.int64) * s_kt + h // group * s_kh
    v_row = v + k_start.to(tl.int64) * s_vt + h // group * s_vh

    first = m + n_k - n_q  # position of the first query
    end = tl.minimum(first + BLOCK_M, n_k)  # and behind the last one
    start = tl.maximum(first + 1 - window, 0)
    # From start on: keys that the window's edge cuts from some query, keys
    # that every query sees, keys that the diagonal cuts.
    n_edge = tl.cdiv(tl.maximum(end - window, 0) - start, BLOCK_CUT)
    whole = start + n_edge * BLOCK_CUT
    n_whole = tl.maximum(first + 1 - whole, 0) // BLOCK_N
    skip = n_whole * BLOCK_N
    n_cut = tl.cdiv(end - start - skip, BLOCK_CUT)

    o_q = first + o_m
    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Base 2: exp2 is one instruction, so log2(e) goes into the scale.
    scale_2 = scale * 1.4426950408889634
    for i in range(n_whole):
        high, total, acc = _attend_block(
            *(high, total, acc, b_q, k_row, v_row, s_kt, s_vt),
            *(whole + i * BLOCK_N, end, o_q, window, scale_2),
            *(HEAD_DIM, BLOCK_D, BLOCK_N, False),
        )
    for i in range(n_cut):
        t = start + i * BLOCK_CUT + tl.where(i < n_edge, 0, skip)
        high, total, acc = _attend_block(
            *(high, total, acc, b_q, k_row, v_row, s_kt, s_vt),
            *(t, end, o_q, window, scale_2),
            *(HEAD_DIM, BLOCK_D, BLOCK_CUT, True),
        )

    # The largest score adds exp2(0), so only a row without keys is below 1.
    average = acc / tl.maximum(total, 1.0)[:, None]
    row, o_row = row * n_heads + h, o_row * n_heads
    out_tile = out + row * HEAD_DIM + o_row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(out_tile, average, mask=m_md)
    tl.store(lse + row + o_row, high * scale + tl.log(total), mask=m_m)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    window: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed sequences of queries over their keys.

    Args:
        q: [Tq, H, D], float16, bfloat16 or float32, D <= 128.
        k, v: [Tk, Hkv, D], q's dtype; H is a multiple of Hkv. Outer strides
            are free, the last one is 1.
        cu_seqlens_q: [B + 1] int32, dense, B <= 65,535: sequence b has the
            queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Starts with 0,
            never falls, ends with Tq.
        cu_seqlens_k: [B + 1] int32, dense: the same for the keys; may end
            before Tk, and the rows behind are never read.
        max_seqlen_q: at least the queries of the longest sequence, at most
            2**20.
        window: keys that a query sees, itself included, 1 to 2**30; None for
            all before it.
        return_lse: also return the log-sum-exp of the scores.

    The queries of a sequence stand at its last positions. Where there are more
    queries than keys, the first ones see no key. The values of cu_seqlens_q
    and cu_seqlens_k are checked on a GPU in debug mode only.

    Returns:
        out [Tq, H, D] in q's dtype, dense; with return_lse also lse [Tq, H]
        float32, natural log. A query without keys gives 0 and -inf. Scores
        and sums are float32, weights are rounded to q's dtype.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691; the window is
    that of Mistral 7B, https://arxiv.org/abs/2310.06825.
    """
    check_tensor("q", q, ("Tq", "H", "D"), DTYPES, q.device)
    Tq, H, D = q.shape
    check_tensor("k", k, ("Tk", "Hkv", D), (q.dtype,), q.device)
    Tk, kv_heads = k.shape[:2]
    check_tensor("v", v, (Tk, kv_heads, D), (q.dtype,), q.device)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    group = H // max(kv_heads, 1)
    if group * kv_heads != H:
        raise ValueError(
            f"k: {kv_heads} KV heads must divide the {H} query heads of q"
        )
    check_int("max_seqlen_q", max_seqlen_q, 0, MAX_SEQLEN)
    if window is None:
        window = MAX_WINDOW
    check_int("window", window, 1, MAX_WINDOW)
    int32 = (torch.int32,)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), int32, q.device)
    B = len(cu_seqlens_q) - 1
    if not 0 <= B <= MAX_BATCH:
        raise ValueError(
            f"cu_seqlens_q: {B} sequences must be 0 to {MAX_BATCH}"
        )
    check_tensor("cu_seqlens_k", cu_seqlens_k, (B + 1,), int32, q.device)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, Tq, Tq, max_seqlen_q)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, 0, Tk, Tk)

    out = torch.empty(Tq, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(Tq, H, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    tiles = _configuration(arch(q.device), D, q.dtype)
    _prefill_attention_kernel[(H, cdiv(max_seqlen_q, tiles["BLOCK_M"]), B)](
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        lse,
        1 / math.sqrt(D),
        group,
        window,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        HEAD_DIM=D,
        BLOCK_D=max(16, next_power_of_2(D)),
        **tiles,
    )
    return (out, lse) if return_lse else out


def _check_offsets(
    name: str, offsets: torch.Tensor, low: int, high: int, longest: int
) -> None:
    """Offsets from 0 in steps of 0 to `longest` to an end of low to high."""
    if not reads_values(offsets.device):
        return
    check_values(name, offsets[:1], 0, 0)
    check_values(name, offsets[-1:], low, high)
    check_values(f"{name}: length", offsets.diff(), 0, longest)


def _configuration(
    target: str, head_dim: int, dtype: torch.dtype
) -> dict[str, int]:
    """Tile sizes and launch options.

    Chosen so that no target spills, shared memory fits (64 KiB on AMD) and a
    thread loads 16 bytes at a time, for every head that we claim. With 128
    rows a byte of K and V serves 128 FLOPs, so that the L2 cache keeps up.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_CUT": 16}
    is_amd = target.startswith("gfx")
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        m, n, cut, warps, stages = 32, 16, 16, (4 if is_amd else 8), 2
    elif is_amd:
        m, n, cut, warps, stages = 128, 64, 64, 8, 2
    elif head_dim <= 64:
        m, n, cut, warps, stages = 128, 64, 64, 8, 3
    elif target in WIDE:
        m, n, cut, warps, stages = 128, 128, 64, 8, 3
    else:
        m, n, cut, warps, stages = 128, 32, 32, 8, 3
    tiles = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_CUT": cut}
    return {**tiles, "num_warps": warps, "num_stages": stages}
