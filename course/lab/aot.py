"""Compile launches ahead of time for GPUs that are not there, and read what came out.

Triton asks a driver which GPU it is running on; here a stub answers. Launchers stay as they are:
inside the recording each `kernel[grid](...)` is compiled instead of run, from meta tensors if you
like, so that production shapes need no memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from course.lab.errors import KernelError
from course.lab.launch import pretending

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
SHARED_PER_SM = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
WARPS_PER_SM, REGISTERS_PER_SM, RESERVED_SHARED = 64, 65_536, 1024
WAVES_PER_SIMD = 8  # gfx942
_TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_\w+)")
_NVIDIA_LOAD = re.compile(r"\bld\.global(?:\.\w+(?:::\w+)?)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_NVIDIA_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?, 0x([0-9a-f]+)")
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}

# Triton 3.9 fuses by default and warns, 3.10 will not: say it, so that the code stays the same.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: per thread (vector registers on AMD).
        spills: bytes of local memory a thread (NVIDIA) or spilled registers (AMD).
        shared: bytes of shared memory a block.
        occupancy: percent of the warps that a multiprocessor can hold, limited by both.
        tensor_core: the tensor-core instructions used.
        wide_loads: percent of the bytes loaded in loops that 16-byte loads carry (of all bytes,
            if the kernel has no loop).
    """

    registers: int
    spills: int
    shared: int
    occupancy: int
    tensor_core: tuple[str, ...]
    wide_loads: int


class _StubDriver:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # Triton caches compiled kernels per device

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_launches(launch: Callable[[], Any], target: str) -> list[Any]:
    """Compile every kernel that `launch()` starts, down to the binary of `target`.

    Args:
        launch: calls a launcher; its tensors may be on the CPU or on the meta device.
        target: a key of `TARGETS`; the launcher's choice of configuration sees it too.

    Returns:
        Triton's compiled kernels, in order, with `.name`, `.metadata` and `.asm`.

    Raises:
        KernelError: a kernel does not compile, or to 64-bit floats.
    """
    compiled: list[Any] = []
    original = KernelInterface.__getitem__

    def compiling(kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_one(*args: Any, **kwargs: Any) -> None:
            try:
                compiled.append(kernel.warmup(*args, grid=(1,), **kwargs))
            except Exception as error:
                raise KernelError(f"{kernel.__name__} on {target}: {error}") from error
            if re.search(r"\bf64\b|xf64>", compiled[-1].asm["ttir"]):
                raise KernelError(
                    f"{kernel.__name__} on {target}: computes in float64, as a Python float "
                    "below 2**-126 makes it"
                )

        return compile_one

    with _driver(TARGETS[target]), pretending(target):
        KernelInterface.__getitem__ = compiling
        try:
            launch()
        finally:
            KernelInterface.__getitem__ = original
    return compiled


@contextmanager
def _driver(target: GPUTarget) -> Iterator[None]:
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_StubDriver(target))
    try:
        yield
    finally:
        driver._active = before


def resources(kernel: Any) -> Resources:
    """Read a compiled kernel's binary or assembly."""
    return _amd(kernel) if kernel.metadata.target.backend == "hip" else _nvidia(kernel)


def _nvidia(kernel: Any) -> Resources:
    ptx, name = kernel.asm["ptx"], f"sm_{kernel.metadata.target.arch}"
    usage = _cuobjdump(kernel.asm["cubin"])
    registers, spills = int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    per_warp = -(-registers * 32 // 256) * 256  # registers are handed out in units of 256 a warp
    blocks = min(
        WARPS_PER_SM // warps,
        REGISTERS_PER_SM // per_warp // warps,
        SHARED_PER_SM[name] // (shared + RESERVED_SHARED),
    )
    streamed = _loops(ptx)
    widths = [int(n or 1) * int(bits) // 8 for n, bits in _NVIDIA_LOAD.findall(streamed)]
    widths += [int(size, 16) for size in _NVIDIA_COPY.findall(streamed)]
    return Resources(
        registers,
        spills,
        shared,
        round(100 * blocks * warps / WARPS_PER_SM),
        tuple(sorted(set(_TENSOR_CORE.findall(ptx)))),
        _wide(widths),
    )


def _amd(kernel: Any) -> Resources:
    assembly = kernel.asm["amdgcn"]

    def number(pattern: str) -> int:
        return int(re.findall(pattern, assembly)[-1])

    widths = [_AMD_BYTES.get(kind, 2) for kind in _AMD_LOAD.findall(_loops(assembly))]
    return Resources(
        number(r"\.vgpr_count:\s*(\d+)"),
        number(r"\.vgpr_spill_count:\s*(\d+)"),
        kernel.metadata.shared,
        round(100 * number(r"; Occupancy: (\d+)") / WAVES_PER_SIMD),
        tuple(sorted(set(_TENSOR_CORE.findall(assembly)))),
        _wide(widths),
    )


def _loops(assembly: str) -> str:
    """The lines inside loops, from a label to a jump back to it; all lines if none of them loads.

    A jump back alone is no loop: a kernel for AMD may have one behind its end.
    """
    lines = assembly.splitlines()
    labels: dict[str, int] = {}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        if label := re.match(r"(\$?[.\w]+):", line):
            labels[label[1]] = number
        elif jump := re.search(r"\b(?:bra(?:\.uni)?|s_c?branch\w*)\s+(\$?[.\w]+)", line):
            inside.update(range(labels.get(jump[1], number + 1), number + 1))
    looped = "\n".join(lines[number] for number in sorted(inside))
    loads = (_NVIDIA_LOAD, _NVIDIA_COPY, _AMD_LOAD)
    return looped if any(load.search(looped) for load in loads) else assembly


def _wide(widths: list[int]) -> int:
    return int(100 * sum(w for w in widths if w >= 16) / max(sum(widths), 1))


def _cuobjdump(cubin: bytes) -> dict[str, str]:
    """Resource usage as the CUDA tool that comes with Triton reports it: REG, STACK, LOCAL."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", output))
