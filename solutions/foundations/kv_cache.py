"""Reference answers of the chapter "The KV cache"."""

import math

import torch

from kernels.attention_decode import (
    _decode_attention_kernel as decode_attention_kernel,
)

__all__ = [
    "LayerKV",
    "attend",
    "decode_attention_kernel",
    "forward_positions",
    "generate_cached",
    "kv_bytes_per_token",
    "max_concurrency",
]


def forward_positions(prompt_len: int, new_tokens: int, cached: bool) -> int:
    """Count the token positions that a model processes while generating.

    The prompt has prompt_len tokens and new_tokens tokens are sampled. The
    last sampled token is returned, never fed back. Without a cache, each step
    feeds the whole sequence so far; with one, no position is fed twice.
    new_tokens=0 costs nothing.

    Raises ValueError if prompt_len < 1 or new_tokens < 0.
    """
    # stub: write down how many positions the first three steps feed
    if prompt_len < 1:
        raise ValueError(f"prompt_len={prompt_len}: must be at least 1")
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens}: must not be negative")
    if new_tokens == 0:
        return 0
    if cached:
        return prompt_len + new_tokens - 1
    return new_tokens * prompt_len + new_tokens * (new_tokens - 1) // 2


def kv_bytes_per_token(
    n_layers: int, n_kv_heads: int, head_dim: int, bytes_per_elem: int = 2
) -> int:
    """Return the bytes that one token occupies in the KV cache.

    Each of n_layers layers keeps one key and one value per KV head, each of
    head_dim elements of bytes_per_elem bytes (2 for fp16 and bf16).

    Raises ValueError if any argument is below 1.
    """
    # stub: count the numbers that one layer keeps for one token
    if n_layers < 1:
        raise ValueError(f"n_layers={n_layers}: must be at least 1")
    if n_kv_heads < 1:
        raise ValueError(f"n_kv_heads={n_kv_heads}: must be at least 1")
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: must be at least 1")
    if bytes_per_elem < 1:
        raise ValueError(
            f"bytes_per_elem={bytes_per_elem}: must be at least 1"
        )
    return 2 * n_layers * n_kv_heads * head_dim * bytes_per_elem


class LayerKV:
    """Keys and values of one layer, in two buffers allocated once.

    The buffers have shape [batch, max_len, n_kv_heads, head_dim]; the first
    `length` tokens of each are valid.
    """

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate room for max_len tokens; length starts at 0."""
        # stub: allocate two buffers and set length to 0
        shape = (batch, max_len, n_kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype)
        self.v = torch.empty(shape, dtype=dtype)
        self.length = 0

    def append(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store t new tokens and return all valid ones.

        k, v: [batch, t, n_kv_heads, head_dim], t >= 0.
        Returns views K, V of the buffers: [batch, T, n_kv_heads, head_dim]
        with T = length after the call.
        Raises ValueError, and stores nothing, if max_len would be exceeded.
        """
        # stub: compute the new length and refuse it if it does not fit
        end = self.length + k.shape[1]
        max_len = self.k.shape[1]
        if end > max_len:
            raise ValueError(f"k ends at token {end}: max_len is {max_len}")
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]

    def truncate(self, n: int) -> None:
        """Keep the first n tokens; ValueError unless 0 <= n <= length."""
        # stub: refuse an n outside 0..length; what is past length is free
        if not 0 <= n <= self.length:
            raise ValueError(f"n={n}: must lie in 0..{self.length}")
        self.length = n


def attend(q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last t of T positions.

    q: [B, t, H, D]; K, V: [B, T, Hkv, D]; returns [B, t, H, D] in q's dtype.
    Query i stands at position T - t + i and sees keys 0..T - t + i. Query
    head h reads KV head h // (H // Hkv). Scores are scaled by 1 / sqrt(D);
    scores, softmax and sum are computed in fp32.

    Raises ValueError if H is not a multiple of Hkv or t > T.
    """
    # stub: split the H query heads into Hkv groups
    B, t, H, D = q.shape
    T, Hkv = K.shape[1:3]
    if H % Hkv:
        raise ValueError(f"q has {H} heads: must be a multiple of {Hkv}")
    if t > T:
        raise ValueError(f"q has {t} tokens: must not exceed the {T} of K")
    groups = q.float().reshape(B, t, Hkv, H // Hkv, D)
    scores = torch.einsum("btkgd,bskd->bkgts", groups, K.float())
    # Row i of the mask is position T - t + i: the diagonal starts there.
    visible = torch.ones(t, T, dtype=torch.bool, device=q.device).tril(T - t)
    scores = (scores / math.sqrt(D)).masked_fill(~visible, -math.inf)
    weights = scores.softmax(dim=-1)  # [B, Hkv, G, t, T]
    out = torch.einsum("bkgts,bskd->btkgd", weights, V.float())
    return out.reshape(B, t, H, D).to(q.dtype)


def generate_cached(
    model, ids: list[int], n_new: int
) -> tuple[list[int], int]:
    """Continue ids greedily by n_new tokens with one LayerKV per layer.

    model(ids [1, t], positions [1, t], attention, logits_to_keep=1) returns
    logits [1, 1, vocab] and calls attention(layer, q, k, v) -> o in each
    layer, with rotated q [1, t, H, D] and k, v [1, t, Hkv, D]. Positions are
    absolute: the first token has position 0. model.config holds n_layers,
    n_kv_heads and head_dim.

    Returns the n_new new ids and the number of positions fed to the model
    (n_new = 0 feeds nothing). Raises ValueError if ids is empty or n_new < 0.
    """
    # stub: make one LayerKV per layer and an attention that appends to it
    if not ids:
        raise ValueError("ids=[]: must hold at least one token")
    if n_new < 0:
        raise ValueError(f"n_new={n_new}: must not be negative")
    config = model.config
    caches = [
        LayerKV(1, config.n_kv_heads, len(ids) + n_new, config.head_dim)
        for _ in range(config.n_layers)
    ]

    def attention(layer, q, k, v):
        return attend(q, *caches[layer].append(k, v))

    new_ids: list[int] = []
    feed, fed = ids, 0
    for _ in range(n_new):
        positions = torch.arange(fed, fed + len(feed))
        logits = model(
            torch.tensor([feed]), positions[None], attention, logits_to_keep=1
        )
        fed += len(feed)
        feed = [int(logits.argmax())]
        new_ids += feed
    return new_ids, fed


def max_concurrency(
    hbm_bytes: float,
    util: float,
    weight_bytes: float,
    bytes_per_token: int,
    ctx: int,
) -> int:
    """Return how many sequences of ctx tokens fit beside the weights.

    The server may use the fraction util of hbm_bytes for weights and cache
    together. Returns 0 if the weights do not fit.

    Raises ValueError unless 0 < util <= 1, bytes_per_token >= 1, ctx >= 1.
    """
    # stub: find the bytes that are left for the cache
    if not 0 < util <= 1:
        raise ValueError(f"util={util}: must lie in (0, 1]")
    if bytes_per_token < 1:
        raise ValueError(
            f"bytes_per_token={bytes_per_token}: must be at least 1"
        )
    if ctx < 1:
        raise ValueError(f"ctx={ctx}: must be at least 1")
    free = util * hbm_bytes - weight_bytes
    return max(0, int(free // (bytes_per_token * ctx)))
