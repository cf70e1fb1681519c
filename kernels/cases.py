"""Inputs of the kernels: edge cases, production launches, and tolerances.

Tests, the chapters' demos and the benchmark share them, so that a shape that
once broke a kernel is tried everywhere.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.attention_decode import decode_attention


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that contain every pair of values of every two axes.

    p * p rows for p a prime that no axis exceeds: the first axis follows j,
    the others i + n * j modulo p, and two of these lines meet exactly once.
    """
    longest = max(len(axes) - 1, *map(len, axes.values()))
    p = next(p for p in (2, 3, 5, 7, 11, 13) if p >= longest)
    rows = []
    for i, j in itertools.product(range(p), repeat=2):
        places = [j, *((i + n * j) % p for n in range(len(axes) - 1))]
        rows.append(
            {
                name: values[place % len(values)]
                for (name, values), place in zip(
                    axes.items(), places, strict=True
                )
            }
        )
    return rows


@dataclass(frozen=True)
class Decode:
    """One call of decode attention.

    `layout` is how the cache lies in memory: "dense"; "fused", K and V in one
    tensor; "heads first", [B, Hkv, S, D] seen as [B, S, Hkv, D]; "shared", one
    cache expanded over the batch; "shifted", off the 16-byte grid.
    """

    seq_lens: tuple[int, ...]
    group: int = 1
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    n_splits: int | None = None
    layout: str = "dense"
    slots: int = 64  # S


# Around a block of 16 keys, the step of the interpreter; empty in the middle.
DECODE_LENGTHS = (1, 15, 0, 16, 17, 55)
DECODE_CASES = [
    Decode(seq_lens=DECODE_LENGTHS, **row)
    for row in pairwise(
        {
            "group": (1, 3, 4, 7, 8),
            "head_dim": (16, 64, 80, 96, 128),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "n_splits": (1, 2, 3, 9),
            "layout": ("dense", "fused", "heads first", "shared", "shifted"),
        }
    )
]


def decode_inputs(
    case: Decode,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and seq_lens of a case; free cache slots hold NaN.

    With a shared cache all sequences are as long as the longest.
    """
    B, S, heads, D = (
        len(case.seq_lens),
        case.slots,
        case.kv_heads,
        case.head_dim,
    )
    lengths = case.seq_lens
    rows = 1 if case.layout == "shared" else B
    if case.layout == "shared":
        lengths = (max(lengths),) * B
    q = torch.randn(B, heads * case.group, D, generator=generator)
    cache = torch.randn(rows, S, 2, heads, D, generator=generator)
    for row, length in zip(range(rows), lengths, strict=False):
        cache[row, length:] = math.nan
    q, cache = q.to(device, case.dtype), cache.to(device, case.dtype)

    k, v = cache[:, :, 0], cache[:, :, 1]  # views into one tensor
    if case.layout == "heads first":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "shared":
        k, v = k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)
    elif case.layout == "shifted":
        q, k, v = _shifted(q), _shifted(k), _shifted(v)
    elif case.layout == "dense":
        k, v = k.contiguous(), v.contiguous()
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=device)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy that begins one element after an aligned address."""
    room = tensor.new_empty(tensor.numel() + 1)
    copy = room[1:].view(tensor.shape)
    copy.copy_(tensor)
    return copy


def error_limit(
    exact: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype
) -> float:
    """Largest error that a result of `dtype` may have, in absolute terms.

    Args:
        exact: the result in float64.
        eager: what plain torch gives in `dtype`.

    Twice the error of eager torch plus one unit in the last place of the
    largest value for 16 bits; four times and 1e-6 of it for float32.
    """
    largest = exact.abs().max().item()
    eager_error = (eager.double() - exact).abs().max().item()
    if dtype == torch.float32:
        return 4 * eager_error + 1e-6 * largest
    return 2 * eager_error + torch.finfo(dtype).eps / 2 * largest


def _decode_launch(
    B: int, S: int, H: int, kv_heads: int, D: int, dtype: torch.dtype
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    q = torch.empty(B, H, D, dtype=dtype, device=meta)
    k = torch.empty(B, S, kv_heads, D, dtype=dtype, device=meta)
    seq_lens = torch.empty(B, dtype=torch.int32, device=meta)
    decode_attention(q, k, k, seq_lens, n_splits=8)


# The launches whose compiled form is committed, at most three per family.
PRODUCTION: dict[str, dict[str, Callable[[], Any]]] = {
    "attention_decode": {
        "Llama-3-8B, bf16": partial(
            _decode_launch, 16, 8192, 32, 8, 128, torch.bfloat16
        ),
        "SmolLM2-135M, fp16": partial(
            _decode_launch, 16, 2048, 9, 3, 64, torch.float16
        ),
        "SmolLM2-135M, fp32": partial(
            _decode_launch, 16, 2048, 9, 3, 64, torch.float32
        ),
    }
}
