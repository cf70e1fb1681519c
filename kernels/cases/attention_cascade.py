"""Cases of cascade attention: edge shapes and layouts, production launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention_cascade import (
    cascade_decode_attention,
    cascade_prefix_attention,
    merge_lse,
)
from kernels.cases import Benchmark, pairwise, shifted


@dataclass(frozen=True)
class Cascade:
    """One call of cascade attention.

    `layout` is how keys and values lie in memory: "dense"; "fused", K and V in
    one tensor; "heads first", [Hkv, S, D] seen as [S, Hkv, D]; "shared", one
    prefix head expanded over the heads and one suffix over the batch;
    "shifted", off the 16-byte grid.
    """

    suffix_lens: tuple[int, ...]
    prefix: int = 20  # P
    group: int = 1
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    n_splits: int | None = None
    layout: str = "dense"
    slots: int = 20  # S


# Around a block of 16 keys, the step of the interpreter.
CASCADE_CASES = [
    Cascade(suffix_lens=(1, 0, 17), **row)
    for row in pairwise(
        {
            "prefix": (0, 1, 16, 17, 55),
            "group": (1, 3, 4, 7, 8),
            "head_dim": (16, 64, 80, 96, 128),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "n_splits": (1, 2, 3, 9),
            "layout": ("dense", "fused", "heads first", "shared", "shifted"),
        }
    )
]


def cascade_inputs(
    case: Cascade,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """q, prefix K and V, suffix K and V, suffix_lens; free slots hold NaN.

    With a shared suffix all sequences are as long as the longest.
    """
    B, heads, D = len(case.suffix_lens), case.kv_heads, case.head_dim
    lengths, shared = case.suffix_lens, case.layout == "shared"
    if shared:
        lengths = (max(lengths),) * B
    q = torch.randn(B, heads * case.group, D, generator=generator)
    prefix = torch.randn(case.prefix, 2, heads, D, generator=generator)
    suffix = torch.randn(B, case.slots, 2, heads, D, generator=generator)
    for row, length in enumerate(lengths):
        suffix[row, length:] = math.nan
    q, prefix, suffix = (x.to(device, case.dtype) for x in (q, prefix, suffix))
    keys = [prefix[:, 0], prefix[:, 1], suffix[:, :, 0], suffix[:, :, 1]]
    if case.layout == "heads first":
        keys = [
            x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in keys
        ]
    elif shared:
        keys = [
            *(x[:, :1].expand(-1, heads, -1) for x in keys[:2]),
            *(x[:1].expand(B, -1, -1, -1) for x in keys[2:]),
        ]
    elif case.layout == "shifted":
        q, *keys = map(shifted, (q, *keys))
    elif case.layout == "dense":
        keys = [x.contiguous() for x in keys]
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q, *keys, lens


def _cascade_launch(
    B: int, P: int, S: int, H: int, kv_heads: int, D: int, dtype: torch.dtype
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    empty = partial(torch.empty, dtype=dtype, device="meta")
    prefix, suffix = empty(P, kv_heads, D), empty(B, S, kv_heads, D)
    lens = torch.empty(B, dtype=torch.int32, device="meta")
    q = empty(B, H, D)
    cascade_decode_attention(q, prefix, prefix, suffix, suffix, lens, 8)


STREAMING = ("_cascade_attention_kernel",)
TENSOR_CORE = ("_cascade_attention_kernel",)
# One level to a launch, since a row of the table is a kernel of a launch.
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, 64 sequences, prefix, bf16": partial(
        _cascade_launch, 64, 8192, 0, 32, 8, 128, torch.bfloat16
    ),
    "Llama-3-8B, 64 sequences, suffixes, bf16": partial(
        _cascade_launch, 64, 0, 1024, 32, 8, 128, torch.bfloat16
    ),
    "SmolLM2-135M, 16 sequences, prefix, fp32": partial(
        _cascade_launch, 16, 2048, 0, 9, 3, 64, torch.float32
    ),
}


def _normal(
    generator: torch.Generator, device: torch.device, *shape: int
) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.bfloat16, device=device, generator=generator
    )


def _prefix_inputs(
    B: int, P: int, H: int, kv_heads: int, D: int, *where: Any
) -> tuple[torch.Tensor, ...]:
    keys = (_normal(*where, P, kv_heads, D) for _ in range(2))
    return _normal(*where, B, H, D), *keys


def _whole_inputs(
    B: int, P: int, S: int, H: int, kv_heads: int, D: int, *where: Any
) -> tuple[torch.Tensor, ...]:
    """Those of the launcher, then K and V with the prefix copied to every
    sequence, for peers that cannot share it. All suffixes are full."""
    q, *prefix = _prefix_inputs(B, P, H, kv_heads, D, *where)
    suffix = [_normal(*where, B, S, kv_heads, D) for _ in range(2)]
    lens = torch.full((B,), S, dtype=torch.int32, device=q.device)
    whole = (
        torch.cat([shared.expand(B, -1, -1, -1), own], 1)
        for shared, own in zip(prefix, suffix, strict=True)
    )
    return q, *prefix, *suffix, lens, *whole


def _part_inputs(
    n: int, B: int, H: int, D: int, *where: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = _normal(*where, n, B, H, D), _normal(*where, n, B, H)
    return outs, lses.float()


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's own attention of [B, T, H, D] over [B, S, Hkv, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return attended.transpose(1, 2)


def _sdpa_whole(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return _sdpa(q[:, None], *rest[-2:])[:, 0]


def _sdpa_prefix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return _sdpa(q[None], k[None], v[None])[0]


def _prefix_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = q.unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[2])
    scores = torch.einsum("bkgd,pkd->bkgp", grouped, k).float()
    weights = scores.softmax(-1).to(q.dtype)
    out = torch.einsum("bkgp,pkd->bkgd", weights, v)
    return out.reshape(q.shape), scores.logsumexp(-1).flatten(1)


def _cascade_eager(
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    suffix_k: torch.Tensor,
    suffix_v: torch.Tensor,
    *rest: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All suffixes full; it too reads the prefix once."""
    grouped = q.unflatten(1, (suffix_k.shape[2], -1)) / math.sqrt(q.shape[2])
    scores = torch.einsum("bkgd,bskd->bkgs", grouped, suffix_k).float()
    weights = scores.softmax(-1).to(q.dtype)
    out = torch.einsum("bkgs,bskd->bkgd", weights, suffix_v).reshape(q.shape)
    lse = scores.logsumexp(-1).flatten(1)
    prefix_out, prefix_lse = _prefix_eager(q, prefix_k, prefix_v)
    outs, lses = torch.stack([prefix_out, out]), torch.stack([prefix_lse, lse])
    return _merge_eager(outs, lses)


