"""Correct answers to "The KV cache" that work on pieces and put them together.

Keys and values lie side by side in one buffer; attention, and the kernel's, is a merge of averages
by their log-sum-exp.
"""

import math

import torch
import triton
import triton.language as tl


def forward_positions(prompt_len, new_tokens, cached):
    """The passes are the numbers from P to P + N - 1: a difference of two triangles."""
    if min(prompt_len - 1, new_tokens) < 0:
        raise ValueError(f"{prompt_len} and {new_tokens} are too few")
    after = prompt_len + new_tokens
    if cached:
        return (after - 1) * min(new_tokens, 1)
    return math.comb(after, 2) - math.comb(prompt_len, 2)


def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, bytes_per_elem=2):
    from functools import reduce
    from operator import mul

    factors = [n_layers, n_kv_heads, head_dim, bytes_per_elem]
    if any(factor < 1 for factor in factors):
        raise ValueError(f"one of {factors} is below 1")
    return reduce(mul, factors) << 1


class LayerKV:
    """A token's key and value lie side by side: [batch, max_len, n_kv_heads, 2 * head_dim]."""

    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32):
        self.pairs = torch.full((batch, max_len, n_kv_heads, 2 * head_dim), math.nan, dtype=dtype)
        self.halves = self.pairs.chunk(2, dim=-1)
        self.used = range(0)

    @property
    def length(self):
        return len(self.used)

    def append(self, k, v):
        new = torch.arange(self.length, self.length + k.shape[1])
        if len(new) and new[-1] >= self.pairs.shape[1]:
            raise ValueError(f"slot {int(new[-1])} is beyond the last")
        for half, token in zip(self.halves, (k, v), strict=True):
            half.index_copy_(1, new, token)
        self.used = range(self.length + len(new))
        K, V = (half.narrow(1, 0, self.length) for half in self.halves)
        return K, V

    def truncate(self, n):
        if n < 0 or self.length < n:
            raise ValueError(f"{n} of {self.length} tokens cannot be kept")
        self.used = self.used[:n]


