"""Cases of the 8-bit linear layer: shapes, layouts, launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.gemm_w8a8 import w8a8_linear

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Linear8:
    """One call of the 8-bit linear layer.

    `layout` is how x and W lie in memory: "dense"; "sliced", the middle of a
    wider matrix of 99; "shared", one row expanded; "shifted", off the 16-byte
    grid.
    """

    rows: int  # M
    outputs: int  # N
    columns: int  # K
    dtype: torch.dtype = torch.bfloat16
    n_splits: int | None = None
    layout: str = "dense"


# The interpreter's blocks: 16 outputs, 16 rows, 64 columns.
LINEAR8_CASES = [
    Linear8(**row)
    for row in pairwise(
        {
            "columns": (1, 63, 64, 65, 150),
            "rows": (1, 3, 16, 17),
            "outputs": (1, 5, 16, 17),
            "dtype": (torch.bfloat16, torch.float16, torch.float32),
            "n_splits": (None, 2, 3, 32),
            "layout": ("dense", "sliced", "shared", "shifted"),
        }
    )
]


def _laid_out(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    rows, columns = matrix.shape
    if layout == "sliced":
        room = matrix.new_full((rows, columns + 12), 99)
        room[:, 5 : columns + 5] = matrix
        return room[:, 5 : columns + 5]
    if layout == "shared":
        return matrix[:1].expand(rows, -1)
    return shifted(matrix) if layout == "shifted" else matrix


def linear8_inputs(
    case: Linear8,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Inputs:
    """x, its scales, W and its scales; all codes, scales of different sizes."""

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(
            -128, 128, (rows, case.columns), generator=generator
        )
        codes = codes.to(device, torch.int8)
        scales = 10 ** (-3 * torch.rand(rows, generator=generator))
        return _laid_out(codes, case.layout), scales.to(device)

    return *draw(case.rows), *draw(case.outputs)


def _launch(rows: int, outputs: int, columns: int) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    x = torch.empty(rows, columns, dtype=torch.int8, device=meta)
    w = torch.empty(outputs, columns, dtype=torch.int8, device=meta)
    scales = torch.empty(rows, device=meta), torch.empty(outputs, device=meta)
    w8a8_linear(x, scales[0], w, scales[1], n_splits=2)


STREAMING = ("_w8a8_gemm_kernel",)
TENSOR_CORE = ("_w8a8_gemm_kernel",)
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, 16 rows": partial(_launch, 16, 14_336, 4096),
    "Llama-3-8B, 64 rows": partial(_launch, 64, 14_336, 4096),
    "Llama-3-8B, 4096 rows": partial(_launch, 4096, 14_336, 4096),
}


def _ours(x, x_scales, w, w_scales, half_x, half_w):
    return w8a8_linear(x, x_scales, w, w_scales)


def _reference(x, x_scales, w, w_scales, half_x, half_w):
    """The codes fit bfloat16, so that its product is as fast and all but exact."""
    total = (x.bfloat16() @ w.bfloat16().T).float()
    return (total * x_scales[:, None] * w_scales).bfloat16()


def _cublas_int8(x, x_scales, w, w_scales, half_x, half_w):
    total = torch._int_mm(x, w.T)
    return (total.float() * x_scales[:, None] * w_scales).bfloat16()


def _cublas_half(x, x_scales, w, w_scales, half_x, half_w):
    """The same layer at 16 bits."""
    return half_x @ half_w.T


def _benchmark(rows: int, outputs: int, columns: int) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        rows: int = rows,
        outputs: int = outputs,
        columns: int = columns,
    ) -> tuple[torch.Tensor, ...]:
        def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = 254 * torch.rand(
                n, columns, generator=generator, device=device
            )
            scales = torch.rand(n, generator=generator, device=device)
            return (codes - 127).round().to(torch.int8), scales + 0.5

        (x, x_scales), (w, w_scales) = draw(rows), draw(outputs)
        half_x = (x * x_scales[:, None]).bfloat16()
        half_w = (w * w_scales[:, None]).bfloat16()
        return x, x_scales, w, w_scales, half_x, half_w

    return Benchmark(
        f"{rows} x {columns} by {outputs} x {columns}",
        inputs,
        partial(inputs, rows=min(rows, 20), outputs=24, columns=136),
        _ours,
        _reference,
        bytes=outputs * columns
        + rows * columns
        + 2 * rows * outputs
        + 4 * (rows + outputs),
        # tensor cores do two int8 operations in the time of a bf16 one
        flops=rows * outputs * columns,
        bound="memory" if rows <= 64 else "compute",
        tolerance=1.5e-2,
        peers={
            "cuBLAS int8": _cublas_int8,
            "cuBLAS, all at 16 bits": _cublas_half,
        },
    )


BENCHMARKS = [
    _benchmark(16, 14_336, 4096),
    _benchmark(8192, 4096, 4096),
    _benchmark(1, 4096, 4096),
]
