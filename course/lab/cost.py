"""Read a kernel's Triton IR: what it does to memory, and offsets that 32 bits may not hold.

Triton IR is the level at which a line of the kernel is still one operation: nothing is
pipelined, unrolled or split over threads, and a load whose value nobody uses is already gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RESULT = re.compile(r"\s*(%[\w.-]+)(?::\d+)? = \"?([\w.]+)\"?(.*)")
_COUNTED = {
    "load": r"= tt\.(?:load|descriptor_load|descriptor_gather)\b",
    "store": r"^\s*tt\.(?:store|descriptor_store|descriptor_scatter)\b",
    "dot": r"= tt\.(?:dot|dot_scaled)\b",
    "tf32_dot": r"= tt\.dot\b.*inputPrecision = tf32\b.*: tensor<[\dx]*xf32> \*",
    "atomic": r"= tt\.atomic_\w+",
    "reduce": r"= \"tt\.(?:reduce|scan)\"",
}


@dataclass(frozen=True)
class Cost:
    """How often a kernel's text loads, stores, multiplies tiles, updates atomically and reduces.

    A loop's body counts once. `int32_offsets` names the variables whose pointer offset is a
    32-bit product of two run-time values, such as row * stride: beyond 2**31 it wraps around.
    `tf32_dot` counts products of float32 tiles that a GPU may round to TF32 first.
    """

    load: int
    store: int
    dot: int
    tf32_dot: int
    atomic: int
    reduce: int
    int32_offsets: tuple[str, ...]


def cost(ttir: str) -> Cost:
    """Count the operations in Triton IR that has been inlined and simplified."""
    counts = {
        name: len(re.findall(pattern, ttir, re.MULTILINE)) for name, pattern in _COUNTED.items()
    }
    return Cost(**counts, int32_offsets=int32_offsets(ttir))


def int32_offsets(ttir: str) -> tuple[str, ...]:
    """Names of the values that hold a suspicious product, in order of appearance, each once.

    A product is suspicious if it has 32 bits, no factor is a constant or a range of constants,
    and it reaches a pointer offset without passing through a load.
    """
    # A name may be used again in a region beside its own, so each offset is followed when its
    # line comes, through what is defined by then.
    operations: dict[str, tuple[str, list[str], str]] = {}

    def is_fixed(value: str) -> bool:
        while operations.get(value, ("",))[0] in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            value = operations[value][1][0]
        return operations.get(value, ("",))[0] in ("arith.constant", "tt.make_range")

    found: dict[str, None] = {}
    for line in ttir.splitlines():
        match = _RESULT.match(line)
        if not match:
            continue
        result, operation, rest = match.groups()
        rest = rest.split(" loc(")[0]
        operations[result] = (operation, re.findall(r"%[\w.-]+", rest), rest)
        if operation != "tt.addptr":
            continue
        # What a 64-bit product scales is an index, such as a row before it meets its stride: it
        # counts rows, which fit, and was wide before it could grow.
        reached, todo = set(), [(operations[result][1][1], False)]
        while todo:
            value, scaled = todo.pop()
            if (value, scaled) in reached or value not in operations:
                continue
            reached.add((value, scaled))
            operation, inputs, rest = operations[value]
            narrow = re.search(r": (?:tensor<[\dx]*)?i32\b", rest)
            product = operation == "arith.muli" and not any(map(is_fixed, inputs))
            if product and narrow:
                name = re.sub(r"_\d+$", "", value.lstrip("%"))
                found["a product without a name" if name.isdigit() else name] = None
            elif operation != "tt.load" and not (scaled and operation == "arith.extsi"):
                todo += [(one, scaled or product) for one in inputs]
    return tuple(found)
