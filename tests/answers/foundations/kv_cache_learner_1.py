"""What somebody answered who had seen nothing of "The KV cache" but its notebook."""

import math

import torch
import triton
import triton.language as tl


def forward_positions(prompt_len: int, new_tokens: int, cached: bool) -> int:
    """Count the token positions that a model processes while generating."""
    if prompt_len < 1 or new_tokens < 0:
        raise ValueError("need a prompt and a count of at least 0")
    if new_tokens == 0:
        return 0
    if cached:
        return prompt_len + new_tokens - 1
    return prompt_len * new_tokens + new_tokens * (new_tokens - 1) // 2


def kv_bytes_per_token(
    n_layers: int, n_kv_heads: int, head_dim: int, bytes_per_elem: int = 2
) -> int:
    """Return the bytes that one token occupies in the KV cache."""
    if min(n_layers, n_kv_heads, head_dim, bytes_per_elem) < 1:
        raise ValueError("all sizes must be at least 1")
    return 2 * n_layers * n_kv_heads * head_dim * bytes_per_elem


class LayerKV:
    """Keys and values of one layer, in two buffers allocated once."""

    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32):
        self.k = torch.empty(batch, max_len, n_kv_heads, head_dim, dtype=dtype)
        self.v = torch.empty(batch, max_len, n_kv_heads, head_dim, dtype=dtype)
        self.length = 0

    def append(self, k, v):
        end = self.length + k.shape[1]
        if end > self.k.shape[1]:
            raise ValueError(f"{end} tokens do not fit {self.k.shape[1]} slots")
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]

    def truncate(self, n):
        if not 0 <= n <= self.length:
            raise ValueError(f"n must be in 0..{self.length}")
        self.length = n


def attend(q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last t of T positions."""
    B, t, H, D = q.shape
    T, Hkv = K.shape[1], K.shape[2]
    if H % Hkv:
        raise ValueError("H must be a multiple of Hkv")
    if t > T:
        raise ValueError("more queries than keys")
    qg = q.float().reshape(B, t, Hkv, H // Hkv, D)
    scores = torch.einsum("bthgd,bshd->bhgts", qg, K.float()) / math.sqrt(D)
    seen = torch.ones(t, T, dtype=torch.bool).tril(T - t)
    scores = scores.masked_fill(~seen, -math.inf)
    out = torch.einsum("bhgts,bshd->bthgd", scores.softmax(-1), V.float())
    return out.reshape(B, t, H, D).to(q.dtype)


def generate_cached(model, ids: list[int], n_new: int) -> tuple[list[int], int]:
    """Continue ids greedily by n_new tokens with one LayerKV per layer."""
    if not ids or n_new < 0:
        raise ValueError("need a prompt and n_new >= 0")
    c = model.config
    caches = [LayerKV(1, c.n_kv_heads, len(ids) + n_new, c.head_dim) for _ in range(c.n_layers)]

    def attention(layer, q, k, v):
        return attend(q, *caches[layer].append(k, v))

    feed, fed, new_ids = list(ids), 0, []
    for _ in range(n_new):
        positions = torch.arange(fed, fed + len(feed))[None]
        logits = model(torch.tensor([feed]), positions, attention, logits_to_keep=1)
        fed += len(feed)
        feed = [int(logits[0, -1].argmax())]
        new_ids += feed
    return new_ids, fed


def max_concurrency(
    hbm_bytes: float,
    util: float,
    weight_bytes: float,
    bytes_per_token: int,
    ctx: int,
) -> int:
    """Return how many sequences of ctx tokens fit beside the weights."""
    if not 0 < util <= 1:
        raise ValueError("util must be in (0, 1]")
    if bytes_per_token < 1 or ctx < 1:
        raise ValueError("bytes_per_token and ctx must be at least 1")
    left = util * hbm_bytes - weight_bytes
    return max(0, int(left // (bytes_per_token * ctx)))


@triton.jit
def decode_attention_kernel(
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
    """Attention of one group of query heads over one split of its keys."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)

    length = tl.load(seq_lens + b)
    per_split = tl.cdiv(tl.cdiv(length, n_splits), BLOCK_T) * BLOCK_T
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + g
    in_group = g < GROUP
    in_head = d < HEAD_DIM

    q_tile = tl.load(
        q + b * s_qb + heads[:, None] * s_qh + d[None, :],
        mask=in_group[:, None] & in_head[None, :],
        other=0.0,
    )

    high = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)

    for first in range(start, end, BLOCK_T):
        t = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
        here = t < end
        k_tile = tl.load(
            k + b * s_kb + kv_head * s_kh + t[None, :] * s_kt + d[:, None],
            mask=in_head[:, None] & here[None, :],
            other=0.0,
        )  # [BLOCK_D, BLOCK_T]
        v_tile = tl.load(
            v + b * s_vb + kv_head * s_vh + t[:, None] * s_vt + d[None, :],
            mask=here[:, None] & in_head[None, :],
            other=0.0,
        )  # [BLOCK_T, BLOCK_D]
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale
        scores = tl.where(here[None, :], scores, -float("inf"))
        new_high = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp(scores - new_high[:, None])
        shrink = tl.exp(high - new_high)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(
            weights.to(v_tile.dtype), v_tile, input_precision="ieee"
        )
        high = new_high

    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    lse = high + tl.log(total)
    tl.store(
        part_out
        + ((b * tl.num_programs(1) * GROUP + heads[:, None]) * n_splits + split) * HEAD_DIM
        + d[None, :],
        out,
        mask=in_group[:, None] & in_head[None, :],
    )
    tl.store(
        part_lse + (b * tl.num_programs(1) * GROUP + heads) * n_splits + split,
        lse,
        mask=in_group,
    )
