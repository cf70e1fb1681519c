"""Cases of decode attention: edge shapes and layouts, production launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention_decode import decode_attention
from kernels.cases import Benchmark, pairwise, shifted


@dataclass(frozen=True)
class Decode:
    """One call of decode attention.

    `layout` is how the cache lies in memory: "dense"; "fused", K and V in one
    tensor; "heads first", [B, Hkv, S, D] seen as [B, S, Hkv, D]; "shared", one
    cache expanded over the batch; "shifted", off the 16-byte grid.
    """

    seq_lens: tuple[int, ...]
    group: int = 1
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    n_splits: int | None = None
    layout: str = "dense"
    slots: int = 64  # S


# Around a block of 16 keys, the step of the interpreter; empty in the middle.
DECODE_LENGTHS = (1, 15, 0, 16, 17, 55)
DECODE_CASES = [
    Decode(seq_lens=DECODE_LENGTHS, **row)
    for row in pairwise(
        {
            "group": (1, 3, 4, 7, 8),
            "head_dim": (16, 64, 80, 96, 128),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "n_splits": (1, 2, 3, 9),
            "layout": ("dense", "fused", "heads first", "shared", "shifted"),
        }
    )
]


def decode_inputs(
    case: Decode,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and seq_lens of a case; free cache slots hold NaN.

    With a shared cache all sequences are as long as the longest.
    """
    B, S, heads, D = (
        len(case.seq_lens),
        case.slots,
        case.kv_heads,
        case.head_dim,
    )
    lengths = case.seq_lens
    rows = 1 if case.layout == "shared" else B
    if case.layout == "shared":
        lengths = (max(lengths),) * B
    q = torch.randn(B, heads * case.group, D, generator=generator)
    cache = torch.randn(rows, S, 2, heads, D, generator=generator)
    for row, length in zip(range(rows), lengths, strict=False):
        cache[row, length:] = math.nan
    q, cache = q.to(device, case.dtype), cache.to(device, case.dtype)

    k, v = cache[:, :, 0], cache[:, :, 1]  # views into one tensor
    if case.layout == "heads first":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "shared":
        k, v = k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)
    elif case.layout == "shifted":
        q, k, v = shifted(q), shifted(k), shifted(v)
    elif case.layout == "dense":
        k, v = k.contiguous(), v.contiguous()
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=device)


def _decode_launch(
    B: int, S: int, H: int, kv_heads: int, D: int, dtype: torch.dtype
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    q = torch.empty(B, H, D, dtype=dtype, device=meta)
    k = torch.empty(B, S, kv_heads, D, dtype=dtype, device=meta)
    seq_lens = torch.empty(B, dtype=torch.int32, device=meta)
    decode_attention(q, k, k, seq_lens, n_splits=8)


STREAMING = ("_decode_attention_kernel",)
TENSOR_CORE = ("_decode_attention_kernel",)
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, bf16": partial(
        _decode_launch, 16, 8192, 32, 8, 128, torch.bfloat16
    ),
    "SmolLM2-135M, fp16": partial(
        _decode_launch, 16, 2048, 9, 3, 64, torch.float16
    ),
    "SmolLM2-135M, fp32": partial(
        _decode_launch, 16, 2048, 9, 3, 64, torch.float32
    ),
}


def _batched_sdpa(q, k, v, seq_lens):
    """Torch's attention over all slots, with a mask for the lengths."""
    slots = torch.arange(k.shape[1], device=k.device)
    mask = slots < seq_lens[:, None]  # [B, S]
    out = F.scaled_dot_product_attention(
        q[:, :, None],
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask[:, None, None],
        enable_gqa=True,
    )
    return out[:, :, 0]


def _batched_reference(q, k, v, seq_lens):
    """The formula on the whole batch at once, for `torch.compile`."""
    B, H, D = q.shape
    heads = k.shape[2]
    groups = q.view(B, heads, H // heads, D).float()
    scores = torch.einsum("bhgd,bthd->bhgt", groups, k.float()) / math.sqrt(D)
    slots = torch.arange(k.shape[1], device=k.device)
    hidden = (slots >= seq_lens[:, None])[:, None, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = torch.einsum("bhgt,bthd->bhgd", weights, v.float())
    return out.reshape(B, H, D).to(q.dtype)


def _flashinfer(q, k, v, seq_lens):
    """FlashInfer's kernel for one sequence, so for a batch of one."""
    import flashinfer

    return flashinfer.single_decode_with_kv_cache(q[0], k[0], v[0])[None]


def _benchmark(
    B: int,
    S: int,
    H: int,
    kv_heads: int,
    D: int,
    **peers: Callable[..., torch.Tensor],
) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        B: int = B,
        S: int = S,
    ) -> tuple[torch.Tensor, ...]:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(
                shape, generator=generator, device=device, dtype=torch.bfloat16
            )

        q, k, v = (
            draw(B, H, D),
            draw(B, S, kv_heads, D),
            draw(B, S, kv_heads, D),
        )
        return q, k, v, torch.full((B,), S, dtype=torch.int32, device=device)

    keys = B * S * kv_heads
    return Benchmark(
        f"B={B}, S={S}, {H}/{kv_heads} heads of {D}, bf16",
        inputs,
        partial(inputs, B=min(B, 2), S=50),
        decode_attention,
        _batched_reference,
        bytes=2 * (2 * keys * D + 2 * B * H * D),
        flops=4 * B * S * H * D,
        bound="memory",
        tolerance=2e-2,
        peers={"SDPA": _batched_sdpa, **peers},
    )


BENCHMARKS = [
    _benchmark(16, 8192, 32, 8, 128),
    _benchmark(1, 32_768, 32, 8, 128, FlashInfer=_flashinfer),
    _benchmark(64, 2048, 9, 3, 64),
]
