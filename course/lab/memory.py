"""Tensors that give a kernel away: poisoned outputs and guarded allocations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from course.lab.errors import KernelError

GUARD_BYTES = 256
CANARY = 0xFF  # as float16, bfloat16, float8 or float32 all ones is NaN; as an integer -1


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A dense tensor in which every byte is 0xFF: NaN in floats, -1 in signed integers.

    An element that a kernel forgets to write stays visible.
    """
    count = int(torch.Size(shape).numel())
    raw = torch.full((count * dtype.itemsize,), CANARY, dtype=torch.uint8, device=device)
    return raw.view(dtype).view(tuple(shape))


@contextmanager
def poisoning() -> Iterator[None]:
    """Within the block, what `torch.empty`, `empty_like` and `.new_empty` return is poisoned."""
    owners = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in owners]

    def wrap(original):
        def make(*args, **kwargs):
            tensor = original(*args, **kwargs)
            if tensor.is_contiguous() and tensor.numel():
                # a single element may have any stride, which a change of dtype refuses
                flat = tensor.view(-1).as_strided((tensor.numel(),), (1,))
                flat.view(torch.uint8).fill_(CANARY)
            return tensor

        return make

    for (owner, name), original in zip(owners, originals, strict=True):
        setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(owners, originals, strict=True):
            setattr(owner, name, original)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, in its own allocation with 256 canary bytes on both sides.

    A read outside the elements finds NaN (or -1); a write there is found by `check_guard`.
    Gaps that the strides leave between elements are canaries too.
    """
    itemsize, span = tensor.dtype.itemsize, _span(tensor)
    raw = torch.full(
        (2 * GUARD_BYTES + span * itemsize,), CANARY, dtype=torch.uint8, device=tensor.device
    )
    copy = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), GUARD_BYTES // itemsize)
    target = copy
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:  # an expanded axis: torch refuses to write it
            tensor, target = tensor.narrow(axis, 0, 1), target.narrow(axis, 0, 1)
    target.copy_(tensor)
    return copy


def check_guard(name: str, tensor: torch.Tensor) -> None:
    """Raise KernelError if bytes outside the elements of a `guarded` tensor were written."""
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    touched = raw != CANARY
    elements = touched.view(-1, tensor.dtype.itemsize).any(-1)
    elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    if elements.any():
        first = int(elements.nonzero()[0]) - tensor.storage_offset()
        raise KernelError(
            f"{name}: {int(elements.sum())} elements outside the tensor were overwritten, "
            f"the first {first} elements from its start; a store lacks its mask"
        )


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
