"""Another one's who had only the notebook, asked for ways that are less usual."""

import math

import torch
import triton
import triton.language as tl


def forward_positions(prompt_len: int, new_tokens: int, cached: bool) -> int:
    if prompt_len < 1:
        raise ValueError(f"a prompt has at least one token, not {prompt_len}")
    if new_tokens < 0:
        raise ValueError(f"new_tokens must not be negative: {new_tokens}")
    passes = range(prompt_len, prompt_len + new_tokens)  # length of each pass
    if cached:
        return passes[-1] if passes else 0
    return sum(passes)


def kv_bytes_per_token(
    n_layers: int, n_kv_heads: int, head_dim: int, bytes_per_elem: int = 2
) -> int:
    factors = (n_layers, n_kv_heads, head_dim, bytes_per_elem)
    if min(factors) < 1:
        raise ValueError(f"every argument must be at least 1: {factors}")
    return math.prod(factors, start=2)


class LayerKV:
    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # One allocation for both: axis 0 is key or value.
        self.kv = torch.empty(2, batch, max_len, n_kv_heads, head_dim, dtype=dtype)
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = k.shape[1]
        if t > self.kv.shape[2] - self.length:
            raise ValueError(f"{t} tokens do not fit behind {self.length} of {self.kv.shape[2]}")
        for buffer, new in zip(self.kv, (k, v), strict=True):
            buffer.narrow(1, self.length, t).copy_(new)
        self.length += t
        K, V = self.kv.narrow(2, 0, self.length).unbind(0)
        return K, V

    def truncate(self, n: int) -> None:
        if not 0 <= n <= self.length:
            raise ValueError(f"cannot keep {n} of {self.length} tokens")
        self.length = n


def attend(q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    B, t, H, D = q.shape
    T, Hkv = K.shape[1:3]
    if H % Hkv:
        raise ValueError(f"{H} query heads cannot share {Hkv} KV heads")
    if t > T:
        raise ValueError(f"{t} queries for {T} keys")
    G = H // Hkv
    # A group's queries become rows of one matrix: row = token * G + member.
    rows = (q.float() / math.sqrt(D)).unflatten(2, (Hkv, G))
    rows = rows.transpose(1, 2).reshape(B, Hkv, t * G, D)
    keys = K.float().permute(0, 2, 3, 1)  # [B, Hkv, D, T]
    values = V.float().transpose(1, 2)  # [B, Hkv, T, D]
    scores = rows @ keys
    stands = torch.arange(T - t, T, device=q.device).repeat_interleave(G)
    future = torch.arange(T, device=q.device) > stands[:, None]
    scores = scores.masked_fill(future, -math.inf)
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    out = (weights @ values).view(B, Hkv, t, G, D)
    return out.transpose(1, 2).reshape(B, t, H, D).to(q.dtype)


def generate_cached(model, ids: list[int], n_new: int) -> tuple[list[int], int]:
    if not ids:
        raise ValueError("the prompt is empty")
    if n_new < 0:
        raise ValueError(f"n_new must not be negative: {n_new}")
    room = len(ids) + max(n_new - 1, 0)
    caches = {}  # made by the first token, which also tells the dtype
    fed = 0

    def attention(layer, q, k, v):
        if layer not in caches:
            caches[layer] = LayerKV(k.shape[0], k.shape[2], room, k.shape[3], k.dtype)
        return attend(q, *caches[layer].append(k, v))

    def feed(tokens):
        nonlocal fed
        positions = torch.arange(fed, fed + len(tokens))[None]
        fed += len(tokens)
        return model(torch.tensor([tokens]), positions, attention, logits_to_keep=1)[0, -1]

    new_ids = []
    if n_new:
        # Chunked prefill, as servers do: at most 32 prompt tokens a pass.
        for first in range(0, len(ids), 32):
            logits = feed(ids[first : first + 32])
        new_ids.append(int(logits.argmax()))
    while len(new_ids) < n_new:
        new_ids.append(int(feed(new_ids[-1:]).argmax()))
    return new_ids, fed


def max_concurrency(
    hbm_bytes: float,
    util: float,
    weight_bytes: float,
    bytes_per_token: int,
    ctx: int,
) -> int:
    from fractions import Fraction

    if not 0 < util <= 1:
        raise ValueError(f"util must be in (0, 1], not {util}")
    if bytes_per_token < 1 or ctx < 1:
        raise ValueError("bytes_per_token and ctx must be at least 1")
    # Read util as it was written: 0.7 of 100 bytes are 70, not 69.99...
    left = Fraction(str(util)) * Fraction(hbm_bytes) - Fraction(weight_bytes)
    return int(max(left, 0) // (bytes_per_token * ctx))


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
    # Everything is transposed: scores are [keys, queries], so the long axis
    # fills the rows of the matrix unit and the small group its columns.
    b = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)

    n = tl.load(seq_lens + b)
    per_split = tl.cdiv(tl.cdiv(n, n_splits), BLOCK_T) * BLOCK_T
    begin = split * per_split
    end = tl.minimum(begin + per_split, n)

    d = tl.arange(0, BLOCK_D)
    member = tl.arange(0, BLOCK_G)
    head = g * GROUP + member  # int64
    in_d = d < HEAD_DIM
    in_g = member < GROUP

    q_t = tl.load(
        q + b * s_qb + head[None, :] * s_qh + d[:, None],
        mask=in_d[:, None] & in_g[None, :],
        other=0.0,
    )  # [D, G]

    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        in_t = t < end
        t64 = t.to(tl.int64)
        mask = in_t[:, None] & in_d[None, :]
        keys = tl.load(
            k + b * s_kb + g * s_kh + t64[:, None] * s_kt + d[None, :],
            mask=mask,
            other=0.0,
        )  # [T, D]
        values = tl.load(
            v + b * s_vb + g * s_vh + t64[:, None] * s_vt + d[None, :],
            mask=mask,
            other=0.0,
        )  # [T, D]
        s = tl.dot(keys, q_t, input_precision="ieee") * scale  # [T, G]
        s = tl.where(in_t[:, None], s, float("-inf"))
        new_high = tl.maximum(high, tl.max(s, 0))
        fade = tl.exp(high - new_high)
        p = tl.exp(s - new_high[None, :])
        total = total * fade + tl.sum(p, 0)
        acc = acc * fade[None, :] + tl.dot(
            tl.trans(values), p.to(values.dtype), input_precision="ieee"
        )
        high = new_high

    some = total > 0
    safe = tl.where(some, total, 1.0)
    lse = tl.where(some, high + tl.log(safe), float("-inf"))
    heads = tl.num_programs(1) * GROUP
    row = (b * heads + head) * n_splits + split
    tl.store(
        part_out + row[None, :] * HEAD_DIM + d[:, None],
        acc / safe[None, :],
        mask=in_d[:, None] & in_g[None, :],
    )
    tl.store(part_lse + row, lse, mask=in_g)
