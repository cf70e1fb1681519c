"""Matrix product of int8 activations with int8 weights.

    y[m, n] = x_scales[m] * w_scales[n] * sum_k x[m, k] * w[n, k]

One scale a row of each: the sum over k is of integers and exact, and the
scales come out of it.

Through memory: M * K + N * K bytes of codes, 2 * M * N of y, the scales. 2 *
M * N * K operations on integers, of which tensor cores do twice as many a
second as of bfloat16. With few rows of x the time is that of reading w, half
of what 16 bits take.

How it fills a GPU: a program per tile of y. Tiles of the same weights follow
each other, so that w comes from memory once and x from the cache. Few rows
take narrow tiles, which makes as many programs as there are processors. A
known bug that this avoids: letting codes of -128 in and summing 2**17 products
of them, which is one more than 32 bits hold.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import arch, cdiv, check_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_K = 2**17 - 1
MAX_N = 2**20


def w8a8_linear_ref(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """The same result in plain torch: the specification.

    The sum is of float64, which hold it exactly.
    """
    total = (x.double() @ w.double().T).float()
    return (total * x_scales[:, None] * w_scales).to(dtype)


@triton.jit
def _w8a8_linear_kernel(
    x,  # [M, K] int8
    x_scales,  # [M] float32, dense
    w,  # [N, K] int8
    w_scales,  # [N] float32, dense
    y,  # [M, N], dense
    M,
    N,
    K,
    s_x,
    s_w,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of y. Grid (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m, m_n = o_m < M, o_n < N
    x_tile = x + o_m[:, None] * s_x + o_k[None, :]
    w_tile = w + o_n[None, :] * s_w + o_k[:, None]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(0, K, BLOCK_K):
        m_k = o_k < K - k
        m_x = m_m[:, None] & m_k[None, :]
        b_x = tl.load(x_tile + k, mask=m_x, other=0)  # [M, K]
        m_w = m_n[None, :] & m_k[:, None]
        b_w = tl.load(w_tile + k, mask=m_w)  # [K, N], behind K against zeros
        total = tl.dot(b_x, b_w, total, out_dtype=tl.int32)

    b_xs = tl.load(x_scales + o_m, mask=m_m)
    b_ws = tl.load(w_scales + o_n, mask=m_n)
    b_y = total * b_xs[:, None] * b_ws[None, :]
    y_tile = y + o_m[:, None] * N + o_n[None, :]
    tl.store(y_tile, b_y, mask=m_m[:, None] & m_n[None, :])


def w8a8_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Multiply quantized activations with quantized weights.

    Args:
        x: [M, K] int8 and x_scales [M] float32, dense: the activations, as
            `kernels.quantize.quantize_int8_rows` makes them. K < 2**17.
        w: [N, K] int8 and w_scales [N] float32, dense: the weights, a scale
            per output channel. N <= 2**20. The row strides of x and w are
            free, the last ones are 1; fast where they and K are multiples of
            16.
        dtype: of the result: float16, bfloat16 or float32.

    Returns:
        y [M, N], dense: the exact integer sum, rounded to float32, times the
        row's scale, times the column's, then rounded to dtype.

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
    if N > MAX_N:
        raise ValueError(f"w: {N} rows must be at most {MAX_N}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype} must be one of {DTYPES}")
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    if y.numel():
        block_m, block_n, block_k, options = _configuration(arch(x.device), M)
        _w8a8_linear_kernel[(cdiv(M, block_m), cdiv(N, block_n))](
            x,
            x_scales,
            w,
            w_scales,
            y,
            M,
            N,
            K,
            x.stride(0),
            w.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            **options,
        )
    return y


def _configuration(
    target: str, M: int
) -> tuple[int, int, int, dict[str, int]]:
    """Rows, columns and depth of a tile, and launch options.

    Chosen so that no target spills and shared memory fits (64 KiB on AMD).
    """
    if target == "cpu":  # the interpreter: small tiles, so tests have many
        return 16, 16, 32, {}
    if M <= 16:
        return 16, 32, 256, {"num_warps": 4, "num_stages": 4}
    if target.startswith("gfx"):
        return 128, 128, 128, {"num_warps": 8, "num_stages": 2}
    return 128, 128, 128, {"num_warps": 8, "num_stages": 3}
