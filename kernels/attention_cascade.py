"""Attention of one new token over a prefix that all sequences share, and more.

Problem: B sequences, one query token each. All begin with the same P tokens,
whose keys and values are stored once, and go on with suffix_lens[b] keys of
their own; query head h reads KV head h // (H / Hkv).

    keys[b] = prefix_k[:P] then suffix_k[b, :n],  n = suffix_lens[b]
    s = q[b, h] @ keys[b].T / sqrt(D);  out[b, h] = softmax(s) @ values[b]

A softmax over a union of disjoint sets of keys follows from its parts, each
given by its average and the logarithm of its sum (Hydragen, FlashInfer):

    lse = log(sum_i exp(lse_i));  out = sum_i exp(lse_i - lse) * out_i

Through memory: the prefix once, 2 * P * Hkv * D elements, instead of B times;
the suffixes once, 2 * Hkv * D * sum(suffix_lens); q and out; the parts,
B * H * (D + 1) floats each, written once and read once. 4 * H * D FLOPs a key.
Over the prefix that is B * H / Hkv FLOPs a byte at 16 bits: beyond some 200
rows (an H200 does that many FLOPs while it reads a byte) the time is that of
the product, not of reading.

How it fills a GPU: over the prefix, the B * H / Hkv queries that read one KV
head are the rows of one matrix, cut into tiles; the keys are cut into splits
until every processor has two programs. The tiles of a split are neighbours in
the grid, so that the second one finds the keys in the cache. Over the suffixes
the same kernel runs with one sequence to a set of keys. One merge weighs all
parts. A known bug that this avoids: a sequence without a suffix, whose part is
0 with a log-sum-exp of 0 instead of -inf, so that it takes weight exp(0).
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
MAX_PARTS = 2 * MAX_SPLITS

# Keys and values [sets, S, Hkv, D] of some, and their lengths [sets]; all S
# slots where the lengths are None.
Level = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def cascade_prefix_attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cascade_prefix_attention` in plain torch, in float32."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)  # [P, H, D]
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("bhd,phd->bhp", q.float(), keys)
    scores = scores / math.sqrt(q.shape[2])
    out = torch.einsum("bhp,phd->bhd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1)


def cascade_decode_attention_ref(
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    suffix_k: torch.Tensor,
    suffix_v: torch.Tensor,
    suffix_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cascade_decode_attention` over the concatenations, in float32."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    for b, n in enumerate(suffix_lens.tolist()):
        keys = torch.cat([prefix_k, suffix_k[b, :n]])
        values = torch.cat([prefix_v, suffix_v[b, :n]])
        out[b], lse[b] = cascade_prefix_attention_ref(
            q[b : b + 1], keys, values
        )
    return out, lse


def merge_lse_ref(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_lse` in plain torch, in float32."""
    lse = lses.logsumexp(0)
    weights = (lses - lse.clamp(min=-1e38)).exp()[..., None]  # [n, B, H, 1]
    known = outs.float().masked_fill(lses.isneginf()[..., None], 0.0)
    return (weights * known).sum(0).to(outs.dtype), lse


