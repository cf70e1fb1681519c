"""What counts as a kernel: names, constructs, compilation, contents."""

import os

import pytest
import torch

from course import lab
from course.lab.jit_rules import _Worker

X = torch.ones(16)
GOOD = """
@triton.jit
def kernel(x, out, n, scale, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < n, other=0.0)
    tl.store(out + o, b_x * scale, mask=o < n)
"""


def check(module, needs=("load", "store"), name="kernel", **changes):
    args = {"x": X, "out": X, "n": 7, "scale": 0.5} | changes
    return lab.check_jit(getattr(module, name), args=args, constexprs={"BLOCK": 16}, needs=needs)


def body(line: str, before: str = "") -> str:
    """The good kernel with one more line before its store, and text above it."""
    return before + GOOD.replace("    tl.store", f"    {line}\n    tl.store")


def test_a_good_kernel(module_of) -> None:
    cost = check(module_of(GOOD))
    assert (cost.load, cost.store, cost.dot, cost.int32_offsets) == (1, 1, 0, ())


def test_arguments_in_order_or_by_name(module_of) -> None:
    kernel = module_of(GOOD).kernel
    by_order = lab.check_jit(kernel, args=(X, X, 7, 0.5), constexprs={"BLOCK": 16})
    assert by_order == check(module_of(GOOD))


def test_other_jit_functions_and_constants(module_of) -> None:
    source = body(
        "b_x = tl.maximum(twice(b_x), LOW).to(KIND) if BLOCK > 8 and FAST else b_x",
        before="LOW = tl.constexpr(0.5)\nFAST = tl.constexpr(True)\nKIND = tl.float16\n"
        "@triton.jit\ndef once(x):\n    return x\n"
        "@triton.jit\ndef twice(x):\n    return once(x) + once(x)\n",
    )
    assert check(module_of(source)).load == 1


@pytest.mark.parametrize("value", [1, None, torch.ones(3, dtype=torch.bfloat16)])
def test_special_arguments(module_of, value) -> None:
    source = GOOD.replace("scale, BLOCK", "scale, extra, BLOCK")
    assert check(module_of(source), extra=value).store == 1


