"""Root-mean-square norm of each row, alone or with the residual added first.

    out[t] = x[t] / sqrt(mean(x[t]**2) + eps) * weight
    residual[t] += x[t]; out[t] = the same of residual[t]

Through memory: x and out, 2 * T * D elements, and the weight, D; with a
residual 2 * T * D more, read and written. 4 FLOPs an element, so the time is
the time to move them. Unfused, the sum would be written and read once more.

How it fills a GPU: a program per row, which it holds in registers between the
sum of squares and the scaling, so that it is read once. The programs share the
weight through the cache. A known bug that this avoids: squaring in the input's
dtype, where a float16 above 255 already overflows.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import arch, check_tensor, next_power_of_2, warps

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_DIM = 16_384


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """The same result in plain torch, in float32: the specification."""
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * scale * weight.float()).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, sum) of `add_rms_norm`, leaving the residual alone."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(total, weight, eps), total


@triton.jit
def _rms_norm_kernel(
    x,  # [T, D]
    residual,  # [T, D], read and written; None without one
    weight,  # [D], dense
    out,  # [T, D], dense
    eps,
    D,
    s_x,
    s_r,
    BLOCK_D: tl.constexpr,  # power of two, at least D
):
    """One row. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_x = tl.load(x + row * s_x + o_d, mask=m_d, other=0.0)  # [D]
    if residual is not None:
        r_row = residual + row * s_r + o_d
        # In their own dtype: the norm is of the sum that later layers read.
        b_x = tl.load(r_row, mask=m_d, other=0.0) + b_x
        tl.store(r_row, b_x, mask=m_d)
    b_x = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    b_w = tl.load(weight + o_d, mask=m_d)
    tl.store(out + row * D + o_d, b_x * scale * b_w, mask=m_d)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """x / rms(x) * weight, row by row.

    Args:
        x: [T, D], float16, bfloat16 or float32, 1 <= D <= 16,384; the outer
            stride is free, the last one is 1.
        weight: [D], x's dtype, dense.
        eps: added to the mean of squares, at least 1e-38.

    Returns:
        [T, D] in x's dtype, dense, computed in float32 and rounded once.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Add x to the residual in place, and return the norm of the sum.

    Args:
        x, weight, eps: as in `rms_norm`.
        residual: [T, D], x's dtype, outer stride free; becomes residual + x,
            rounded to its dtype. Its rows must not overlap.

    Returns:
        [T, D], dense: the norm of the rounded sum.

    Raises:
        ValueError: an argument breaks one of the rules above.
    """
    return _launch(x, residual, weight, eps)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    check_tensor("x", x, ("T", "D"), DTYPES, x.device)
    T, D = x.shape
    check_tensor("weight", weight, (D,), (x.dtype,), x.device)
    if residual is not None:
        check_tensor("residual", residual, (T, D), (x.dtype,), x.device)
        if T > 1 and residual.stride(0) < D:
            raise ValueError(
                f"residual: outer stride {residual.stride(0)} must be at "
                f"least {D}, since rows are written"
            )
    if not 1 <= D <= MAX_DIM:
        raise ValueError(f"x: row of {D} must have 1 to {MAX_DIM} elements")
    if not eps >= 1e-38:  # less may be 0 as float32
        raise ValueError(f"eps: {eps} must be at least 1e-38")
    out = torch.empty(T, D, dtype=x.dtype, device=x.device)
    if T:
        block_d = next_power_of_2(D)
        _rms_norm_kernel[(T,)](
            x,
            residual,
            weight,
            out,
            eps,
            D,
            x.stride(0),
            (x if residual is None else residual).stride(0),
            BLOCK_D=block_d,
            num_warps=warps(arch(x.device), block_d * x.itemsize),
        )
    return out
