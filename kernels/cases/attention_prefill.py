"""Cases of prefill attention: edge shapes, production launches, benchmarks."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention_prefill import prefill_attention
from kernels.cases import Benchmark, pairwise, shifted

Inputs = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    int,
    int | None,
]


@dataclass(frozen=True)
class Prefill:
    """One call of prefill attention on packed sequences.

    `lengths` holds (queries, keys) of each sequence, `heads` (H, Hkv).
    `layout` is how q, k and v lie in memory: "dense"; "fused", K and V in one
    tensor; "heads first", [H, T, D] seen as [T, H, D]; "shared", one KV head
    expanded over all; "shifted", off the 16-byte grid.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    layout: str = "dense"
    spare: int = 3  # rows of k and v that belong to no sequence


# Around the interpreter's 16 queries, 32 keys and 16 keys at the edges; whole
# prompts, chunks over a cache, and more queries than keys.
PREFILL_LENGTHS = (
    ((1, 1), (15, 40)),
    ((16, 16), (3, 0)),
    ((17, 55),),
    ((0, 0), (20, 17)),
    ((5, 100), (0, 3)),
)
PREFILL_CASES = [
    Prefill(**row)
    for row in pairwise(
        {
            "lengths": PREFILL_LENGTHS,
            "heads": ((2, 2), (6, 2), (4, 1), (7, 1), (8, 1)),
            "head_dim": (16, 64, 80, 96, 128),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "window": (None, 1, 16, 20, 40),
            "layout": ("dense", "fused", "heads first", "shared", "shifted"),
        }
    )
]


