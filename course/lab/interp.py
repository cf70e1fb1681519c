"""Run `@triton.jit` kernels on CPU tensors, in the same process that compiles them.

Triton can interpret a kernel with NumPy, but only when an environment variable is set before
Triton is imported, and then it can no longer compile. Here launches are redirected while a
`with interpreted():` block is open. Four things are closer to the compiled kernel than in
Triton's own interpreter: bfloat16 and float8 round as on a GPU (`course.lab.exact`), a float
argument is a float32 scalar, an integer argument equal to 1 is a compile-time constant, and a
masked load without `other` gives NaN (or -1) where the mask is false, not 0.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import JITFunction, KernelInterface

from course.lab.errors import KernelError
from course.lab.exact import ExactBuilder, Handle, convert_float

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}
GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
Program = tuple[int, ...]


class Observer(Protocol):
    """Sees the memory accesses and products of every interpreted launch."""

    def start(self, name: str, arguments: dict[str, Any]) -> None: ...
    def access(self, kind: str, program: Program, addresses: np.ndarray, size: int) -> None: ...
    def dot(self, flops: int) -> None: ...


class _Builder(ExactBuilder):
    """Reports to the observers what a program does before doing it."""

    def __init__(self) -> None:
        super().__init__()
        self.options: Any
        # debug: arithmetic that overflows its integer type fails instead of wrapping around.
        self.options = dataclasses.replace(self.options, debug=True)
        self.observers: list[Observer] = []
        self.grid_idx: Program = (0, 0, 0)

    def _report(self, kind: str, pointers: Handle, mask: Handle) -> None:
        if self.observers:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            live = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            for observer in self.observers:
                observer.access(kind, self.grid_idx, live, size)

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle | None, *rest: Any
    ) -> Handle:
        self._report("load", ptrs, mask)
        if other is None and not mask.data.all():
            other = self._undefined(ptrs)
        return super().create_masked_load(ptrs, mask, other, *rest)

    @staticmethod
    def _undefined(ptrs: Handle) -> Handle:
        """What lanes without mask and `other` get: bits all ones, since a GPU promises nothing."""
        dtype = ptrs.get_element_ty()
        kind = triton_interpreter._get_np_dtype(dtype)
        raw = np.full((*ptrs.data.shape, kind.itemsize), 0xFF, np.uint8)
        return Handle(raw.view(kind)[..., 0], dtype)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *rest: Any) -> Any:
        self._report("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Handle, val: Handle, mask: Handle, *rest: Any) -> Any:
        self._report("atomic", ptr, mask)
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Handle, *rest: Any) -> Handle:
        self._report("atomic", ptr, Handle(np.ones(ptr.data.shape, bool), tl.int1))
        return super().create_atomic_cas(ptr, *rest)

    def create_dot(self, a: Handle, b: Handle, d: Handle, *rest: Any) -> Handle:
        for observer in self.observers:
            observer.dot(2 * a.data.size * b.data.shape[-1])
        return super().create_dot(a, b, d, *rest)


class _Semantic(TritonSemantic):
    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Callable) -> None:
        """Refuse a result outside its integer type: Triton's own rule, in one step of NumPy."""
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64:
            return
        apply = getattr(np, _NUMPY_NAMES.get(binary_op.__name__, binary_op.__name__))
        exact = apply(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        if exact.size and not (low <= exact.min() and exact.max() <= high):
            raise OverflowError(
                f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
            )


_NUMPY_NAMES = {"sub": "subtract", "mul": "multiply"}
BUILDER = _Builder()
_SEMANTIC = _Semantic(BUILDER)
_np_dtypes: dict[str, np.dtype] = {}  # Triton's lookup builds its table anew for each operation
_slow_np_dtype = triton_interpreter._get_np_dtype
_TOUCHED = (
    *(tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.condition),
    *(tl.core.tensor_descriptor_base, JITFunction, triton_interpreter),
)
_rewritten: weakref.WeakKeyDictionary[Callable, types.CodeType] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within the block, `kernel[grid](...)` on CPU tensors runs in the interpreter.

    A launch that gets a CUDA tensor goes to the GPU as always. Raises `KernelError` when a
    kernel fails, with the program, the line and the reason. Blocks may be nested.
    """
    compiled = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if any(tensor.is_cuda for tensor in tensors):
                compiled(kernel, grid)(*args, **kwargs)
            else:
                interpret(kernel, grid, *args, **kwargs)

        return launch

    KernelInterface.__getitem__ = launcher
    try:
        yield
    finally:
        KernelInterface.__getitem__ = compiled


def interpret(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Run one launch on CPU tensors, program by program in order of the grid."""
    if type(kernel) is not JITFunction:
        raise KernelError(f"{kernel!r} is not a function under @triton.jit alone")
    name = kernel.__name__
    given = {key: value for key, value in kwargs.items() if key not in LAUNCH_OPTIONS}
    try:
        bound = inspect.signature(kernel.fn).bind(*args, **given)
    except TypeError as error:
        raise KernelError(f"{name}: {error}") from None
    bound.apply_defaults()
    values = {p.name: _convert(p, bound.arguments[p.name]) for p in kernel.params}
    shape = _grid(name, grid(dict(bound.arguments)) if callable(grid) else grid)
    for observer in BUILDER.observers:
        observer.start(name, dict(bound.arguments))
    with _interpreting_language(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of a row that is all NaN
        BUILDER.set_grid_dim(*shape)
        body = _python(kernel)
        for program in itertools.product(*map(range, shape)):
            BUILDER.grid_idx = program
            try:
                body(**values)
            except Exception as error:
                raise KernelError(_explain(kernel, program, error)) from error


def _grid(name: str, grid: tuple[int, ...]) -> Program:
    shape = (*grid, 1, 1)[:3]
    for axis, (size, limit) in enumerate(zip(shape, GRID_LIMITS, strict=True)):
        if not 0 <= size <= limit:
            raise KernelError(f"{name}: grid axis {axis} is {size:,}; a GPU takes 0 to {limit:,}")
    return shape


def _convert(parameter: Any, value: Any) -> Any:
    """What a compiled kernel would see for this argument."""
    if parameter.is_constexpr or value is None:
        return value
    if isinstance(value, float):
        return tl.tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)
    if type(value) is int and value == 1 and not parameter.do_not_specialize:
        return tl.constexpr(1)
    return triton_interpreter._implicit_cvt(value)


def _python(kernel: JITFunction) -> Callable:
    """The kernel as a Python function over interpreter tensors, in a copy of its namespace."""
    if kernel.fn not in _rewritten:
        placed = "\n" * (_first_line(kernel) - 1) + kernel.src  # errors name lines of the file
        tree = triton_interpreter.FunctionRewriter.ast_transformer.visit(ast.parse(placed))
        ast.fix_missing_locations(tree)
        _rewritten[kernel.fn] = compile(tree, kernel.fn.__code__.co_filename, "exec")
    namespace = dict(kernel.get_capture_scope())
    for helper in ("interpreter_semantic", "_InterpreterComparison"):
        if hasattr(triton_interpreter, helper):
            namespace[helper] = getattr(triton_interpreter, helper)
    exec(_rewritten[kernel.fn], namespace)
    return namespace[kernel.fn.__name__]


@contextlib.contextmanager
def _interpreting_language() -> Iterator[None]:
    """Make `triton.language` act on NumPy for the length of one launch, and undo all of it.

    Triton patches its language once per function call; once per launch is enough, and what it
    sets is always the same.
    """
    patch, before = _language_patch(), [(owner, dict(vars(owner))) for owner in _TOUCHED]
    for owner, name, value in patch:
        setattr(owner, name, value)
    bodies: dict[Callable, Callable] = {}  # functions called by the kernel, tl.sum among them

    def call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in bodies:
            bodies[function.fn] = _python(function)
        return bodies[function.fn](*args, **kwargs)

    JITFunction.__call__ = call
    try:
        yield
    finally:
        _restore(before)


def _np_dtype(dtype: Any) -> np.dtype:
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.uint64)
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _slow_np_dtype(scalar)
    return _np_dtypes[scalar.name]