def attend(q, K, V):
    """Averages of a third of the keys each, merged from the back by their log-sum-exp in base 2."""
    (B, t, H, D), (T, Hkv) = q.shape, K.shape[1:3]
    if Hkv * (H // Hkv) < H:
        raise ValueError(f"{H} heads are no multiple of {Hkv}")
    if t > T:
        raise ValueError(f"{t} of {T} positions")
    q32 = q.float().reshape(B, t, Hkv, H // Hkv, D).permute(0, 2, 3, 1, 4)
    q32 = q32 * (1.4426950408889634 * D**-0.5)
    place = torch.arange(T)
    out, lse = torch.zeros_like(q32), torch.full((*q32.shape[:-1], 1), -math.inf)
    pieces = [x.tensor_split(3, -2)[::-1] for x in (place[:, None], *_by_head(K, V))]
    for piece, keys, values in zip(*pieces, strict=True):
        scores = q32 @ keys.mT  # [B, Hkv, G, t, keys of the piece]
        scores = scores.masked_fill(place[T - t :, None] < piece.T, -math.inf)
        mine = scores.mul(math.log(2)).logsumexp(-1, keepdim=True) / math.log(2)
        both = torch.logaddexp2(lse, mine)
        keep, weights = (torch.exp2(x - both).nan_to_num(0.0) for x in (lse, scores))
        out, lse = out * keep + weights @ values, both
    return out.permute(0, 3, 1, 2, 4).reshape(B, t, H, D).type(q.dtype)


def _by_head(*tensors):
    """[B, T, Hkv, D] to fp32 [B, Hkv, 1, T, D]."""
    return [x.to(torch.float32).transpose(1, 2).unsqueeze(2) for x in tensors]


def generate_cached(model, ids, n_new):
    """Caches all of the prompt but its last token, with which every step is the same."""
    if not len(ids):
        raise ValueError("ids must not be empty")
    if n_new < 0:
        raise ValueError(f"n_new is {n_new}")
    caches = {}

    def attention(layer, q, k, v):
        if layer not in caches:
            shape = (k.shape[0], k.shape[2], len(ids) + n_new, k.shape[3])
            caches[layer] = LayerKV(*shape, dtype=k.dtype)
        return attend(q, *caches[layer].append(k, v))

    def logits(tokens, first):
        positions = torch.arange(len(tokens)).add(first)
        return model(torch.tensor(tokens)[None], positions[None], attention, logits_to_keep=1)

    sequence = list(ids)
    if n_new and len(ids) > 1:
        logits(sequence[:-1], 0)
    for _ in range(n_new):
        best = logits(sequence[-1:], len(sequence) - 1).topk(1).indices
        sequence.append(best.item())
    return sequence[len(ids) :], (len(sequence) - 1) * bool(n_new)


def max_concurrency(hbm_bytes, util, weight_bytes, bytes_per_token, ctx):
    if not 0 < util <= 1:
        raise ValueError(f"util is {util}")
    if min(bytes_per_token, ctx) < 1:
        raise ValueError(f"{bytes_per_token} bytes, {ctx} tokens")
    users = (hbm_bytes * util - weight_bytes) / (ctx * bytes_per_token)
    return math.floor(users) if users > 0 else 0


@triton.jit
def decode_attention_kernel(
    q,
    k,
    v,
    seq_lens,
    part_out,
    part_lse,
    scale,
    s_qb,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_vb,
    s_vt,
    s_vh,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Every block is a softmax of its own; blocks are merged as the splits will be."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split, n_splits = tl.program_id(2), tl.num_programs(2)
    g = tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    head = kv_head * GROUP + g
    q_tile = tl.load(q + b * s_qb + head * s_qh + d, (g < GROUP) & (d < HEAD_DIM), 0.0)

    n = tl.load(seq_lens + b)
    step = n_splits * BLOCK_T
    each = (n + step - 1) // step
    block = split * each
    last = tl.minimum(block + each, tl.cdiv(n, BLOCK_T))

    lse = tl.full([BLOCK_G, 1], -1.0e38, tl.float32)  # in base 2
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    t = tl.arange(0, BLOCK_T).to(tl.int64) + block.to(tl.int64) * BLOCK_T
    k_tile = k + b * s_kb + kv_head * s_kh + t[None, :] * s_kt + tl.trans(d)
    v_tile = v + b * s_vb + kv_head * s_vh + t[:, None] * s_vt + d
    while block < last:
        here = t < n
        keys = tl.load(k_tile, here[None, :] & (tl.trans(d) < HEAD_DIM), 0.0)
        scores = tl.dot(q_tile, keys, input_precision="ieee") * (scale / 0.6931471805599453)
        scores = tl.where(here[None, :], scores, float("-inf"))
        high = tl.max(scores, axis=1, keep_dims=True)
        weights = tl.exp2(scores - high)
        total = tl.sum(weights, axis=1, keep_dims=True)
        values = tl.load(v_tile, here[:, None] & (d < HEAD_DIM), 0.0)
        mine = tl.dot((weights / total).to(values.dtype), values, input_precision="ieee")
        my_lse = high + tl.log2(total)
        top = tl.maximum(lse, my_lse)
        both = top + tl.log2(tl.exp2(lse - top) + tl.exp2(my_lse - top))
        out = out * tl.exp2(lse - both) + mine * tl.exp2(my_lse - both)
        lse = both
        t += BLOCK_T
        k_tile += s_kt.to(tl.int64) * BLOCK_T
        v_tile += s_vt.to(tl.int64) * BLOCK_T
        block += 1

    row = (b * tl.num_programs(1) * GROUP + head) * n_splits + split
    lse = tl.where(lse > -1.0e38, lse * 0.6931471805599453, float("-inf"))
    tl.store(part_lse + row, lse, g < GROUP)
    tl.store(part_out + row * HEAD_DIM + d, out, (g < GROUP) & (d < HEAD_DIM))
