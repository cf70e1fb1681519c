"""Cases of the quantizers: edge shapes and layouts, launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.quantize import (
    quantize_int4_groups,
    quantize_int4_groups_ref,
    quantize_int8_rows,
    quantize_int8_rows_ref,
    quantize_nf4,
    quantize_nf4_ref,
)


@dataclass(frozen=True)
class Matrix:
    """One matrix to quantize.

    `layout` is how it lies in memory: "dense"; "sliced", the middle columns of
    a wider one that is NaN elsewhere; "shared", one row expanded; "shifted",
    off the 16-byte grid.
    """

    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    layout: str = "dense"


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("dense", "sliced", "shared", "shifted")
# A program of the interpreter takes two rows.
ROW_CASES = [
    Matrix(**row)
    for row in pairwise(
        {
            "columns": (1, 15, 16, 17, 55),
            "rows": (1, 2, 3, 7),
            "dtype": DTYPES,
            "layout": LAYOUTS,
        }
    )
]
GROUP_CASES = [  # with the group size
    (
        Matrix(
            row["rows"],
            row["group"] * row["groups"],
            row["dtype"],
            row["layout"],
        ),
        row["group"],
    )
    for row in pairwise(
        {
            "group": (16, 32, 48, 80),
            "groups": (1, 2, 3),
            "rows": (1, 2, 3),
            "dtype": DTYPES,
            "layout": LAYOUTS,
        }
    )
]


def matrix(
    case: Matrix,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The matrix of a case, normal numbers, rows of different sizes."""
    rows = 1 if case.layout == "shared" else case.rows
    x = torch.randn(rows, case.columns + 9, generator=generator)
    x *= torch.logspace(-3, 2, rows)[:, None]
    x = x.to(device, case.dtype)
    if case.layout == "sliced":
        x[:, :4] = x[:, case.columns + 4 :] = torch.nan
        return x[:, 4 : case.columns + 4]
    x = x[:, : case.columns].contiguous()
    if case.layout == "shared":
        return x.expand(case.rows, -1)
    return shifted(x) if case.layout == "shifted" else x


def _launch(rows: int, columns: int, dtype: torch.dtype, group: int) -> None:
    """Call the launchers on a tensor without memory, to be compiled only."""
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    quantize_int8_rows(x)
    quantize_int4_groups(x, group)
    quantize_nf4(x, group)


STREAMING = (
    "_quantize_int8_rows_kernel",
    "_quantize_int4_groups_kernel",
    "_quantize_nf4_kernel",
)
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, 4096 columns, bf16": partial(
        _launch, 14_336, 4096, torch.bfloat16, 128
    ),
    "Llama-3-70B, 28672 columns, bf16": partial(
        _launch, 8192, 28_672, torch.bfloat16, 128
    ),
    "SmolLM2-135M, 576 columns, fp32": partial(
        _launch, 1536, 576, torch.float32, 64
    ),
}


def _inputs(
    generator: torch.Generator,
    device: torch.device,
    rows: int,
    columns: int,
    *rest: int,
) -> tuple[Any, ...]:
    x = torch.randn(
        rows,
        columns,
        generator=generator,
        device=device,
        dtype=torch.bfloat16,
    )
    return x, *rest


def _vllm_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's scales are a column."""
    from vllm import _custom_ops

    codes, scales, _ = _custom_ops.scaled_int8_quant(x)
    return codes, scales[:, 0]


def _bitsandbytes_nf4(
    w: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes packs the even column high."""
    from bitsandbytes import functional

    codes, state = functional.quantize_nf4(w, blocksize=group)
    codes = codes.view(len(w), -1)
    return codes << 4 | codes >> 4, state.absmax.view(len(w), -1)


def _rows_benchmark(rows: int, columns: int) -> Benchmark:
    return Benchmark(
        f"int8 rows, {rows} x {columns}, bf16",
        partial(_inputs, rows=rows, columns=columns),
        partial(_inputs, rows=3, columns=70),
        quantize_int8_rows,
        quantize_int8_rows_ref,
        bytes=3 * rows * columns + 4 * rows,
        flops=6 * rows * columns,
        bound="memory",
        tolerance=1e-2,  # a peer may multiply with 127 / max: one code off
        peers={"vLLM": _vllm_int8},
    )


def _groups_benchmark(rows: int, columns: int, group: int) -> Benchmark:
    return Benchmark(
        f"int4 groups of {group}, {rows} x {columns}, bf16",
        lambda g, device: _inputs(g, device, rows, columns, group),
        lambda g, device: _inputs(g, device, 3, 64, 32),
        quantize_int4_groups,
        quantize_int4_groups_ref,
        bytes=rows * columns * 5 // 2 + 4 * rows * columns // group,
        flops=8 * rows * columns,
        bound="memory",
        tolerance=0.0,
    )


def _nf4_benchmark(rows: int, columns: int, group: int) -> Benchmark:
    return Benchmark(
        f"NF4 groups of {group}, {rows} x {columns}, bf16",
        lambda g, device: _inputs(g, device, rows, columns, group),
        lambda g, device: _inputs(g, device, 3, 64, 32),
        quantize_nf4,
        quantize_nf4_ref,
        bytes=rows * columns * 5 // 2 + 4 * rows * columns // group,
        flops=20 * rows * columns,
        bound="memory",
        tolerance=0.0,
        peers={"bitsandbytes": _bitsandbytes_nf4},
    )


BENCHMARKS = [
    _rows_benchmark(8192, 4096),
    _rows_benchmark(8192, 14_336),
    _groups_benchmark(14_336, 4096, 128),
    _nf4_benchmark(14_336, 4096, 64),
]
