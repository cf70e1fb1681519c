"""The rules of a kernel exercise: an answer that only the interpreter accepts is no kernel.

The interpreter is Python, so a body that calls torch, an earlier answer or NumPy would pass
there. `check_jit` reads the body's names, then compiles it in a clean process.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction, mangle_type

from course.lab.cost import Cost, cost
from course.lab.errors import KernelError

PYTHON_NAMES = {"range", "min", "max", "float", "int", "None", "True", "False"}
LANGUAGE_MODULES = {"math"}
COMPILE_SECONDS = 120
_FORBIDDEN = {
    ast.Import: "imports something",
    ast.ImportFrom: "imports something",
    ast.Lambda: "uses a lambda",
    ast.FunctionDef: "defines another function",
    ast.ClassDef: "defines a class",
    ast.Try: "uses try",
    ast.With: "uses with",
    ast.Global: "uses global",
    ast.Nonlocal: "uses nonlocal",
    ast.Break: "uses break",
    ast.ListComp: "uses a list comprehension",
    ast.SetComp: "uses a comprehension",
    ast.DictComp: "uses a comprehension",
    ast.GeneratorExp: "uses a generator",
}
_MISSING = {
    "load": "it never reads memory with tl.load (or never uses what it reads)",
    "store": "it never writes a result with tl.store",
    "dot": "it never multiplies tiles with tl.dot, so the tensor cores stay idle",
    "atomic": "it never updates memory with an atomic",
    "reduce": "it never reduces a tile (tl.sum, tl.max)",
}


def check_jit(
    kernel: Any,
    *,
    args: Sequence[Any] | Mapping[str, Any],
    constexprs: Mapping[str, Any],
    needs: Sequence[str] = ("load", "store"),
) -> Cost:
    """Check that `kernel` is real Triton; call it before running the kernel.

    Args:
        kernel: the answer, a function under `@triton.jit`.
        args: the run-time arguments of a launch, by name or in order: tensors (only their dtype
            counts), ints, floats, None.
        constexprs: the `tl.constexpr` arguments by name.
        needs: what the compiled kernel must contain: "load", "store", "dot", "atomic", "reduce".

    Returns:
        What it contains once compiled, see `Cost`.

    Raises:
        KernelError: the body names something that a kernel may not use, does not compile, or
            lacks one of `needs`.
    """
    if type(kernel) is not JITFunction:  # a subclass could run what it likes at a launch
        what = getattr(kernel, "__name__", repr(kernel))
        raise KernelError(f"{what} must be a function under @triton.jit, with nothing around it")
    functions = list(_reachable(kernel))
    for function in functions:
        lint(function)
    found = cost(_ttir(kernel, functions, args, constexprs))
    for need in needs:
        if not getattr(found, need):
            raise KernelError(f"{kernel.__name__} compiles, but {_MISSING[need]}")
    return found


def lint(kernel: JITFunction) -> None:
    """Raise KernelError if the body uses a name or a construct that a kernel may not use."""
    scope, name = kernel.get_capture_scope(), kernel.__name__
    lines = kernel.src.splitlines()
    definition = ast.parse(kernel.src).body[0]
    assert isinstance(definition, ast.FunctionDef)
    stored = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and _is_stored(n)}
    local = stored | {p.name for p in kernel.params}
    constant = {p.name for p in kernel.params if p.is_constexpr} - stored

    def refuse(node: ast.AST, why: str) -> None:
        number = getattr(node, "lineno", 1)
        raise KernelError(f"{name}, line {number} `{lines[number - 1].strip()}`: {why}")

    def is_constant(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare) and all(
            isinstance(op, ast.Is | ast.IsNot) for op in node.ops
        ):
            return True
        loaded = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        return all(n in constant or _is_constexpr(scope.get(n)) for n in loaded)

    for statement in definition.body:
        for node in ast.walk(statement):
            if type(node) in _FORBIDDEN:
                refuse(node, f"{_FORBIDDEN[type(node)]}, which Triton cannot compile")
            is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
            if (isinstance(node, ast.BoolOp) or is_not) and not is_constant(node):
                why = "and, or, not take the truth of a whole tile; use &, |, ~ on tensors"
                refuse(node, why)
            if isinstance(node, ast.Attribute):
                if node.attr.startswith("_") or node.attr in ("handle", "type"):
                    refuse(node, f"reaches into Triton's internals with .{node.attr}")
                if _root(node) == "tl" and not _is_language(node):
                    refuse(node, f"`{ast.unparse(node)}` is not part of the Triton language")
            if isinstance(node, ast.Name) and not _is_stored(node) and node.id not in local:
                known = scope.get(node.id)
                if node.id == "tl" and known is tl:
                    continue
                if node.id in PYTHON_NAMES and node.id not in scope:
                    continue
                if type(known) is JITFunction or _is_constexpr(known):
                    continue
                refuse(
                    node,
                    f"`{node.id}` is not available on a GPU: a kernel may name only tl, its "
                    "parameters, its own variables, other jit functions and tl.constexpr globals",
                )


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_constexpr(value: Any) -> bool:
    return type(value) is tl.constexpr or isinstance(value, tl.dtype)


def _root(node: ast.Attribute) -> str:
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _is_language(node: ast.Attribute) -> bool:
    """Whether `tl.x` or `tl.math.x` is a function, type or constant of the language."""
    owner: Any = tl
    parts = ast.unparse(node).split(".")[1:]
    for position, part in enumerate(parts):
        owner = getattr(owner, part, None)
        is_module = type(owner) is type(tl)
        if owner is None or (is_module and (position or part not in LANGUAGE_MODULES)):
            return False
    return True


def _reachable(kernel: JITFunction) -> Iterator[JITFunction]:
    """`kernel` and the jit functions that it calls, callees first; the language's own left out."""
    seen: set[int] = set()

    def visit(function: JITFunction) -> Iterator[JITFunction]:
        if id(function) in seen or function.__module__.startswith("triton."):
            return
        seen.add(id(function))
        for value in _globals_used(function).values():
            if isinstance(value, JITFunction):
                yield from visit(value)
        yield function

    yield from visit(kernel)


