"""Cases of the int8 product: sizes and layouts, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.gemm_w8a8 import w8a8_linear

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Product:
    """One call. `layout`: "dense"; "sliced", columns of wider matrices;
    "shared", one row of x expanded; "shifted", off the 16-byte grid.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.float16
    layout: str = "dense"


# Around tiles of 16 by 16 by 32, those of the interpreter.
CASES = [
    Product(**row)
    for row in pairwise(
        {
            "M": (1, 15, 16, 17, 33),
            "N": (1, 16, 31, 40),
            "K": (1, 31, 32, 33, 100),
            "dtype": (torch.float16, torch.bfloat16, torch.float32),
            "layout": ("dense", "sliced", "shared", "shifted"),
        }
    )
]


def product_inputs(
    case: Product,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Inputs:
    """x, x_scales, w and w_scales; codes of the whole range of a byte."""
    K = case.K

    def codes(rows: int) -> torch.Tensor:
        wide = torch.randint(-128, 128, (rows, 2 * K), generator=generator)
        wide = wide.to(device, torch.int8)
        if case.layout == "sliced":
            return wide[:, K:]
        return (shifted if case.layout == "shifted" else torch.clone)(
            wide[:, :K].contiguous()
        )

    x, w = codes(case.M), codes(case.N)
    if case.layout == "shared":
        x = x[:1].expand(case.M, K)
    x_scales, w_scales = (
        torch.rand(n, generator=generator).to(device) / 64
        for n in (case.M, case.N)
    )
    return x, x_scales, w, w_scales


def _production(M: int, N: int, K: int) -> None:
    meta = torch.device("meta")
    x = torch.empty(M, K, dtype=torch.int8, device=meta)
    w = torch.empty(N, K, dtype=torch.int8, device=meta)
    scales = torch.empty(max(M, N), device=meta)
    w8a8_linear(x, scales[:M], w, scales[:N])


STREAMING = ("_w8a8_linear_kernel",)
TENSOR_CORE = ("_w8a8_linear_kernel",)
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B down projection, one row": partial(
        _production, 1, 4096, 14_336
    ),
    "Llama-3-8B down projection, 4,096 rows": partial(
        _production, 4096, 4096, 14_336
    ),
    "SmolLM2-135M up projection, 512 rows": partial(
        _production, 512, 1536, 576
    ),
}


def _draw(
    generator: torch.Generator, device: torch.device, M: int, N: int, K: int
) -> Inputs:
    def codes(rows: int) -> torch.Tensor:
        return torch.randint(
            -127,
            128,
            (rows, K),
            generator=generator,
            device=device,
            dtype=torch.int8,
        )

    def scales(rows: int) -> torch.Tensor:
        return torch.rand(rows, generator=generator, device=device) / K

    return codes(M), scales(M), codes(N), scales(N)


def _dequantized(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
) -> torch.Tensor:
    """The product of the codes in bfloat16, which holds each of them."""
    total = x.bfloat16() @ w.bfloat16().T
    return (total.float() * x_scales[:, None] * w_scales).half()


def _torch_int8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
) -> torch.Tensor:
    """cuBLAS's int8 product, for more than 16 rows."""
    total = torch._int_mm(x, w.T)
    return (total.float() * x_scales[:, None] * w_scales).half()


def _benchmark(M: int, N: int, K: int, **peers: Callable) -> Benchmark:
    return Benchmark(
        f"{M:,} x {N:,} x {K:,}",
        partial(_draw, M=M, N=N, K=K),
        partial(_draw, M=min(M, 20), N=24, K=72),
        w8a8_linear,
        _dequantized,
        bytes=(M + N) * K + 2 * M * N + 4 * (M + N),
        # tensor cores do two int8 operations in the time of a bf16 one
        flops=M * N * K,
        bound="memory" if M == 1 else "compute",
        tolerance=1e-2,
        peers=peers,
    )


BENCHMARKS = [
    _benchmark(1, 4096, 4096),
    _benchmark(4096, 4096, 4096, **{"torch._int_mm": _torch_int8}),
]
