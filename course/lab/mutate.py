"""Break a function on purpose, one small edit at a time, the same edits on every run.

A test suite that still passes on a mutant has a hole. The rules are plain Python's usual
mistakes and a kernel's: a dropped mask, the wrong branch of `tl.where`, a missing rescale.
Each edit replaces a piece of text, so comments and layout stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARES = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
TWINS = {
    **{"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax"},
    **{"floor": "ceil", "exp": "exp2", "log": "log2", "all": "any"},
}
TWINS |= {twin: name for name, twin in TWINS.items()}
SYMMETRIC = {"min", "max", "minimum", "maximum", "isinstance", "tl.where", "torch.where"}


@dataclass(frozen=True)
class Mutation:
    """One wrong version: `id` says where and what ("tl.load#2: drop mask"), `source` is whole."""

    id: str
    source: str


@dataclass(frozen=True)
class _Edit:
    site: str
    what: str
    node: ast.AST  # replaced by text
    text: str
    owner: ast.AST | None = None  # what the number counts, if not the node


def mutations(source: str) -> list[Mutation]:
    """Every single-edit mutant of `source`, in source order, without repetitions.

    Sites are numbered by kind from 1, so an id survives edits elsewhere. Mutants that do not
    parse are left out; docstrings, annotations and decorators are left alone.
    """
    finder = _Finder(source)
    seen_sites: Counter[str] = Counter()
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    results: dict[str, str] = {}  # source -> id
    for edit in sorted(finder.edits(), key=lambda edit: _place(edit.owner or edit.node)):
        key = (edit.site, _place(edit.owner or edit.node))
        if key not in numbers:
            seen_sites[edit.site] += 1
            numbers[key] = seen_sites[edit.site]
        mutant = finder.replace(edit.node, edit.text)
        if mutant != source and mutant not in results and _parses(mutant):
            name = f"{edit.site}#{numbers[key]}: {edit.what}"
            results[mutant] = f"{name} again" if name in results.values() else name
    return [Mutation(name, mutant) for mutant, name in results.items()]


def _place(node: ast.AST) -> tuple[int, ...]:
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.tree = ast.parse(source)
        self.line_starts = [0]  # in bytes, as the columns of the syntax tree are
        for line in self.raw.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def span(self, node: ast.AST) -> slice:
        line, column, end_line, end_column = _place(node)
        return slice(
            self.line_starts[line - 1] + column, self.line_starts[end_line - 1] + end_column
        )

    def replace(self, node: ast.AST, text: str) -> str:
        span = self.span(node)
        return (self.raw[: span.start] + text.encode() + self.raw[span.stop :]).decode()

    def text(self, node: ast.AST) -> str:
        return self.raw[self.span(node)].decode()

    def operand(self, node: ast.AST) -> str:
        """The text, in the parentheses that the syntax tree does not keep."""
        loose = isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda)
        return f"({self.text(node)})" if loose else self.text(node)

    def edits(self) -> Iterator[_Edit]:
        for node, statement in _walk(self.tree):
            yield from self._statement(node)
            yield from self._expression(node)
            if isinstance(node, ast.Call):
                yield from self._call(node)
            if isinstance(node, ast.BinOp):
                yield from self._product(node, statement)

    def _statement(self, node: ast.AST) -> Iterator[_Edit]:
        match node:
            case ast.Raise():
                yield _Edit("raise", "drop", node, "pass")
            case ast.Expr(value=ast.Call() as call):
                yield _Edit(_called(call), "drop the call", node, "pass")
            case ast.AugAssign():
                yield _Edit("update", f"drop {ast.unparse(node.target)}", node, "pass")
                if type(node.op) in ARITHMETIC:
                    old, new = ARITHMETIC[type(node.op)]
                    flipped = f"{self.text(node.target)} {new}= {self.text(node.value)}"
                    yield _Edit("update", f"{old}= to {new}=", node, flipped)
            case ast.Assign(targets=[target]) if _names(target) & _names(node.value):
                yield _Edit("update", f"drop {ast.unparse(target)}", node, "pass")
            case ast.Break() | ast.Continue():
                yield _Edit(type(node).__name__.lower(), "drop", node, "pass")
            case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                kind = {ast.If: "if", ast.While: "while", ast.IfExp: "if", ast.Assert: "assert"}
                negated = f"(not ({self.text(node.test)}))"
                yield _Edit(f"{kind[type(node)]}", "negate", node.test, negated)

    def _expression(self, node: ast.AST) -> Iterator[_Edit]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for position, op in enumerate(node.ops):
                    old, new = COMPARES[type(op)]
                    words = [COMPARES[type(o)][0] for o in node.ops]
                    words[position] = new
                    rest = zip(words, map(self.operand, operands[1:]), strict=True)
                    text = self.operand(operands[0]) + "".join(f" {w} {t}" for w, t in rest)
                    yield _Edit("compare", f"{old} to {new}", node, text)
            case ast.BinOp(op=op) if type(op) in ARITHMETIC:
                old, new = ARITHMETIC[type(op)]
                text = f"({self.text(node.left)}) {new} ({self.text(node.right)})"
                yield _Edit("operator", f"{old} to {new}", node, f"({text})")
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                text = f" {new} ".join(f"({self.text(value)})" for value in node.values)
                yield _Edit("operator", f"{old} to {new}", node, f"({text})")
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
                sign = {ast.USub: "-", ast.Not: "not", ast.Invert: "~"}[type(node.op)]
                yield _Edit("operator", f"drop {sign}", node, f"({self.text(node.operand)})")
            case ast.Constant(value=bool(value)):
                yield _Edit("constant", f"{value} to {not value}", node, str(not value))
            case ast.Constant(value=int(value)):
                yield _Edit("constant", f"{value} to {value + 1}", node, str(value + 1))
                if value > 0:
                    yield _Edit("constant", f"{value} to {value - 1}", node, str(value - 1))
            case ast.Constant(value=float(value)):
                other = 2 * value if value else 1.0
                yield _Edit("constant", f"{value} to {other}", node, repr(other))
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        text = f"{self.text(bound)} + 1"
                        yield _Edit("slice", f"{self.text(bound)} + 1", bound, text)

    def _call(self, node: ast.Call) -> Iterator[_Edit]:
        name, arguments = _called(node), node.args
        last = name.rsplit(".", 1)[-1]
        texts = [self.text(argument) for argument in arguments]
        if last in TWINS:
            twin = name[: len(name) - len(last)] + TWINS[last]
            yield _Edit(name, f"{last} to {TWINS[last]}", node.func, twin, owner=node)
        if len(texts) > 1 and name not in SYMMETRIC and last not in SYMMETRIC:
            swapped = self._rebuild(node, [texts[1], texts[0], *texts[2:]])
            yield _Edit(name, "swap the first two arguments", node, swapped)
        if name in {"tl.minimum", "tl.maximum", "min", "max"} and len(texts) > 1:
            for position, text in enumerate(texts):
                yield _Edit(name, f"keep argument {position + 1} only", node, f"({text})")
        if name in {"tl.where", "torch.where"} and len(texts) == 3:
            yield _Edit(name, "always the first branch", node, f"({texts[1]})")
            yield _Edit(name, "always the second branch", node, f"({texts[2]})")
        if name in {"tl.load", "tl.store"}:
            for keyword in node.keywords:
                if keyword.arg in {"mask", "other"}:
                    kept = [k for k in node.keywords if k is not keyword]
                    yield _Edit(name, f"drop {keyword.arg}", node, self._rebuild(node, texts, kept))
        if name == "tl.arange":
            yield _Edit(name, "shift by one", node, f"({self.text(node)} + 1)")
        if last == "cdiv" and len(texts) == 2:
            yield _Edit(name, "round down", node, f"(({texts[0]}) // ({texts[1]}))")
        if name == "tl.dot" and len(texts) == 3:
            yield _Edit(name, "drop the accumulator", node, self._rebuild(node, texts[:2]))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and name != "tl.to":
            yield _Edit(".to", f"drop {', '.join(texts)}", node, f"({self.text(node.func.value)})")

    def _rebuild(
        self, node: ast.Call, texts: list[str], keywords: list[ast.keyword] | None = None
    ) -> str:
        keywords = node.keywords if keywords is None else keywords
        named = [f"{k.arg}={self.text(k.value)}" if k.arg else self.text(k) for k in keywords]
        return f"{self.text(node.func)}({', '.join([*texts, *named])})"

    def _product(self, node: ast.BinOp, statement: ast.stmt | None) -> Iterator[_Edit]:
        left, right = self.text(node.left), self.text(node.right)
        if isinstance(node.op, ast.BitAnd):
            yield _Edit("operator", f"drop & {right}", node, f"({left})")
            yield _Edit("operator", f"drop {left} &", node, f"({right})")
        updates = isinstance(statement, ast.Assign) and left in _names(statement.targets[0])
        if isinstance(node.op, ast.Mult) and updates:
            yield _Edit("update", f"drop rescale of {left}", node, left)


def _called(node: ast.Call) -> str:
    """The dotted name of what is called; a launch `kernel[grid](...)` goes by the kernel's."""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return ast.unparse(function)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.stmt | None]]:
    """Nodes that run, each with its statement; no docstrings, annotations or decorators."""
    stack: list[tuple[ast.AST, ast.stmt | None]] = [(tree, None)]
    while stack:
        node, statement = stack.pop()
        yield node, statement
        if isinstance(node, ast.stmt):
            statement = node
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list", "arg"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if isinstance(child, ast.AST) and not is_text:
                    stack.append((child, statement))
