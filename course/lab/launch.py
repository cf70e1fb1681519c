"""What every launcher needs: argument checks that teach, ceiling division, and the target's name.

Light on purpose: torch and the standard library only, so a kernel runs on a bare GPU machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_pretended: list[str] = []


def cdiv(a: int, b: int) -> int:
    """Smallest integer that is at least a / b, for b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n (1 for n <= 1): tile sizes must be one."""
    return 1 << max(n - 1, 0).bit_length()


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError unless `tensor` fits what a kernel reads.

    Args:
        name: the argument's name, for the message.
        shape: a number fixes a size; a letter names a free one (``("B", "S", 8, 64)``).
        dtypes: the accepted dtypes.
        device: where the first argument lives; all must live there.

    The last stride must be 1, because kernels read rows with wide loads; other strides are free.
    """
    wanted = "[" + ", ".join(map(str, shape)) + "]"
    got = list(tensor.shape)
    fits = len(got) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(got, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: shape {got} must be {wanted}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype} must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name}: device {tensor.device} must be {device}, as the first argument")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last stride {tensor.stride(-1)} must be 1")


def reads_values(device: torch.device) -> bool:
    """Whether `check_values` looks at tensors there, so that what it looks at is worth making."""
    if device.type == "cuda":
        return bool(os.environ.get("COURSE_KERNEL_DEBUG"))
    return device.type != "meta"


def check_values(name: str, tensor: torch.Tensor, low: float, high: float) -> None:
    """Raise ValueError unless every element of a tensor is in low <= x <= high.

    On a GPU only if the environment sets COURSE_KERNEL_DEBUG: reading the values makes the host
    wait for the device. Tensors without memory (meta) are never read.
    """
    if not reads_values(tensor.device) or not tensor.numel():
        return
    wrong = ~((tensor >= low) & (tensor <= high))  # NaN too
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {tensor[tuple(place)].item()} at {place} must be {low} to {high}"
        )


def query_group(name: str, heads: int, kv_heads: int, largest: int) -> int:
    """Query heads per KV head; ValueError unless they divide, into groups of at most `largest`.

    Args:
        name: of the argument that has the KV heads, for the message.
    """
    group = heads // max(kv_heads, 1)
    if group * kv_heads != heads or group > largest:
        raise ValueError(
            f"{name}: {kv_heads} KV heads must divide the {heads} query heads of q "
            f"into groups of at most {largest}"
        )
    return group


def check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is an int (2.0 is none) in low <= value <= high."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r} must be an int, {low} to {high}")


def check_splits(n_splits: int | None, largest: int) -> None:
    """Raise ValueError unless n_splits is None, the launcher's choice, or 1 to `largest`."""
    if n_splits is not None:
        check_int("n_splits", n_splits, 1, largest)


def arch(device: torch.device) -> str:
    """Name of the target that a launch on `device` is compiled for.

    ``"sm_90"`` style for NVIDIA, ``"gfx942"`` style for AMD, ``"cpu"`` for the interpreter.
    """
    if _pretended:
        return _pretended[-1]
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def warps(target: str, nbytes: int) -> int:
    """Warps of a program that reads `nbytes` at once: each thread loads 16 bytes. 1 to 16."""
    lanes = 64 if target.startswith("gfx") else 32
    return min(max(nbytes // (16 * lanes), 1), 16)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on AMD) of `device`; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def pretending(name: str) -> Iterator[None]:
    """Make `arch` answer `name`, so a launcher picks the configuration of another target."""
    _pretended.append(name)
    try:
        yield
    finally:
        _pretended.pop()
