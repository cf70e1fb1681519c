"""The small parts: comparing, reading notebooks, references and stubs, forbidding, feedback."""

import ast
import functools
import math

import nbformat
import pytest
import torch

import course
from course import compare, forbidden, mistakes, notebook, recordfile, runtime, solutions
from course.errors import CourseError


@pytest.mark.parametrize(
    ("expected", "got", "tol", "same"),
    [
        ([3], [3], 1e-4, True),
        ([3], [3.0], 1e-4, False),
        ([3], [4], 1, False),
        ([3.0], [3], 1e-4, True),
        ([1.0], [1.00005], 1e-4, True),
        ([1.0], [1.0002], 1e-4, False),
        ([1e6], [1e6 + 50], 1e-4, True),
        ([0.0], [2e-4], 1e-4, False),
        (["nan"], ["nan"], 1e-4, True),
        (["inf"], ["-inf"], 1e-4, False),
        (["nan"], [0.0], 1e-4, False),
        ([1.0], ["nan"], 1e-4, False),
        ([1, 2], [1], 1e-4, False),
        ([], [], 1e-4, True),
    ],
)
def test_agree(expected, got, tol, same):
    assert compare.agree(expected, got, tol) is same


def test_tokens_keep_shape_kind_and_seven_digits():
    assert compare.tokens("x", torch.ones(2, 3, dtype=torch.int64)) == ["2x3", 1, 1, 1, 1, 1, 1]
    assert compare.tokens("x", torch.zeros(0, 4)) == ["0x4"]
    assert compare.tokens("x", torch.tensor(2.0)) == [2.0]
    assert compare.tokens("x", [1, 2.123456789, "w", math.inf]) == [1, 2.123457, "w", "inf"]
    assert compare.tokens("x", torch.ones(2, dtype=torch.bfloat16)) == ["2", 1.0, 1.0]


def test_a_float_never_looks_like_an_integer():
    """Else `expected 3` and `got 3` would be all that a learner reads."""
    assert compare.line("x", [1, 1.0, -2.0, 0.5, 1e20, "nan"]) == "x: 1 1.0 -2.0 0.5 1e+20 nan"


def test_many_integers_become_a_digest_that_sees_every_one():
    a = list(range(100))
    b = [*a[:-1], 100]
    assert compare.tokens("x", a) != compare.tokens("x", b)
    assert len(compare.tokens("x", a)) == 2
    assert compare.tokens("x", torch.tensor(a)) != compare.tokens("x", torch.tensor(b))


@pytest.mark.parametrize("value", [True, [1, False], torch.tensor([True]), torch.ones(2) > 0])
def test_booleans_are_refused(value):
    with pytest.raises(TypeError, match="not whether they agree"):
        compare.tokens("x", value)


@pytest.mark.parametrize("value", [torch.zeros(65), [0.5] * 65])
def test_too_many_floats_are_refused(value):
    with pytest.raises(ValueError, match="pick"):
        compare.tokens("x", value)


@pytest.mark.parametrize(
    ("source", "names", "found"),
    [
        ("torch.cat([a])", ("torch.cat",), True),
        ("from torch import cat", ("torch.cat",), True),
        ("import torch as t\nt.cat([a])", ("torch.cat",), True),
        ("getattr(torch, 'cat')", ("torch.cat",), True),
        ("cat = 3\nprint(cat)", ("torch.cat",), False),
        ("'torch.cat is forbidden'", ("torch.cat",), False),
        ("import torch.nn.functional as F\nF.scaled_dot_product_attention(q)",
         ("scaled_dot_product_attention",), True),
        ("from course.lm import load", ("course.lm",), True),
        ("from course import lm", ("course.lm",), True),
        ("import course.lm.model", ("course.lm",), True),
        ("from transformers import x", ("transformers",), True),
        ("x.concatenated", ("torch.concatenate",), False),
        ("import torch", ("torch",), False),
        ("import torch\ntorch.ones(1)", ("torch",), True),
        ("import torch as t", ("torch",), True),
        ("self.stack = 1\nself.stack += 1", ("torch.stack",), False),
        ("self.stack(x)", ("torch.stack",), True),
        ("match torch:\n    case object(cat=join): pass", ("torch.cat",), True),
        ("torch._scaled_dot_product_math(q)", ("torch.scaled_dot_product",), True),
        ("def scaled_dot_product(q): pass", ("torch.scaled_dot_product",), False),
    ],
)  # fmt: skip
def test_scan(source, names, found):
    assert bool(forbidden.scan(source, names)) is found


