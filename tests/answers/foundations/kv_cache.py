"""Second correct answers to the chapter "The KV cache": other algorithms, the same contracts."""

import math

import torch
import triton
import triton.language as tl


def forward_positions(prompt_len, new_tokens, cached):
    """Plays the loop through and counts."""
    if prompt_len < 1 or new_tokens < 0:
        raise ValueError("prompt_len or new_tokens is too small")
    fed, length, in_cache = 0, prompt_len, 0
    for _ in range(new_tokens):
        fed += length - in_cache
        if cached:
            in_cache = length
        length += 1
    return fed


def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, bytes_per_elem=2):
    """Lets a tensor without memory count."""
    shape = (n_layers, 2, n_kv_heads, head_dim, bytes_per_elem)
    if min(shape) < 1:
        raise ValueError(f"{shape} holds a number below 1")
    return torch.empty(shape, dtype=torch.uint8, device="meta").nbytes


class LayerKV:
    """One buffer for both, heads before tokens; what is returned is a transposed view."""

    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32):
        self.buffer = torch.zeros(2, batch, n_kv_heads, max_len, head_dim, dtype=dtype)
        self.free = max_len

    @property
    def length(self):
        return self.buffer.shape[3] - self.free

    def append(self, k, v):
        if k.shape[1] > self.free:
            raise ValueError(f"{k.shape[1]} tokens do not fit into {self.free} slots")
        for token in range(k.shape[1]):
            self.buffer[0, :, :, self.length] = k[:, token]
            self.buffer[1, :, :, self.length] = v[:, token]
            self.free -= 1
        K, V = self.buffer[:, :, :, : self.length].transpose(2, 3)
        return K, V

    def truncate(self, n):
        if n < 0 or n > self.length:
            raise ValueError(f"cannot keep {n} of {self.length} tokens")
        self.free += self.length - n


def attend(q, K, V):
    """16 keys at a time with a running softmax, in float64, KV heads repeated."""
    t, T, group = q.shape[1], K.shape[1], q.shape[2] // max(K.shape[2], 1)
    if group * K.shape[2] != q.shape[2] or t > T:
        raise ValueError("q does not fit K")
    K, V = (x.double().repeat_interleave(group, dim=2) for x in (K, V))
    high = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)  # [B, t, H]
    total = torch.zeros_like(high)
    out = torch.zeros(q.shape, dtype=torch.float64)
    place = torch.arange(T - t, T)[:, None, None]  # [t, 1, 1], of each query
    for j in range(0, T, 16):
        keys, values = K[:, j : j + 16], V[:, j : j + 16]
        scores = torch.einsum("bthd,bshd->bths", q.double(), keys) / q.shape[-1] ** 0.5
        later = torch.arange(j, j + keys.shape[1]) > place  # [t, 1, s]
        scores = torch.where(later, -math.inf, scores)
        higher = torch.maximum(high, scores.amax(-1))
        weights, keep = (scores - higher[..., None]).exp(), (high - higher).exp()
        total = total * keep + weights.sum(-1)
        out = out * keep[..., None] + torch.einsum("bths,bshd->bthd", weights, values)
        high = higher
    return (out / total[..., None]).to(q.dtype)


def generate_cached(model, ids, n_new):
    """Prefill in chunks of four tokens, then decode."""
    if len(ids) == 0 or n_new < 0:
        raise ValueError("nothing to continue, or a negative length")
    if n_new == 0:
        return [], 0
    sizes = model.config
    room = len(ids) + n_new - 1  # the last token is never stored
    layers = [LayerKV(1, sizes.n_kv_heads, room, sizes.head_dim) for _ in range(sizes.n_layers)]

    def attention(layer, q, k, v):
        K, V = layers[layer].append(k, v)
        return attend(q, K, V)

    def feed(tokens):
        first = layers[0].length
        positions = torch.arange(first, first + len(tokens)).unsqueeze(0)
        return model(torch.tensor([tokens]), positions, attention, 1)[0, 0]

    for start in range(0, len(ids), 4):
        logits = feed(list(ids[start : start + 4]))
    chosen = [logits.argmax().item()]
    while len(chosen) < n_new:
        chosen.append(feed(chosen[-1:]).argmax().item())
    return chosen, layers[0].length


def max_concurrency(hbm_bytes, util, weight_bytes, bytes_per_token, ctx):
    """Counts down from what the memory could hold without weights."""
    if util <= 0 or util > 1 or bytes_per_token < 1 or ctx < 1:
        raise ValueError("util, bytes_per_token or ctx is out of range")
    slots = math.floor(util * hbm_bytes - weight_bytes) // bytes_per_token
    return slots // ctx if slots > 0 else 0


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
    """Two passes over the keys, the maximum first; natural exponentials, sums in fp32."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    d = tl.arange(0, BLOCK_D)[None, :]
    g = tl.arange(0, BLOCK_G)[:, None]
    head = kv_head * GROUP + g
    inside = (g < GROUP) & (d < HEAD_DIM)
    queries = tl.load(q + b * s_qb + head * s_qh + d, mask=inside, other=0.0)
    queries = queries.to(tl.float32) * scale

    blocks = tl.cdiv(tl.load(seq_lens + b), BLOCK_T)
    first = split * tl.cdiv(blocks, splits) * BLOCK_T
    last = tl.minimum(first + tl.cdiv(blocks, splits) * BLOCK_T, tl.load(seq_lens + b))

    high = tl.full([BLOCK_G, 1], -1e30, tl.float32)
    for t in range(first, last, BLOCK_T):
        rows = t + tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
        here = (rows < last) & (d < HEAD_DIM)
        keys = tl.load(k + b * s_kb + rows * s_kt + kv_head * s_kh + d, mask=here, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(tl.float32)), input_precision="ieee")
        scores = tl.where(tl.trans(rows < last), scores, -float("inf"))
        high = tl.maximum(high, tl.max(scores, 1)[:, None])

    total = tl.zeros([BLOCK_G, 1], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for t in range(first, last, BLOCK_T):
        rows = t + tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
        here = (rows < last) & (d < HEAD_DIM)
        keys = tl.load(k + b * s_kb + rows * s_kt + kv_head * s_kh + d, mask=here, other=0.0)
        values = tl.load(v + b * s_vb + rows * s_vt + kv_head * s_vh + d, mask=here, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(tl.float32)), input_precision="ieee")
        weights = tl.where(tl.trans(rows < last), tl.exp(scores - high), 0.0)
        total += tl.sum(weights, 1)[:, None]
        acc += tl.dot(weights, values.to(tl.float32), input_precision="ieee")

    row = (b * tl.num_programs(1) * GROUP + head) * splits + split
    empty = total == 0.0
    average = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(part_out + row * HEAD_DIM + d, average, mask=inside)
    tl.store(part_lse + row, high + tl.log(total), mask=g < GROUP)
