"""Read an answer cell as text: what may stand at its top level, and which library names it uses.

This gives clear messages early; it is not the security boundary, since function bodies still run
(the box is). The forbidden names are read here as well as in the check cell, because code in the
box can switch the check's own reading off. What reaches for the check itself is refused here too:
right values cannot be had that way, but demands that no value shows could be switched off.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import EllipsisType

from course import forbidden

MAX_SOURCE = 64 << 10  # characters of one answer cell
MAX_WARNINGS = 5
_CHECKS = {  # what setup cells define or bring from `course`; tests compare these sets with them
    *("show", "require", "forbid", "begin", "rng", "demo", "outcome"),
    *("error_kind", "play", "books", "Request"),
}
_BUILTINS = {  # of Python, with which check cells count and compare
    *("all", "enumerate", "float", "getattr", "int", "isinstance", "len", "list", "map", "max"),
    *("min", "next", "ord", "property", "range", "sorted", "str", "sum", "super", "tuple"),
    *("type", "zip"),
    *("Exception", "ImportError", "MemoryError", "NotImplementedError", "ValueError"),
}
_MODULES = {  # of setup cells, by the name that they have there
    **{name: name for name in ("contextlib", "heapq", "math", "pathlib", "subprocess", "sys")},
    **{"torch": "torch", "triton": "triton", "tl": "triton.language", "importlib": "importlib"},
}
_RESERVED = _CHECKS | _BUILTINS | _MODULES.keys()
_OF_COURSE = _CHECKS | {"lm", "plots"}  # what an answer may import from `course`
_MACHINERY = {  # modules that the check itself stands on, and ways to any module
    *("IPython", "ctypes", "linecache", "builtins", "__main__", "sys.modules", "unittest.mock"),
    *("importlib.import_module", "pkgutil.resolve_name", "inspect.stack", "inspect.trace"),
}
_REACHING = {  # ways into the check's own frames, names and functions
    *("get_ipython", "user_ns", "_getframe", "currentframe", "_current_frames", "__globals__"),
    *("f_back", "f_globals", "f_locals", "f_builtins", "tb_frame", "gi_frame", "__builtins__"),
    *("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__subclasses__"),
    *("get_objects", "get_referrers", "get_referents"),
}
# ways to have a name without writing it
_LOOKUPS = {"eval", "exec", "compile", "globals", "locals", "vars", "__import__"}
_LOOKUP_PARTS = {
    *("__dict__", "__getattribute__", "attrgetter", "methodcaller", "import_module"),
    *("get_field", "__self__"),
}
_LOOKUP_MODULES = {"importlib", "inspect", "pickle", "marshal", "pkgutil", "runpy"}
_ADVICE = "an answer holds imports, functions, classes and constants; move the rest to another cell"


@dataclass
class Finding:
    """What is wrong with one answer cell: `refused` keeps it from running, warnings do not."""

    refused: str = ""
    warnings: list[str] = field(default_factory=list)


def lint(source: str) -> Finding:
    """Look at the top level of one answer cell that parses as Python.

    Imports (also `if TYPE_CHECKING` and tried ones), functions, classes, docstrings and assignments
    to plain names are fine; an assignment that calls something or makes a lambda gives a warning,
    except `tl.constexpr(...)`, which kernels need. Every other statement is refused.
    """
    if len(source) > MAX_SOURCE:
        return Finding(f"the answer has {len(source):,} characters; at most {MAX_SOURCE:,}")
    if source.splitlines() != source.split("\n")[: len(source.splitlines())]:
        # IPython ends a line at each of them, Python does not: it would run what we did not read
        return Finding("the answer holds an odd line separator (such as U+2028): remove it")
    tree = ast.parse(source)
    reaching = _reaching(tree) or _rebinding(tree) or _changing(tree)
    if reaching:
        return Finding(f"{reaching}, which belongs to what checks the answer: do without it")
    found = Finding()
    for node in tree.body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                pass
            case ast.AsyncFunctionDef() | ast.Pass():
                pass
            case ast.Expr(value=ast.Constant(value=str() | EllipsisType())):
                pass
            case ast.If() | ast.Try() if _imports(node):
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


def _reaching(tree: ast.Module) -> str:
    """The first way from an answer to what runs it, as "line N uses `x`"."""
    modules = _modules(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=module, names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
                names += [alias.name for alias in aliases if alias.name in _REACHING]
            case ast.Attribute(attr=attr):
                names = [_dotted(node, modules), attr if attr in _REACHING else ""]
            case ast.Name(id=name) if name in _REACHING:
                names = [name]
            case ast.MatchClass(kwd_attrs=attrs):
                names = [attr for attr in attrs if attr in _REACHING]
        for name in names:
            if name in _REACHING or _is_machinery(name):
                return f"line {getattr(node, 'lineno', 1)} uses `{name}`"
    return ""


def _is_machinery(name: str) -> bool:
    module, _, rest = name.partition(".")
    if module == "course":
        return rest.split(".")[0] not in _OF_COURSE
    return any(name == m or name.startswith(f"{m}.") for m in _MACHINERY)


def _modules(tree: ast.AST) -> dict[str, str]:
    """The names that a cell gives to modules, as far as its imports tell."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {name: whole for node in nodes for name, whole in _imported(node).items()}


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that one import binds, each with the dotted name of what it stands for."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    heads = ((alias.asname, alias.name, alias.name.split(".")[0]) for alias in node.names)
    return {new or head: whole if new else head for new, whole, head in heads}


