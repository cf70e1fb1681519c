"""The reference answers as source: read from `solutions/`, never imported here.

`reference` gives what recording, checking and the website put into an answer cell; `stub` gives
what the learner starts from. Both come from one definition, so they cannot drift apart.
"""

import ast
import functools
import re
import textwrap
from pathlib import Path

from course.catalog import ROOT, Chapter, find
from course.errors import CourseError

_STUB = re.compile(r"^\s*# stub: (.*)$")
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


def reference(part: str, slug: str, key: str) -> str:
    """The source that answers exercise `key`: its definition after the helpers it uses."""
    chapter = find(slug)
    if chapter.part != part:
        raise CourseError(f"`{slug}` is in part `{chapter.part}`, not in `{part}`")
    return from_file(chapter.solution, key)


def from_file(path: Path, key: str) -> str:
    """The same for any module of answers; a re-export from `kernels` is followed.

    Raises CourseError if the module does not define `key`.
    """
    return "\n".join(line for line in _definition(path, key) if not _STUB.match(line))


def keys(path: Path) -> list[str]:
    """The public names that a module of answers defines or re-exports from `kernels`."""
    out = []
    for node in _tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            out.append(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels"):
            out += [alias.asname or alias.name for alias in node.names]
    return out


def origin(path: Path, key: str) -> Path:
    """The file that really holds the definition of `key`."""
    moved = _reexport(path, key)
    return moved[0] if moved else path


def stub(chapter: Chapter, key: str) -> str:
    """What the learner starts from: signature, docstring, and the first step as an error.

    A jit function's stub has only its docstring, since `raise` does not compile there.
    """
    lines = _definition(chapter.solution, key)
    node = next(
        n
        for n in ast.parse("\n".join(lines)).body
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == key
    )
    if ast.get_docstring(node) is None:
        raise CourseError(f"{chapter.solution}: `{key}` needs a docstring, which its stub keeps")
    if isinstance(node, ast.ClassDef):
        return _class_stub(lines, node)
    return "\n".join(_function_stub(lines, node, 1, chapter))


def answer_cell(key: str, source: str) -> str:
    """`source` as the learner's cell has it: under the line that names the exercise."""
    return f"# answer: {key}\n{source}"


def _tree(path: Path) -> ast.Module:
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CourseError(f"{path} does not exist: write the reference answers first") from None


@functools.lru_cache(maxsize=8)  # every answer of a chapter asks for the same file
def _parsed(path: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as problem:
        raise CourseError(f"{path}: line {problem.lineno}: {problem.msg}") from None


def _definition(path: Path, key: str) -> list[str]:
    """Lines of helpers and definition, `# stub:` comments included."""
    moved = _reexport(path, key)
    source_path, name = moved if moved else (path, key)
    tops = {n: node for node in _tree(source_path).body for n in _binds(node)}
    if name not in tops:
        raise CourseError(f"{path} does not define `{key}`")
    wanted = _with_helpers(name, tops)
    lines = source_path.read_text(encoding="utf-8").split("\n")
    blocks = [
        "\n".join(lines[_first_line(tops[n]) - 1 : tops[n].end_lineno])
        for n in sorted(wanted, key=lambda n: tops[n].lineno)
    ]
    # two blank lines between functions, none between constants
    joined = "\n\n\n".join(blocks)
    return re.sub(rf"\b{re.escape(name)}\b", key, joined).split("\n")


def _reexport(path: Path, key: str) -> tuple[Path, str] | None:
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels"):
            for alias in node.names:
                if (alias.asname or alias.name) == key:
                    return ROOT / f"{(node.module or '').replace('.', '/')}.py", alias.name
    return None


def _binds(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _with_helpers(name: str, tops: dict[str, ast.stmt]) -> set[str]:
    """`name` and the private helpers and constants of the same file that it uses."""
    wanted, queue = set(), [name]
    while queue:
        current = queue.pop()
        wanted.add(current)
        for node in ast.walk(tops[current]):
            used = node.id if isinstance(node, ast.Name) else None
            if used in tops and used not in wanted and (used.startswith("_") or used.isupper()):
                queue.append(used)
    return wanted


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _body_start(node: ast.FunctionDef | ast.ClassDef) -> int:
    """The first line after signature and docstring."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        return (first.end_lineno or first.lineno) + 1
    return _first_line(first)


def _function_stub(
    lines: list[str], node: ast.FunctionDef, indent: int, chapter: Chapter | None
) -> list[str]:
    if node.body[0].lineno == node.lineno:
        raise CourseError(f"`{node.name}` needs a body on lines of its own to make a stub from")
    head = lines[_first_line(node) - 1 : _body_start(node) - 1]
    head = [line for line in head if not _STUB.match(line)]
    while head and (not head[-1].strip() or head[-1].strip().startswith("#")):
        head.pop()  # comments that introduce the body belong to the answer
    if any("jit" in ast.unparse(d) for d in node.decorator_list):
        return head
    step = _first_step(lines, node)
    if not step and chapter:
        raise CourseError(f"{chapter.solution}: `{node.name}` needs a `# stub: first step` comment")
    return head + _raise(step or f"{node.name}", indent)


def _class_stub(lines: list[str], node: ast.ClassDef) -> str:
    out = lines[_first_line(node) - 1 : _body_start(node) - 1]
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            if member.name.startswith("_") and not member.name.startswith("__"):
                continue
            out += ["", *_function_stub(lines, member, 2, None)]
        elif isinstance(member, ast.AnnAssign):  # the fields of a dataclass are its signature
            out += lines[member.lineno - 1 : member.end_lineno]
    return "\n".join(out)


def _first_step(lines: list[str], node: ast.FunctionDef) -> str:
    """The text of the `# stub:` comment, continued by comment lines indented by three blanks."""
    step: list[str] = []
    for line in lines[node.lineno - 1 : node.end_lineno]:
        found = _STUB.match(line)
        if found:
            step = [found[1].strip()]
        elif step and re.match(r"^\s*#   \S", line):
            step.append(line.strip().lstrip("# "))
        elif step:
            break
    return " ".join(step)


def _raise(step: str, indent: int) -> list[str]:
    pad = " " * 4 * indent
    text = step.replace("\\", "\\\\").replace('"', "'")
    one = f'{pad}raise NotImplementedError("{text}")'
    if len(one) <= 79:
        return [one]
    parts = textwrap.wrap(text, 66 - 4 * indent)
    quoted = [f'{pad}    "{p} "' for p in parts[:-1]] + [f'{pad}    "{parts[-1]}"']
    return [f"{pad}raise NotImplementedError(", *quoted, f"{pad})"]
