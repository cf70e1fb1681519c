"""Causal linear attention by chunks: a running state instead of a KV cache.

Problem: each head keeps S [Dk, Dv] and z [Dk]. Token t adds to them and reads

    S_t = exp(g_t) * S_{t-1} + phi(k_t) v_t^T,  phi(x) = elu(x) + 1 > 0
    z_t = exp(g_t) * z_{t-1} + phi(k_t),        g_t <= 0: a log decay, or 0
    out_t = S_t^T phi(q_t) / (z_t . phi(q_t))

By chunks of C tokens, with c the running sum of g inside a chunk and S, z
from before it, this is a few products that a tensor core can do:

    A[t, s] = exp(c_t - c_s) * phi(q_t) . phi(k_s) for s <= t, else 0
    out = (A V + exp(c) * phi(Q) S) / (A 1 + exp(c) * phi(Q) z)

Through memory: q, k, v once and out once, B * T * H * (2 Dk + 2 Dv) elements.
FLOPs, a head: 4 T Dk Dv for S and 2 T C (Dk + Dv) for A, half of which the
mask throws away. With Dk = Dv = 128, C = 64 and 16 bits that is 96 a byte,
half of what it takes to keep an H200 busy: the time is the time to read.

How it fills a GPU: chunks depend on each other, so one program walks along a
head with S in registers, and nothing is read twice. With fewer heads than
processors the sequence is cut into splits: a first kernel leaves what each
split but the last adds to the state, the second begins each split with the
decayed sum of those before. K and V are then read twice, 1.5 times the bytes
in all; a state in memory for every chunk would cost 2.5 times. The second
kernel holds S as [Dv, Dk]: then S, V and A enter the products as they lie,
and only Q goes through registers.

Known bugs that this avoids: exp(c_t) times exp(-c_s), of which the second
overflows (here every exponent that counts is a difference of at most 0), and
sums in float16, which overflow too (rows of A and S are divided first).
"""

from typing import Literal

import torch
import torch.nn.functional as F
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
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
MAX_SPLITS = 32

State = tuple[torch.Tensor, torch.Tensor]


def chunk_linear_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None = None,
    state: State | None = None,
    strict: bool = False,
    feature_map: Literal["elu", "identity"] = "elu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The recurrence token by token, in float32: the specification.

    Arguments as `chunk_linear_attention`. Returns out in q's dtype, S and z.
    """
    B, T, H, Dk = q.shape
    Dv, elu = v.shape[-1], feature_map == "elu"
    q, k, v, dtype = q.float(), k.float(), v.float(), q.dtype
    if elu:
        q, k = F.elu(q) + 1, F.elu(k) + 1
    S = q.new_zeros(B, H, Dk, Dv) if state is None else state[0].clone()
    z = q.new_zeros(B, H, Dk) if state is None else state[1].clone()
    keep = q.new_ones(B, T, H)
    if decay is not None:
        keep = decay.clamp(min=-60).exp().expand(B, T, H)

    out = q.new_zeros(B, T, H, Dv)
    for t in range(T):
        before = S * keep[:, t, :, None, None], z * keep[:, t, :, None]
        S = before[0] + k[:, t, :, :, None] * v[:, t, :, None, :]
        z = before[1] + k[:, t]
        read = before if strict else (S, z)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], read[0])
        if elu:
            norm = (q[:, t] * read[1]).sum(-1, keepdim=True)
            out[:, t] /= norm.clamp(min=1e-37)  # 0 where nothing was seen
    return out.to(dtype), S, z


@triton.jit
def _features(x, ELU: tl.constexpr):
    """phi of a tile, in the tile's dtype."""
    if ELU:
        f = tl.cast(x, tl.float32)
        # exp(f) >= f + 1, so that the larger is always the right branch.
        low = tl.exp(tl.minimum(f, 0.0))
        x = tl.maximum(f + 1, low, tl.PropagateNan.ALL).to(x.dtype)
    return x


@triton.jit
def _log_decay(decay, o_t, T, s_dt):
    """Running sum [T] of a chunk's log decays, and the sum of all."""
    c = tl.zeros_like(o_t).to(tl.float32)
    total = 0.0  # without a decay the factors are constants that vanish
    if decay is not None:
        g = tl.load(decay + o_t * s_dt, mask=o_t < T, other=0.0)
        g = tl.maximum(g, -60.0)  # more would only blur the differences
        c = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
    return c, total


