"""A linear layer whose weights have 4 bits and its activations 16.

Problem: y = x @ W.T, where W [N, K] is stored as codes of 4 bits, with a scale
and a zero point for every G weights of a row:

    W[n, k] = scales[n, k // G] * (code[n, k] - zeros[n, k // G])
    code[n, 2i] = codes[n, i] & 15,  code[n, 2i + 1] = codes[n, i] >> 4

Through memory: N K / 2 bytes of codes, 4 N K / G of scales and zero points,
2 M K of x and 2 M N of y, for 2 M N K FLOPs. One row of x makes 4 FLOPs a
byte: the time is the time to read the codes, 3.8 times fewer bytes than at 16
bits for G = 128. From some hundred rows on it is the tensor cores' time, and
then 4 bits save room but no time.

How it fills a GPU: one row of x goes through ordinary arithmetic, where an
instruction more per weight would cost more than the read. So the four bits
stay where they are in their word of eight codes: masked, converted to float
and multiplied by x / 16**j, three instructions. More rows go through the
tensor cores, on weights expanded in registers. Where the tiles of y are fewer
than the processors, K is split, and the parts are added in a fixed order.

A known bug that this avoids: s * code - s * z in float16, where a zero point
of some thousands, far from all codes, leaves no digit of the codes. Here that
difference and all sums are float32.
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

DTYPES = (torch.float16, torch.bfloat16)
MAX_SPLITS = 32


def w4a16_linear_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> torch.Tensor:
    """The same result in plain torch, in float32: the specification.

    Shapes as `w4a16_linear`.
    """
    group = x.shape[1] // scales.shape[1]
    code = torch.stack([codes & 15, codes >> 4], 2).flatten(1)  # [N, K]
    scale, zero = (
        t.float().repeat_interleave(group, 1) for t in (scales, zeros)
    )
    return (x.float() @ (scale * (code - zero)).T).to(x.dtype)


@triton.jit
def _evens_odds(x, HALF: tl.constexpr):
    """Elements 0, 2, 4, ... and 1, 3, 5, ... of a tile of 2 * HALF."""
    return tl.split(tl.reshape(x, [HALF, 2]))


@triton.jit
def _w4a16_gemv_kernel(
    x,  # [K]
    words,  # [N, K / 8] int32: eight codes, the first in the lowest bits
    scales,  # [N, K / G] float16
    zeros,  # [N, K / G] float16
    part,  # [n_splits, N], dense
    N,
    n_quads,  # K / 32: four words, 16 bytes
    s_w,  # quads from row to row
    s_s,
    s_z,
    GROUP: tl.constexpr,  # G
    SEG: tl.constexpr,  # weights that share a scale in a step; divides G
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, a multiple of SEG
    STAGES: tl.constexpr,  # steps whose loads are in flight
):
    """One row of x times BLOCK_N rows of W over one split of K.

    Grid (cdiv(N, BLOCK_N), n_splits). Sums s * (sum(code * x) - z * sum(x))
    over segments of SEG weights.
    """
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    n_splits = tl.num_programs(1)
    m_n = (o_n < N)[:, None]
    # Multiples of constants, so that the masks too allow 16-byte loads.
    K = n_quads * 32
    n_words = n_quads * 4
    span = tl.cdiv(K, n_splits * BLOCK_K) * BLOCK_K
    start = split * span

    HALF: tl.constexpr = BLOCK_K // 2
    WORDS: tl.constexpr = BLOCK_K // 8
    SEGS: tl.constexpr = BLOCK_K // SEG
    w_row = words + o_n[:, None] * (s_w * 4)
    s_row = scales + o_n[:, None] * s_s
    z_row = zeros + o_n[:, None] * s_z
    acc = tl.zeros([BLOCK_N, SEGS], tl.float32)
    for k in tl.range(start, start + span, BLOCK_K, num_stages=STAGES):
        # Beyond K the x are 0, so that there any code and scale will do.
        o_k = k + tl.arange(0, BLOCK_K)
        b_x = tl.load(x + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        o_w = (k // 8 + tl.arange(0, WORDS))[None, :]
        b_w = tl.load(w_row + o_w, mask=m_n & (o_w < n_words))  # [N, WORDS]
        b_w = b_w.to(tl.uint32)
        o_g = (k + tl.arange(0, SEGS) * SEG) // GROUP
        o_g = tl.minimum(o_g, K // GROUP - 1)[None, :]
        scale = tl.load(s_row + o_g, mask=m_n)  # [N, SEGS]
        zero = tl.load(z_row + o_g, mask=m_n)

        evens, odds = _evens_odds(b_x, HALF)
        x04, x26 = _evens_odds(evens, HALF // 2)
        x15, x37 = _evens_odds(odds, HALF // 2)
        x0, x4 = _evens_odds(x04, WORDS)
        x1, x5 = _evens_odds(x15, WORDS)
        x2, x6 = _evens_odds(x26, WORDS)
        x3, x7 = _evens_odds(x37, WORDS)
        b_xs = (x0, x1, x2, x3, x4, x5, x6, x7)  # x[j::8] goes with code j
        dots = tl.zeros([BLOCK_N, WORDS], tl.float32)
        for j in tl.static_range(8):
            code = b_w & (15 << (4 * j))  # code * 16**j
            dots += code * (b_xs[j] * 0.0625**j)[None, :]
        dots = tl.sum(tl.reshape(dots, [BLOCK_N, SEGS, SEG // 8]), 2)
        sums = tl.sum(tl.reshape(b_x, [SEGS, SEG]), 1)[None, :]
        acc += scale * (dots - zero * sums)

    tl.store(part + split.to(tl.int64) * N + o_n, tl.sum(acc, 1), mask=o_n < N)


@triton.jit
def _w4a16_gemm_kernel(
    x,  # [M, K]
    codes,  # [N, K / 2] uint8
    scales,  # [N, K / G] float16
    zeros,  # [N, K / G] float16
    part,  # [n_splits, M, N], dense
    M,
    N,
    n_quads,  # K / 32
    s_x,
    s_c,
    s_s,
    s_z,
    GROUP: tl.constexpr,  # G
    SEG: tl.constexpr,  # weights that share a scale in a step; divides G
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, a multiple of SEG
):
    """A tile of x @ W.T over one split of K.

    Grid (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M), n_splits): neighbours share rows
    of x, and all of W at 4 bits is what a cache of a GPU holds.
    """
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    m_n = (o_n < N)[:, None]
    m_m = (o_m < M)[:, None]
    K = n_quads * 32  # a multiple of 32: the masks too allow 16-byte loads
    span = tl.cdiv(K, n_splits * BLOCK_K) * BLOCK_K
    start = split * span

    x_row = x + o_m[:, None] * s_x
    c_row = codes + o_n[:, None] * s_c
    s_row = scales + o_n[:, None] * s_s
    z_row = zeros + o_n[:, None] * s_z
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(start, start + span, BLOCK_K):
        # Beyond K the x are 0, so that there any code and scale will do.
        o_k = (k + tl.arange(0, BLOCK_K))[None, :]
        b_x = tl.load(x_row + o_k, mask=m_m & (o_k < K), other=0.0)  # [M, K]
        o_c = (k // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
        b_c = tl.load(c_row + o_c, mask=m_n & (o_c < n_quads * 16))
        o_g = (k + tl.arange(0, BLOCK_K // SEG) * SEG) // GROUP
        o_g = tl.minimum(o_g, K // GROUP - 1)[None, :]
        scale = tl.load(s_row + o_g, mask=m_n).to(tl.float32)  # [N, SEGS]
        zero = tl.load(z_row + o_g, mask=m_n)
        offset = (scale * zero)[:, :, None]  # s * (code - z) = s * code - s z
        scale = scale[:, :, None]
        # The high four bits too stay where they are: they count 16 times.
        # 32 bits, since smaller integers become floats four times slower.
        b_c = tl.reshape(b_c.to(tl.int32), [BLOCK_N, BLOCK_K // SEG, SEG // 2])
        low = ((b_c & 15) * scale - offset).to(b_x.dtype)
        high = ((b_c & 240) * (scale / 16) - offset).to(b_x.dtype)
        b_w = tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K])
        acc = tl.dot(b_x, tl.trans(b_w), acc)

    tile = part + (split.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    tl.store(tile, acc, mask=m_m & (o_n < N)[None, :])


@triton.jit
def _w4a16_sum_kernel(
    part,  # [n_splits, M, N] float32, dense
    out,  # [M, N], dense
    N,
    size,  # M * N
    n_splits,
    BLOCK_N: tl.constexpr,
):
    """Add the splits in order, the same at every run.

    Grid (M, cdiv(N, BLOCK_N)).
    """
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(0).to(tl.int64) * N + o_n
    total = tl.zeros([BLOCK_N], tl.float32)
    for _ in range(n_splits):
        total += tl.load(part + o, mask=o_n < N)
        part += size
    tl.store(out + o, total, mask=o_n < N)


def w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    n_splits: int | None = None,
) -> torch.Tensor:
    """Multiply activations of 16 bits with weights of 4.

    Args:
        x: [M, K], float16 or bfloat16. The row stride is free, the last one
            is 1; so for `scales` and `zeros`.
        codes: [N, K / 2] uint8, column 2i of W in the low four bits of byte i
            and column 2i + 1 in the high ones, as `quantize_int4_groups`
            packs them. Rows start at multiples of 16 bytes.
        scales, zeros: [N, K / G] float16, one for G weights of a row; the
            group G is a multiple of 32. Symmetric codes -8 to 7 are these
            with 8 added and zeros of 8.
        n_splits: pieces of K, at most 32; by default enough to keep every
            processor busy. Never more than K has blocks.

    Returns:
        y [M, N] in x's dtype, dense. Sums are float32; with more than one row
        of x the expanded weights are rounded to x's dtype first.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: weights in groups as in GPTQ, https://arxiv.org/abs/2210.17323; on
    what the expansion costs, MARLIN, https://arxiv.org/abs/2408.11743.
    """
    check_tensor("x", x, ("M", "K"), DTYPES, x.device)
    M, K = x.shape
    check_tensor("codes", codes, ("N", K // 2), (torch.uint8,), x.device)
    N = codes.shape[0]
    check_tensor("scales", scales, (N, "K / G"), (torch.float16,), x.device)
    n_groups = scales.shape[1]
    check_tensor("zeros", zeros, (N, n_groups), (torch.float16,), x.device)
    if n_groups == 0 or K % (32 * n_groups):
        raise ValueError(
            f"scales: {n_groups} groups must divide the {K} columns of x into "
            "multiples of 32"
        )
    if codes.stride(0) % 16 or codes.storage_offset() % 16:
        raise ValueError(
            f"codes: row stride {codes.stride(0)} and offset "
            f"{codes.storage_offset()} must be multiples of 16"
        )
    check_splits(n_splits, MAX_SPLITS)

    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out

    group = K // n_groups
    block_m, block_n, block_k, options = _configuration(arch(x.device), M)
    segment = min(block_k, group & -group)  # the power of two that divides G
    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    if n_splits is None:
        programs = (2 if M <= 16 else 1) * processors(x.device)
        n_splits = max(1, min(programs // tiles, MAX_SPLITS))
    n_splits = min(n_splits, cdiv(K, block_k))
    part = out  # a single split is the whole answer
    if n_splits > 1:
        shape = (n_splits, M, N)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
    strides = scales.stride(0), zeros.stride(0)
    if M == 1:
        _w4a16_gemv_kernel[(tiles, n_splits)](
            x,
            codes.view(torch.int32),
            scales,
            zeros,
            part,
            N,
            K // 32,
            codes.stride(0) // 16,
            *strides,
            GROUP=group,
            SEG=segment,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            **options,
        )
    else:
        grid = (cdiv(N, block_n), cdiv(M, block_m), n_splits)
        _w4a16_gemm_kernel[grid](
            x,
            codes,
            scales,
            zeros,
            part,
            M,
            N,
            K // 32,
            x.stride(0),
            codes.stride(0),
            *strides,
            GROUP=group,
            SEG=segment,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            **options,
        )
    if n_splits > 1:
        _w4a16_sum_kernel[(M, cdiv(N, 1024))](
            part, out, N, M * N, n_splits, BLOCK_N=1024, num_warps=4
        )
    return out


def _configuration(
    target: str, M: int
) -> tuple[int, int, int, dict[str, int]]:
    """Rows of x, rows of W and columns a step, and launch options."""
    stages = 2 if target.startswith("gfx") else 3
    if M == 1:
        block_n, block_k = (4, 64) if target == "cpu" else (16, 2048)
        return 1, block_n, block_k, {"num_warps": 4, "STAGES": stages}
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 16, 16, 64, {}
    if M <= 16:
        return 16, 128, 128, {"num_warps": 4, "num_stages": stages}
    if M <= 64:
        return 64, 128, 64, {"num_warps": 4, "num_stages": stages}
    options = {"num_warps": 8, "num_stages": stages}
    if (
        target == "sm_90"
    ):  # so that two blocks fit: one expands, one multiplies
        options["maxnreg"] = 128
    return 128, 128, 64, options
