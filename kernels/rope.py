"""Rotary position embedding: turn pairs of channels by a token's angles.

    out[t, h, i]         = x[t, h, i] * cos[t, i] - x[t, h, i + D/2] * sin[t, i]
    out[t, h, i + D/2] = x[t, h, i + D/2] * cos[t, i] + x[t, h, i] * sin[t, i]

for i < D/2: the halves of a head are paired, as in Llama checkpoints, and not
its neighbours.

Through memory: x and out, 2 * T * H * D elements, and the angles, T * D. 6
FLOPs a pair, so the time is the time to move them.

How it fills a GPU: a program per token takes all of its heads, so that cos and
sin are read once. A known bug that this avoids: angles computed in bfloat16,
whose 8 bits cannot tell position 257 from 256; they come as cosines here.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import arch, check_tensor, next_power_of_2, warps

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_HEADS = 128


def apply_rope_ref(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The same result in plain torch, in float32: the specification."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]  # [T, 1, D/2]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.to(x.dtype)


@triton.jit
def _rope_kernel(
    x,  # [T, H, D]
    cos,  # [T, D/2]
    sin,  # [T, D/2]
    out,  # [T, H, D], dense
    H,
    s_xt,
    s_xh,
    s_ct,
    s_st,
    HALF: tl.constexpr,  # D/2
    BLOCK_H: tl.constexpr,  # power of two, at least H
    BLOCK_D: tl.constexpr,  # power of two, at least D/2
):
    """All heads of one token. Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HALF
    m_hd = (o_h[:, None] < H) & m_d[None, :]

    b_cos = tl.load(cos + t * s_ct + o_d, mask=m_d)[None, :]
    b_sin = tl.load(sin + t * s_st + o_d, mask=m_d)[None, :]
    x_tile = x + t * s_xt + o_h[:, None] * s_xh + o_d[None, :]
    b_a = tl.load(x_tile, mask=m_hd).to(tl.float32)  # [H, D/2]
    b_b = tl.load(x_tile + HALF, mask=m_hd).to(tl.float32)
    out_tile = out + (t * H + o_h[:, None]) * (2 * HALF) + o_d[None, :]
    tl.store(out_tile, b_a * b_cos - b_b * b_sin, mask=m_hd)
    tl.store(out_tile + HALF, b_b * b_cos + b_a * b_sin, mask=m_hd)


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate queries or keys to their positions.

    Args:
        x: [T, H, D], float16, bfloat16 or float32, H <= 128, D even and at
            most 256; outer strides are free, the last one is 1.
        cos, sin: [T, D/2], x's dtype or float32, of the angle
            position * theta**(-2 i / D).

    Returns:
        [T, H, D] in x's dtype, dense, computed in float32 and rounded once.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    check_tensor("x", x, ("T", "H", "D"), DTYPES, x.device)
    T, H, D = x.shape
    if D % 2 or D == 0 or D > MAX_HEAD_DIM:
        raise ValueError(f"x: head_dim {D} must be even, 2 to {MAX_HEAD_DIM}")
    if H > MAX_HEADS:
        raise ValueError(f"x: {H} heads must be at most {MAX_HEADS}")
    angles = (T, D // 2)
    check_tensor("cos", cos, angles, (x.dtype, torch.float32), x.device)
    check_tensor("sin", sin, angles, (cos.dtype,), x.device)
    out = torch.empty(T, H, D, dtype=x.dtype, device=x.device)
    if x.numel():
        block_h, block_d = next_power_of_2(H), next_power_of_2(D // 2)
        _rope_kernel[(T,)](
            x,
            cos,
            sin,
            out,
            H,
            *x.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            HALF=D // 2,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=warps(arch(x.device), block_h * block_d * x.itemsize),
        )
    return out
