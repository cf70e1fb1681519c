"""What the calculator `quantization` has to return.

The size is the chapter's formula for bits per weight. The error is that of the chapter's
`quantize_groups` and `dequantize` on normal weights in the limit of many, integrated.
"""

import math

import torch

RULER_BITS = {"asymmetric": 32, "symmetric": 16}  # fp16 scale, and zero point


def compute(parameters: float, bits: int, group: int, ruler: str) -> dict[str, float]:
    """Parameters in billions; returns bits, bytes, a ratio and percent of the spread."""
    each = bits + RULER_BITS[ruler] / group
    return {
        "each": each,
        "size": parameters * 1e9 * each / 8,
        "ratio": 16 / each,
        "error": 100 * rounding_error(bits, group, ruler == "symmetric"),
    }


def rounding_error(bits: int, group: int, symmetric: bool) -> float:
    """Root of the mean squared error of standard normal weights, rounded in groups.

    Given the outermost weights of a group, the others are independent normal weights cut off
    there; the mean over them is known in closed form. What is left is an integral over the
    outermost ones: the largest magnitude (symmetric), or the smallest and the largest weight.
    """
    pace = 1 / 24
    high = torch.arange(-8, 8 + pace / 2, pace, dtype=torch.float64)
    if symmetric:
        high = high[high > 0]
        low, steps, spread = -high, 2**bits - 2, 2 * pace * _density(high)
        outermost = 1
    else:
        low, high = torch.meshgrid(high, high, indexing="ij")
        low, high = low[low < high], high[low < high]
        steps, spread = 2**bits - 1, (group - 2) * pace**2 * _density(low) * _density(high)
        outermost = 2
    inside = torch.special.ndtr(high) - torch.special.ndtr(low)
    weight = (group - 1) * spread * inside ** (group - outermost - 1)
    some = weight > 1e-14
    mean = (weight[some] * _damage(low[some], high[some], steps)).sum()
    return math.sqrt(mean)


def _damage(low: torch.Tensor, high: torch.Tensor, steps: int) -> torch.Tensor:
    """The integral of (w - nearest mark)^2 times the normal density over low..high, [n].

    The marks are low, high and those that cut what lies between into `steps` equal steps.
    """
    marks = low[:, None] + (high - low)[:, None] * torch.arange(steps + 1) / steps
    middles = (marks[:, 1:] + marks[:, :-1]) / 2
    start = torch.cat((marks[:, :1], middles), 1)
    end = torch.cat((middles, marks[:, -1:]), 1)

    def until(w: torch.Tensor) -> torch.Tensor:
        """The integral of (x - mark)^2 times the density over x < w."""
        return (1 + marks**2) * torch.special.ndtr(w) + (2 * marks - w) * _density(w)

    return (until(end) - until(start)).sum(1)


def _density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


INPUTS = (
    (8.03, 4, 64, "asymmetric"),
    (8.03, 4, 64, "symmetric"),
    (0.106, 3, 192, "asymmetric"),
    (70.6, 8, 4096, "symmetric"),
    (70.6, 8, 128, "asymmetric"),
    (0.0625, 2, 8, "asymmetric"),
    (0.0625, 2, 8, "symmetric"),
    (1024, 2, 16384, "symmetric"),
    (1024, 5, 16384, "asymmetric"),
    (13, 6, 100, "asymmetric"),
)
