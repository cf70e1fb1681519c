"""Cases of the rotary embedding: layouts, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.rope import apply_rope, apply_rope_ref


@dataclass(frozen=True)
class Rope:
    """One call. `layout`: "dense"; "fused", Q out of one QKV matrix; "heads
    first", [H, T, D] seen as [T, H, D]; "shifted", off the 16-byte grid.
    """

    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    exact_angles: bool = True  # cos and sin in float32 whatever the dtype


CASES = [
    Rope(**row)
    for row in pairwise(
        {
            "tokens": (1, 3, 6),
            "heads": (1, 3, 7, 9),
            "head_dim": (2, 16, 64, 80, 96),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "fused", "heads first", "shifted"),
            "exact_angles": (True, False),
        }
    )
]


def rope_inputs(
    case: Rope,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, cos and sin, at positions of up to 1,000."""
    T, H, D = case.tokens, case.heads, case.head_dim
    x = torch.randn(T, 3, H, D, generator=generator).to(device, case.dtype)
    positions = torch.randint(1000, (T, 1), generator=generator)
    angles = positions * 10_000.0 ** -(torch.arange(0, D, 2) / D)
    dtype = torch.float32 if case.exact_angles else case.dtype
    cos, sin = (f(angles).to(device, dtype) for f in (torch.cos, torch.sin))
    if case.layout == "fused":
        return x[:, 1], cos, sin
    if case.layout == "heads first":
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
        return x[:, 0], cos, sin
    x = x[:, 0].contiguous()
    if case.layout == "shifted":
        x, cos, sin = shifted(x), shifted(cos), shifted(sin)
    return x, cos, sin


def _production(T: int, H: int, D: int, dtype: torch.dtype) -> None:
    meta = torch.device("meta")
    x = torch.empty(T, H, D, dtype=dtype, device=meta)
    angles = torch.empty(T, D // 2, dtype=torch.float32, device=meta)
    apply_rope(x, angles, angles)


STREAMING = ("_rope_kernel",)
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B queries, bf16": partial(
        _production, 8192, 32, 128, torch.bfloat16
    ),
    "SmolLM2-135M queries, fp32": partial(
        _production, 8192, 9, 64, torch.float32
    ),
}


def _draw(
    generator: torch.Generator, device: torch.device, T: int, H: int, D: int
) -> tuple[torch.Tensor, ...]:
    x = torch.randn(
        T, H, D, generator=generator, device=device, dtype=torch.bfloat16
    )
    angles = torch.rand(T, D // 2, generator=generator, device=device)
    return x, angles.cos(), angles.sin()


BENCHMARKS = [
    Benchmark(
        "16,384 tokens, 32 heads of 128, bf16",
        partial(_draw, T=16_384, H=32, D=128),
        partial(_draw, T=3, H=3, D=20),
        apply_rope,
        apply_rope_ref,
        bytes=16_384 * (2 * 2 * 32 * 128 + 4 * 128),
        flops=3 * 16_384 * 32 * 128,
        bound="memory",
        tolerance=1e-2,
    )
]
