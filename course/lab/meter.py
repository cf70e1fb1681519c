"""Meter an interpreted launch: bytes, FLOPs, accesses outside the tensors, races.

Every address of every load and store is compared with the tensors that the launch received,
element by element, so that reading a neighbour through a sliced view counts as outside too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from course.lab.errors import KernelError
from course.lab.interp import BUILDER, Program, interpreted

PAGE_BITS = 16
SEVERAL = -1  # in a shadow: more than one program


@dataclass
class Meter:
    """What the launches inside a `metered()` block moved.

    Attributes:
        launches: kernels started.
        loads, stores: bytes moved by lanes whose mask was true; an atomic counts as both.
        read, written: the same by name of the kernel's argument.
        flops: 2 M N K for every tl.dot, padding included.
    """

    launches: int = 0
    loads: int = 0
    stores: int = 0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    _regions: list[_Region] = field(default_factory=list, repr=False)
    _programs: list[Program] = field(default_factory=list, repr=False)
    _writers: _Shadow = field(default_factory=lambda: _Shadow(), repr=False)
    _readers: _Shadow = field(default_factory=lambda: _Shadow(), repr=False)

    def start(self, name: str, arguments: dict[str, Any]) -> None:
        self.launches += 1
        tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
        self._regions = [_Region(n, tensor) for n, tensor in tensors.items() if tensor.numel()]
        self._programs, self._writers, self._readers = [], _Shadow(), _Shadow()

    def access(self, kind: str, program: Program, addresses: np.ndarray, size: int) -> None:
        addresses = addresses.ravel().astype(np.int64)
        if not addresses.size:
            return
        names = self._owners(kind, addresses)
        moved = Counter({name: count * size for name, count in names.items()})
        if kind != "store":
            self.loads += addresses.size * size
            self.read += moved
        if kind != "load":
            self.stores += addresses.size * size
            self.written += moved
        if kind != "atomic":
            self._check_race(kind, program, addresses)

    def dot(self, flops: int) -> None:
        self.flops += flops

    def _owners(self, kind: str, addresses: np.ndarray) -> Counter[str]:
        """Elements touched by argument name; raises for an address in none of them."""
        names: Counter[str] = Counter()
        rest = addresses
        for region in self._regions:
            inside = region.contains(rest)
            if count := int(inside.sum()):
                names[region.name] += count
                rest = rest[~inside]
                if not rest.size:
                    return names
        verb = "reads" if kind == "load" else "writes"
        nearest = min(self._regions, key=lambda region: region.distance(int(rest[0])), default=None)
        where = nearest.describe_outside(int(rest[0])) if nearest else "no tensor was passed"
        raise KernelError(
            f"{verb} outside every argument; {where}. A mask is missing or an offset is wrong"
        )

    def _check_race(self, kind: str, program: Program, addresses: np.ndarray) -> None:
        """On a GPU the programs of a launch run in any order, so they may share only reads."""
        if not self._programs or self._programs[-1] != program:
            self._programs.append(program)
        me = len(self._programs)
        self._refuse_other(self._writers.get(addresses), me, kind, "writes", addresses)
        if kind == "store":
            self._refuse_other(self._readers.get(addresses), me, kind, "reads", addresses)
            self._writers.set(addresses, np.int32(me))
        else:
            before = self._readers.get(addresses)
            alone = (before == 0) | (before == me)
            self._readers.set(addresses, np.where(alone, np.int32(me), np.int32(SEVERAL)))

    def _refuse_other(
        self, others: np.ndarray, me: int, kind: str, verb: str, addresses: np.ndarray
    ) -> None:
        conflict = (others != 0) & (others != me)
        if not conflict.any():
            return
        first = int(conflict.argmax())
        other = int(others[first])
        who = "another program" if other == SEVERAL else f"program {self._programs[other - 1]}"
        address = addresses[first : first + 1]
        region = next(region for region in self._regions if region.contains(address)[0])
        raise KernelError(
            f"race: {'stores to' if kind == 'store' else 'loads'} {region.name}"
            f"{region.index(int(address[0]))}, which {who} {verb} too; programs of a launch run "
            "in any order"
        )


@contextmanager
def metered() -> Iterator[Meter]:
    """Like `interpreted`, and meters every launch; yields the `Meter`.

    Raises `KernelError` at the first access outside the tensors and at the first race: an
    element stored by one program and loaded or stored by another. Atomics are not checked
    for races.
    """
    meter = Meter()
    BUILDER.observers.append(meter)
    try:
        with interpreted():
            yield meter
    finally:
        BUILDER.observers.remove(meter)


class _Region:
    """The addresses of one tensor's elements."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape, self.itemsize = name, tuple(tensor.shape), tensor.itemsize
        axes = [
            (stride * self.itemsize, size, axis)
            for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
            if size > 1 and stride > 0
        ]
        self.axes = sorted(axes, reverse=True)
        self.low = tensor.data_ptr()
        self.high = self.low + self.itemsize + sum(s * (n - 1) for s, n, _ in axes)
        inner = [*(s * n for s, n, _ in self.axes[1:]), self.itemsize]
        nested = all(s >= below for (s, _, _), below in zip(self.axes, inner, strict=False))
        has_gaps = self.high - self.low > self.itemsize * int(np.prod([n for _, n, _ in axes]))
        self.has_gaps = nested and has_gaps

    def contains(self, addresses: np.ndarray) -> np.ndarray:
        inside = (addresses >= self.low) & (addresses < self.high)
        if self.has_gaps and inside.any():
            offset = addresses - self.low
            for stride, size, _ in self.axes:
                inside &= offset // stride < size
                offset = offset % stride
            inside &= offset < self.itemsize
        return inside

    def index(self, address: int) -> list[int]:
        """The element at `address`; 0 along axes that the strides do not tell apart."""
        index, offset = [0] * len(self.shape), address - self.low
        for stride, _, axis in self.axes:
            index[axis], offset = divmod(offset, stride)
        return index

    def distance(self, address: int) -> int:
        return max(self.low - address, address - self.high + 1, 0)

    def describe_outside(self, address: int) -> str:
        before, after = self.low - address, address - self.high
        where = (
            f"starts {before // self.itemsize} elements before"
            if before > 0
            else f"lies {after // self.itemsize} elements past the end of"
            if after >= 0
            else "falls between the rows of"
        )
        return f"the first one {where} {self.name} {list(self.shape)}"


class _Shadow:
    """One integer per address, 0 at first, kept in pages so that huge tensors cost nothing."""

    def __init__(self) -> None:
        self.pages: dict[int, np.ndarray] = {}

    def _parts(self, addresses: np.ndarray) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
        numbers, offsets = addresses >> PAGE_BITS, addresses & ((1 << PAGE_BITS) - 1)
        for number in np.unique(numbers):
            if number not in self.pages:
                self.pages[number] = np.zeros(1 << PAGE_BITS, np.int32)
            chosen = numbers == number
            yield self.pages[number], chosen, offsets[chosen]

    def get(self, addresses: np.ndarray) -> np.ndarray:
        values = np.zeros(addresses.shape, np.int32)
        for page, chosen, offsets in self._parts(addresses):
            values[chosen] = page[offsets]
        return values

    def set(self, addresses: np.ndarray, values: Any) -> None:
        values = np.broadcast_to(values, addresses.shape)
        for page, chosen, offsets in self._parts(addresses):
            page[offsets] = values[chosen]
