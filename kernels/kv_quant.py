"""Attention of one new token over a KV cache of 2, 4 or 8 bits.

Problem: decoding is as fast as the cache can be read, so store it in fewer
bits. KIVI quantises keys per channel, because a few channels of K are always
large, and values per token, because attention mixes few tokens. A group of G
neighbours x along the other axis shares an asymmetric grid, at 2 bits

    zero = fp16(min x), scale = fp16((max x - min x) / 3)
    code = clamp(round((x - zero) / scale), 0, 3), 0 if scale is 0
    value = code * scale + zero

A group of keys needs G tokens, so the newest tokens stay in 16 bits until a
group is full. The attention is over both parts, without a dequantised copy:

    k, v = [unpack(k_codes)[b, :n], k_rest[b, :r]], the same for v
    out[b, h], lse[b, h] = softmax attention of q[b, h] over k, v

int8_decode_attention is the same over codes of 8 bits with one symmetric
scale a token and head.

Through memory: 2 * Hkv * D * (n * (bits / 8 + 4 / G) + 2 * r) bytes a
sequence, once: 0.375 bytes a value at 2 bits and G = 32 where bf16 has 2. That
is so little that unpacking can take longer than reading, so it is kept to a
shift, a mask, a multiply-add and a rounding a value; a conversion from integer
to float, several times slower than these, is not among them.

How it fills a GPU: both parts of a sequence are cut into splits, as in
kernels.attention_decode, the newest tokens from the other end. A known bug
that this avoids: a constant group has scale 0, and dividing by it gives codes
of NaN.
"""

import math
from typing import Literal

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
from kernels.attention_decode import merge_splits

DTYPES = (torch.float16, torch.bfloat16)
GROUPS = (16, 32, 64, 128)
GROUPED_DIM = {"channel": 1, "token": 3}  # whose scale -> where groups run
MAX_HEAD_DIM = 128
MAX_GROUP = 16  # query heads a KV head: the rows of one tensor-core tile
MAX_SPLITS = 128
BLOCK_R = 32  # tokens in 16 bits per step

Axis = Literal["channel", "token"]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def kivi_pack_ref(
    x: torch.Tensor, bits: int, group: int, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result as `kivi_pack` in plain torch: the specification."""
    dim, levels = GROUPED_DIM[axis], 2**bits - 1
    x = x.float().movedim(dim, -1)
    x = x.unflatten(-1, (x.shape[-1] // group, group))  # [..., groups, G]
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero, scale = low.half(), ((high - low) / levels).half()
    codes = ((x - zero.float()) / scale.float()).round().clamp(0, levels)
    codes = torch.where(scale == 0, 0, codes).long()

    per_word = 32 // bits  # the first code in the lowest bits
    places = bits * torch.arange(per_word, device=x.device)
    codes = codes.unflatten(-1, (group // per_word, per_word))
    words = (codes << places).sum(-1).flatten(-2).int()
    meta = torch.cat([scale, zero], -1).view(torch.int32)[..., 0]
    return (
        words.movedim(-1, dim).contiguous(),
        meta.movedim(-1, dim).contiguous(),
    )


def kivi_unpack_ref(
    codes: torch.Tensor, meta: torch.Tensor, bits: int, group: int, axis: Axis
) -> torch.Tensor:
    """What packed codes stand for, in float32: code * scale + zero."""
    dim = GROUPED_DIM[axis]
    places = bits * torch.arange(32 // bits, device=codes.device)
    words = codes.movedim(dim, -1)[..., None]
    values = (words >> places & (2**bits - 1)).flatten(-2)
    halves = meta.movedim(dim, -1)[..., None].view(torch.float16).float()
    scale, zero = halves.repeat_interleave(group, -2).unbind(-1)
    return (values * scale + zero).movedim(-1, dim)


def _attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32 over k, v [B, S, Hkv, D] where valid [B, S]."""
    group, dim = q.shape[1] // k.shape[2], q.shape[2]
    v = torch.where(valid[:, :, None, None], v.float(), 0.0)
    keys = k.float().repeat_interleave(group, 2)
    scores = torch.einsum("bhd,bshd->bhs", q.float(), keys) / math.sqrt(dim)
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.clamp(min=-1e38)[..., None])
    out = torch.einsum("bhs,bshd->bhd", p, v.repeat_interleave(group, 2))
    return out.to(q.dtype), lse