@functools.cache
def _language_patch() -> list[tuple[Any, str, Any]]:
    """What Triton sets in its language to run it on NumPy: (owner, name, value)."""
    before = [(owner, dict(vars(owner))) for owner in _TOUCHED]
    triton_interpreter.interpreter_builder = BUILDER
    triton_interpreter.interpreter_semantic = _SEMANTIC
    triton_interpreter._convert_float = convert_float
    triton_interpreter._get_np_dtype = _np_dtype
    triton_interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # 3.6's fails on NumPy 2.4
    patch = [
        (owner, name, value)
        for owner, old in before
        for name, value in vars(owner).items()
        if old.get(name) is not value
    ]
    _restore(before)
    return patch


def _restore(before: list[tuple[Any, dict[str, Any]]]) -> None:
    for owner, attributes in before:
        for name in [name for name in vars(owner) if name not in attributes]:
            delattr(owner, name)
        for name, value in attributes.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def _first_line(kernel: JITFunction) -> int:
    """The line of `def` in the file; decorators stand above it."""
    starts = (line.lstrip().startswith("def ") for line in kernel.raw_src)
    return kernel.starting_line_number + list(starts).index(True)


def _explain(kernel: JITFunction, program: Program, error: Exception) -> str:
    where, traceback = "", error.__traceback__
    lines, first = kernel.src.splitlines(), _first_line(kernel)
    file = kernel.fn.__code__.co_filename
    while traceback:
        index = traceback.tb_lineno - first
        if traceback.tb_frame.f_code.co_filename == file and 0 <= index < len(lines):
            where = f", line {index + 1} of the function `{lines[index].strip()}`"
        traceback = traceback.tb_next
    reason = str(error) or type(error).__name__
    if "overflow detected" in reason:
        reason += "; make one factor 64 bits wide with .to(tl.int64) before multiplying"
    return f"{kernel.__name__}, program {program}{where}: {reason}"
