"""Round a matrix to 8 or 4 bits, with one scale for a row or a group.

Problem: numbers that share a ruler become small integers. For a row of x, as
for the activations of an int8 product,

    scale = max|x| / 127
    code = round(x / scale), in -127..127; x is about scale * code

and for G weights that lie side by side in a row of w,

    scale = (max - min) / 15,  zero = -min / scale
    code = round(w / scale + zero), in 0..15; w is about scale * (code - zero)

`round` goes to the nearest integer and from a half to the even one. The zero
point is not rounded to an integer, so a constant group comes back as it was.
NF4 has 16 levels that are no ladder but quantiles of a normal law, from -1 to
1, and a group is divided by max|w|. Two codes share a byte, the even column in
the low half.

Through memory: x once, 2 M N bytes at 16 bits, and the codes, M N; the scales
are 1/N of that. For 4 bits 2 N K bytes in, N K / 2 out and 4 N K / G of scales
and zero points. A dozen operations a number: the time is the time to read x.

How it fills a GPU: rows and groups are independent. A program holds whole rows
(or groups) in registers, some 4,096 numbers, so that the second look at them,
when the maximum is known, costs no second read. A known bug that this avoids:
dividing by the scale of a row of zeros, which makes the row NaN.
"""

import itertools

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_int,
    check_tensor,
    next_power_of_2,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROW = 32768
MAX_NF4_GROUP = 4096
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
NF4_EDGES = tl.constexpr(
    tuple((low + high) / 2 for low, high in itertools.pairwise(NF4_LEVELS))
)


