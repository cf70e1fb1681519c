"""What the calculator `serving` has to return, by the function of its chapter."""

import math

from solutions.foundations.serving import step_time


def compute(
    bandwidth: float,
    compute_rate: float,
    weights: float,
    parameters: float,
    per_token: int,
    context: int,
    batch: int,
) -> dict[str, float]:
    """In TB/s, TFLOP/s, GB, billions, bytes and tokens; returns tokens per second and ms."""

    def step(bw: float, flops: float) -> float:
        return step_time(batch, context, weights * 1e9, parameters * 1e9, per_token, bw, flops)

    bw, flops = bandwidth * 1e12, compute_rate * 1e12
    seconds = step(bw, flops)
    return {
        "total": batch / seconds,
        "each": 1 / seconds,
        "step": 1e3 * seconds,
        "reading": 1e3 * step(bw, math.inf),
        "computing": 1e3 * step(math.inf, flops),
    }


INPUTS = (
    (3.35, 989, 16.06, 8.03, 131072, 2048, 64),
    (3.35, 989, 16.06, 8.03, 131072, 2048, 1),
    (3.35, 989, 16.06, 8.03, 131072, 128, 1000),  # arithmetic takes longer
    (2.039, 312, 0.269, 0.135, 23040, 1000, 7),
    (5.3, 1307, 141.2, 70.6, 327680, 131072, 3),
    (0.05, 1, 0.125, 0.0625, 1024, 128, 1),
    (20, 8192, 1024, 1024, 4194304, 1048576, 1024),
)