REFUSED = {
    "b_x = torch.exp(b_x)": "`torch` is not available on a GPU",
    "b_x = earlier(b_x)": "`earlier` is not available",
    "print(b_x)": "`print` is not available",
    "b_x = b_x * PLAIN": "`PLAIN` is not available",
    "b_x = np.exp(b_x)": "`np` is not available",
    "b_x = b_x * getattr(n, 'x')": "`getattr` is not available",
    "import math": "imports something",
    "f = lambda y: y": "uses a lambda",
    "m = o < n and o > 1": "take the truth of a whole tile",
    "m = not o": "take the truth of a whole tile",
    "y = b_x.handle": "reaches into Triton's internals",
    "y = tl.__builtins__": "reaches into Triton's internals",
    "y = tl.core.builtins": "`tl.core` is not part|`tl.core.builtins` is not part",
    "y = tl.softmaxx(b_x)": "`tl.softmaxx` is not part",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_by_reading(module_of, line: str) -> None:
    module = module_of(body(line, before="PLAIN = 3\ndef earlier(x):\n    return x\n"))
    with pytest.raises(lab.KernelError, match=REFUSED[line]) as caught:
        check(module)
    assert line.split(" = ")[0].split("(")[0] in str(caught.value)  # quotes the line


def test_a_helper_is_read_too(module_of) -> None:
    source = body(
        "b_x = helper(b_x)", before="@triton.jit\ndef helper(x):\n    return torch.exp(x)\n"
    )
    with pytest.raises(lab.KernelError, match=r"helper, line 2 .*`torch` is not available"):
        check(module_of(source))


NOT_COMPILED = {
    "b_x = tl.dot(b_x, b_x)": r"line `b_x = tl\.dot",
    "b_x = b_x.to(tl.int64) + n.missing": "line `b_x",
    "b_y = b_x + tl.arange(0, 7)": "power of 2",
    "b_x = b_x + undefined if n > 3 else b_x": "undefined",
}


@pytest.mark.parametrize("line", NOT_COMPILED)
def test_refused_by_the_compiler(module_of, line: str) -> None:
    with pytest.raises(lab.KernelError, match=NOT_COMPILED[line]):
        check(module_of(body(line)))


def test_what_the_interpreter_accepts_may_not_compile(module_of) -> None:
    """A sum over a list comprehension runs in Python."""
    module = module_of(body("b_x = b_x + sum([1, 2])"))
    out = torch.zeros(16)
    with lab.interpreted():
        module.kernel[(1,)](X, out, 7, 1.0, BLOCK=16)
    assert out[:7].tolist() == [4.0] * 7
    with pytest.raises(lab.KernelError, match="`sum` is not available"):
        check(module)


@pytest.mark.parametrize(
    "source, needs, message",
    [
        (GOOD.replace("tl.load(x + o, mask=o < n, other=0.0)", "o"), ["load"], "never reads"),
        (GOOD.replace("b_x * scale", "scale"), ["load"], "never uses"),
        (GOOD.replace("    tl.store(", "    tl.max("), ["store"], "never writes|does not compile"),
        (GOOD, ["load", "dot"], r"tl\.dot, so the tensor cores stay idle"),
        (GOOD, ["reduce"], "never reduces"),
        (GOOD, ["atomic"], "never updates"),
    ],
)
def test_what_a_kernel_lacks(module_of, source, needs, message) -> None:
    with pytest.raises(lab.KernelError, match=message):
        check(module_of(source), needs)


def test_an_empty_stub_compiles_and_reads_nothing(module_of) -> None:
    stub = '@triton.jit\ndef kernel(x, out, n, scale, BLOCK: tl.constexpr):\n    """Scale x."""\n'
    with pytest.raises(lab.KernelError, match="never reads"):
        check(module_of(stub))


def test_changed_parameters_are_named(module_of) -> None:
    with pytest.raises(lab.KernelError, match="keep the stub's parameters"):
        check(module_of(GOOD.replace("scale", "factor")))
    with pytest.raises(lab.KernelError, match="keep the stub's parameters"):
        lab.check_jit(module_of(GOOD).kernel, args=(X, X), constexprs={"BLOCK": 16})


def test_only_plain_jit_functions(module_of) -> None:
    with pytest.raises(lab.KernelError, match=r"kernel must be a function under @triton\.jit"):
        check(module_of(GOOD.replace("@triton.jit\n", "")))


OWN = """
class Mine(triton.JITFunction):
    def __getitem__(self, grid):
        return lambda *args, **sizes: None

    def __call__(self, x):
        return x.to_torch()
"""


def test_a_kind_of_ones_own_is_no_jit_function(module_of) -> None:
    """It could compute in Python at a launch, or where a kernel calls it."""
    with pytest.raises(lab.KernelError, match=r"kernel must be a function under @triton\.jit"):
        check(module_of(OWN + GOOD.replace("@triton.jit", "@Mine")))
    helper = OWN + "\n\n@Mine\ndef helper(x):\n    return x\n\n\n"
    with pytest.raises(lab.KernelError, match="`helper` is not available on a GPU"):
        check(module_of(body("b_x = helper(b_x)", helper)))


def test_the_worker_survives_errors_and_is_replaced_when_it_dies(module_of) -> None:
    module = module_of(GOOD)
    check(module)
    first = _Worker.shared()
    with pytest.raises(lab.KernelError):
        check(module_of(body("b_x = tl.dot(b_x, b_x)")))
    assert _Worker.shared() is first and first.owner == os.getpid()
    first.process.kill()
    first.process.wait()
    assert check(module).load == 1
    assert _Worker.shared() is not first


def test_int32_offsets_are_named(module_of) -> None:
    source = """
@triton.jit
def kernel(x, out, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    wrong = x + row * n + tl.arange(0, BLOCK)
    right = out + row.to(tl.int64) * n + tl.arange(0, BLOCK)
    tl.store(right, tl.load(wrong) * scale)
"""
    assert check(module_of(source)).int32_offsets == ("wrong",)
    inline = source.replace("    wrong = x + row * n + tl.arange(0, BLOCK)\n", "").replace(
        "tl.load(wrong)", "tl.load(x + (row * n + tl.arange(0, BLOCK)))"
    )
    assert check(module_of(inline)).int32_offsets == ("a product without a name",)


def test_int32_offsets_in_the_first_of_two_loops(module_of) -> None:
    """Triton IR names the values of both loops alike."""
    source = """
@triton.jit
def kernel(x, out, n, scale, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for row in range(n):
        wrong = row * n
        tl.store(out + wrong + o, scale)
    for row in range(n):
        right = row.to(tl.int64) * n
        tl.store(out + right + o, tl.load(x + right + o))
"""
    assert check(module_of(source)).int32_offsets == ("wrong",)


def test_an_index_that_was_loaded_is_not_suspicious(module_of) -> None:
    source = """
@triton.jit
def kernel(x, out, n, scale, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    index = tl.load(x + o).to(tl.int32)
    tl.store(out + index + o * 3, o * scale)
"""
    assert check(module_of(source)).int32_offsets == ()