def offsets(
    lengths: tuple[int, ...], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """cu_seqlens of packed sequences: 0 and running sums, [B + 1] int32."""
    sums = [0, *itertools.accumulate(lengths)]
    return torch.tensor(sums, dtype=torch.int32, device=device)


def prefill_inputs(
    case: Prefill,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Arguments of a case, up to window; spare rows of k and v hold NaN."""
    queries = tuple(n_q for n_q, _ in case.lengths)
    keys = tuple(n_k for _, n_k in case.lengths)
    (H, kv_heads), D = case.heads, case.head_dim
    shared = case.layout == "shared"
    q = torch.randn(sum(queries), H, D, generator=generator)
    rows, columns = sum(keys) + case.spare, 1 if shared else kv_heads
    cache = torch.randn(rows, 2, columns, D, generator=generator)
    cache[sum(keys) :] = math.nan
    q, cache = q.to(device, case.dtype), cache.to(device, case.dtype)

    k, v = cache[:, 0], cache[:, 1]  # views into one tensor
    if case.layout == "heads first":
        q, k, v = (
            x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)
        )
    elif shared:
        k, v = k.expand(-1, kv_heads, -1), v.expand(-1, kv_heads, -1)
    elif case.layout == "shifted":
        q, k, v = shifted(q), shifted(k), shifted(v)
    elif case.layout == "dense":
        k, v = k.contiguous(), v.contiguous()
    cu_seqlens = offsets(queries, device), offsets(keys, device)
    return q, k, v, *cu_seqlens, max(queries, default=0), case.window


def _prefill_launch(
    B: int, S: int, H: int, kv_heads: int, D: int, dtype: torch.dtype
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    q = torch.empty(B * S, H, D, dtype=dtype, device=meta)
    k = torch.empty(B * S, kv_heads, D, dtype=dtype, device=meta)
    cu_seqlens = torch.empty(B + 1, dtype=torch.int32, device=meta)
    prefill_attention(q, k, k, cu_seqlens, cu_seqlens, S)


STREAMING = ("_prefill_attention_kernel",)
TENSOR_CORE = ("_prefill_attention_kernel",)
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, bf16": partial(
        _prefill_launch, 4, 4096, 32, 8, 128, torch.bfloat16
    ),
    "SmolLM2-135M, fp16": partial(
        _prefill_launch, 16, 2048, 9, 3, 64, torch.float16
    ),
    "SmolLM2-135M, fp32": partial(
        _prefill_launch, 16, 2048, 9, 3, 64, torch.float32
    ),
}


def _equal_sequences(
    B: int,
    heads: tuple[int, int],
    n_q: int,
    n_k: int,
    window: int | None,
    generator: torch.Generator,
    device: torch.device,
) -> Inputs:
    """B sequences of the same lengths with heads (H, Hkv) of 128, bfloat16."""

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(
            *(tokens, heads, 128),
            dtype=torch.bfloat16,
            device=device,
            generator=generator,
        )

    q = draw(B * n_q, heads[0])
    k, v = draw(B * n_k, heads[1]), draw(B * n_k, heads[1])
    cu_seqlens = offsets((n_q,) * B, device), offsets((n_k,) * B, device)
    return q, k, v, *cu_seqlens, n_q, window


def _batched(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[B, heads, n, D], for sequences of the same length."""
    B = len(cu_seqlens) - 1
    return x.view(B, -1, *x.shape[1:]).transpose(1, 2)


def _packed(out: torch.Tensor) -> torch.Tensor:
    """[B * n, heads, D]."""
    return out.transpose(1, 2).flatten(0, 1)


def _seen(
    n_q: int, n_k: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Which keys the queries see, [n_q, n_k] bool."""
    positions = torch.arange(n_k - n_q, n_k, device=device)
    back = positions[:, None] - torch.arange(n_k, device=device)
    return (back >= 0) & (back < (n_k if window is None else window))


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    window: int | None,
) -> torch.Tensor:
    """The whole matrix of scores in torch, for sequences of equal lengths."""
    q, k = _batched(q, cu_seqlens_q), _batched(k, cu_seqlens_k)
    v = _batched(v, cu_seqlens_k)
    kv_heads, n_k, D = k.shape[1:]
    n_q = q.shape[2]
    q = q.unflatten(1, (kv_heads, -1))  # [B, Hkv, group, n_q, D]
    scores = q @ k[:, :, None].mT / math.sqrt(D)
    seen = _seen(n_q, n_k, window, q.device)
    scores = scores.float().masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).to(v.dtype)
    return _packed((weights @ v[:, :, None]).flatten(1, 2))


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    window: int | None,
) -> torch.Tensor:
    """Torch's own: causal where q is as long as k, else a bias or mask."""
    from torch.nn.attention.bias import causal_lower_right

    q, k = _batched(q, cu_seqlens_q), _batched(k, cu_seqlens_k)
    v = _batched(v, cu_seqlens_k)
    n_q, n_k = q.shape[2], k.shape[2]
    kind: dict[str, Any] = {"is_causal": True}
    if window is not None:
        kind = {"attn_mask": _seen(n_q, n_k, window, q.device)}
    elif n_q != n_k:
        # The bias takes no groups, so KV heads are copied out.
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        kind = {"attn_mask": causal_lower_right(n_q, n_k)}
    return _packed(
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kind)
    )


def _flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    window: int | None,
) -> torch.Tensor:
    """The flash-attn package, which also aligns queries to the last keys."""
    from flash_attn import flash_attn_varlen_func

    n_k = k.shape[0] // (len(cu_seqlens_k) - 1)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, n_k),
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
    )


def _benchmark(
    name: str, B: int, n_q: int, n_k: int, window: int | None
) -> Benchmark:
    """All sequences alike, at the sizes of Llama-3-8B."""
    H, kv_heads, D = 32, 8, 128
    widest = n_k if window is None else window
    pairs = sum(min(p + 1, widest) for p in range(n_k - n_q, n_k))
    small = 2, (2, 1), 9, 9 * n_k // n_q, window and 5
    return Benchmark(
        name=name,
        inputs=partial(_equal_sequences, B, (H, kv_heads), n_q, n_k, window),
        small=partial(_equal_sequences, *small),
        ours=prefill_attention,
        reference=plain_attention,
        peers={"torch SDPA": _sdpa, "flash-attn": _flash_attn},
        bytes=2 * B * D * 2 * (n_q * H + n_k * kv_heads),
        flops=4 * B * H * D * pairs,
        bound="compute",
        tolerance=2e-2,
    )


BENCHMARKS = [
    _benchmark("4 prompts of 4,096 tokens, bf16", 4, 4096, 4096, None),
    _benchmark("2,048 tokens after 30,720, bf16", 1, 2048, 32768, None),
    _benchmark("8,192 tokens, window of 1,024, bf16", 1, 8192, 8192, 1024),
]
