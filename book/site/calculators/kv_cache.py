"""What the calculator `kv_cache` has to return, by the functions of its chapter."""

from solutions.foundations.kv_cache import kv_bytes_per_token, max_concurrency


def compute(
    layers: int,
    kv_heads: int,
    head_size: int,
    bytes_per_number: int,
    context: int,
    memory: float,
    weights: float,
    util: float,
) -> dict[str, float]:
    """Memory and weights in GB of 10^9 bytes; returns bytes and a count."""
    per_token = kv_bytes_per_token(layers, kv_heads, head_size, bytes_per_number)
    fit = max_concurrency(memory * 1e9, util, weights * 1e9, per_token, context)
    return {"per_token": per_token, "per_sequence": per_token * context, "sequences": fit}


INPUTS = (
    (32, 8, 128, 2, 8192, 80, 16.06, 0.9),
    (32, 32, 128, 2, 4096, 80, 13.48, 0.9),
    (30, 3, 64, 2, 43390, 24, 0.27, 0.9),  # 999.7 MB, to be shown as 1.00 GB
    (80, 8, 128, 1, 131072, 640, 141.2, 0.92),
    (40, 40, 128, 2, 2048, 40, 26, 1),
    (32, 8, 128, 2, 8192, 16, 16.06, 0.9),  # the weights alone do not fit
    (1, 1, 8, 1, 128, 4, 0.125, 0.05),
    (128, 128, 512, 4, 1048576, 640, 0.125, 1),
    (61, 1, 288, 4, 32769, 141, 100.001, 0.87),
)