def test_the_cell_of_what_can_be_called():
    def answer(a, b):
        return a, b

    class Called:
        def __call__(self, b):
            return b

    for one in (answer, functools.partial(answer, 1), Called(), Called):
        assert "def test_the_cell_of_what_can_be_called" in forbidden.cell_of(one)


def test_rng_streams_depend_on_name_and_seed_alone(monkeypatch):
    def draw(name):
        return torch.rand(3, generator=course.rng(name)).tolist()

    first, other = draw("a"), draw("b")
    assert draw("a") == first != other
    monkeypatch.setenv("COURSE_SEED", "1")
    assert draw("a") != first


def recorded(expected: dict[str, list], *known: dict) -> recordfile.Recorded:
    lines = [{"name": n, "values": v, "tol": 1e-4, "part": 0} for n, v in expected.items()]
    return recordfile.Recorded(
        "f", "Exercise 1: f", 1, 5, "count K and V", [], "", lines, list(known)
    )


def mistake(message: str, differs: dict[str, list], seen: tuple = (), error: str = "") -> dict:
    wrong = [{"name": n, "values": v} for n, v in differs.items()]
    return {
        "mutant": message,
        "message": message,
        "error": error,
        "seen": [*differs, *seen],
        "differs": wrong,
    }


def shown(**values: list) -> list[dict]:
    return [{"name": n, "values": v, "tol": 1e-4} for n, v in values.items()]


def test_a_mistake_is_named_by_all_its_lines():
    exercise = recorded(
        {"a": [1], "b": [2], "c": [3]},
        mistake("both", {"a": [0], "b": [0]}, ("c",)),
        mistake("first", {"a": [0]}, ("b", "c")),
        mistake("raises", {}, ("a",), "TypeError: no"),
        mistake("late", {"a": [9]}, (), "TypeError: other"),
    )
    assert mistakes.named(exercise, shown(a=[0], b=[0], c=[3]), "") == "both"
    assert mistakes.named(exercise, shown(a=[0], b=[2], c=[3]), "") == "first"
    assert mistakes.named(exercise, shown(a=[0], b=[7], c=[3]), "") == ""
    assert mistakes.named(exercise, shown(a=[1], b=[2], c=[3]), "") == ""
    assert mistakes.named(exercise, shown(a=[1]), "TypeError: no\n  more") == "raises"
    assert mistakes.named(exercise, shown(a=[1]), "TypeError: yes") == ""
    assert mistakes.named(exercise, shown(a=[9]), "TypeError: in other words") == "late"
    # while it runs, only what can be one thing alone
    assert mistakes.named(exercise, shown(a=[0])) == ""
    assert mistakes.named(exercise, shown(a=[0], b=[0])) == "both"


def test_feedback_forgets_an_earlier_run_of_the_cell(monkeypatch, capsys):
    exercise = recorded({"a": [1], "b": [2]}, mistake("swapped", {"a": [2], "b": [1]}))
    monkeypatch.setattr(runtime.STATE, "exercises", {"a": exercise, "b": exercise})
    monkeypatch.setattr(runtime.STATE, "shown", [])
    for a, b in ((7, 7), (2, 1)):
        course.show("a", a)
        course.show("b", b)
    said = capsys.readouterr().err
    assert said.count("hint: count K and V") == 2 and said.count("swapped") == 2


