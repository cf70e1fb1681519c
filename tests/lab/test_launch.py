"""Argument checks of launchers, and that they need nothing but torch."""

import subprocess
import sys

import pytest
import torch

from course.lab.launch import (
    arch,
    cdiv,
    check_int,
    check_splits,
    check_tensor,
    check_values,
    next_power_of_2,
    pretending,
    processors,
    query_group,
    warps,
)

CPU = torch.device("cpu")


def test_rounding() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 16, 17)] == [1, 1, 2, 4, 16, 32]


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.ones(3), r"^x: shape \[3\] must be \[B, 4\]"),
        (torch.ones(3, 5), r"^x: shape \[3, 5\] must be \[B, 4\]"),
        (torch.ones(3, 4).double(), r"^x: dtype torch\.float64 must be torch\.float32"),
        (torch.ones(3, 4, device="meta"), r"^x: device meta must be cpu"),
        (torch.ones(3, 8)[:, ::2], r"^x: last stride 2 must be 1"),
        (torch.ones(4, 3).T, r"^x: last stride 3 must be 1"),
    ],
)
def test_what_does_not_fit_is_named(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor("x", tensor, ("B", 4), (torch.float32,), CPU)


def test_what_fits() -> None:
    for tensor in (torch.ones(3, 4), torch.ones(9, 8)[::3, :4], torch.ones(0, 4)):
        check_tensor("x", tensor, ("B", 4), (torch.float16, torch.float32), CPU)
    check_tensor("x", torch.ones(2, 2)[:, :1], ("B", 1), (torch.float32,), CPU)


def test_values_are_checked_where_it_costs_no_wait() -> None:
    ids = torch.tensor([[0, 4], [5, 9]], dtype=torch.int32)
    check_values("ids", ids, 0, 9)
    check_values("ids", ids[:0], 5, 5)
    check_values("ids", ids.to("meta"), 5, 5)  # has no values
    with pytest.raises(ValueError, match=r"^ids: 9 at \[1, 1\] must be 0 to 8$"):
        check_values("ids", ids, 0, 8)
    with pytest.raises(ValueError, match=r"^ids: 0 at \[0, 0\] must be 1 to 9$"):
        check_values("ids", ids, 1, 9)
    with pytest.raises(ValueError, match=r"^p: nan at \[1\] must be 0 to 1$"):
        check_values("p", torch.tensor([0.5, torch.nan]), 0, 1)


def test_heads_form_equal_groups() -> None:
    assert [query_group("k", 12, n, 12) for n in (1, 3, 12)] == [12, 4, 1]
    assert query_group("k", 0, 2, 8) == 0
    for heads, kv_heads, largest in ((12, 5, 12), (12, 0, 12), (12, 2, 5), (2, 4, 8)):
        with pytest.raises(ValueError, match=rf"^k: {kv_heads} KV heads .* {heads} .* {largest}$"):
            query_group("k", heads, kv_heads, largest)


def test_splits() -> None:
    for n_splits in (None, 1, 8):
        check_splits(n_splits, 8)
    for n_splits in (0, 9, 2.0, "2"):
        with pytest.raises(ValueError, match=rf"^n_splits: {n_splits!r} must be an int, 1 to 8$"):
            check_splits(n_splits, 8)


def test_whole_numbers() -> None:
    for value in (-3, 4, 2**70):
        check_int("step", value, -3)
    for value in (-4, 1.0, float("inf"), None):
        with pytest.raises(ValueError, match=rf"^step: {value!r} must be an int, -3 to inf$"):
            check_int("step", value, -3)


class OnGpu(torch.Tensor):
    """A tensor that says that it lives on a GPU, where there is none."""

    device = torch.device("cuda")
    is_meta = False


def test_on_a_gpu_values_are_checked_in_debug_mode_alone(monkeypatch) -> None:
    ids = torch.tensor([7]).as_subclass(OnGpu)
    monkeypatch.delenv("COURSE_KERNEL_DEBUG", raising=False)
    check_values("ids", ids, 0, 1)
    monkeypatch.setenv("COURSE_KERNEL_DEBUG", "1")
    with pytest.raises(ValueError, match=r"^ids: 7 at"):
        check_values("ids", ids, 0, 1)


def test_warps_load_16_bytes_a_thread() -> None:
    assert [warps("sm_90", n) for n in (0, 512, 1024, 8192, 16_384)] == [1, 1, 2, 16, 16]
    assert [warps("gfx942", n) for n in (512, 1024, 2048, 16_384)] == [1, 1, 2, 16]


def test_targets() -> None:
    assert (arch(CPU), processors(CPU)) == ("cpu", 1)
    with pretending("sm_90"), pretending("gfx942"):
        assert arch(CPU) == "gfx942"
    assert arch(CPU) == "cpu"


def test_a_launcher_needs_only_torch_and_triton() -> None:
    """A bare GPU machine has no typer, rich, nbval, notebook tools, nor the interpreter's needs."""
    program = """
import sys
for name in ("typer", "rich", "nbval", "nbformat", "jupytext", "yaml", "matplotlib", "IPython"):
    sys.modules[name] = None
import kernels.cases
kernels.cases.families()
loaded = [name for name in sys.modules if name.startswith("course.lab.")]
assert loaded == ["course.lab.launch"], loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_triton_the_lab_says_what_to_do() -> None:
    program = """
import sys
sys.modules["triton"] = None
import course
from course import lab
assert lab.poisoned((2,), __import__("torch").float32).isnan().all()
try:
    lab.interpreted
except course.errors.CourseError as error:
    assert "pip install triton" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run(
        [sys.executable, "-c", program.replace("import course\n", "import course.errors\n")],
        check=True,
    )


def test_unknown_instruments() -> None:
    from course import lab

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lab.nothing  # noqa: B018


def test_importing_the_course_does_not_import_triton() -> None:
    program = "import sys, course, course.lab; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
