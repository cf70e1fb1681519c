"""Cases of the gate: widths and layouts, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cases import Benchmark, pairwise, shifted
from kernels.swiglu import swiglu, swiglu_ref


@dataclass(frozen=True)
class Gate:
    """One call. `layout`: "dense"; "fused", halves of one matrix; "shared",
    one row expanded; "shifted", off the 16-byte grid.
    """

    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    layout: str = "dense"


# Around the 16 columns of a program in the interpreter.
CASES = [
    Gate(**row)
    for row in pairwise(
        {
            "rows": (1, 2, 5),
            "columns": (1, 15, 16, 17, 55),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "fused", "shared", "shifted"),
        }
    )
]


def gate_inputs(
    case: Gate,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up."""
    shape = (case.rows, 2 * case.columns)
    both = 3 * torch.randn(shape, generator=generator)
    gate, up = both.to(device, case.dtype).chunk(2, dim=1)
    if case.layout == "fused":
        return gate, up
    if case.layout == "shared":
        return gate[:1].expand(gate.shape), up
    if case.layout == "shifted":
        return shifted(gate), shifted(up)
    return gate.contiguous(), up.contiguous()


def _production(T: int, columns: int, dtype: torch.dtype) -> None:
    both = torch.empty(
        T, 2 * columns, dtype=dtype, device=torch.device("meta")
    )
    swiglu(both[:, :columns], both[:, columns:])


STREAMING = ("_swiglu_kernel",)
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, bf16": partial(_production, 8192, 14_336, torch.bfloat16),
    "SmolLM2-135M, fp32": partial(_production, 8192, 1536, torch.float32),
}


def _draw(
    generator: torch.Generator, device: torch.device, T: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(
        T,
        2 * columns,
        generator=generator,
        device=device,
        dtype=torch.bfloat16,
    )
    return both[:, :columns], both[:, columns:]


def _liger(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


BENCHMARKS = [
    Benchmark(
        "8,192 rows of 14,336, bf16",
        partial(_draw, T=8192, columns=14_336),
        partial(_draw, T=3, columns=20),
        swiglu,
        swiglu_ref,
        bytes=3 * 2 * 8192 * 14_336,
        flops=5 * 8192 * 14_336,
        bound="memory",
        tolerance=1e-2,
        peers={
            "torch": lambda gate, up: F.silu(gate) * up,
            "Liger": _liger,
        },
    )
]
