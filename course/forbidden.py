"""Find forbidden library names in an answer's source."""

import ast
import functools
import inspect
import linecache
from typing import Any


def cell_of(answer: Any) -> str:
    """The source of the whole cell that defined `answer` (a function, class or jit function).

    Raises ValueError if the source is not at hand.
    """
    function = getattr(answer, "fn", answer)  # a jit function keeps the Python one in .fn
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function)  # an object that can be called
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
    `getattr(x, "cat")`; a local variable called `cat` and an attribute that the answer sets itself,
    `self.cat`, stay allowed. A name without a dot is forbidden everywhere, but a plain import of
    it is no use yet. The private spellings of a long name, `torch._long_name_cpu`, are forbidden
    with it.
    """
    tree = ast.parse(source)
    made = {ast.unparse(n) for n in ast.walk(tree) if _is_made(n)}
    for node in ast.walk(tree):
        for used in _names(node):
            if used in made:
                continue
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
    part, last = used.rpartition(".")[2], name.rpartition(".")[2]
    return "." in used and (part == last or (last.count("_") > 1 and last in part))


def _is_made(node: ast.AST) -> bool:
    """Whether a node sets `self.x`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return True
    return False


def _names(node: ast.AST) -> list[str]:
    """The dotted names that one node brings in or uses."""
    match node:
        case ast.Import(names=aliases):
            return [a.name for a in aliases if a.asname or "." in a.name]
        case ast.ImportFrom(module=module, names=aliases):
            return [f"{module}.{alias.name}" for alias in aliases]
        case ast.Attribute():
            return [ast.unparse(node)]
        case ast.Name(id=name):
            return [name]
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [f"getattr.{name}"]
        case ast.MatchClass(kwd_attrs=attrs):
            return [f"match.{attr}" for attr in attrs]
    return []
