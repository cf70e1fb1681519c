"""The lint refuses what runs at once and what solves an exercise; it rejects no honest answer."""

import ast
import builtins

import pytest

from course import catalog, lint, recordfile
from tests.grade.classes import School, school

SCHOOL = school()
READY = [chapter.slug for chapter in catalog.chapters() if chapter.status == "ready"]


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""\nimport torch\nfrom math import pi\nX: int = 3\nA, B = 1, [2.0, -pi]\npass',
        "BLOCK = tl.constexpr(16)",
        "@triton.jit\ndef f(x, sys):\n    print(x)\n    x.cat = sys.cat = x",
        "class A(B, metaclass=C):\n    x = 1\n    print(x)\nasync def g():\n    await g()",
        "...\n[A, B] = 1, 2\nA, *B = 1, 2\nif TYPE_CHECKING:\n    from x import Y",
        "try:\n    import numpy as np\nexcept ImportError:\n    np = None",
        "DTYPE = torch.float32\nT = {k: v for k, v in PAIRS}\nY: int",
    ],
)
def test_what_an_answer_holds(source):
    assert lint.lint(source) == lint.Finding()


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_what_python_reads_as_a_comment_and_ipython_runs(separator):
    source = f"# a{separator}!true{separator}HID = 7\ndef f():\n    return HID"
    assert "line separator" in lint.lint(source).refused


@pytest.mark.parametrize(
    "source", ["T = torch.tensor([1, 2])", "f = lambda x: x", "A = B = (y := 3)", "X = [g(1)]"]
)
def test_what_gives_a_warning(source):
    found = lint.lint("import torch\n" + source)
    assert not found.refused and len(found.warnings) == 1 and "line 2" in found.warnings[0]


@pytest.mark.parametrize(
    "source",
    [
        *("print(1)", "torch.cat = mine", "x[0] = 1", "del x", "x += 1", "for i in x: pass"),
        *("if True:\n    import os", "with a: pass", "try:\n    pass\nfinally:\n    pass"),
        *("try:\n    f()\nexcept ImportError:\n    pass", "if TYPE_CHECKING:\n    f()"),
        *("assert x", "global x", "raise E", "while 1: pass", "(a, b[0]) = 1, 2", "3"),
        *("get_ipython().system('id')", "[f(x) for x in y]", "match x:\n    case _: pass"),
    ],
)
def test_what_is_refused(source):
    assert "line 2" in lint.lint("import torch\n" + source).refused


@pytest.mark.parametrize(
    "source",
    [
        *("def require(*a): pass", "from x import show", "from course import rng as show"),
        *("def f():\n    global forbid\n    forbid = None", "(require, x) = 1, 2"),
        *("import course.forbidden", "from course import runtime", "import ctypes as c"),
        *("def f():\n    import course\n    course.runtime.STATE = 1", "from sys import _getframe"),
        *("def f():\n    return sys._getframe(1).f_globals", "def f(x=get_ipython()): pass"),
        *("class A:\n    require.__code__ = f", "class A:\n    from course import lab", "len = f"),
        *(
            "def outcome(call): pass",
            "from x import len",
            "import numpy as torch",
            "class Request: x",
        ),
        *("class A:\n    import torch.nn as n\n    n.x = 1", "def f():\n    torch.a.b = 1"),
        *("def f(m=torch):\n    setattr(torch, 'cat', m)", "import sys as s\nM = s.modules"),
        *("def f(model):\n    return model.__closure__", "def f(x):\n    x.__defaults__ = ()"),
        *("import course", "def f():\n    global max\n    max = f"),
    ],
)
def test_what_reaches_for_the_checks_is_refused(source):
    assert "belongs to what checks the answer" in lint.lint("import torch\n" + source).refused
    assert lint.lint("from course import require, lm, rng\nx = 1").refused == ""
    assert lint.lint("def f(seed):\n    rng = torch.Generator()\n    show = 1").refused == ""


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nimport triton.language as tl\nimport torch.nn.functional as F\nimport sys",
        "from collections.abc import Sequence\nfrom typing import Any\nfrom math import pi\nx = 1",
        "class A:\n    def max(self, len):\n        self.show = len\n        len.x = 1",
        "def f(torch):\n    torch.x = outcome = 1\n    str: int = 2\n    return [all for all in x]",
        "def f(self):\n    setattr(self, 'k', 1)\n    return type(self).__name__, self.__class__",
    ],
)
def test_names_inside_functions_and_the_same_imports_are_ones_own(source):
    assert lint.lint(source).refused == ""


def test_the_names_that_checks_use_are_reserved():
    used, bound = set(), set()
    for slug in READY:
        for kind, _, source in recordfile.load(catalog.find(slug)).cells:
            if kind != "answer":
                tree = ast.parse(source)
                used |= {n.id for n in ast.walk(tree) if _is_load(n)}
            if kind == "setup":
                bound |= lint._bound(tree) | lint._modules(tree).keys()
    names = bound - {"home", "url", "clone", "pip", "Any", "NamedTuple", "Sequence"}
    assert names <= lint._CHECKS | lint._MODULES.keys()
    assert {n for n in used - {"id"} if hasattr(builtins, n)} <= lint._BUILTINS


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


