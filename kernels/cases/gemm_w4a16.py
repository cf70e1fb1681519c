"""Cases of the 4-bit linear layer: shapes, layouts, launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.gemm_w4a16 import w4a16_linear, w4a16_linear_ref

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Linear:
    """One call of the linear layer.

    `layout` is how all but the output lie in memory: "dense"; "sliced", the
    middle of a wider tensor with NaN (or codes of 15) around it; "shared", all
    but the codes one row expanded; "shifted", off the 16-byte grid, on which
    the codes must stay.
    """

    rows: int  # M
    outputs: int  # N
    group: int  # G
    groups: int = 1  # K / G
    dtype: torch.dtype = torch.float16
    n_splits: int | None = None
    layout: str = "dense"


# The interpreter's blocks: 4 or 16 outputs, 16 rows, 64 columns.
LINEAR_CASES = [
    Linear(**row)
    for row in pairwise(
        {
            "rows": (1, 3, 16, 17),
            "outputs": (1, 5, 16, 17),
            "group": (32, 64, 96, 128, 160),
            "groups": (1, 2, 3),
            "dtype": (torch.float16, torch.bfloat16),
            "n_splits": (None, 2, 3, 32),
            "layout": ("dense", "sliced", "shared", "shifted"),
        }
    )
]


def _laid_out(tensor: torch.Tensor, layout: str, margin: int) -> torch.Tensor:
    rows, columns = tensor.shape
    if layout == "sliced":
        around = 255 if tensor.dtype == torch.uint8 else torch.nan
        room = tensor.new_full((rows, columns + 2 * margin), around)
        room[:, margin : margin + columns] = tensor
        return room[:, margin : margin + columns]
    if tensor.dtype == torch.uint8 or layout == "dense":
        return tensor
    return (
        shifted(tensor) if layout == "shifted" else tensor[:1].expand(rows, -1)
    )


def linear_inputs(
    case: Linear,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Inputs:
    """x, codes, scales and zeros of a case; zeros are no integers.

    x and W lean to one side: sums that happen to cancel say nothing about
    relative errors.
    """
    M, N, K = case.rows, case.outputs, case.group * case.groups
    x = 1 + torch.randn(M, K, generator=generator)
    codes = torch.randint(
        256, (N, K // 2), generator=generator, dtype=torch.uint8
    )
    scales = torch.rand(N, case.groups, generator=generator) + 0.01
    zeros = 5 * torch.rand(N, case.groups, generator=generator)
    tensors = (x.to(case.dtype), codes, scales.half(), zeros.half())
    x, codes, scales, zeros = (
        _laid_out(tensor.to(device), case.layout, margin)
        for tensor, margin in zip(tensors, (5, 16, 3, 1), strict=True)
    )
    return x, codes, scales, zeros


def _launch(
    rows: int, outputs: int, columns: int, group: int, dtype: torch.dtype
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scales = empty(outputs, columns // group)
    codes = empty(outputs, columns // 2, dtype=torch.uint8)
    w4a16_linear(empty(rows, columns, dtype=dtype), codes, scales, scales, 2)


# Few rows of x read W as fast as one does, but the multiply kernel is also
# that of many rows, whose time is not the read's.
STREAMING = ("_w4a16_gemv_kernel",)
TENSOR_CORE = ("_w4a16_gemm_kernel",)
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, one row, bf16": partial(
        _launch, 1, 14_336, 4096, 128, torch.bfloat16
    ),
    "Llama-3-8B, 16 rows, bf16": partial(
        _launch, 16, 14_336, 4096, 128, torch.bfloat16
    ),
    "SmolLM2-135M, one row, fp16": partial(
        _launch, 1, 1536, 576, 64, torch.float16
    ),
    "Llama-3-8B, 4096 rows, bf16": partial(
        _launch, 4096, 14_336, 4096, 128, torch.bfloat16
    ),
}


def _ours(x, codes, scales, zeros, w, packed, pairs):
    return w4a16_linear(x, codes, scales, zeros)


def _reference(x, codes, scales, zeros, w, packed, pairs):
    return w4a16_linear_ref(x, codes, scales, zeros)


def _cublas(x, codes, scales, zeros, w, packed, pairs):
    """The same weights at 16 bits."""
    return x @ w.T


def _tinygemm(x, codes, scales, zeros, w, packed, pairs):
    """Torch's own 4-bit product, for few rows."""
    if packed is None:
        raise ImportError("for CUDA only")
    group = x.shape[1] // scales.shape[1]
    return torch.ops.aten._weight_int4pack_mm(x, packed, group, pairs)


def _benchmark(
    rows: int, outputs: int, columns: int, group: int = 128
) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        rows: int = rows,
        outputs: int = outputs,
        columns: int = columns,
    ) -> tuple[Any, ...]:
        def draw(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device)

        n_groups = columns // group
        x = (draw(rows, columns) - 0.5).bfloat16()
        codes = (256 * draw(outputs, columns // 2)).to(torch.uint8)
        scales = (draw(outputs, n_groups) + 0.5).half()
        zeros = (7 + draw(outputs, n_groups)).half()
        eye = torch.eye(columns, device=device, dtype=torch.bfloat16)
        w = w4a16_linear_ref(eye, codes, scales, zeros).T.contiguous()
        packed = pairs = None
        if device.type == "cuda":  # the even column high, s * (q - 8) + z
            packed = torch.ops.aten._convert_weight_to_int4pack(
                codes << 4 | codes >> 4, 8
            )
            pairs = torch.stack([scales, scales * (8 - zeros)], 2)
            pairs = pairs.transpose(0, 1).contiguous().bfloat16()
        return x, codes, scales, zeros, w, packed, pairs

    weights = outputs * columns
    return Benchmark(
        f"{rows} x {columns} by {outputs} x {columns}, G = {group}, bf16",
        inputs,
        partial(inputs, rows=min(rows, 5), outputs=9, columns=2 * group),
        _ours,
        _reference,
        bytes=weights // 2
        + 4 * weights // group
        + 2 * rows * (columns + outputs),
        flops=2 * rows * weights,
        bound="memory" if rows <= 64 else "compute",
        tolerance=1e-2,
        peers={
            "cuBLAS, 16-bit weights": _cublas,
            "torch int4pack": _tinygemm,
        },
    )


BENCHMARKS = [
    _benchmark(1, 4096, 4096),
    _benchmark(1, 28_672, 8192),
    _benchmark(16, 4096, 4096),
    _benchmark(4096, 4096, 4096),
]