@triton.jit
def _cascade_attention_kernel(
    q,  # [B, H, D]
    k,  # [sets, S, Hkv, D]
    v,  # [sets, S, Hkv, D]
    seq_lens,  # [sets] int32, or None: S keys in every set
    part_out,  # [n_splits, B, H, D], dense
    part_lse,  # [n_splits, B, H] float32, dense
    B,
    S,
    share,  # B / sets, the sequences that share a set of keys
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
    BLOCK_M: tl.constexpr,  # queries per program, a power of two from 16 on
    BLOCK_T: tl.constexpr,  # keys per step
):
    """Attention of a tile of queries over one split of the keys they share.

    Grid (sets * tiles, Hkv, n_splits). The share * GROUP queries that read the
    same keys are the rows of a matrix, GROUP heads of one sequence after those
    of another. The keys are dealt to the splits in equal runs of whole blocks;
    the last runs may be short or empty. Writes the split's own softmax average
    to part_out and its log-sum-exp (natural log) to part_lse; an empty split
    writes 0 and -inf.
    """
    n_tiles = tl.cdiv(share * GROUP, BLOCK_M)
    keys = tl.program_id(0).to(tl.int64) // n_tiles
    h_kv = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)

    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    o_m = tl.program_id(0) % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    m_md = (o_m < share * GROUP)[:, None] & m_d[None, :]
    b = keys * share + o_m // GROUP  # [M]
    h = h_kv * GROUP + o_m % GROUP  # [M]
    q_tile = q + b[:, None] * s_qb + h[:, None] * s_qh + o_d[None, :]
    b_q = tl.load(q_tile, mask=m_md, other=0.0)  # [M, D]
    k_row = k + keys * s_kb + h_kv * s_kh
    v_row = v + keys * s_vb + h_kv * s_vh

    length = S
    if seq_lens is not None:
        length = tl.load(seq_lens + keys)
    per_split = tl.cdiv(length, n_splits * BLOCK_T) * BLOCK_T
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for t in range(start, end, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T).to(tl.int64)
        m_t = o_t < end
        k_tile = k_row + o_t[None, :] * s_kt + o_d[:, None]
        b_k = tl.load(k_tile, mask=m_t[None, :] & m_d[:, None], other=0.0)
        # Base 2: exp2 is one instruction, so log2(e) goes into the scale.
        s = tl.dot(b_q, b_k, input_precision="ieee")  # [M, T]
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

    row = (split.to(tl.int64) * B + b) * (tl.num_programs(1) * GROUP) + h
    # The largest score adds exp2(0), so only an empty split is below 1.
    average = acc / tl.maximum(total, 1.0)[:, None]
    out_tile = part_out + row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(out_tile, average, mask=m_md)
    lse = (high + tl.log2(total)) * 0.6931471805599453
    tl.store(part_lse + row, lse, mask=o_m < share * GROUP)


@triton.jit
def _merge_lse_kernel(
    outs,  # [n, B, H, D]
    lses,  # [n, B, H] float32
    out,  # [B, H, D], dense
    lse,  # [B, H] float32, dense
    n,
    s_on,
    s_ob,
    s_oh,
    s_ln,
    s_lb,
    HEAD_DIM: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_N: tl.constexpr,  # power of two, at least n
):
    """Weigh the parts of one query head by exp(lse). Grid (B, H).

    The average of a part without keys (lse = -inf) is not even read.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)

    lse_tile = lses + o_n * s_ln + b * s_lb + h
    b_lse = tl.load(lse_tile, mask=o_n < n, other=-float("inf"))
    # A finite floor: with no keys at all, -inf - -inf would be NaN.
    high = tl.maximum(tl.max(b_lse, 0), -1e38)
    weight = tl.exp(b_lse - high)  # [N]
    total = tl.sum(weight, 0)

    out_tile = outs + o_n[:, None] * s_on + b * s_ob + h * s_oh + o_d[None, :]
    m_nd = (b_lse != -float("inf"))[:, None] & (o_d < HEAD_DIM)[None, :]
    b_out = tl.load(out_tile, mask=m_nd, other=0.0)  # [N, D]
    # The largest weight is 1, so only a head without keys is below.
    merged = tl.sum(b_out * weight[:, None], 0) / tl.maximum(total, 1.0)
    row = b * tl.num_programs(1) + h
    tl.store(out + row * HEAD_DIM + o_d, merged, mask=o_d < HEAD_DIM)
    tl.store(lse + row, high + tl.log(total))


def merge_lse(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attentions of the same queries over disjoint sets of keys.

    Args:
        outs: [n, B, H, D], float16, bfloat16 or float32, D <= 128, n <= 256:
            what each set of keys gives on its own.
        lses: [n, B, H] float32, its log-sum-exps, natural log; -inf marks a
            set without keys, whose `outs` may hold anything, NaN included.

        Outer strides are free, the last one is 1.

    Returns:
        out [B, H, D] in the dtype of `outs` and lse [B, H] float32, both
        dense; 0 and -inf where all sets are empty, and where n = 0.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: FlashInfer, https://flashinfer.ai/2024/02/02/cascade-inference.html.
    """
    check_tensor("outs", outs, ("n", "B", "H", "D"), DTYPES, outs.device)
    n, B, H, D = outs.shape
    check_tensor("lses", lses, (n, B, H), (torch.float32,), outs.device)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"outs: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    if n > MAX_PARTS:
        raise ValueError(f"outs: {n} parts must be at most {MAX_PARTS}")
    out = torch.empty(B, H, D, dtype=outs.dtype, device=outs.device)
    lse = torch.empty(B, H, dtype=torch.float32, device=outs.device)
    if out.numel():
        _merge(outs, lses, out, lse)
    return out, lse