@pytest.mark.parametrize(
    "use",
    [
        *("getattr(torch, 'c' + 'at')", "map(getattr, x)", "eval('torch.cat')", "vars(torch)"),
        *("torch.__dict__['cat']", "sys.modules['torch']", "operator.methodcaller('cat')"),
        *("importlib.import_module('x')", "__import__('x')", "torch.__getattribute__('cat')"),
        *("string.Formatter().get_field('0.cat', [torch], {})[0]", "print.__self__"),
    ],
)
def test_names_are_not_looked_up_where_some_are_forbidden(use):
    answers = {"f": f"def f(x):\n    return {use}"}
    assert "looks a name up" in lint.shortcut("f", answers, ("torch.cat",))
    assert lint.shortcut("f", answers, ()) == ""
    helper = {"f": "def f(x):\n    return g(x)", "h": f"def g(x):\n    return {use}"}
    assert "`g`" in lint.shortcut("f", helper, ("torch.cat",))
    fine = (
        "def f(self, n):\n    return getattr(self, n), getattr(x, 'k'), self.__dict__, re.compile"
    )
    assert lint.shortcut("f", {"f": fine}, ("torch.cat",)) == ""


@pytest.mark.parametrize(
    "helper",
    [
        "from torch.nn.functional import scaled_dot_product_attention as g",
        "g, one = F.scaled_dot_product_attention, 1",
        "def b(*more):\n    return F.scaled_dot_product_attention(*more)\ng = b",
        "if TYPE_CHECKING:\n    pass\nelse:\n    g = torch.ops.aten._scaled_dot_product_cpu",
        "import pickle\ndef g(*more):\n    return pickle.loads(more)",
    ],
)
def test_what_an_answer_uses_of_other_cells_counts_as_its_own(helper):
    names = demanded("attend")
    answers = {"attend": "def attend(q):\n    return g(q)", "b": helper}
    assert lint.shortcut("attend", answers, names).startswith("`")
    assert lint.shortcut("attend", {**answers, "attend": "def attend(q): pass"}, names) == ""
    assert lint.shortcut("attend", {"attend": helper + "\ndef attend(q): g(q)"}, names)


def test_a_local_called_vars_looks_nothing_up():
    source = "def f(x):\n    vars = x.sum()\n    return vars"
    assert lint.shortcut("f", {"f": source}, ("torch.cat",)) == ""


def test_length_is_bounded():
    assert "characters" in lint.lint("x = 1\n" * 20_000).refused


@pytest.mark.parametrize("slug", READY)
def test_honest_answers_are_never_refused(slug):
    taught = school(slug)
    for answers in (taught.ours, taught.second):
        for key, source in answers.items():
            assert lint.lint(source).refused == ""
            assert lint.shortcut(key, answers, demanded(key, taught)) == ""


def demanded(key: str, taught: School = SCHOOL) -> tuple[str, ...]:
    checks = [s for kind, where, s in taught.record.cells if kind == "check" and where == key]
    return lint.demanded(checks, key)


def test_shortcuts_are_found_in_the_answer_and_in_helpers_of_other_cells():
    names = demanded("LayerKV")
    assert "torch.cat" in names and demanded("kv_bytes_per_token") == ()
    plain = {"LayerKV": "class LayerKV:\n    def append(self, k): return join(k)"}
    helper = "def far(x):\n    return torch.cat(x)\n\ndef join(x):\n    return far(x)\n"
    assert lint.shortcut("LayerKV", plain, names) == ""
    other = {"attend": helper + "def attend(q): return torch.cat(q)"}
    found = lint.shortcut("LayerKV", plain | other, names)
    assert "`far`" in found and "torch.cat" in found
    # the other exercise may use it for itself
    other = {"attend": "def attend(q): return torch.cat(q)"}
    assert lint.shortcut("LayerKV", plain | other, names) == ""
    own = {"LayerKV": "class LayerKV:\n    def append(self, k): return torch.cat(k)"}
    assert "line 2" in lint.shortcut("LayerKV", own, names)


@pytest.mark.parametrize("slug", READY)
def test_every_shortcut_that_the_course_knows_is_found_by_reading(slug):
    from course import mutants

    taught = school(slug)
    known = [m for m in mutants.written(taught.chapter) if m.shortcut]
    missed = [
        m.name
        for m in known
        if not lint.shortcut(m.key, {m.key: m.source}, demanded(m.key, taught))
    ]
    assert known and missed == []


def test_there_are_only_so_many_warnings():
    found = lint.lint("\n".join(f"X{n} = f()" for n in range(1000)))
    assert len(found.warnings) == lint.MAX_WARNINGS and not found.refused
