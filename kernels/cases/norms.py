"""Cases of the norms: row lengths, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cases import Benchmark, pairwise, shifted
from kernels.norms import (
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
)


@dataclass(frozen=True)
class Norm:
    """One call. `layout`: "dense"; "sliced", columns of a wider matrix;
    "shared", one row expanded; "shifted", off the 16-byte grid.
    """

    rows: int
    dim: int
    dtype: torch.dtype = torch.float32
    layout: str = "dense"


CASES = [
    Norm(**row)
    for row in pairwise(
        {
            "rows": (1, 3, 5),
            "dim": (1, 31, 64, 100, 257),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "sliced", "shared", "shifted"),
        }
    )
]


def norm_inputs(
    case: Norm,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual and weight; of a shared layout x alone is."""
    shape = (case.rows, case.dim)
    x, residual = torch.randn(2, *shape, generator=generator).unbind()
    weight = 1 + torch.randn(case.dim, generator=generator) / 4
    x, residual, weight = (
        t.to(device, case.dtype) for t in (x, residual, weight)
    )
    if case.layout == "sliced":
        x = torch.cat((residual, x, residual), 1)[:, case.dim : 2 * case.dim]
        residual = torch.cat((residual, residual), 1)[:, : case.dim]
    elif case.layout == "shared":
        x = x[:1].expand(shape)
    elif case.layout == "shifted":
        x, residual, weight = shifted(x), shifted(residual), shifted(weight)
    return x, residual, weight


def _production(
    T: int, D: int, dtype: torch.dtype, residual: bool = False
) -> None:
    meta = torch.device("meta")
    x = torch.empty(T, D, dtype=dtype, device=meta)
    weight = torch.empty(D, dtype=dtype, device=meta)
    add_rms_norm(x, x, weight) if residual else rms_norm(x, weight)


STREAMING = ("_rms_norm_kernel",)
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, bf16": partial(_production, 8192, 4096, torch.bfloat16),
    "Llama-3-8B with residual, bf16": partial(
        _production, 8192, 4096, torch.bfloat16, True
    ),
    "SmolLM2-135M, fp32": partial(_production, 8192, 576, torch.float32),
}


def _in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(x, residual, weight), residual


def _liger(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, 1e-5)


def _draw(
    generator: torch.Generator, device: torch.device, T: int, D: int, n: int
) -> tuple[torch.Tensor, ...]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(
            shape, generator=generator, device=device, dtype=torch.bfloat16
        )

    return (*(draw(T, D) for _ in range(n)), draw(D))


BENCHMARKS = [
    Benchmark(
        "rms_norm, 16,384 rows of 4,096, bf16",
        partial(_draw, T=16_384, D=4096, n=1),
        partial(_draw, T=3, D=100, n=1),
        rms_norm,
        rms_norm_ref,
        bytes=2 * (2 * 16_384 * 4096 + 4096),
        flops=0,
        bound="memory",
        tolerance=1e-2,
        peers={
            "torch": lambda x, weight: F.rms_norm(
                x, weight.shape, weight, 1e-5
            ),
            "Liger": _liger,
        },
    ),
    Benchmark(
        "add_rms_norm, 16,384 rows of 4,096, bf16",
        partial(_draw, T=16_384, D=4096, n=2),
        partial(_draw, T=3, D=100, n=2),
        _in_place,
        add_rms_norm_ref,
        bytes=2 * (4 * 16_384 * 4096 + 4096),
        flops=0,
        bound="memory",
        tolerance=1e-2,
    ),
]