def kivi_decode_attention_ref(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_meta: torch.Tensor,
    v_codes: torch.Tensor,
    v_meta: torch.Tensor,
    packed_lens: torch.Tensor,
    k_rest: torch.Tensor,
    v_rest: torch.Tensor,
    rest_lens: torch.Tensor,
    bits: int,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in plain torch, in float32: the specification.

    Shapes as `kivi_decode_attention`. Returns out [B, H, D] in q's dtype and
    lse [B, H] float32, natural log.
    """
    k = kivi_unpack_ref(k_codes, k_meta, bits, group, "channel")
    v = kivi_unpack_ref(v_codes, v_meta, bits, group, "token")
    packed = torch.arange(k.shape[1], device=q.device) < packed_lens[:, None]
    slots = torch.arange(k_rest.shape[1], device=q.device)
    valid = torch.cat([packed, slots < rest_lens[:, None]], 1)
    k, v = torch.cat([k, k_rest], 1), torch.cat([v, v_rest], 1)
    return _attention_ref(q, k, v, valid)


def int8_decode_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, as `kivi_decode_attention_ref`."""
    valid = torch.arange(k.shape[1], device=q.device) < seq_lens[:, None]
    k, v = k * k_scale[..., None], v * v_scale[..., None]
    return _attention_ref(q, k, v, valid)


@triton.jit
def _kivi_pack_kernel(
    x,  # [B, T, Hkv, D]; groups run along axis m, lanes along axis l
    codes,  # [B, ..., Hkv, ...] int32, axis m shorter by 32 / BITS
    meta,  # [B, ..., Hkv, ...] int32, axis m shorter by GROUP
    n_groups,
    n_lanes,
    s_xb,
    s_xh,
    s_xm,
    s_xl,
    s_cb,
    s_ch,
    s_cm,
    s_cl,
    s_mb,
    s_mh,
    s_mm,
    s_ml,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # groups side by side, a power of two
):
    """Quantise LANES groups. Grid (n_groups * blocks of lanes, Hkv, B).

    Neighbouring programs take neighbouring groups.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // PER_WORD
    LEVELS: tl.constexpr = (1 << BITS) - 1.0
    group = (tl.program_id(0) % n_groups).to(tl.int64)
    block = tl.program_id(0) // n_groups
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)

    o_l = block.to(tl.int64) * LANES + tl.arange(0, LANES)
    m_l = o_l < n_lanes
    o_m = group * GROUP + tl.arange(0, GROUP)
    x_tile = x + b * s_xb + h * s_xh + o_m[:, None] * s_xm
    x_tile += o_l[None, :] * s_xl
    b_x = tl.load(x_tile, mask=m_l[None, :]).to(tl.float32)  # [G, L]
    low = tl.min(b_x, 0)  # [L]
    zero = low.to(tl.float16)
    scale = tl.div_rn(tl.max(b_x, 0) - low, LEVELS).to(tl.float16)

    # Divisions that round as IEEE says, or codes would depend on the GPU.
    level = tl.div_rn(b_x - zero[None, :], scale.to(tl.float32)[None, :])
    level = tl.where(scale[None, :] == 0.0, 0.0, level)
    level = tl.minimum(tl.maximum(level, 0.0), LEVELS)
    # At 2^23 floats are whole numbers, so adding it rounds, half to even, and
    # leaves the integer in the lowest bits.
    code = (level + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.reshape(code, [WORDS, PER_WORD, LANES])
    places = tl.arange(0, PER_WORD) * BITS
    word = tl.sum(code << places[None, :, None], 1)  # [W, L]

    o_w = group * WORDS + tl.arange(0, WORDS)
    c_tile = codes + b * s_cb + h * s_ch + o_w[:, None] * s_cm
    tl.store(c_tile + o_l[None, :] * s_cl, word, mask=m_l[None, :])
    b_meta = zero.to(tl.int16, bitcast=True).to(tl.int32) << 16
    b_meta |= scale.to(tl.int16, bitcast=True)  # never negative
    m_row = meta + b * s_mb + h * s_mh + group * s_mm
    tl.store(m_row + o_l * s_ml, b_meta, mask=m_l)


@triton.jit
def _dequantize(words, meta, places, BITS: tl.constexpr, dtype: tl.constexpr):
    """Values of the codes that `places`, rotations to the left, bring up.

    words, meta and places are int32 and broadcast. A rotation brings a code to
    the top of the mantissa of 1.0, which makes it 1 + code / 2^BITS.
    """
    words = words.to(tl.uint32)
    bits = (words << places) | (words >> (32 - places))
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    level = ((bits & MASK) | 0x3F800000).to(tl.float32, bitcast=True)
    scale = meta.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    scale = scale * (1 << BITS)
    return (level * scale + (zero - scale)).to(dtype)


@triton.jit
def _head(x, s_b, s_h, UNIT: tl.constexpr = 1):
    """Where the first row of this program's sequence and KV head lies."""
    b = tl.program_id(0).to(tl.int64)
    h_kv = tl.program_id(1).to(tl.int64)
    return x + (b * s_b + h_kv * s_h) * UNIT


@triton.jit
def _load_rows(first, o_r, s_r, o_c, m_r, m_c):
    """The tile [rows, columns] from row `first` on; 0 where a mask is off."""
    tile = first + o_r[:, None] * s_r + o_c[None, :]
    return tl.load(tile, mask=m_r[:, None] & m_c[None, :], other=0)


@triton.jit
def _scores(b_q, b_k, scale, m_t):
    """Scores [H, T] of keys [T, D]; minus infinity where the mask is off."""
    s = tl.dot(b_q, tl.trans(b_k)) * scale
    return tl.where(m_t[None, :], s, -float("inf"))


@triton.jit
def _softmax_step(s, b_v, high, total, acc):
    """Add keys with scores s [H, T], in base 2, to the running average."""
    new_high = tl.maximum(high, tl.max(s, 1))
    p = tl.exp2(s - new_high[:, None])
    rescale = tl.exp2(high - new_high)
    total = total * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc * rescale[:, None])
    return new_high, total, acc


