"""Reference answers of the chapter "Quantization"."""

import torch

from kernels.gemm_w4a16 import _w4a16_gemv_kernel as w4a16_gemv_kernel

__all__ = [
    "affine_params",
    "behaviour_report",
    "dequantize",
    "gptq",
    "pack_nibbles",
    "quantize_groups",
    "smooth_scales",
    "unpack_nibbles",
    "w4a16_gemv_kernel",
]


def affine_params(lo: float, hi: float, bits: int) -> tuple[float, int]:
    """Return the scale and the zero point of an affine quantizer.

    The range lo..hi is first widened to contain 0. Codes run from 0 to
    2**bits - 1 and stand for scale * (code - zero); scale is the distance of
    two neighbours, zero the code of 0.0, a whole number, so that 0.0 is
    represented exactly. The range lo = hi = 0 gives (1.0, 0).

    Raises ValueError if lo > hi or bits is not in 2..8.
    """
    # stub: widen lo..hi so that it contains 0
    if lo > hi:
        raise ValueError(f"lo={lo}: must not exceed hi={hi}")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits}: must lie in 2..8")
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    if lo == hi:
        return 1.0, 0
    scale = (hi - lo) / (2**bits - 1)
    return scale, round(-lo / scale)


def quantize_groups(
    W: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a matrix to integer codes, with one ruler per group of a row.

    W: [O, I], any float dtype; computed in fp32. `group` neighbours of a row
    share a scale and a zero point; an entry is about scale * (q - zero).

    symmetric=False: q is 0..2**bits - 1, uint8; the smallest entry of a group
    gets code 0 and the largest the highest code, q = round((w - min) / scale),
    zero = -min / scale, not rounded. A constant group has scale 1, q 0.
    symmetric=True: q is -(2**(bits-1) - 1)..2**(bits-1) - 1, int8; the entry
    of largest magnitude gets an outermost code, zero = 0. A group of zeros
    has scale 1.

    Returns q [O, I], scale and zero [O, I // group], both fp32.
    Raises ValueError if bits is not in 2..8, or unless group >= 1 divides I.
    """
    # stub: reshape W to [O, I // group, group] in fp32
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits}: must lie in 2..8")
    O, I = W.shape  # noqa: E741
    if group < 1 or I % group:
        raise ValueError(f"group={group}: must divide the {I} columns of W")
    groups = W.float().reshape(O, I // group, group)
    if symmetric:
        levels = 2 ** (bits - 1) - 1
        low = torch.zeros(O, I // group)
        scale = groups.abs().amax(2) / levels
        dtype = torch.int8
    else:
        low = groups.amin(2)
        scale = (groups.amax(2) - low) / (2**bits - 1)
        dtype = torch.uint8
    scale = torch.where(scale == 0, 1.0, scale)
    q = ((groups - low[..., None]) / scale[..., None]).round()
    return q.reshape(O, I).to(dtype), scale, (0 - low) / scale


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int
) -> torch.Tensor:
    """Return scale * (q - zero), what the codes stand for.

    q: [O, I], uint8 or int8; scale, zero: [O, I // group], one for `group`
    neighbours of a row, any float dtype; returns fp32 [O, I].
    Raises ValueError unless scale and zero have I / group columns.
    """
    # stub: spread scale and zero over the columns of q
    for name, t in (("scale", scale), ("zero", zero)):
        if t.shape[1] * group != q.shape[1]:
            raise ValueError(
                f"{name} has {t.shape[1]} columns: with group={group}, "
                f"it must cover the {q.shape[1]} of q"
            )
    scale = scale.float().repeat_interleave(group, dim=1)  # [O, I]
    zero = zero.float().repeat_interleave(group, dim=1)
    return scale * (q.float() - zero)


def pack_nibbles(q: torch.Tensor) -> torch.Tensor:
    """Store two 4-bit codes in each byte.

    q: uint8 [O, I], values 0..15; returns uint8 [O, I // 2]. Column 2i goes
    into the low four bits of byte i, column 2i + 1 into the high four.
    Raises ValueError if I is odd or a value exceeds 15.
    """
    # stub: refuse odd columns and codes above 15
    if q.shape[1] % 2:
        raise ValueError(f"q has {q.shape[1]} columns: must be even")
    if (q > 15).any():
        raise ValueError(f"q holds {int(q.max())}: must not exceed 15")
    return q[:, 0::2] | q[:, 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo pack_nibbles: uint8 [O, B] becomes uint8 [O, 2 * B]."""
    # stub: take the low and the high four bits of each byte
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def smooth_scales(
    x_absmax: torch.Tensor, w_absmax: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Return SmoothQuant's divisor of each input channel.

    x_absmax, w_absmax: [K], the largest magnitudes of input channel k in the
    activations and in the weights. Activations are to be divided by the
    result and weights multiplied: s = x_absmax**alpha / w_absmax**(1 - alpha),
    and 1 where one of the two maxima is 0. Returns fp32 [K].

    Raises ValueError if the shapes differ or alpha is not in 0..1.
    """
    # stub: refuse shapes that differ and an alpha outside 0..1
    if x_absmax.shape != w_absmax.shape:
        raise ValueError(
            f"w_absmax has shape {list(w_absmax.shape)}: must be that of "
            f"x_absmax, {list(x_absmax.shape)}"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: must lie in 0..1")
    x, w = x_absmax.float(), w_absmax.float()
    idle = (x == 0) | (w == 0)
    return torch.where(idle, 1.0, x**alpha / w ** (1 - alpha))


def gptq(
    W: torch.Tensor, H: torch.Tensor, bits: int, damp: float = 0.01
) -> torch.Tensor:
    """Round a matrix column by column, compensating in the columns to come.

    W: [O, K]; H: [K, K], proportional to X^T X of the inputs X [N, K].
    Computed in fp64. The ruler of each row is fixed by the original W, as in
    quantize_groups with symmetric=False and group=K; a code that compensation
    pushes outside 0..2**bits - 1 is clipped.

    With damp times the mean of H's diagonal added to that diagonal, and
    H^-1 = U^T U with U upper triangular, column j from left to right is
    rounded to w_hat, and every later column k loses U[j, k] times the error
    (w - w_hat) / U[j, j].

    Returns the rounded weights [O, K] in W's dtype; W and H stay as they are.
    Raises ValueError if H is not [K, K] or bits is not in 2..8.
    """
    # stub: fix scale and minimum of each row from the original W
    K = W.shape[1]
    if H.shape != (K, K):
        raise ValueError(f"H has shape {list(H.shape)}: must be [{K}, {K}]")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits}: must lie in 2..8")
    work = W.double().clone()
    low = work.amin(1)  # [O]
    scale = (work.amax(1) - low) / (2**bits - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    damped = H.double() + damp * H.double().diag().mean() * torch.eye(K)
    U = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    for j in range(K):
        codes = ((work[:, j] - low) / scale).round().clamp(0, 2**bits - 1)
        w_hat = codes * scale + low
        error = (work[:, j] - w_hat) / U[j, j]
        work[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]
        work[:, j] = w_hat
    return work.to(W.dtype)


def behaviour_report(
    base: torch.Tensor, quant: torch.Tensor, target: torch.Tensor
) -> dict[str, float]:
    """Compare what two models predict for the same N tokens.

    base, quant: logits [N, V] of the original and of the quantized model, any
    float dtype; target: [N], the tokens that really came. Computed in fp32 or
    wider, natural logarithms.

    Returns a dict: `ppl_ratio`, perplexity of quant over that of base;
    `flips`, in how many places exactly one of the two has its most likely
    token equal to the target; `agree`, the share of places where their most
    likely tokens are the same; `kl`, the mean divergence KL(base || quant).
    Raises ValueError if N is 0 or the shapes do not fit.
    """
    # stub: refuse N = 0 and shapes that do not fit
    if base.shape != quant.shape or base.shape[:1] != target.shape:
        raise ValueError(
            f"quant {list(quant.shape)}, target {list(target.shape)}: must "
            f"fit base {list(base.shape)}"
        )
    if len(target) == 0:
        raise ValueError("target is empty: there is nothing to compare")
    log_p = base.float().log_softmax(1)  # [N, V]
    log_q = quant.float().log_softmax(1)
    rows = torch.arange(len(target))
    gain = (log_p - log_q)[rows, target].mean()  # NLL quant - NLL base
    best_p, best_q = base.argmax(1), quant.argmax(1)
    return {
        "ppl_ratio": float(gain.exp()),
        "flips": int(((best_p == target) != (best_q == target)).sum()),
        "agree": float((best_p == best_q).float().mean()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(1).mean()),
    }