def cascade_prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of decode attention over keys that all sequences share.

    Args:
        q: [B, H, D], float16, bfloat16 or float32, D <= 128.
        k, v: [P, Hkv, D], q's dtype; H is a multiple of Hkv, at most 64 times
            it. Outer strides are free, the last one is 1.
        n_splits: pieces of the keys, at most 128; by default enough to give
            every processor two programs. Never more than P has blocks.

    Returns:
        out [B, H, D] in q's dtype and lse [B, H] float32, natural log, both
        dense; 0 and -inf for P = 0. Scores, sums and partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Hydragen, https://arxiv.org/abs/2402.05099.
    """
    _check(q, k, v, n_splits, "")
    return _attend(q, [(k[None], v[None], None)], n_splits)


def cascade_decode_attention(
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    suffix_k: torch.Tensor,
    suffix_v: torch.Tensor,
    suffix_lens: torch.Tensor,
    n_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of decode attention over a shared prefix and own suffixes.

    Args:
        q: [B, H, D], float16, bfloat16 or float32, D <= 128.
        prefix_k, prefix_v: [P, Hkv, D], q's dtype; H is a multiple of Hkv, at
            most 64 times it. Outer strides are free, the last one is 1.
        suffix_k, suffix_v: [B, S, Hkv, D], the same.
        suffix_lens: [B] int32, dense; 0 <= suffix_lens[b] <= S, which on a GPU
            is checked in debug mode only. Slots from there on are never read.
        n_splits: pieces of the prefix and of every suffix, at most 128; by
            default enough to give every processor two programs in each. Never
            more than there are blocks.

    Returns:
        out [B, H, D] in q's dtype and lse [B, H] float32, natural log, both
        dense; 0 and -inf for a sequence without keys. Scores, sums and
        partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Hydragen, https://arxiv.org/abs/2402.05099, and FlashInfer,
    https://flashinfer.ai/2024/02/02/cascade-inference.html.
    """
    _check(q, prefix_k, prefix_v, n_splits, "prefix_")
    B, kv_heads, D = q.shape[0], *prefix_k.shape[1:]
    check_tensor(
        "suffix_k", suffix_k, (B, "S", kv_heads, D), (q.dtype,), q.device
    )
    S = suffix_k.shape[1]
    check_tensor(
        "suffix_v", suffix_v, (B, S, kv_heads, D), (q.dtype,), q.device
    )
    check_tensor("suffix_lens", suffix_lens, (B,), (torch.int32,), q.device)
    check_values("suffix_lens", suffix_lens, 0, S)
    levels: list[Level] = [
        (prefix_k[None], prefix_v[None], None),
        (suffix_k, suffix_v, suffix_lens),
    ]
    return _attend(q, levels, n_splits)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n_splits: int | None,
    prefix: str,
) -> None:
    """Raise ValueError unless q and the shared keys, named prefix + k, fit."""
    check_tensor("q", q, ("B", "H", "D"), DTYPES, q.device)
    H, D = q.shape[1:]
    check_tensor(f"{prefix}k", k, ("P", "Hkv", D), (q.dtype,), q.device)
    P, kv_heads = k.shape[:2]
    check_tensor(f"{prefix}v", v, (P, kv_heads, D), (q.dtype,), q.device)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {D} must be 1 to {MAX_HEAD_DIM}")
    query_group(f"{prefix}k", H, kv_heads, MAX_GROUP)
    check_splits(n_splits, MAX_SPLITS)