def quantize_int8_rows_ref(
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same codes and scales in plain torch: the specification.

    Shapes as `quantize_int8_rows`.
    """
    finite = x.isfinite()
    wide = torch.where(finite, x, 0).float()
    # A tensor: by a number, torch multiplies with 1 / 127 on a GPU.
    scales = wide.abs().amax(1) / torch.full((), 127.0, device=x.device)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (wide / scales[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), torch.where(finite.all(1), scales, torch.nan)


def quantize_int4_groups_ref(
    w: torch.Tensor, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same codes, scales and zeros in plain torch: the specification.

    Shapes as `quantize_int4_groups`.
    """
    finite = w.isfinite()
    groups = torch.where(finite, w, 0).float()
    groups = groups.unflatten(1, (-1, group))  # [N, K / G, G]
    sound = finite.unflatten(1, (-1, group)).all(2)
    low, high = groups.amin(2), groups.amax(2)
    scales = (high - low) / torch.full((), 15.0, device=w.device)
    scales = scales.half().float()
    zeros = (-low / scales).half()
    varied = zeros.isfinite()  # a constant group divides by 0
    scales = torch.where(varied, scales, 1.0)
    zeros = torch.where(varied, zeros, (-low).half())
    codes = groups / scales[..., None] + zeros.float()[..., None]
    codes = codes.round().clamp(0, 15).to(torch.uint8).flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed, torch.where(sound, scales, torch.nan).half(), zeros


def quantize_nf4_ref(
    w: torch.Tensor, group: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same codes and scales in plain torch: the specification.

    Shapes as `quantize_nf4`.
    """
    finite = w.isfinite()
    groups = torch.where(finite, w, 0).float()
    groups = groups.unflatten(1, (-1, group))  # [N, K / G, G]
    sound = finite.unflatten(1, (-1, group)).all(2)
    scales = groups.abs().amax(2)
    scales = torch.where(scales == 0, 1.0, scales)
    ratio = groups / scales[..., None]
    # Numbers, no tensor of them: a copy from the host fits in no CUDA graph.
    codes = sum((ratio > edge).to(torch.uint8) for edge in NF4_EDGES.value)
    codes = codes.flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed, torch.where(sound, scales, torch.nan)


@triton.jit
def _round_half_even(x):
    """The nearest integer to each |x| < 2**22, as float32.

    Beyond 2**23 float32 holds integers only, so the sum itself is rounded.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize_int8_rows_kernel(
    x,  # [M, N]
    codes,  # [M, N] int8, dense
    scales,  # [M] float32, dense
    M,
    N,
    s_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two, at least N
):
    """Scale and round BLOCK_M whole rows. Grid (cdiv(M, BLOCK_M),)."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < M
    m_mn = m_m[:, None] & (o_n < N)[None, :]

    x_tile = x + o_m[:, None] * s_x + o_n[None, :]
    b_x = tl.load(x_tile, mask=m_mn, other=0.0).to(tl.float32)  # [M, N]
    finite = tl.abs(b_x) < float("inf")  # NaN is not
    b_x = tl.where(finite, b_x, 0.0)
    sound = tl.min(finite, 1) == 1

    # div_rn: the plain division of a GPU is off by a unit in the last place,
    # and then a number halfway between two codes falls on the wrong side.
    scale = tl.div_rn(tl.max(tl.abs(b_x), 1), 127.0)  # [M]
    scale = tl.where(scale == 0.0, 1.0, scale)
    q = _round_half_even(tl.div_rn(b_x, scale[:, None]))
    q = tl.minimum(tl.maximum(q, -127.0), 127.0)
    tl.store(codes + o_m[:, None] * N + o_n[None, :], q, mask=m_mn)
    tl.store(scales + o_m, tl.where(sound, scale, float("nan")), mask=m_m)


@triton.jit
def _quantize_int4_groups_kernel(
    w,  # [N, K]
    codes,  # [N, K / 2] uint8, dense
    scales,  # [N, K / G] float16, dense
    zeros,  # [N, K / G] float16, dense
    n_groups,  # N * K / G
    row_groups,  # K / G
    s_w,
    GROUP: tl.constexpr,  # G
    BLOCK_R: tl.constexpr,  # groups
    BLOCK_G: tl.constexpr,  # power of two, at least G
):
    """Scale, round and pack BLOCK_R groups. Grid (cdiv(n_groups, BLOCK_R),).

    Groups are numbered row by row.
    """
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_g = tl.arange(0, BLOCK_G)
    m_r = o_r < n_groups
    m_g = (o_g < GROUP)[None, :]

    start = o_r // row_groups * s_w + o_r % row_groups * GROUP
    w_tile = w + start[:, None] + o_g[None, :]
    b_w = tl.load(w_tile, mask=m_r[:, None] & m_g, other=0.0)
    b_w = b_w.to(tl.float32)  # [R, G]
    finite = tl.abs(b_w) < float("inf")  # NaN is not
    b_w = tl.where(finite, b_w, 0.0)
    sound = tl.min(finite, 1) == 1
    low = tl.min(tl.where(m_g, b_w, float("inf")), 1)
    high = tl.max(tl.where(m_g, b_w, -float("inf")), 1)

    # Round to float16 first: the codes belong to the ruler that is stored.
    scale = tl.div_rn(high - low, 15.0).to(tl.float16).to(tl.float32)
    zero = tl.div_rn(-low, scale).to(tl.float16)
    # Not finite: constant (-low / 0), or narrower than float16 can tell.
    varied = tl.abs(zero) < float("inf")
    scale = tl.where(varied, scale, 1.0)
    zero = tl.where(varied, zero, -low).to(tl.float16)

    q = _round_half_even(tl.div_rn(b_w, scale[:, None]) + zero[:, None])
    q = tl.minimum(tl.maximum(q, 0.0), 15.0).to(tl.uint8)
    even, odd = tl.split(tl.reshape(q, [BLOCK_R, BLOCK_G // 2, 2]))

    o_b = tl.arange(0, BLOCK_G // 2)
    codes_tile = codes + o_r[:, None] * (GROUP // 2) + o_b[None, :]
    m_rb = m_r[:, None] & (o_b < GROUP // 2)[None, :]
    tl.store(codes_tile, even | (odd << 4), mask=m_rb)
    tl.store(scales + o_r, tl.where(sound, scale, float("nan")), mask=m_r)
    tl.store(zeros + o_r, zero, mask=m_r)


@triton.jit
def _quantize_nf4_kernel(
    w,  # [N, K]
    codes,  # [N, K / 2] uint8, dense
    scales,  # [N, K / G] float32, dense
    n_groups,  # N * K / G
    row_groups,  # K / G
    s_w,
    GROUP: tl.constexpr,  # G
    BLOCK_R: tl.constexpr,  # groups
    BLOCK_G: tl.constexpr,  # power of two, at least G
):
    """Scale, classify and pack BLOCK_R groups. Grid as for int4."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_g = tl.arange(0, BLOCK_G)
    m_r = o_r < n_groups

    start = o_r // row_groups * s_w + o_r % row_groups * GROUP
    w_tile = w + start[:, None] + o_g[None, :]
    m_rg = m_r[:, None] & (o_g < GROUP)[None, :]
    b_w = tl.load(w_tile, mask=m_rg, other=0.0).to(tl.float32)  # [R, G]
    finite = tl.abs(b_w) < float("inf")  # NaN is not
    b_w = tl.where(finite, b_w, 0.0)
    sound = tl.min(finite, 1) == 1
    scale = tl.max(tl.abs(b_w), 1)
    scale = tl.where(scale == 0.0, 1.0, scale)

    b_w = tl.div_rn(b_w, scale[:, None])
    q = tl.zeros([BLOCK_R, BLOCK_G], tl.uint8)
    for i in tl.static_range(15):
        q = tl.where(b_w > NF4_EDGES[i], i + 1, q)
    even, odd = tl.split(tl.reshape(q, [BLOCK_R, BLOCK_G // 2, 2]))

    o_b = tl.arange(0, BLOCK_G // 2)
    codes_tile = codes + o_r[:, None] * (GROUP // 2) + o_b[None, :]
    m_rb = m_r[:, None] & (o_b < GROUP // 2)[None, :]
    tl.store(codes_tile, even | (odd << 4), mask=m_rb)
    tl.store(scales + o_r, tl.where(sound, scale, float("nan")), mask=m_r)


def quantize_int8_rows(
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 codes of a matrix, with one scale a row.

    Args:
        x: [M, N], float16, bfloat16 or float32, N <= 32768. The row stride is
            free, the last one is 1.

    Returns:
        codes [M, N] int8, dense, -127 to 127 (-128 is not used), and scales
        [M] float32; x is about scales[:, None] * codes. A row of zeros, or so
        small that its scale is 0 in float32, has scale 1 and codes 0; a row
        with an infinity or a NaN has scale NaN, and for its codes they count
        as 0. Same bits on every device.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: the row-wise half of LLM.int8(), https://arxiv.org/abs/2208.07339.
    """
    check_tensor("x", x, ("M", "N"), DTYPES, x.device)
    M, N = x.shape
    if N > MAX_ROW:
        raise ValueError(f"x: {N} columns must be at most {MAX_ROW}")
    codes = torch.empty(M, N, dtype=torch.int8, device=x.device)
    scales = torch.ones(M, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scales

    block_n = next_power_of_2(N)
    block_m, options = _configuration(arch(x.device), block_n)
    _quantize_int8_rows_kernel[(cdiv(M, block_m),)](
        x,
        codes,
        scales,
        M,
        N,
        x.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **options,
    )
    return codes, scales


def quantize_int4_groups(
    w: torch.Tensor, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Int4 codes of a weight matrix, a scale and a zero point per group.

    Args:
        w: [N, K], float16, bfloat16 or float32. The row stride is free, the
            last one is 1.
        group: G, weights of a row that share a scale; a multiple of 16, at
            most 32768, that divides K.

    Returns:
        codes [N, K / 2] uint8, dense: column 2i in the low four bits of byte
        i, column 2i + 1 in the high ones; scales and zeros [N, K / G] float16,
        dense. w is about scale * (code - zero).

        A constant group has scale 1 and zero -min, and so has one that is
        narrower than float16 can tell from its minimum (|zero| would exceed
        65504, or the scale be 0). A group with an infinity or a NaN has scale
        NaN, and for its codes they count as 0. Same bits on every device.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: the blocks with a minimum (Q4_1) of
    https://github.com/ggml-org/llama.cpp.
    """
    check_tensor("w", w, ("N", "K"), DTYPES, w.device)
    N, K = w.shape
    _check_group(group, K, MAX_ROW)
    row_groups = K // group
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(N, row_groups, dtype=torch.float16, device=w.device)
    zeros = torch.empty_like(scales)
    if w.numel() == 0:
        return codes, scales, zeros

    block_g = next_power_of_2(group)
    block_r, options = _configuration(arch(w.device), block_g)
    _quantize_int4_groups_kernel[(cdiv(N * row_groups, block_r),)](
        w,
        codes,
        scales,
        zeros,
        N * row_groups,
        row_groups,
        w.stride(0),
        GROUP=group,
        BLOCK_R=block_r,
        BLOCK_G=block_g,
        **options,
    )
    return codes, scales, zeros


def quantize_nf4(
    w: torch.Tensor, group: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """NF4 codes of a weight matrix, a scale per group.

    Args:
        w: [N, K], float16, bfloat16 or float32. The row stride is free, the
            last one is 1.
        group: G, weights of a row that share a scale; a multiple of 16, at
            most 4096, that divides K.

    Returns:
        codes [N, K / 2] uint8, dense, packed as `quantize_int4_groups` does,
        and scales [N, K / G] float32, dense: the largest |w| of each group. w
        is about scale * NF4_LEVELS[code].

        Each w / scale takes the nearest level, halfway between two the lower.
        A group of zeros has scale 1; one with an infinity or a NaN has scale
        NaN, and for its codes they count as 0. Same bits on every device.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: QLoRA, https://arxiv.org/abs/2305.14314; the levels are those of
    https://github.com/bitsandbytes-foundation/bitsandbytes, which packs the
    even column in the high half.
    """
    check_tensor("w", w, ("N", "K"), DTYPES, w.device)
    N, K = w.shape
    _check_group(group, K, MAX_NF4_GROUP)
    shape = (N, K // group)
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(shape, dtype=torch.float32, device=w.device)
    if w.numel() == 0:
        return codes, scales

    block_g = next_power_of_2(group)
    block_r, options = _configuration(arch(w.device), block_g)
    _quantize_nf4_kernel[(cdiv(scales.numel(), block_r),)](
        w,
        codes,
        scales,
        scales.numel(),
        K // group,
        w.stride(0),
        GROUP=group,
        BLOCK_R=block_r,
        BLOCK_G=block_g,
        **options,
    )
    return codes, scales


def _check_group(group: int, columns: int, largest: int) -> None:
    check_int("group", group, 1, largest)
    if group % 16 or columns % group:
        raise ValueError(
            f"group: {group} must be a multiple of 16 that divides the "
            f"{columns} columns of w"
        )


def _configuration(target: str, width: int) -> tuple[int, dict[str, int]]:
    """Rows a program, and launch options, for rows of `width` numbers.

    32 numbers a thread on NVIDIA, half as many on AMD: 16-byte loads and no
    spills, while several programs share a multiprocessor.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return 2, {}
    warps = max(width // 1024, 4)
    if target.startswith("gfx"):  # 64 threads each, 1,024 a block
        warps = min(warps, 16)
    return max(1, 4096 // width), {"num_warps": warps}
