"""The mutator makes the mistakes it promises, each once, the same on every run."""

import ast

import pytest

from course.lab.mutate import mutations

SOURCE = '''
def f(x: int = 3, *, flag=True) -> int:
    """Text with 1 < 2 stays."""
    if x < 2 and not flag:
        raise ValueError("no")
    total = 0
    for i in range(x, len(x)):
        total += i * 2  # a comment stays
    total = total - min(x, 7)
    y = x[: len(x)]
    y.append(total)
    return -total
'''
KERNEL = """
@triton.jit
def k(x, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x + o, mask=o < n, other=0.0)
    m = tl.minimum(tl.max(b, 0), 3.0)
    b = tl.where(o < n, b.to(tl.float32), m)
    acc = tl.dot(b, b, acc)
    tl.store(x + tl.cdiv(n, BLOCK), b, mask=(o < n) & (o > 0))
"""


def by_id(source: str) -> dict[str, str]:
    return {mutation.id: mutation.source for mutation in mutations(source)}


@pytest.mark.parametrize(
    "name, text",
    [
        ("compare#1: < to <=", "if x <= 2 and"),
        ("operator#1: and to or", "if ((x < 2) or (not flag))"),
        ("operator#2: drop not", "and (flag):"),
        ("if#1: negate", "if (not (x < 2 and not flag)):"),
        ("raise#1: drop", "        pass\n    total = 0"),
        ("constant#1: 3 to 4", "x: int = 4"),
        ("constant#2: True to False", "flag=False"),
        ("range#1: swap the first two arguments", "range(len(x), x)"),
        ("update#1: drop total", "        pass  # a comment stays"),
        ("update#1: += to -=", "total -= i * 2"),
        ("update#2: drop total", "    pass\n    y ="),
        ("min#1: min to max", "max(x, 7)"),
        ("min#1: keep argument 2 only", "total - (7)"),
        ("slice#1: len(x) + 1", "x[: len(x) + 1]"),
        ("y.append#1: drop the call", "    pass\n    return"),
        ("operator#5: drop -", "return (total)"),
    ],
)
def test_python_rules(name: str, text: str) -> None:
    assert text in by_id(SOURCE)[name]


@pytest.mark.parametrize(
    "name, text",
    [
        ("tl.load#1: drop mask", "tl.load(x + o, other=0.0)"),
        ("tl.load#1: drop other", "tl.load(x + o, mask=o < n)"),
        ("tl.store#1: drop mask", "tl.store(x + tl.cdiv(n, BLOCK), b)"),
        ("tl.store#1: drop the call", "    pass\n"),
        ("tl.arange#1: shift by one", "(tl.arange(0, BLOCK) + 1)"),
        ("tl.minimum#1: keep argument 1 only", "m = (tl.max(b, 0))"),
        ("tl.minimum#1: minimum to maximum", "tl.maximum(tl.max"),
        ("tl.where#1: always the first branch", "b = (b.to(tl.float32))"),
        ("tl.where#1: always the second branch", "b = (m)"),
        (".to#1: drop tl.float32", "tl.where(o < n, (b), m)"),
        ("tl.dot#1: drop the accumulator", "acc = tl.dot(b, b)"),
        ("tl.cdiv#1: round down", "((n) // (BLOCK))"),
        ("operator#3: drop o < n &", "mask=(o > 0)"),
    ],
)
def test_triton_rules(name: str, text: str) -> None:
    assert text in by_id(KERNEL)[name]


def test_a_missing_rescale() -> None:
    source = "def f(a, r, b):\n    a = a * r + b\n    return a\n"
    assert "a = a + b" in by_id(source)["update#2: drop rescale of a"]


def test_parentheses_survive() -> None:
    source = "def f(a, b, c):\n    return (a & b) < (c or 1)\n"
    assert "(a & b) <= (c or 1)" in by_id(source)["compare#1: < to <="]
    assert "(((a) | (b))) < (c or 1)" in by_id(source)["operator#1: & to |"]


def test_chained_comparisons_are_told_apart() -> None:
    mutants = by_id("def f(x):\n    return 0 <= x <= 9\n")
    assert "0 < x <= 9" in mutants["compare#1: <= to <"]
    assert "0 <= x < 9" in mutants["compare#1: <= to < again"]


@pytest.mark.parametrize("source", [SOURCE, KERNEL])
def test_every_mutant_is_new_parses_and_has_its_own_name(source: str) -> None:
    mutants = mutations(source)
    assert len({m.id for m in mutants}) == len({m.source for m in mutants}) == len(mutants) > 25
    assert source not in {m.source for m in mutants}
    for mutant in mutants:
        ast.parse(mutant.source)
        assert "1 < 2 stays" in mutant.source or source is KERNEL
    assert mutants == mutations(source)


def test_text_beyond_ascii_does_not_shift_the_edit() -> None:
    source = 'def f(x):\n    return "Größe", x < 1  # é\n'
    assert 'return "Größe", x <= 1  # é' in by_id(source)["compare#1: < to <="]


def test_nothing_to_break() -> None:
    assert mutations('def f(x):\n    """Doc."""\n    return x\n') == []
