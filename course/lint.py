"""Read an answer cell as text: what may stand at its top level, and which library names it uses.

This gives clear messages early; it is not the security boundary, since function bodies still run
(the box is). The forbidden names are read here as well as in the check cell, because code in the
box can switch the check's own reading off. What reaches for the check itself is refused here too:
right values cannot be had that way, but demands that no value shows could be switched off.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from course import forbidden, notebook

MAX_SOURCE = 64 << 10  # characters of one answer cell
MAX_WARNINGS = 5
_CHECKS = {"show", "require", "forbid", "begin", "rng"}  # what check cells call
_MACHINERY = {  # modules that the check itself stands on
    *("IPython", "ctypes", "linecache", "builtins", "__main__"),
    *(f"course.{name}" for name in ("runtime", "forbidden", "compare", "shell", "grade")),
}
_REACHING = {  # ways into the check's own frames and names
    *("get_ipython", "user_ns", "_getframe", "currentframe", "_current_frames", "__globals__"),
    *("f_back", "f_globals", "f_locals", "f_builtins", "tb_frame", "gi_frame", "__builtins__"),
}
# ways to have a name without writing it
_LOOKUPS = {"eval", "exec", "compile", "globals", "locals", "vars", "__import__"}
_LOOKUP_PARTS = {"__dict__", "__getattribute__", "attrgetter", "methodcaller", "import_module"}
_ADVICE = "an answer holds imports, functions, classes and constants; move the rest to another cell"


@dataclass
class Finding:
    """What is wrong with one answer cell: `refused` keeps it from running, warnings do not."""

    refused: str = ""
    warnings: list[str] = field(default_factory=list)


def lint(source: str) -> Finding:
    """Look at the top level of one answer cell that parses as Python.

    Imports, functions, classes, docstrings and assignments to plain names are fine; an assignment
    that calls something or makes a lambda gives a warning, except `tl.constexpr(...)`, which
    kernels need. Every other statement is refused.
    """
    if len(source) > MAX_SOURCE:
        return Finding(f"the answer has {len(source):,} characters; at most {MAX_SOURCE:,}")
    if source.splitlines() != source.split("\n")[: len(source.splitlines())]:
        # IPython ends a line at each of them, Python does not: it would run what we did not read
        return Finding("the answer holds an odd line separator (such as U+2028): remove it")
    tree = ast.parse(source)
    reaching = next(filter(None, map(_reaching, ast.walk(tree))), "") or _rebinding(tree)
    if reaching:
        return Finding(f"{reaching}, which belongs to what checks the answer: do without it")
    found = Finding()
    for node in tree.body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                pass
            case ast.AsyncFunctionDef() | ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                pass
            case ast.Assign() | ast.AnnAssign() if _plain(node):
                if node.value and _runs(node.value) and len(found.warnings) < MAX_WARNINGS:
                    found.warnings.append(
                        f"line {node.lineno} runs code while the cell is read: "
                        f"`{_short(node)}`; a function is easier to check"
                    )
            case _:
                found.refused = (
                    f"line {node.lineno} of the answer, `{_short(node)}`, does something "
                    f"at once: {_ADVICE}"
                )
                return found
    return found


def _reaching(node: ast.AST) -> str:
    """Whether one node uses a way from an answer to what runs it, as "line N uses `x`"."""
    names: list[str] = []
    match node:
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases):
            names = [f"{module}.{alias.name}" for alias in aliases]
            names += [alias.name for alias in aliases if alias.name in _REACHING]
        case ast.Attribute(attr=attr):
            names = [_dotted(node), attr]
        case ast.Name(id=name):
            names = [name] if name in _REACHING else []
    for name in names:
        if name in _REACHING or any(name == m or name.startswith(f"{m}.") for m in _MACHINERY):
            return f"line {getattr(node, 'lineno', 1)} uses `{name}`"
    return ""


def _rebinding(tree: ast.Module) -> str:
    """Whether a cell gives a check's function another meaning; importing the real one is fine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and _CHECKS & set(node.names):
            return f"line {node.lineno} redefines `{(_CHECKS & set(node.names)).pop()}`"
    for node in tree.body:
        names = notebook.defined(ast.Module([node], []))
        if isinstance(node, ast.Import | ast.ImportFrom):
            ours = isinstance(node, ast.ImportFrom) and node.module == "course"
            names = [a.asname or a.name for a in node.names if a.asname or not ours]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            bound = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            names = [n.id for n in bound if isinstance(n.ctx, ast.Store)]
        if _CHECKS & set(names):
            return f"line {node.lineno} redefines `{(_CHECKS & set(names)).pop()}`"
    return ""