def test_feedback_says_expected_got_and_hint_or_mistake(monkeypatch, capsys):
    exercise = recorded({"size": [4]}, mistake("V is missing", {"size": [2]}))
    monkeypatch.setattr(runtime.STATE, "exercises", {"size": exercise})
    monkeypatch.setattr(runtime.STATE, "shown", [])
    course.show("size", 4)
    course.show("size", 3)
    course.show("size", 2)
    said = capsys.readouterr()
    assert said.out.splitlines() == ["size: 4", "size: 3", "size: 2"]
    right, wrong = said.err.split("✗", 1)
    assert "✓ size matches" in right
    assert "expected 4" in wrong and "got      3" in wrong and "hint: count K and V" in wrong
    assert "V is missing" in wrong.split("got      2")[1]


def test_demo_turns_a_stub_into_one_line(capsys):
    with course.demo():
        raise NotImplementedError("count first")
    assert "still a stub (count first)" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError), course.demo():
        1 / 0  # noqa: B018


def test_require_is_silent_or_raises_the_message():
    course.require(True, "no")
    with pytest.raises(runtime.CheckFailed, match="only this"):
        course.require(0, "only this")


SOLUTION = '''"""A module."""

import torch

LIMIT = 3


def _helper(x):
    return x + LIMIT


def plus(x: int) -> int:
    """Add."""
    # stub: add the limit, "quoted", and make this sentence so long that it does not fit into
    #   one line of seventy-nine columns
    return _helper(x)


class Box:
    """Holds.

    More.
    """

    size: int

    def __init__(self, size: int) -> None:
        """Keep the size."""
        # stub: keep it
        self.size = size

    def _private(self):
        return 1
'''


def test_reference_brings_its_helpers_and_no_stub_comment(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(SOLUTION)
    assert solutions.keys(path) == ["plus", "Box"]
    space: dict = {}
    source = solutions.from_file(path, "plus")
    exec(source, space)
    assert space["plus"](4) == 7
    assert "stub" not in source
    with pytest.raises(CourseError, match="does not define `minus`"):
        solutions.from_file(path, "minus")


def test_stubs_parse_keep_signatures_and_stay_narrow(tmp_path, monkeypatch):
    path = tmp_path / "s.py"
    path.write_text(SOLUTION)

    class Chapter:
        solution = path

    plus, box = (solutions.stub(Chapter, key) for key in ("plus", "Box"))
    for text in (plus, box):
        ast.parse(text)
        assert max(map(len, text.split("\n"))) <= 79
    assert "def plus(x: int) -> int:" in plus and "_helper" not in plus and "return" not in plus
    space: dict = {}
    exec(plus + "\n" + box, space)
    with pytest.raises(NotImplementedError, match="seventy-nine columns"):
        space["plus"](1)
    with pytest.raises(NotImplementedError, match="keep it"):
        space["Box"](1)
    assert "_private" not in box and "    size: int" in box and "\n\n    More." in box


def test_a_jit_stub_has_no_raise():
    from tests.pipeline.conftest import CHAPTER

    stub = solutions.stub(CHAPTER, "decode_attention_kernel")
    assert "@triton.jit" in stub and "raise" not in stub and "_decode_attention_kernel" not in stub
    body = ast.parse(stub).body[0].body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)


def test_marks_and_fingerprints():
    assert notebook.mark("\n# answer: f\nx") == ("answer", "f")
    assert notebook.mark("# setup") == ("setup", "")
    assert notebook.mark("x = 1\n# answer: f") is None
    assert notebook.fingerprint("x = 1  # a\n\n") == notebook.fingerprint("\r\nx=1")
    assert notebook.fingerprint("x = 1") != notebook.fingerprint("x = 2")


def test_a_tag_stands_in_for_a_lost_mark():
    nb = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell("def f(): pass", metadata={"tags": ["answer-f"]})
    nb.cells = [cell]
    assert notebook.answers(nb, ["f"]).answers == {"f": "def f(): pass"}


def test_write_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "x.json"
    recordfile.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        recordfile.write_json(path, {"a": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'
    with pytest.raises(CourseError, match="cannot write"):
        recordfile.write_text(tmp_path / "deep" / "x.json" / "y", "")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