def _bound(tree: ast.AST) -> set[str]:
    """The names that a statement or a cell binds where it stands, imports apart."""
    names, queue = set(), [tree]
    while queue:
        node = queue.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue  # what is bound inside stays there
            case ast.Lambda():
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                names.add(name)
        queue += ast.iter_child_nodes(node)
    return names


def _rebinding(tree: ast.Module) -> str:
    """Whether a cell gives a name of the setup or of a check another meaning."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and _RESERVED & set(node.names):
            return f"line {node.lineno} redefines `{min(_RESERVED & set(node.names))}`"
    for node in tree.body:
        names = _bound(node)
        for inner in ast.walk(node) if not _is_scope(node) else ():
            if isinstance(inner, ast.Import | ast.ImportFrom):
                names |= {n for n, whole in _imported(inner).items() if not _is_same(n, whole)}
        if _RESERVED & names:
            return f"line {node.lineno} redefines `{min(_RESERVED & names)}`"
    return ""


def _is_scope(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_same(name: str, whole: str) -> bool:
    """Whether an import binds to a reserved name what the setup cell binds to it."""
    return whole == (f"course.{name}" if name in _CHECKS else _MODULES.get(name))


def _changing(tree: ast.Module) -> str:
    """Whether a cell sets an attribute of something that it did not make itself."""
    shared = _RESERVED | _modules(tree).keys()
    for node, own in _scoped(tree):
        target: ast.AST | None = None
        match node:
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
                target = value
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[first, *_]):
                target = first
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target.id in shared - own:
            return f"line {getattr(node, 'lineno', 1)} changes `{target.id}`"
    return ""


def _scoped(tree: ast.AST) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """All nodes, each with the names that belong to the functions around it."""
    queue: deque[tuple[ast.AST, frozenset[str]]] = deque([(tree, frozenset())])
    while queue:
        node, own = queue.popleft()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            own |= {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
            own |= frozenset(name for part in body for name in _bound(part))
        yield node, own
        queue += [(child, own) for child in ast.iter_child_nodes(node)]


def _looks_up(tree: ast.AST) -> str:
    """A sentence about a name that is looked up rather than written, or an empty string."""
    called = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    modules = _modules(tree)
    for node, own in _scoped(tree):
        used = ""
        match node:
            case ast.Name(id="getattr"):
                call = called.get(id(node))
                plain = call and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
                if not plain and not (call and call.args and _is_self(call.args[0])):
                    used = "getattr"
            case ast.Name(id=name) if name in _LOOKUPS - own:
                used = name
            case ast.Attribute(value=value, attr=attr) if attr in _LOOKUP_PARTS:
                used = "" if _is_self(value) else attr
            case ast.Attribute() if _dotted(node, modules) == "sys.modules":
                used = "sys.modules"
            case ast.MatchClass(kwd_attrs=attrs):
                used = next((attr for attr in attrs if attr in _LOOKUP_PARTS), "")
            case ast.Import() | ast.ImportFrom():
                names = {alias.name for alias in node.names}
                whole = set(_imported(node).values())
                whole |= {name.split(".")[0] for name in [*whole, *names]} & _LOOKUP_MODULES
                found = ({"sys.modules"} | _LOOKUP_MODULES) & whole
                used = next(iter(sorted(found | names & _LOOKUP_PARTS)), "")
        if used:
            line = getattr(node, "lineno", 1)
            return (
                f"line {line} looks a name up with `{used}`, which this exercise does not allow: "
                f"write names as they are"
            )
    return ""


def _dotted(node: ast.Attribute, modules: dict[str, str]) -> str:
    """`a.b` for an attribute of a plain name; longer chains hold that one inside."""
    if not isinstance(node.value, ast.Name):
        return ""
    return f"{modules.get(node.value.id, node.value.id)}.{node.attr}"


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _plain(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether only names are bound: `a = 1`, `a, *b = 1, 2`, never `torch.cat = mine`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    kinds = (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)
    return all(isinstance(part, kinds) for target in targets for part in ast.walk(target))


def _imports(node: ast.If | ast.Try) -> bool:
    """Whether a statement does no more than import: `if TYPE_CHECKING:`, `try: import x`."""
    whole = [*node.body, *node.orelse]
    if isinstance(node, ast.Try):
        kinds = {ast.unparse(h.type) if h.type else "" for h in node.handlers}
        whole += [part for handler in node.handlers for part in handler.body]
        right = kinds <= {"ImportError", "ModuleNotFoundError"} and not node.finalbody
    else:
        right = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    kept = (ast.Import, ast.ImportFrom, ast.Pass)
    return right and all(
        isinstance(part, kept)
        or (isinstance(part, ast.Assign) and _plain(part) and not _runs(part.value))
        for part in whole
    )


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
        answers: the sources of all answer cells that parse. What the answer uses of the cells of
            other exercises is read too, be it a helper, an import or the exercise itself.
    """
    if not names:
        return ""
    own = ast.parse(answers[key])
    found = forbidden.scan(answers[key], names) or _looks_up(own)
    helpers: dict[str, list[ast.stmt]] = {}
    for other, source in answers.items():
        for node in ast.parse(source).body if other != key else ():
            brought = _modules(node) if not _is_scope(node) else {}
            for name in _bound(node) | brought.keys():
                helpers.setdefault(name, []).append(node)
    queue, seen = _used(own), set()
    while queue and not found:
        name = queue.pop()
        for node in helpers.get(name, ()) if name not in seen else ():
            queue |= _used(node)
            inside = forbidden.scan(ast.unparse(node), names) or _looks_up(node)
            found = found or (f"`{name}`: {inside}" if inside else "")
        seen.add(name)
    return found


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
