"""The lint refuses what runs at once and what solves an exercise; it rejects no honest answer."""

import pytest

from course import catalog, lint
from tests.grade.classes import School, school

SCHOOL = school()


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""\nimport torch\nfrom math import pi\nX: int = 3\nA, B = 1, [2.0, -pi]\npass',
        "BLOCK = tl.constexpr(16)",
        "@triton.jit\ndef f(x):\n    print(x)\n    torch.cat = x",
        "class A(B, metaclass=C):\n    x = 1\n    print(x)\nasync def g():\n    await g()",
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
    ],
)
def test_what_reaches_for_the_checks_is_refused(source):
    assert "belongs to what checks the answer" in lint.lint("import torch\n" + source).refused
    assert lint.lint("from course import require, lab, rng\nx = 1").refused == ""
    assert lint.lint("def f(seed):\n    rng = torch.Generator()\n    show = 1").refused == ""


@pytest.mark.parametrize(
    "use",
    [
        *("getattr(torch, 'c' + 'at')", "map(getattr, x)", "eval('torch.cat')", "vars(torch)"),
        *("torch.__dict__['cat']", "sys.modules['torch']", "operator.methodcaller('cat')"),
        *("importlib.import_module('x')", "__import__('x')", "torch.__getattribute__('cat')"),
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


def test_length_is_bounded():
    assert "characters" in lint.lint("x = 1\n" * 20_000).refused


READY = [chapter.slug for chapter in catalog.chapters() if chapter.status == "ready"]


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