def _merge_eager(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None]
    return (weights * outs.float()).sum(0).to(outs.dtype), lse


def _flashinfer_prefix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    import flashinfer

    return flashinfer.single_prefill_with_kv_cache(
        q, k, v, causal=False, return_lse=True
    )


def _flashinfer_merge(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its log-sum-exps are of base 2: the same work, other weights."""
    import flashinfer

    return flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])


def _cascade_bytes(B: int, P: int, S: int, H: int, heads: int, D: int) -> int:
    return 2 * (2 * heads * D * (P + B * S) + 2 * B * H * D) + 4 * B * H


LLAMA = (32, 8, 128)  # query heads, KV heads, head_dim of Llama-3-8B
BENCHMARKS = [
    Benchmark(
        name="Llama-3-8B, 64 sequences, prefix 8192, suffixes 256",
        inputs=partial(_whole_inputs, 64, 8192, 256, *LLAMA),
        small=partial(_whole_inputs, 3, 20, 5, 4, 2, 16),
        ours=lambda *inputs: cascade_decode_attention(*inputs[:6]),
        reference=_cascade_eager,
        peers={"torch SDPA, prefix copied": _sdpa_whole},
        bytes=_cascade_bytes(64, 8192, 256, *LLAMA),
        flops=4 * 32 * 128 * 64 * (8192 + 256),
        bound="memory",
        tolerance=2e-2,
    ),
    Benchmark(
        name="Llama-3-8B, 16 sequences, prefix 8192 alone",
        inputs=partial(_prefix_inputs, 16, 8192, *LLAMA),
        small=partial(_prefix_inputs, 3, 20, 4, 2, 16),
        ours=cascade_prefix_attention,
        reference=_prefix_eager,
        peers={
            "torch SDPA, 16 rows of one sequence": _sdpa_prefix,
            "FlashInfer, 16 rows of one sequence": _flashinfer_prefix,
        },
        bytes=_cascade_bytes(16, 8192, 0, *LLAMA),
        flops=4 * 32 * 128 * 16 * 8192,
        bound="memory",
        tolerance=2e-2,
    ),
    Benchmark(
        name="Llama-3-8B, 256 sequences, prefix 8192 alone",
        inputs=partial(_prefix_inputs, 256, 8192, *LLAMA),
        small=partial(_prefix_inputs, 9, 20, 4, 2, 16),
        ours=cascade_prefix_attention,
        reference=_prefix_eager,
        peers={
            "torch SDPA, 256 rows of one sequence": _sdpa_prefix,
            "FlashInfer, 256 rows of one sequence": _flashinfer_prefix,
        },
        bytes=_cascade_bytes(256, 8192, 0, *LLAMA),
        flops=4 * 32 * 128 * 256 * 8192,
        bound="compute",
        tolerance=2e-2,
    ),
    Benchmark(
        name="Llama-3-8B, 4096 sequences, merge of two parts",
        inputs=partial(_part_inputs, 2, 4096, 32, 128),
        small=partial(_part_inputs, 2, 3, 4, 16),
        ours=merge_lse,
        reference=_merge_eager,
        peers={"FlashInfer merge_state": _flashinfer_merge},
        bytes=4096 * 32 * 3 * (2 * 128 + 4),
        flops=4096 * 32 * 128 * 4,
        bound="memory",
        tolerance=1e-2,
    ),
]