def _looks_up(tree: ast.AST) -> str:
    """A sentence about a name that is looked up rather than written, or an empty string."""
    called = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        used = ""
        match node:
            case ast.Name(id="getattr"):
                call = called.get(id(node))
                plain = call and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
                if not plain and not (call and call.args and _is_self(call.args[0])):
                    used = "getattr"
            case ast.Name(id=name) if name in _LOOKUPS:
                used = name
            case ast.Attribute(value=value, attr=attr) if attr in _LOOKUP_PARTS:
                used = "" if _is_self(value) else attr
            case ast.Attribute() if _dotted(node) == "sys.modules":
                used = "sys.modules"
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                module = getattr(node, "module", None)
                whole = [alias.name.split(".")[0] for alias in names]
                whole += [f"{module}.{alias.name}" for alias in names] if module else []
                parts = {alias.name for alias in names} & _LOOKUP_PARTS
                found = {"importlib", "sys.modules"} & {*whole, str(module).split(".")[0]}
                used = next(iter(sorted(found | parts)), "")
        if used:
            line = getattr(node, "lineno", 1)
            return (
                f"line {line} looks a name up with `{used}`, which this exercise does not allow: "
                f"write names as they are"
            )
    return ""


def _dotted(node: ast.Attribute) -> str:
    """`a.b` for an attribute of a plain name; longer chains hold that one inside."""
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _plain(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether only names are bound: `a = 1`, `a, b = 1, 2`, never `torch.cat = mine`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return all(isinstance(name, ast.Name) for name in names)


def _runs(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Lambda | ast.Await | ast.NamedExpr)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) not in ("tl.constexpr",))
        for node in ast.walk(value)
    )


def _short(node: ast.stmt) -> str:
    first = ast.unparse(node).split("\n")[0]
    return first if len(first) <= 60 else f"{first[:60]}..."


def demanded(checks: Iterable[str], key: str) -> tuple[str, ...]:
    """The names that the check cells forbid to the answer `key`: their `forbid(key, "a", ...)`."""
    names = []
    for source in checks:
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(func=ast.Name(id="forbid"), args=[ast.Name(id=answer), *rest]):
                    if answer == key:
                        names += [a.value for a in rest if isinstance(a, ast.Constant)]
    return tuple(str(name) for name in names)


def shortcut(key: str, answers: dict[str, str], names: tuple[str, ...]) -> str:
    """A sentence about a forbidden name in an answer, or an empty string.

    Args:
        answers: the sources of all answer cells that parse. A helper that stands in the cell of
            another exercise is read too, other exercises themselves are not.
    """
    if not names:
        return ""
    own = ast.parse(answers[key])
    found = forbidden.scan(answers[key], names) or _looks_up(own)
    helpers: dict[str, ast.stmt] = {}
    for other, source in answers.items():
        if other != key:
            for node in ast.parse(source).body:
                for name in notebook.defined(ast.Module([node], [])):
                    if name not in answers:
                        helpers[name] = node
    queue, seen = _used(own), set()
    while queue and not found:
        name = queue.pop()
        if name in helpers and name not in seen:
            seen.add(name)
            queue |= _used(helpers[name])
            inside = forbidden.scan(ast.unparse(helpers[name]), names) or _looks_up(helpers[name])
            found = f"`{name}`: {inside}" if inside else ""
    return found


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
