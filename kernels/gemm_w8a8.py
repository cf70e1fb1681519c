"""A linear layer on integers: weights and activations of 8 bits.

Problem: y = x @ W.T, where x and W are int8 codes with a scale for every row
of each, that is for every token and every output channel:

    y[m, n] = x_scales[m] * w_scales[n] * sum_k x[m, k] * w[n, k]

The sum is of int32, so it is exact: 128 * 128 * K stays below 2**31 up to K =
131,071, and neither the order nor the number of splits changes a bit.

Through memory: N K bytes of W, M K of x and 2 M N of y, for 2 M N K
operations. With few rows of x the time is that of reading W, half of what it
takes at 16 bits; with many it is the tensor cores', which do twice as many
integer operations a second as they do FLOPs.

How it fills a GPU: tiles of y as in any matrix product, on integer tensor
cores. Where the tiles are fewer than the processors, K is split, and the parts
are int32 too. A known bug that this avoids: scaling each part on its own and
adding the rounded results, which depends on the number of splits.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_splits,
    check_tensor,
    processors,
)

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_K = 131_071  # 128 * 128 * MAX_K fits int32
MAX_SPLITS = 32


def w8a8_linear_ref(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The same result in plain torch, the sum in float64: the specification.

    Shapes as `w8a8_linear`.
    """
    total = (x.double() @ w.double().T).float()  # no integer product on a GPU
    return (total * x_scales[:, None] * w_scales).to(dtype)


@triton.jit
def _w8a8_gemm_kernel(
    x,  # [M, K] int8
    x_scales,  # [M] float32
    w,  # [N, K] int8
    w_scales,  # [N] float32
    part,  # [n_splits, M, N], dense; int32, or the output itself
    M,
    N,
    K,
    s_x,
    s_w,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,  # this is the only split: write y
):
    """A tile of x @ W.T over one split of K.

    Grid (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M), n_splits): neighbours share rows
    of x.
    """
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    m_n = o_n < N
    m_m = o_m < M
    span = tl.cdiv(K, tl.num_programs(2) * BLOCK_K) * BLOCK_K
    start = split * span

    x_row = x + o_m[:, None] * s_x
    w_row = w + o_n[:, None] * s_w
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(start, start + span, BLOCK_K):
        # Beyond K the x are 0, so that there any w will do.
        o_k = (k + tl.arange(0, BLOCK_K))[None, :]
        m_k = o_k < K
        b_x = tl.load(x_row + o_k, mask=m_m[:, None] & m_k, other=0)  # [M, K]
        b_w = tl.load(w_row + o_k, mask=m_n[:, None] & m_k)  # [N, K]
        acc = tl.dot(b_x, tl.trans(b_w), acc, out_dtype=tl.int32)

    tile = (split.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    m_mn = m_m[:, None] & m_n[None, :]
    if SCALED:
        b_xs = tl.load(x_scales + o_m, mask=m_m)
        b_ws = tl.load(w_scales + o_n, mask=m_n)
        y = acc * b_xs[:, None] * b_ws[None, :]  # float32
        tl.store(part + tile, y, mask=m_mn)
    else:
        tl.store(part + tile, acc, mask=m_mn)


@triton.jit
def _w8a8_sum_kernel(
    part,  # [n_splits, M, N] int32, dense
    x_scales,  # [M] float32
    w_scales,  # [N] float32
    out,  # [M, N], dense
    N,
    size,  # M * N
    n_splits,
    BLOCK_N: tl.constexpr,
):
    """Add the splits of a row, then scale. Grid (M, cdiv(N, BLOCK_N))."""
    m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o = m * N + o_n
    total = tl.zeros([BLOCK_N], tl.int32)
    for _ in range(n_splits):
        total += tl.load(part + o, mask=m_n)
        part += size
    scale = tl.load(x_scales + m)
    b_ws = tl.load(w_scales + o_n, mask=m_n)
    tl.store(out + o, total * scale * b_ws, mask=m_n)


def w8a8_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    n_splits: int | None = None,
) -> torch.Tensor:
    """Multiply int8 activations with int8 weights.

    Args:
        x: [M, K] int8, K <= 131071. The row stride is free, the last one is
            1; so for `w`.
        x_scales: [M] float32, dense, a scale for each row of x, both as
            `quantize_int8_rows` makes them.
        w: [N, K] int8. w_scales: [N] float32, dense.
        dtype: of the result: float16, bfloat16 or float32.
        n_splits: pieces of K, at most 32; by default enough to keep every
            processor busy. Never more than K has blocks.

    Returns:
        y [M, N] in `dtype`, dense. The sums are exact int32, rounded to
        float32 and multiplied by x's scale, then by w's: the same bits for
        any number of splits. All codes are allowed, -128 too.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: the vector-wise product of LLM.int8(),
    https://arxiv.org/abs/2208.07339.
    """
    check_tensor("x", x, ("M", "K"), (torch.int8,), x.device)
    M, K = x.shape
    check_tensor("x_scales", x_scales, (M,), (torch.float32,), x.device)
    check_tensor("w", w, ("N", K), (torch.int8,), x.device)
    N = w.shape[0]
    check_tensor("w_scales", w_scales, (N,), (torch.float32,), x.device)
    if K > MAX_K:
        raise ValueError(f"x: {K} columns must be at most {MAX_K}")
    if dtype not in OUT_DTYPES:
        names = " or ".join(map(str, OUT_DTYPES))
        raise ValueError(f"dtype: {dtype} must be {names}")
    check_splits(n_splits, MAX_SPLITS)

    out = torch.empty(M, N, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    if K == 0:
        return out.zero_()

    block_m, block_n, block_k, options = _configuration(arch(x.device), M)
    grid = cdiv(N, block_n), cdiv(M, block_m)
    if n_splits is None:
        programs = (2 if M <= 16 else 1) * processors(x.device)
        n_splits = max(1, min(programs // (grid[0] * grid[1]), MAX_SPLITS))
    n_splits = min(n_splits, cdiv(K, block_k))
    part = out  # a single split is the whole answer
    if n_splits > 1:
        shape = (n_splits, M, N)
        part = torch.empty(shape, dtype=torch.int32, device=x.device)
    _w8a8_gemm_kernel[(*grid, n_splits)](
        x,
        x_scales,
        w,
        w_scales,
        part,
        M,
        N,
        K,
        x.stride(0),
        w.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SCALED=n_splits == 1,
        **options,
    )
    if n_splits > 1:
        _w8a8_sum_kernel[(M, cdiv(N, 1024))](
            part,
            x_scales,
            w_scales,
            out,
            N,
            M * N,
            n_splits,
            BLOCK_N=1024,
            num_warps=8,
        )
    return out


def _configuration(
    target: str, M: int
) -> tuple[int, int, int, dict[str, int]]:
    """Rows of x, rows of W and columns a step, and launch options."""
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, 16, 64, {}
    stages = 2 if target.startswith("gfx") else 4
    if M <= 16:
        return 16, 64, 256, {"num_warps": 4, "num_stages": stages}
    if M <= 64:
        return 64, 64, 128, {"num_warps": 4, "num_stages": stages}
    if target == "sm_90":  # wider, for what wgmma reads from shared memory
        return 128, 256, 128, {"num_warps": 8, "num_stages": 3}
    return 128, 128, 128, {"num_warps": 8, "num_stages": stages}