def _attend(
    q: torch.Tensor, levels: list[Level], n_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of q over the keys of all levels together.

    The first B / sets sequences read a level's first set of keys, and so on.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    plan = [((k, v, lens), _splits(q, k, n_splits)) for k, v, lens in levels]
    n = sum(count for _, count in plan)
    part_out, part_lse = out[None], lse[None]  # one part is the whole answer
    if n != 1:
        part_out = out.new_empty(n, *q.shape, dtype=torch.float32)
        part_lse = lse.new_empty(n, *lse.shape)
    first = 0
    for level, count in plan:
        if count:
            _attend_level(q, level, part_out[first:], part_lse[first:], count)
        first += count
    if n != 1:
        _merge(part_out, part_lse, out, lse)
    return out, lse


def _attend_level(
    q: torch.Tensor,
    level: Level,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    n_splits: int,
) -> None:
    """Write the first n_splits of the parts."""
    k, v, seq_lens = level
    B, H, D = q.shape
    sets, S, kv_heads = k.shape[:3]
    share, group = B // sets, H // kv_heads
    block_m, block_t, options = _configuration(
        arch(q.device), share * group, D, q.dtype
    )
    tiles = cdiv(share * group, block_m)
    _cascade_attention_kernel[(sets * tiles, kv_heads, n_splits)](
        q,
        k,
        v,
        seq_lens,
        part_out,
        part_lse,
        B,
        S,
        share,
        1 / math.sqrt(D),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        HEAD_DIM=D,
        GROUP=group,
        BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        **options,
    )


def _merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out and lse; shapes as `merge_lse`."""
    n, B, H, D = outs.shape
    block_n, block_d = next_power_of_2(n), next_power_of_2(D)
    _merge_lse_kernel[(B, H)](
        outs,
        lses,
        out,
        lse,
        n,
        *outs.stride()[:3],
        *lses.stride()[:2],
        HEAD_DIM=D,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        # At least four 16-byte loads a thread, as far as eight warps go.
        num_warps=max(1, min(8, block_n * block_d // 512)),
    )


def _splits(q: torch.Tensor, k: torch.Tensor, n_splits: int | None) -> int:
    """Into how many parts the keys of a level are cut; 0 without any."""
    sets, S, kv_heads, D = k.shape
    rows = q.shape[0] // sets * (q.shape[1] // kv_heads)
    block_m, block_t, _ = _configuration(arch(q.device), rows, D, q.dtype)
    if n_splits is None:
        programs = sets * cdiv(rows, block_m) * kv_heads
        n_splits = cdiv(2 * processors(q.device), programs)
    return min(n_splits, cdiv(S, block_t), MAX_SPLITS)


def _configuration(
    target: str, rows: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int, dict[str, int]]:
    """Queries per program, keys per step and launch options.

    Chosen so that no target spills, shared memory fits (64 KiB on AMD) and a
    thread loads 16 bytes at a time. Where memory on the chip is ample, 128
    rows share one read of the keys, and two steps are on their way meanwhile.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, 16, {}
    block_m = max(16, next_power_of_2(rows))  # tl.dot takes 16
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        block_t = 16 if head_dim > 64 else 32
        return min(block_m, 64), block_t, {"num_warps": 8, "num_stages": 2}
    if target.startswith(("sm_9", "sm_10")):  # 227 KiB of shared memory
        block_m = min(block_m, 128)
        warps = 8 if block_m == 128 else 4
        return block_m, 64, {"num_warps": warps, "num_stages": 3}
    block_t = 32 if target.startswith("gfx") else 64
    return min(block_m, 64), block_t, {"num_warps": 4, "num_stages": 2}