def _globals_used(function: JITFunction) -> dict[str, Any]:
    scope = function.get_capture_scope()
    names = (n.id for n in ast.walk(ast.parse(function.src)) if isinstance(n, ast.Name))
    return {name: scope[name] for name in names if name in scope}


def _ttir(
    kernel: JITFunction,
    functions: Sequence[JITFunction],
    args: Sequence[Any] | Mapping[str, Any],
    constexprs: Mapping[str, Any],
) -> str:
    runtime = [p.name for p in kernel.params if not p.is_constexpr]
    static = [p.name for p in kernel.params if p.is_constexpr]
    if not isinstance(args, Mapping):
        if len(args) != len(runtime):
            raise KernelError(
                f"{kernel.__name__} takes {len(runtime)} arguments before its constants, the "
                f"launch passes {len(args)}: keep the stub's parameters"
            )
        args = dict(zip(runtime, args, strict=True))
    if set(args) != set(runtime) or set(constexprs) != set(static):
        raise KernelError(
            f"{kernel.__name__} takes {', '.join([*runtime, *static])}; the launch passes "
            f"{', '.join([*args, *constexprs])}: keep the stub's parameters"
        )
    constants = {name: _json(value) for name, value in constexprs.items()}
    signature = {}
    for name in (p.name for p in kernel.params):
        value = args.get(name)
        if name in static or value is None or (type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
        else:
            signature[name] = mangle_type(value)
    fixed = {
        name: _json(value.value if isinstance(value, tl.constexpr) else value)
        for function in functions
        for name, value in _globals_used(function).items()
        if _is_constexpr(value)
    }
    header = ["import triton", "import triton.language as tl", ""]
    source = "\n".join(header) + "\n".join(f"@triton.jit\n{f.src}" for f in functions)
    request = {
        "source": source,
        "name": kernel.fn.__name__,
        "signature": signature,
        "constexprs": constants,
        "globals": fixed,
    }
    reply = _Worker.shared().ask(request)
    if "error" in reply:
        where = f", line `{reply['line']}`" if reply["line"] else ""
        raise KernelError(f"{kernel.__name__} does not compile{where}: {reply['error'].strip()}")
    return reply["ttir"]


def _json(value: Any) -> Any:
    return {"dtype": value.name} if isinstance(value, tl.dtype) else value


class _Worker:
    """A process that holds Triton and nothing of ours; started once, restarted if it hangs."""

    _shared: _Worker | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.replies: dict[str, str] = {}  # the same kernel is asked about under each seed
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_INTERPRET": "0"},
        )

    @classmethod
    def shared(cls) -> _Worker:
        worker = cls._shared
        if worker is None or worker.owner != os.getpid() or worker.process.poll() is not None:
            worker = cls._shared = cls()
            atexit.register(worker.process.kill)
        return worker

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = json.dumps(request)
        if asked in self.replies:
            return json.loads(self.replies[asked])
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        stdin.write(asked + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], COMPILE_SECONDS)
        line = stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            self.process.wait()
            raise KernelError(f"{request['name']}: the compiler crashed or took too long")
        self.replies[asked] = line
        return json.loads(line)
