"""Find forbidden library names in an answer's source."""

import ast
import inspect
import linecache
from typing import Any


def cell_of(answer: Any) -> str:
    """The source of the whole cell that defined `answer` (a function, class or jit function).

    Raises ValueError if the source is not at hand.
    """
    function = getattr(answer, "fn", answer)  # a jit function keeps the Python one in .fn
    if inspect.isclass(function):
        methods = [m for m in vars(function).values() if inspect.isfunction(m)]
        if not methods:
            return ""
        function = methods[0]
    code = inspect.unwrap(function).__code__
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise ValueError(f"the source of {answer!r} is not available")
    return "".join(lines)


def scan(source: str, names: tuple[str, ...]) -> str:
    """A sentence about the first forbidden name in `source`, or an empty string.

    `torch.cat` forbids any attribute `.cat`, importing it (alone or by `*`) and
    `getattr(x, "cat")`; a local variable called `cat` stays allowed. A name without a dot is
    forbidden everywhere.
    """
    for node in ast.walk(ast.parse(source)):
        for used in _names(node):
            for name in names:
                if _is(used, name):
                    line = getattr(node, "lineno", 1)
                    return (
                        f"line {line} uses `{used}`, which does this exercise for you: build it "
                        f"from plain tensor operations instead"
                    )
    return ""


def _is(used: str, name: str) -> bool:
    if used == name or used.startswith(name + "."):
        return True
    if used.endswith(".*"):
        return name.startswith(used[:-1])
    return "." in used and used.rsplit(".", 1)[1] == name.rsplit(".", 1)[-1]


def _names(node: ast.AST) -> list[str]:
    """The dotted names that one node brings in or uses."""
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases):
            return [f"{module}.{alias.name}" for alias in aliases]
        case ast.Attribute():
            return [ast.unparse(node)]
        case ast.Name(id=name):
            return [name]
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [f"getattr.{name}"]
    return []
