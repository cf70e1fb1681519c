"""Compiled resources: planted spills and narrow loads are seen; tables compare and print."""

import functools
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from course.errors import CourseError
from course.lab import KernelError, table
from course.lab.aot import TARGETS, _loops, compile_launches, resources

WIDE = torch.empty(1 << 20, device="meta", dtype=torch.float16)


@triton.jit
def _sum_rows(x, out, n, BLOCK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        acc += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(out, tl.sum(acc, 0))


@triton.jit
def _matmul(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


def launch_sum(x=WIDE, n=1 << 20, block=2048, **options) -> None:
    _sum_rows[(1,)](x, torch.empty(1, device="meta"), n, BLOCK=block, **options)


def launch_matmul(n: int, **options) -> None:
    a = torch.empty(n, n, device="meta", dtype=torch.float16)
    _matmul[(1,)](a, a, torch.empty(n, n, device="meta"), N=n, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_wide_loads(target: str) -> None:
    (kernel,) = compile_launches(launch_sum, target)
    found = resources(kernel)
    assert (found.spills, found.wide_loads, found.tensor_core) == (0, 100, ())
    assert 0 < found.registers <= 128 and found.occupancy >= 50


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_misaligned_pointer_loads_narrowly(target: str) -> None:
    odd = torch.empty(1 << 12, dtype=torch.float16)[1:]
    (kernel,) = compile_launches(functools.partial(launch_sum, odd), target)
    assert resources(kernel).wide_loads == 0


TENSOR_CORE = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma_f32_32x32x8_f16",
}


@pytest.mark.parametrize("target", TARGETS)
def test_tensor_cores(target: str) -> None:
    (kernel,) = compile_launches(functools.partial(launch_matmul, 64), target)
    assert resources(kernel).tensor_core == (TENSOR_CORE[target],)


@pytest.mark.parametrize("target, limit", [("sm_80", "maxnreg"), ("gfx942", "waves_per_eu")])
def test_spills(target: str, limit: str) -> None:
    """64 registers for NVIDIA; eight waves share AMD's 512."""
    starved = {limit: 64 if limit == "maxnreg" else 8}
    launch = functools.partial(launch_matmul, 64, num_warps=1, **starved)
    (kernel,) = compile_launches(launch, target)
    assert resources(kernel).spills > 0


def test_what_does_not_compile_is_named() -> None:
    with pytest.raises(KernelError, match="_sum_rows on sm_90"):
        compile_launches(functools.partial(launch_sum, block=1000), "sm_90")


@triton.jit
def _at_least(x, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tl.maximum(tl.load(x + o), 1e-38))


def test_double_precision_by_accident_is_refused() -> None:
    """The compiler takes a constant that float32 holds as a subnormal only for a float64."""
    x = torch.empty(64, device="meta")
    with pytest.raises(KernelError, match="_at_least on sm_90: computes in float64"):
        compile_launches(lambda: _at_least[(1,)](x, x, BLOCK=64), "sm_90")


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n), mask=o < n)


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_loop_all_loads_count(target: str) -> None:
    (kernel,) = compile_launches(lambda: _copy[(1,)](WIDE, WIDE, 1 << 20, BLOCK=2048), target)
    assert resources(kernel).wide_loads == 100


def test_a_jump_back_without_loads_is_no_loop() -> None:
    load = "  global_load_dwordx4 v[0:3], v[4:5], off"
    idle = f"{load}\n.L1:\n  s_nop 0\n  s_branch .L1"
    assert _loops(idle) == idle
    loop = f".L1:\n{load}\n  s_branch .L1"
    assert _loops(f"{load}\n{loop}") == loop


ROW = {
    "kernel": "_k",
    "launch": "small",
    "target": "sm_80",
    "warps": 4,
    "stages": 2,
    "registers": 40,
    "spills": 0,
    "shared": 1024,
    "occupancy": 50,
    "tensor_core": ("mma.sync",),
    "wide_loads": 100,
}


def test_complaints() -> None:
    assert table.complaints([ROW], ["_k"]) == []
    bad = ROW | {"spills": 8, "shared": 1 << 20, "wide_loads": 89}
    assert len(table.complaints([bad], ["_k"])) == 3
    assert len(table.complaints([bad], [])) == 2


def test_compare() -> None:
    assert table.compare([ROW | {"tensor_core": ["mma.sync"]}], [ROW]) == []
    assert table.compare([ROW], [ROW | {"registers": 41}])[0].endswith(
        "registers 40 to 41, tensor_core ('mma.sync',) to ['mma.sync']"
    )
    assert table.compare([], [ROW]) == ["_k, small, sm_80: not in the table"]


def test_save_load_print(tmp_path: Path, capsys) -> None:
    source = tmp_path / "family.py"
    source.write_text("x = 1\n")
    path = table.save("family", source, [ROW], tmp_path)
    key, rows = table.load("family", tmp_path)
    assert key == table.key(source) and table.compare(rows, [ROW]) == []
    assert path.read_text().count("\n") == 3
    source.write_text("x = 2\n")
    assert key != table.key(source)
    table.print_tables(tmp_path)
    printed = capsys.readouterr().out
    assert "family: small" in printed and "mma.sync" in printed


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"python -m kernels\.resources"):
        table.load("family", tmp_path)
    with pytest.raises(CourseError, match=r"python -m kernels\.resources"):
        table.print_tables(tmp_path)
