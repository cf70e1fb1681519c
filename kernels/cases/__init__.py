"""Inputs of the kernels: edge cases, production launches, benchmarks, tolerances.

Tests, the chapters' demos and the benchmark share them, so that a shape that
once broke a kernel is tried everywhere. The module of a family, named like the
kernel's, holds its input builders and

    PRODUCTION: label -> a call of the launcher on meta tensors; the launches
        whose compiled form is committed, at most three per kernel.
    STREAMING: names of the kernels that move the bulk of the data.
    TENSOR_CORE: names of the kernels whose products the tensor cores do.
    BENCHMARKS: what `make bench-gpu` times.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch


def families() -> dict[str, ModuleType]:
    """Name of each kernel file that has cases -> its module of cases."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    }


@dataclass(frozen=True)
class Benchmark:
    """One launcher at one real size, what it is compared with, and its floor.

    Attributes:
        name: the sizes, as a reader would say them.
        inputs: (generator, device) -> the arguments of `ours`. Called several
            times, so that a timing can rotate over buffers that no cache
            holds; draw on the device where the tensors are large.
        small: the same for sizes that an interpreter can run.
        ours: the launcher; returns a tensor or a tuple of tensors.
        reference: the same in plain torch, for `torch.compile` and for
            comparing results. Same arguments, same kind of result.
        peers: name -> the same by a named library. Raises ImportError where
            the library is not installed.
        bytes: that must move: inputs once, outputs once.
        flops: useful operations.
        bound: which of the two sets the floor.
        tolerance: largest error against `reference`, as a part of its
            largest value.
        deterministic: False where the peers draw random numbers of their own.
    """

    name: str
    inputs: Callable[[torch.Generator, torch.device], tuple]
    small: Callable[[torch.Generator, torch.device], tuple]
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    bytes: int
    flops: int
    bound: Literal["memory", "compute"]
    tolerance: float
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    deterministic: bool = True


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


def shifted(tensor: torch.Tensor) -> torch.Tensor:
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
