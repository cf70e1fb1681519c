"""Second correct answers to the chapter "Quantization": other algorithms, the same contracts."""

import math

import torch
import triton
import triton.language as tl


def affine_params(lo, hi, bits):
    """Works from the width of the widened range, in fractions."""
    from fractions import Fraction

    if hi < lo or bits not in range(2, 9):
        raise ValueError("lo, hi or bits is out of range")
    below, above = Fraction(max(0.0, -lo)), Fraction(max(0.0, hi))
    if below + above == 0:
        return 1.0, 0
    steps = (1 << bits) - 1
    zero = math.floor(below * steps / (below + above) + Fraction(1, 2))
    return float((below + above) / steps), zero


def quantize_groups(W, bits, group, symmetric):
    """One group after the other, in float64, codes by comparing with every midpoint."""
    if bits < 2 or bits > 8 or group <= 0 or W.shape[1] % group:
        raise ValueError("bits or group does not fit")
    rows, n = W.shape[0], W.shape[1] // group
    q = torch.zeros(W.shape, dtype=torch.int8 if symmetric else torch.uint8)
    scale, zero = torch.ones(rows, n), torch.zeros(rows, n)
    half = (1 << (bits - 1)) - 1
    for r in range(rows):
        for g in range(n):
            entries = W[r, g * group : (g + 1) * group].double()
            if symmetric:
                first, last, start = -half, half, -entries.abs().max()
                step = -start / half
            else:
                first, last, start = 0, (1 << bits) - 1, entries.min()
                step = (entries.max() - start) / last
            if step == 0:
                step = torch.tensor(1.0)
                zero[r, g] = 0.0 if symmetric else -start
                continue
            middles = start + step * (torch.arange(last - first) + 0.5)
            codes = torch.bucketize(entries, middles) + first
            q[r, g * group : (g + 1) * group] = codes.to(q.dtype)
            scale[r, g] = step
            if not symmetric:
                zero[r, g] = -start / step
    return q, scale, zero


def dequantize(q, scale, zero, group):
    """Reshapes the codes into groups, in float64."""
    rows, columns = q.shape
    if {scale.shape[1] * group, zero.shape[1] * group} != {columns}:
        raise ValueError("scale or zero does not cover q")
    groups = q.double().reshape(rows, scale.shape[1], group)
    out = torch.addcmul(
        -(scale.double() * zero.double())[..., None], scale.double()[..., None], groups
    )
    return out.reshape(rows, columns).float()


def behaviour_report(base, quant, target):
    """Row by row, in float64, with logsumexp."""
    rows = target.numel()
    if rows == 0 or base.shape != quant.shape or base.shape[0] != rows:
        raise ValueError("nothing to compare, or shapes differ")
    loss = kl = 0.0
    flips = same = 0
    for p, q, t in zip(base.double(), quant.double(), target.tolist(), strict=True):
        p, q = p - p.logsumexp(0), q - q.logsumexp(0)
        loss += (p[t] - q[t]).item()
        kl += torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
        best_p, best_q = p.max(0).indices.item(), q.max(0).indices.item()
        flips += {best_p, best_q} != {t} and t in (best_p, best_q)
        same += best_p == best_q
    return {
        "kl": kl / rows,
        "agree": same / rows,
        "flips": flips,
        "ppl_ratio": math.exp(loss / rows),
    }


def smooth_scales(x_absmax, w_absmax, alpha):
    """Channel by channel, in logarithms."""
    if tuple(x_absmax.shape) != tuple(w_absmax.shape) or alpha < 0 or alpha > 1:
        raise ValueError("shapes differ, or alpha is out of range")
    out = []
    for x, w in zip(x_absmax.tolist(), w_absmax.tolist(), strict=True):
        idle = x == 0 or w == 0
        out.append(0.0 if idle else alpha * math.log(x) - (1 - alpha) * math.log(w))
    return torch.tensor(out, dtype=torch.float32).exp()


def gptq(W, H, bits, damp=0.01):
    """Solves for the best change of all later columns, instead of factoring the inverse.

    With the rounding error of column j fixed, the later columns change by the error times the
    solution of a linear system in the damped H, restricted to them.
    """
    K = W.shape[1]
    if tuple(H.shape) != (K, K) or not 1 < bits < 9:
        raise ValueError("H or bits does not fit")
    H = H.double() + torch.eye(K).double() * H.double().diagonal().mean() * damp
    out = torch.empty(W.shape, dtype=torch.float64)
    work, top = W.double() * 1.0, 2**bits - 1
    low, high = work.min(dim=1).values, work.max(dim=1).values
    step = (high - low) / top
    step[step == 0] = 1.0
    for j in range(K):
        code = torch.clamp(torch.round((work[:, j] - low) / step), 0, top)
        out[:, j] = low + code * step
        if j + 1 < K:
            error = work[:, j] - out[:, j]
            answer = torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])
            work[:, j + 1 :] += error[:, None] * answer[None]
    return out.to(W.dtype)


def pack_nibbles(q):
    """Arithmetic in int64 over pairs."""
    if q.shape[1] & 1 or bool(torch.any(q >= 16)):
        raise ValueError("odd number of columns, or a code that needs five bits")
    pairs = q.long().reshape(q.shape[0], q.shape[1] // 2, 2)
    return (pairs * torch.tensor([1, 16])).sum(2).to(torch.uint8)


def unpack_nibbles(packed):
    """Division with remainder, written into a new tensor."""
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8)
    out[:, ::2] = packed % 16
    out[:, 1::2] = packed // 16
    return out


@triton.jit
def w4a16_gemv_kernel(
    x,
    words,
    scales,
    zeros,
    part,
    N,
    n_quads,
    s_w,
    s_s,
    s_z,
    GROUP: tl.constexpr,
    SEG: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Expands every weight before the product; one column of scales per weight."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    there = rows < N
    K = 32 * n_quads
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    first = tl.program_id(1) * blocks
    total = tl.zeros([BLOCK_N], tl.float32)
    for block in range(first, first + blocks):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        inside = there & (column < K)
        word = tl.load(words + rows * (4 * s_w) + column // 8, mask=inside, other=0)
        code = ((word >> (column % 8 * 4)) & 15).to(tl.float32)
        scale = tl.load(scales + rows * s_s + column // GROUP, mask=inside, other=0.0)
        zero = tl.load(zeros + rows * s_z + column // GROUP, mask=inside, other=0.0)
        weight = scale.to(tl.float32) * (code - zero.to(tl.float32))
        inputs = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        total += tl.sum(weight * inputs, 1)
    out = part + tl.program_id(1).to(tl.int64) * N + tl.reshape(rows, [BLOCK_N])
    tl.store(out, total, mask=tl.reshape(there, [BLOCK_N]))
