"""Correct answers to "The KV cache" that take one thing at a time: a token, a head, a layer.

Buffers have the token first, attention slices where others mask and computes in float64, the
kernel walks block pointers from the last block to the first and adds its scores up by itself.
"""

import torch
import triton
import triton.language as tl


def forward_positions(prompt_len, new_tokens, cached):
    """Counts by token: in how many passes does each take part?"""
    if prompt_len < 1:
        raise ValueError(f"prompt_len is {prompt_len}")
    if new_tokens < 0:
        raise ValueError(f"new_tokens is {new_tokens}")
    passes = [new_tokens] * prompt_len + list(range(new_tokens - 1, 0, -1))
    return sum(min(n, 1) if cached else n for n in passes)


def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, bytes_per_elem=2):
    if n_layers < 1 or n_kv_heads < 1:
        raise ValueError("there must be a layer and a head")
    if head_dim < 1 or bytes_per_elem < 1:
        raise ValueError("a head must hold something")
    size = 0
    for _ in range(n_layers):
        for _ in range(n_kv_heads):
            size += head_dim * bytes_per_elem  # its key
            size += head_dim * bytes_per_elem  # its value
    return size


class LayerKV:
    """Token first, [max_len, batch, n_kv_heads, head_dim]: one slot is one contiguous block."""

    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32):
        self.keys = torch.zeros(max_len, batch, n_kv_heads, head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, k, v):
        room = len(self.keys) - self.length
        if k.shape[1] > room:
            raise ValueError(f"room for {room} tokens, not for {k.shape[1]}")
        for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
            self.keys[self.length] = key
            self.values[self.length] = value
            self.length += 1
        return tuple(x[: self.length].transpose(0, 1) for x in (self.keys, self.values))

    def truncate(self, n):
        if n not in range(self.length + 1):
            raise ValueError(f"{n} is not one of 0..{self.length}")
        self.length = n


def attend(q, K, V):
    """Query by query, KV head by KV head; what a query may not see is not sliced."""
    t, H, D = q.shape[1:]
    T, Hkv = K.shape[1:3]
    if H % Hkv or t > T:
        raise ValueError(f"{t} queries of {H} heads, {T} keys of {Hkv}")
    group, out = H // Hkv, torch.empty_like(q)
    q, K, V = q.double() / D**0.5, K.double(), V.double()
    for i in range(t):
        seen = T - t + i + 1
        for head in range(Hkv):
            mine = slice(head * group, (head + 1) * group)
            weights = (q[:, i, mine] @ K[:, :seen, head].mT).softmax(-1)  # [B, group, seen]
            out[:, i, mine] = (weights @ V[:, :seen, head]).to(out.dtype)
    return out


def generate_cached(model, ids, n_new):
    """Prefill in steps that double; then the chosen token is the prompt's next step."""
    if len(ids) < 1 or n_new < 0:
        raise ValueError(f"{len(ids)} ids, {n_new} new ones")
    sizes = model.config
    room = len(ids) + n_new - 1
    caches = [LayerKV(1, sizes.n_kv_heads, room, sizes.head_dim) for _ in range(sizes.n_layers)]

    def attention(layer, q, k, v):
        K, V = caches[layer].append(k, v)
        return attend(q, K, V)

    sequence, fed = ids.copy(), 0
    while len(sequence) < len(ids) + n_new:
        stop = min(2 * fed + 1, len(sequence))
        positions = torch.arange(fed, stop).expand(1, -1)
        logits = model(torch.tensor([sequence[fed:stop]]), positions, attention, 1)
        fed = stop
        if fed == len(sequence):
            sequence.append(int(logits.flatten().argmax()))
    return sequence[len(ids) :], fed


def max_concurrency(hbm_bytes, util, weight_bytes, bytes_per_token, ctx):
    """Searches for the first number of users that is too many."""
    import bisect

    if not (util > 0 and util <= 1):
        raise ValueError(f"util is {util}")
    if bytes_per_token < 1 or ctx < 1:
        raise ValueError(f"{ctx} tokens of {bytes_per_token} bytes")
    free = util * hbm_bytes - weight_bytes
    users = range(int(hbm_bytes) + 1)
    fit = bisect.bisect_right(users, free, key=lambda n: n * bytes_per_token * ctx)
    return max(fit - 1, 0)


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
    """Block pointers, from the last block to the first; scores without `tl.dot`; a mask that
    multiplies."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    part, parts = tl.program_id(2), tl.num_programs(2)
    length = tl.load(seq_lens + b)
    blocks_each = tl.cdiv(tl.cdiv(length, parts), BLOCK_T)
    first = part * blocks_each
    blocks = tl.minimum(blocks_each, tl.cdiv(length, BLOCK_T) - first)

    queries = tl.make_block_ptr(
        base=q + b * s_qb + kv_head * GROUP * s_qh,
        shape=(GROUP, HEAD_DIM),
        strides=(s_qh, 1),
        offsets=(0, 0),
        block_shape=(BLOCK_G, BLOCK_D),
        order=(1, 0),
    )
    keys = tl.make_block_ptr(
        base=k + b * s_kb + kv_head * s_kh,
        shape=(length, HEAD_DIM),
        strides=(s_kt, 1),
        offsets=((first + blocks - 1) * BLOCK_T, 0),
        block_shape=(BLOCK_T, BLOCK_D),
        order=(1, 0),
    )
    values = tl.make_block_ptr(
        base=v + b * s_vb + kv_head * s_vh,
        shape=(length, HEAD_DIM),
        strides=(s_vt, 1),
        offsets=((first + blocks - 1) * BLOCK_T, 0),
        block_shape=(BLOCK_T, BLOCK_D),
        order=(1, 0),
    )
    b_q = tl.load(queries, boundary_check=(0, 1), padding_option="zero").to(tl.float32) * scale

    high = tl.full((BLOCK_G,), -1.0e38, tl.float32)
    total = tl.full((BLOCK_G,), 0.0, tl.float32)
    acc = tl.full((BLOCK_G, BLOCK_D), 0.0, tl.float32)
    for back in range(blocks):
        o_t = (first + blocks - 1 - back) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = (o_t < length).to(tl.float32)
        b_k = tl.load(keys, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        scores = tl.sum(b_q[:, None, :] * b_k[None, :, :], axis=2)
        scores = scores * real - 2.0e38 * (1 - real)
        higher = tl.maximum(high, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None]) * real
        fade = tl.exp(high - higher)
        b_v = tl.load(values, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        acc = tl.dot(weights, b_v, acc=acc * fade[:, None], input_precision="ieee")
        total = tl.fma(total, fade, tl.sum(weights, axis=1))
        high = higher
        keys = tl.advance(keys, (-BLOCK_T, 0))
        values = tl.advance(values, (-BLOCK_T, 0))

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    row = ((b * tl.num_programs(1) + kv_head) * GROUP + g) * parts + part
    if blocks > 0:
        acc = acc / total[:, None]
        high += tl.log(total)
    else:
        high = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    inside = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(part_out + row[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
    tl.store(part_lse + row, high, mask=g < GROUP)