@triton.jit
def _share(lengths, split, BLOCK: tl.constexpr):
    """The keys of a split: whole blocks in equal runs, the last run short."""
    length = tl.load(lengths + tl.program_id(0))
    per_split = tl.cdiv(length, tl.num_programs(2) * BLOCK) * BLOCK
    start = split * per_split
    return start, tl.minimum(start + per_split, length)


@triton.jit
def _store_split(
    part_out, part_lse, high, total, acc, HEAD_DIM, HEADS: tl.constexpr
):
    """Write a split's average and log-sum-exp; 0 and -inf if it is empty."""
    o_h = tl.arange(0, acc.shape[0])
    o_d = tl.arange(0, acc.shape[1])
    m_h = o_h < HEADS
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    row = (row + tl.program_id(1)) * HEADS + o_h
    row = row * tl.num_programs(2) + tl.program_id(2)
    # The largest score adds exp2(0), so only an empty split is below 1.
    average = acc / tl.maximum(total, 1.0)[:, None]
    out_tile = part_out + row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(out_tile, average, mask=m_h[:, None] & (o_d < HEAD_DIM)[None, :])
    lse = (high + tl.log2(total)) * 0.6931471805599453
    tl.store(part_lse + row, lse, mask=m_h)


@triton.jit
def _kivi_decode_kernel(
    q,  # [B, H, D]
    k_codes,  # [B, S / PER_WORD, Hkv, D] int32
    k_meta,  # [B, S / GROUP, Hkv, D] int32
    v_codes,  # [B, S, Hkv, D / PER_WORD] int32
    v_meta,  # [B, S, Hkv, D / GROUP] int32
    packed_lens,  # [B] int32
    k_rest,  # [B, R, Hkv, D]
    v_rest,  # [B, R, Hkv, D]
    rest_lens,  # [B] int32
    part_out,  # [B, H, n_splits, D], dense
    part_lse,  # [B, H, n_splits] float32, dense
    scale,  # log2(e) / sqrt(D)
    s_qb,
    s_qh,
    s_kcb,
    s_kct,
    s_kch,
    s_kmb,
    s_kmt,
    s_kmh,
    s_vcb,  # the strides of v_codes and v_meta count UNITs
    s_vct,
    s_vch,
    s_vmb,
    s_vmt,
    s_vmh,
    s_krb,
    s_krt,
    s_krh,
    s_vrb,
    s_vrt,
    s_vrh,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # values that share a scale
    UNIT: tl.constexpr,  # 4 tells the compiler that rows start on 16 bytes
    HEAD_DIM: tl.constexpr,  # D
    HEADS: tl.constexpr,  # query heads per KV head
    BLOCK_D: tl.constexpr,  # power of two, at least D
    BLOCK_H: tl.constexpr,  # 16 (tl.dot)
    BLOCK_T: tl.constexpr,  # packed tokens per step, a multiple of GROUP
    BLOCK_R: tl.constexpr,  # tokens in 16 bits per step
):
    """Attention of one group of query heads over one split of its keys.

    Grid (B, Hkv, n_splits). Writes the split's softmax average and its
    log-sum-exp, as the kernel of kernels.attention_decode.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    GROUP_WORDS: tl.constexpr = GROUP // PER_WORD
    T_GROUPS: tl.constexpr = BLOCK_T // GROUP
    D_GROUPS: tl.constexpr = BLOCK_D // GROUP
    T_WORDS: tl.constexpr = BLOCK_T // PER_WORD
    D_WORDS: tl.constexpr = BLOCK_D // PER_WORD
    split = tl.program_id(2)
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, BLOCK_H)  # the query heads that share this KV head
    m_d = o_d < HEAD_DIM
    q_row = _head(q, s_qb, s_qh * HEADS)
    b_q = _load_rows(q_row, o_h, s_qh, o_d, o_h < HEADS, m_d)  # [H, D]
    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_H], -1e38, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)

    kc_row = _head(k_codes, s_kcb, s_kch)
    km_row = _head(k_meta, s_kmb, s_kmh)
    vc_row = _head(v_codes, s_vcb, s_vch, UNIT)
    vm_row = _head(v_meta, s_vmb, s_vmh, UNIT)
    o_dw = tl.arange(0, D_WORDS)
    o_dg = tl.arange(0, D_GROUPS)
    m_dw = o_dw < HEAD_DIM // PER_WORD
    m_dg = o_dg < HEAD_DIM // GROUP
    # Rotations to the left that bring code 0, 1, ... to the top of a mantissa.
    places = (55 - BITS - tl.arange(0, PER_WORD) * BITS) % 32
    start, end = _share(packed_lens, split, BLOCK_T)
    for t in range(start, end, BLOCK_T):
        o_w = t // PER_WORD + tl.arange(0, T_WORDS).to(tl.int64)
        o_g = t // GROUP + tl.arange(0, T_GROUPS).to(tl.int64)
        o_t = t + tl.arange(0, BLOCK_T).to(tl.int64)
        m_w, m_g, m_t = o_w * PER_WORD < end, o_g * GROUP < end, o_t < end

        b_kc = _load_rows(kc_row, o_w, s_kct, o_d, m_w, m_d)  # [W, D]
        b_km = _load_rows(km_row, o_g, s_kmt, o_d, m_g, m_d)  # [T / GROUP, D]
        # reshape keeps the registers as loaded, and the scales follow them;
        # with b_kc[:, :, None] every thread would end up with scattered values
        b_kc = tl.reshape(b_kc, [T_GROUPS, GROUP_WORDS, 1, BLOCK_D])
        k_places = places[None, None, :, None]
        b_k = _dequantize(
            b_kc, b_km[:, None, None, :], k_places, BITS, b_q.dtype
        )
        b_k = tl.reshape(b_k, [BLOCK_T, BLOCK_D])
        s = _scores(b_q, b_k, scale, m_t)  # [H, T]

        o_v = o_t * UNIT
        b_vc = _load_rows(vc_row, o_v, s_vct, o_dw, m_t, m_dw)
        b_vm = _load_rows(vm_row, o_v, s_vmt, o_dg, m_t, m_dg)
        # The channels come out by their place in a word, words side by side.
        b_vc = tl.reshape(b_vc, [BLOCK_T, 1, D_GROUPS, GROUP_WORDS])
        v_places = places[None, :, None, None]
        b_v = _dequantize(
            b_vc, b_vm[:, None, :, None], v_places, BITS, b_q.dtype
        )
        b_v = tl.reshape(b_v, [BLOCK_T, BLOCK_D])
        high, total, acc = _softmax_step(s, b_v, high, total, acc)
    acc = tl.reshape(acc, [BLOCK_H, PER_WORD, D_WORDS])
    acc = tl.reshape(tl.permute(acc, [0, 2, 1]), [BLOCK_H, BLOCK_D])

    # The last splits have the fewest packed tokens: they come first here.
    k_row = _head(k_rest, s_krb, s_krh)
    v_row = _head(v_rest, s_vrb, s_vrh)
    split = tl.num_programs(2) - 1 - split
    start, end = _share(rest_lens, split, BLOCK_R)
    for t in range(start, end, BLOCK_R):
        o_t = t + tl.arange(0, BLOCK_R).to(tl.int64)
        m_t = o_t < end
        b_k = _load_rows(k_row, o_t, s_krt, o_d, m_t, m_d)
        s = _scores(b_q, b_k, scale, m_t)
        b_v = _load_rows(v_row, o_t, s_vrt, o_d, m_t, m_d)
        high, total, acc = _softmax_step(s, b_v, high, total, acc)
    _store_split(part_out, part_lse, high, total, acc, HEAD_DIM, HEADS)


@triton.jit
def _int8_decode_kernel(
    q,  # [B, H, D]
    k,  # [B, S, Hkv, D] int8
    k_scale,  # [B, S, Hkv] float32
    v,  # [B, S, Hkv, D] int8
    v_scale,  # [B, S, Hkv] float32
    seq_lens,  # [B] int32
    part_out,  # [B, H, n_splits, D], dense
    part_lse,  # [B, H, n_splits] float32, dense
    scale,  # log2(e) / sqrt(D)
    s_qb,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_ksb,
    s_kst,
    s_vb,
    s_vt,
    s_vh,
    s_vsb,
    s_vst,
    HEAD_DIM: tl.constexpr,  # D
    HEADS: tl.constexpr,  # query heads per KV head
    BLOCK_D: tl.constexpr,  # power of two, at least D and 16
    BLOCK_H: tl.constexpr,  # 16 (tl.dot)
    BLOCK_T: tl.constexpr,  # tokens per step
):
    """The same over int8 codes with one scale a token. Grid as above."""
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, BLOCK_H)
    m_d = o_d < HEAD_DIM
    q_row = _head(q, s_qb, s_qh * HEADS)
    b_q = _load_rows(q_row, o_h, s_qh, o_d, o_h < HEADS, m_d)  # [H, D]
    high = tl.full([BLOCK_H], -1e38, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)

    k_row = _head(k, s_kb, s_kh)
    v_row = _head(v, s_vb, s_vh)
    ks_row = _head(k_scale, s_ksb, 1)
    vs_row = _head(v_scale, s_vsb, 1)
    start, end = _share(seq_lens, tl.program_id(2), BLOCK_T)
    for t in range(start, end, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T).to(tl.int64)
        m_t = o_t < end
        b_k = _load_rows(k_row, o_t, s_kt, o_d, m_t, m_d)  # [T, D]
        # as above, reshape keeps the registers as loaded
        b_k = tl.reshape(b_k, [BLOCK_T, 1, BLOCK_D]).to(b_q.dtype)
        b_k = tl.reshape(b_k, [BLOCK_T, BLOCK_D])
        b_ks = tl.load(ks_row + o_t * s_kst, mask=m_t)  # [T]
        # The scale of a key is a factor of its score.
        s = _scores(b_q, b_k, (b_ks * scale)[None, :], m_t)

        b_v = _load_rows(v_row, o_t, s_vt, o_d, m_t, m_d)
        b_v = tl.reshape(b_v, [BLOCK_T, 1, BLOCK_D])
        b_vs = tl.load(vs_row + o_t * s_vst, mask=m_t, other=0.0)
        # That of a value is no factor of p, which could underflow in float16.
        b_v = (b_v * b_vs[:, None, None]).to(b_q.dtype)
        b_v = tl.reshape(b_v, [BLOCK_T, BLOCK_D])
        high, total, acc = _softmax_step(s, b_v, high, total, acc)
    _store_split(part_out, part_lse, high, total, acc, HEAD_DIM, HEADS)


def kivi_pack(
    x: torch.Tensor, bits: int, group: int, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys or values and pack the codes.

    Args:
        x: [B, T, Hkv, D], float16, bfloat16 or float32; finite, magnitudes at
            most 32768. Outer strides are free, the last one is 1.
        bits: 2 or 4.
        group: G, neighbours that share a scale: 16, 32, 64 or 128.
        axis: who owns the scale. "channel", for keys: groups run along the
            tokens, T is a multiple of group. "token", for values: groups run
            along the channels, D is a multiple of group.

    Returns:
        codes: int32, [B, T * bits / 32, Hkv, D] for "channel" and
            [B, T, Hkv, D * bits / 32] for "token": consecutive codes of a
            group, the first in the lowest bits.
        meta: int32, [B, T / G, Hkv, D] or [B, T, Hkv, D / G]: scale, float16,
            in the low half and zero, float16, in the high half;
            meta.view(torch.float16) shows them in turn.

    Codes are rounded half to even, with the float16 scale and zero; a group
    whose scale is 0, constant or nearly so, has codes 0.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: KIVI, https://arxiv.org/abs/2402.02750.
    """
    dtypes = (*DTYPES, torch.float32)
    check_tensor("x", x, ("B", "T", "Hkv", "D"), dtypes, x.device)
    if axis not in GROUPED_DIM:
        raise ValueError(f"axis: {axis!r} must be 'channel' or 'token'")
    _check_format(bits, group)
    dim = GROUPED_DIM[axis]
    length = x.shape[dim]
    if length % group:
        raise ValueError(
            f"x: size {length} of axis {dim} must be a multiple of {group}"
        )
    shape = list(x.shape)
    shape[dim] = length * bits // 32
    codes = torch.empty(shape, dtype=torch.int32, device=x.device)
    shape[dim] = length // group
    meta = torch.empty(shape, dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return codes, meta

    lanes = 4 - dim  # channels for keys, tokens for values
    block = 16 if arch(x.device) == "cpu" else 4096 // group
    blocks = cdiv(x.shape[lanes], block)
    axes = (0, 2, dim, lanes)
    _kivi_pack_kernel[(meta.shape[dim] * blocks, x.shape[2], x.shape[0])](
        x,
        codes,
        meta,
        meta.shape[dim],
        x.shape[lanes],
        *[tensor.stride(i) for tensor in (x, codes, meta) for i in axes],
        BITS=bits,
        GROUP=group,
        LANES=block,
        num_warps=4,
    )
    return codes, meta


def kivi_decode_attention(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_meta: torch.Tensor,
    v_codes: torch.Tensor,
    v_meta: torch.Tensor,
    packed_lens: torch.Tensor,
    k_rest: torch.Tensor,
    v_rest: torch.Tensor,
    rest_lens: torch.Tensor,
    bits: int,
    group: int,
    n_splits: int | None = None,
    return_lse: bool = False,
) -> Result:
    """One step of decode attention over a KIVI cache.

    Args:
        q: [B, H, D], float16 or bfloat16; D is a multiple of group, at most
            128.
        k_codes, k_meta: of `kivi_pack(k, bits, group, "channel")` for k
            [B, S, Hkv, D]; H is a multiple of Hkv, at most 16 times it.
        v_codes, v_meta: of `kivi_pack(v, bits, group, "token")`.
        packed_lens: [B] int32, dense; 0 <= packed_lens[b] <= S.
        k_rest, v_rest: [B, R, Hkv, D], q's dtype: the tokens after them.
        rest_lens: [B] int32, dense; 0 <= rest_lens[b] <= R. Lengths on a GPU
            are checked in debug mode only; slots beyond them are never read.
        bits, group: as for `kivi_pack`.
        n_splits: pieces per sequence, at most 128; by default enough to give
            every processor two programs. Never more than the cache has blocks.
        return_lse: also return the log-sum-exp of the scores.

    Outer strides are free, the last one is 1.

    Returns:
        out [B, H, D] in q's dtype, dense; with return_lse also lse [B, H]
        float32, natural log. No keys give 0 and -inf. A dequantised value is
        rounded to q's dtype; scores, sums and partials are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Sources: KIVI, https://arxiv.org/abs/2402.02750; Flash-Decoding,
    https://pytorch.org/blog/flash-decoding/.
    """
    check_tensor("q", q, ("B", "H", "D"), DTYPES, q.device)
    _check_format(bits, group)
    B, H, D = q.shape
    word, code = (torch.int32,), 32 // bits
    shape: tuple[int | str, ...] = (B, "S", "Hkv", D // code)
    check_tensor("v_codes", v_codes, shape, word, q.device)
    S, kv_heads = v_codes.shape[1:3]
    heads = _query_heads("v_codes", H, D, kv_heads, n_splits)
    if D % group or S % group:
        raise ValueError(
            f"group: {group} must divide head_dim {D} and the {S} slots"
        )
    for name, tensor, shape in [
        ("k_codes", k_codes, (B, S // code, kv_heads, D)),
        ("k_meta", k_meta, (B, S // group, kv_heads, D)),
        ("v_meta", v_meta, (B, S, kv_heads, D // group)),
    ]:
        check_tensor(name, tensor, shape, word, q.device)
    shape = (B, "R", kv_heads, D)
    check_tensor("k_rest", k_rest, shape, (q.dtype,), q.device)
    check_tensor("v_rest", v_rest, k_rest.shape, (q.dtype,), q.device)
    for name, tensor, most in [
        ("packed_lens", packed_lens, S),
        ("rest_lens", rest_lens, k_rest.shape[1]),
    ]:
        check_tensor(name, tensor, (B,), word, q.device)
        check_values(name, tensor, 0, most)

    block_t, options = _configuration(arch(q.device), bits, group)
    blocks = max(cdiv(S, block_t), cdiv(k_rest.shape[1], BLOCK_R))
    out, lse, part_out, part_lse = _outputs(q, kv_heads, blocks, n_splits)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    v_strides = [*v_codes.stride()[:3], *v_meta.stride()[:3]]
    unit = 1 if any(stride % 4 for stride in v_strides) else 4
    _kivi_decode_kernel[(B, kv_heads, part_lse.shape[-1])](
        q,
        k_codes,
        k_meta,
        v_codes,
        v_meta,
        packed_lens,
        k_rest,
        v_rest,
        rest_lens,
        part_out,
        part_lse,
        1 / (math.log(2) * math.sqrt(D)),
        *q.stride()[:2],
        *k_codes.stride()[:3],
        *k_meta.stride()[:3],
        *[stride // unit for stride in v_strides],
        *k_rest.stride()[:3],
        *v_rest.stride()[:3],
        BITS=bits,
        GROUP=group,
        UNIT=unit,
        HEAD_DIM=D,
        HEADS=heads,
        BLOCK_D=next_power_of_2(D),
        BLOCK_H=MAX_GROUP,
        BLOCK_T=block_t,
        BLOCK_R=BLOCK_R,
        **options,
    )
    return _merged(out, lse, part_out, part_lse, return_lse)


def int8_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    seq_lens: torch.Tensor,
    n_splits: int | None = None,
    return_lse: bool = False,
) -> Result:
    """One step of decode attention over an int8 cache.

    Args:
        q: [B, H, D], float16 or bfloat16, D <= 128.
        k, v: [B, S, Hkv, D] int8; H is a multiple of Hkv, at most 16 times it.
        k_scale, v_scale: [B, S, Hkv] float32; a value is code * scale, as
            kernels.quantize.quantize_int8_rows rounds the rows of K and V.
        seq_lens: [B] int32, dense; 0 <= seq_lens[b] <= S, which on a GPU is
            checked in debug mode only. Slots beyond are never read.
        n_splits, return_lse: as for `kivi_decode_attention`.

    Outer strides are free, the last one is 1. Returns and raises as
    `kivi_decode_attention`.

    Source: vLLM's quantized KV cache,
    https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/.
    """
    check_tensor("q", q, ("B", "H", "D"), DTYPES, q.device)
    B, H, D = q.shape
    check_tensor("k", k, (B, "S", "Hkv", D), (torch.int8,), q.device)
    S, kv_heads = k.shape[1:3]
    heads = _query_heads("k", H, D, kv_heads, n_splits)
    check_tensor("v", v, k.shape, (torch.int8,), q.device)
    for name, tensor in [("k_scale", k_scale), ("v_scale", v_scale)]:
        shape, dtypes = (B, S, kv_heads), (torch.float32,)
        check_tensor(name, tensor, shape, dtypes, q.device)
    check_tensor("seq_lens", seq_lens, (B,), (torch.int32,), q.device)
    check_values("seq_lens", seq_lens, 0, S)

    block_t, options = _configuration(arch(q.device), 8, D)
    blocks = cdiv(S, block_t)
    out, lse, part_out, part_lse = _outputs(q, kv_heads, blocks, n_splits)
    if q.numel() == 0:
        return (out, lse) if return_lse else out

    _int8_decode_kernel[(B, kv_heads, part_lse.shape[-1])](
        q,
        k,
        k_scale,
        v,
        v_scale,
        seq_lens,
        part_out,
        part_lse,
        1 / (math.log(2) * math.sqrt(D)),
        *q.stride()[:2],
        *k.stride()[:3],
        *k_scale.stride()[:2],
        *v.stride()[:3],
        *v_scale.stride()[:2],
        HEAD_DIM=D,
        HEADS=heads,
        BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_H=MAX_GROUP,
        BLOCK_T=block_t,
        **options,
    )
    return _merged(out, lse, part_out, part_lse, return_lse)


def _check_format(bits: int, group: int) -> None:
    if not isinstance(bits, int) or bits not in (2, 4):
        raise ValueError(f"bits: {bits} must be 2 or 4")
    if not isinstance(group, int) or group not in GROUPS:
        raise ValueError(f"group: {group} must be one of {GROUPS}")


def _query_heads(
    name: str, heads: int, head_dim: int, kv_heads: int, n_splits: int | None
) -> int:
    """Query heads per KV head. Raises ValueError beyond the claim."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {head_dim} must be 1 to {MAX_HEAD_DIM}")
    group = query_group(name, heads, kv_heads, MAX_GROUP)
    check_splits(n_splits, MAX_SPLITS)
    return group


def _outputs(
    q: torch.Tensor, kv_heads: int, blocks: int, n_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and what the splits write, which is the same for one split.

    blocks: steps that the longest sequence takes, the most splits it can feed.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if n_splits is None:
        pieces = max(1, q.shape[0] * kv_heads)
        n_splits = cdiv(2 * processors(q.device), pieces)
    n_splits = max(1, min(n_splits, blocks, MAX_SPLITS))
    if n_splits == 1:
        return out, lse, out, lse[..., None]
    shape = (*q.shape[:2], n_splits)
    part_out = lse.new_empty(*shape, q.shape[2])
    return out, lse, part_out, lse.new_empty(shape)


def _merged(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    return_lse: bool,
) -> Result:
    if part_lse.shape[-1] > 1:
        merge_splits(part_out, part_lse, out, lse)
    return (out, lse) if return_lse else out


def _configuration(
    target: str, bits: int, group: int
) -> tuple[int, dict[str, int]]:
    """Quantised tokens per step and launch options.

    Chosen so that no target spills, shared memory fits and, for 128 channels,
    a thread loads 16 bytes of codes and of scales at a time. A wave of AMD has
    64 threads.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return (16 if bits == 8 else max(32, group)), {}
    if target.startswith("gfx"):
        return 128, {"num_warps": 2, "num_stages": 2}
    return (64 if bits == 8 else 128), {"num_warps": 4, "num_stages": 3}