@triton.jit
def _linear_state_kernel(
    k,  # [B, T, H, Dk]
    v,  # [B, T, H, Dv]
    decay,  # [B, T, H] float32, or None
    part_S,  # [B * H, n_splits - 1, Dk, Dv] float32, dense
    part_z,  # [B * H, n_splits - 1, Dk] float32, dense
    part_g,  # [B * H, n_splits - 1] float32, dense
    T,
    H,
    per_split,  # tokens of a split, whole blocks
    s_kb,
    s_kt,
    s_kh,
    s_vb,
    s_vt,
    s_vh,
    s_db,
    s_dt,
    DIM_K: tl.constexpr,  # Dk
    DIM_V: tl.constexpr,  # Dv
    BLOCK_K: tl.constexpr,  # power of two, at least Dk and 16 (tl.dot)
    BLOCK_V: tl.constexpr,  # values of a program
    BLOCK_T: tl.constexpr,  # tokens of a chunk
    ELU: tl.constexpr,
):
    """What a split adds to the state, and the sum of its log decays.

    Grid (B * H, blocks of Dv, n_splits - 1): not the last, so all are full.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    b, h = head // H, head % H
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < DIM_K
    m_v = o_v < DIM_V
    k_row = k + b * s_kb + h * s_kh + o_k[None, :]
    v_row = v + b * s_vb + h * s_vh + o_v[:, None]
    if decay is not None:
        decay += b * s_db + h

    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    z = tl.zeros([BLOCK_K], tl.float32)
    g = 0.0
    start = split * per_split
    for t in range(start, start + per_split, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T).to(tl.int64)
        c, total = _log_decay(decay, o_t, T, s_dt)
        b_k = tl.load(k_row + o_t[:, None] * s_kt, mask=m_k[None, :])
        b_k = _features(b_k, ELU)  # [T, Dk]
        b_k = (b_k * tl.exp(total - c)[:, None]).to(b_k.dtype)
        b_v = tl.load(v_row + o_t[None, :] * s_vt, mask=m_v[:, None])
        # z sums the same rounded keys as S, so that S / z is an average.
        z = z * tl.exp(total) + tl.sum(b_k.to(tl.float32), 0)
        S = tl.dot(b_v, b_k, S * tl.exp(total), input_precision="ieee")
        g += total

    row = head * tl.num_programs(2) + split
    S_tile = part_S + (row * DIM_K + o_k[None, :]) * DIM_V + o_v[:, None]
    tl.store(S_tile, S, mask=m_v[:, None] & m_k[None, :])
    if tl.program_id(1) == 0:
        tl.store(part_z + row * DIM_K + o_k, z, mask=m_k)
        tl.store(part_g + row, g)


@triton.jit
def _linear_output_kernel(
    q,  # [B, T, H, Dk]
    k,  # [B, T, H, Dk]
    v,  # [B, T, H, Dv]
    decay,  # [B, T, H] float32, or None
    first_S,  # [B * H, Dk, Dv] float32, dense, or None: zeros
    first_z,  # [B * H, Dk] float32, dense, or None
    part_S,  # [B * H, n_splits - 1, Dk, Dv] float32, dense
    part_z,  # [B * H, n_splits - 1, Dk] float32, dense
    part_g,  # [B * H, n_splits - 1] float32, dense
    out,  # [B, T, H, Dv], dense
    last_S,  # like first_S, or None: not wanted
    last_z,  # like first_z, or None
    T,
    H,
    per_split,
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_vb,
    s_vt,
    s_vh,
    s_db,
    s_dt,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ELU: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Outputs of one split. Grid (B * H, blocks of Dv, n_splits).

    The state before the split is the first one and what the splits before it
    add, each decayed by those after it. The last split writes the state.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    b, h = head // H, head % H
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_c = tl.arange(0, BLOCK_T)
    m_k = o_k < DIM_K
    m_v = o_v < DIM_V
    m_vk = m_v[:, None] & m_k[None, :]
    q_row = q + b * s_qb + h * s_qh + o_k[None, :]
    k_row = k + b * s_kb + h * s_kh + o_k[None, :]
    v_row = v + b * s_vb + h * s_vh + o_v[:, None]
    out_row = out + (b * T * H + h) * DIM_V + o_v[:, None]
    if decay is not None:
        decay += b * s_db + h

    o_S = o_k[None, :] * DIM_V + o_v[:, None]  # within one state
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    z = tl.zeros([BLOCK_K], tl.float32)
    if first_S is not None:
        S_tile = first_S + head * DIM_K * DIM_V + o_S
        S = tl.load(S_tile, mask=m_vk, other=0.0)
        z = tl.load(first_z + head * DIM_K + o_k, mask=m_k, other=0.0)
    for earlier in range(split):
        row = head * (n_splits - 1) + earlier
        keep = tl.exp(tl.load(part_g + row))
        S_tile = part_S + row * DIM_K * DIM_V + o_S
        S = S * keep + tl.load(S_tile, mask=m_vk, other=0.0)
        b_z = tl.load(part_z + row * DIM_K + o_k, mask=m_k, other=0.0)
        z = z * keep + b_z

    start = split * per_split
    for t in range(start, tl.minimum(start + per_split, T), BLOCK_T):
        o_t = t + o_c.to(tl.int64)
        m_t = o_t < T
        m_tk = m_t[:, None] & m_k[None, :]
        m_vt = m_v[:, None] & m_t[None, :]
        c, total = _log_decay(decay, o_t, T, s_dt)
        # In this order few tiles are alive at once: registers are tight.
        b_q = tl.load(q_row + o_t[:, None] * s_qt, mask=m_tk, other=0.0)
        b_q = _features(b_q, ELU)  # [T, Dk]
        weight = tl.exp(c)  # of what S holds
        norm = weight * tl.sum(b_q * z[None, :], 1)
        high = tl.maximum(tl.max(z, 0), 1e-37)

        b_k = tl.load(k_row + o_t[:, None] * s_kt, mask=m_tk, other=0.0)
        b_k = tl.where(m_k[None, :], _features(b_k, ELU), 0.0)  # [T, Dk]
        fade = tl.where(m_t, tl.exp(total - c), 0.0)  # phi(0) = 1 in the tail
        faded = (b_k * fade[:, None]).to(b_k.dtype)
        z = z * tl.exp(total) + tl.sum(faded.to(tl.float32), 0)
        b_v = tl.load(v_row + o_t[None, :] * s_vt, mask=m_vt, other=0.0)

        # Row t, column s. Where s > t, exp may be infinite: select, for 0
        # times it is NaN.
        a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        seen = o_c[:, None] >= o_c[None, :] + STRICT
        a = tl.where(seen, a * tl.exp(c[:, None] - c[None, :]), 0.0)
        b_S = S
        if ELU:
            # Divide before rounding, so that float16 cannot overflow: a to
            # weights of at most 1, S to at most the largest value.
            scale = 1 / tl.maximum(norm + tl.sum(a, 1), 1e-37)
            a *= scale[:, None]
            weight *= tl.minimum(scale * high, 1e37)
            b_S = S * (1 / high)
        a = a.to(b_v.dtype)
        b_S = b_S.to(b_v.dtype)
        b_out = tl.dot(b_S, tl.trans(b_q), input_precision="ieee")
        b_out *= weight[None, :]
        b_out = tl.dot(b_v, tl.trans(a), b_out, input_precision="ieee")
        S = tl.dot(b_v, faded, S * tl.exp(total), input_precision="ieee")
        tl.store(out_row + o_t[None, :] * H * DIM_V, b_out, mask=m_vt)

    if last_S is not None:
        is_last = split == n_splits - 1
        if is_last:
            tl.store(last_S + head * DIM_K * DIM_V + o_S, S, mask=m_vk)
            if tl.program_id(1) == 0:
                tl.store(last_z + head * DIM_K + o_k, z, mask=m_k)


def chunk_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None = None,
    state: State | None = None,
    strict: bool = False,
    feature_map: Literal["elu", "identity"] = "elu",
    n_splits: int | None = None,
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal linear attention over whole sequences, from a state to a state.

    Args:
        q, k: [B, T, H, Dk], float16, bfloat16 or float32, Dk <= 128.
        v: [B, T, H, Dv], q's dtype, Dv <= 128. Outer strides of q, k and v
            are free, the last one is 1: values shared by the heads may be an
            expanded view.
        decay: log of the factor that a token applies to the state before
            adding to it, float32, at most 0 (on a GPU checked in debug mode
            only): [H] for a constant, [B, T, H] for a gate. What is below
            -60, a factor of 1e-26, counts as -60.
        state: S [B, H, Dk, Dv] and z [B, H, Dk] from before the first token,
            float32, dense; None for zeros.
        strict: a token does not see itself: out_t reads the decayed state
            before k_t and v_t are added.
        feature_map: "elu" for phi(x) = elu(x) + 1 and the division by
            z . phi(q); "identity" for phi(x) = x and no division, where in
            float16 products q . k and sums in S beyond 65504 overflow.
        n_splits: pieces per sequence, at most 32; by default as many as there
            are processors for, but no piece under four chunks.
        return_state: also return the state after the last token.

    Returns:
        out [B, T, H, Dv] in q's dtype, dense, 0 where nothing was seen; with
        return_state also S and z, shaped like `state`, dense. phi and the
        weights are rounded to q's dtype, all sums are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236;
    chunks: Yang et al. 2023, https://arxiv.org/abs/2312.06635.
    """
    check_tensor("q", q, ("B", "T", "H", "Dk"), DTYPES, q.device)
    B, T, H, Dk = q.shape
    check_tensor("k", k, (B, T, H, Dk), (q.dtype,), q.device)
    check_tensor("v", v, (B, T, H, "Dv"), (q.dtype,), q.device)
    Dv, single = v.shape[-1], (torch.float32,)
    for name, size in (("q", Dk), ("v", Dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: head_dim {size} must be 1 to {MAX_HEAD_DIM}"
            )
    if decay is not None:
        shape = (H,) if decay.dim() == 1 else (B, T, H)
        check_tensor("decay", decay, shape, single, q.device)
        check_values("decay", decay, float("-inf"), 0)
        decay = decay.expand(B, T, H)
    first_S = first_z = None
    if state is not None:
        first_S, first_z = state
        check_tensor("state[0]", first_S, (B, H, Dk, Dv), single, q.device)
        check_tensor("state[1]", first_z, (B, H, Dk), single, q.device)
        if not (first_S.is_contiguous() and first_z.is_contiguous()):
            raise ValueError(
                f"state: strides {first_S.stride()} and {first_z.stride()} "
                "must be dense"
            )
    if feature_map not in ("elu", "identity"):
        raise ValueError(
            f"feature_map: {feature_map!r} must be 'elu' or 'identity'"
        )
    check_splits(n_splits, MAX_SPLITS)

    out = torch.empty(B, T, H, Dv, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        if not return_state:
            return out
        if state is not None:
            return out, state[0].clone(), state[1].clone()
        S = torch.zeros(B, H, Dk, Dv, device=q.device)
        return out, S, S.new_zeros(B, H, Dk)

    last_S = last_z = None
    if return_state:
        last_S = out.new_empty(B, H, Dk, Dv, dtype=torch.float32)
        last_z = out.new_empty(B, H, Dk, dtype=torch.float32)
    elu = feature_map == "elu"
    target = arch(q.device)
    block_t, block_v, options = _configuration(target, q.dtype, elu)
    block_v = min(block_v, max(16, next_power_of_2(Dv)))
    v_blocks = cdiv(Dv, block_v)
    chunks = cdiv(T, block_t)
    if n_splits is None:
        n_splits = min(
            processors(q.device) // (B * H * v_blocks), chunks // 4, MAX_SPLITS
        )
    per_split = cdiv(chunks, max(1, n_splits))
    n_splits = cdiv(chunks, per_split)  # so that none is empty
    rows = B * H, n_splits - 1
    part_S = out.new_empty(*rows, Dk, Dv, dtype=torch.float32)
    part_z = out.new_empty(*rows, Dk, dtype=torch.float32)
    part_g = out.new_empty(rows, dtype=torch.float32)

    parts = part_S, part_z, part_g
    sizes = T, H, per_split * block_t
    strides = *k.stride()[:3], *v.stride()[:3]
    strides += decay.stride()[:2] if decay is not None else (0, 0)
    options |= dict(
        DIM_K=Dk,
        DIM_V=Dv,
        BLOCK_K=max(16, next_power_of_2(Dk)),
        BLOCK_V=block_v,
        BLOCK_T=block_t,
        ELU=elu,
    )
    if n_splits > 1:
        _linear_state_kernel[(B * H, v_blocks, n_splits - 1)](
            k, v, decay, *parts, *sizes, *strides, **options
        )
    _linear_output_kernel[(B * H, v_blocks, n_splits)](
        *(q, k, v, decay, first_S, first_z, *parts, out, last_S, last_z),
        *(*sizes, *q.stride()[:3], *strides),
        STRICT=strict,
        **options,
    )
    return (out, last_S, last_z) if return_state else out  # type: ignore


def _configuration(
    target: str, dtype: torch.dtype, elu: bool
) -> tuple[int, int, dict[str, int]]:
    """Tokens per chunk, values per program, launch options.

    Chosen so that no target spills, shared memory fits (64 KiB on AMD) and a
    thread loads 16 bytes at a time, for every head that we claim. A block of
    all values reads q and k once, but needs the registers of wgmma.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, 32, {}
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    block_t, block_v, warps, stages = 16, 64, 4, 2
    if target.startswith("gfx"):
        block_t = 64
    elif target in ("sm_90", "sm_100"):
        block_t, block_v, warps = 64, 128, 8
        # Without elu the compiler keeps more and would spill with three. Tensor
        # memory is read through registers, so on sm_100 one must do.
        stages = 1 if target == "sm_100" else 3 if elu else 2
    return block_t, block_v, {"num_warps": warps, "num_stages": stages}
