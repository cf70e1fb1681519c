"""Edges of the small parts: sizes, depths, odd sources, files that cannot be written."""

import ast
import dataclasses
import errno
import os

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course import catalog, compare, forbidden, learner, notebook, progress, recordfile, solutions
from course.check import FAILED, PASSED, Verdict
from course.errors import CourseError
from tests.pipeline.conftest import CHAPTER, RECORD, answered


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x" * 2001, "2,001 characters; at most 2,000"),
        (["x" * 1000] * 3, "3,000 characters"),
        ([1] * 1000 + ["a"], "1,001 entries"),
        ([0.5] * 64 + [[0.5]], "more than 64 floats"),
    ],
)
def test_what_is_too_long_to_read_is_refused(value, problem):
    with pytest.raises(ValueError, match=problem):
        compare.tokens("x", value)


@pytest.mark.parametrize("value", [None, {"a": 1}, 1j, b"x", object()])
def test_unknown_types_are_refused(value):
    with pytest.raises(TypeError, match=r"show\('x'\): cannot show a"):
        compare.tokens("x", value)


def test_an_integer_beyond_every_float_differs():
    assert compare.agree([1.0], [10**400], 1e-4) is False
    assert compare.agree([10**400], [10**400], 1e-4) is True
    assert compare.agree([10**400], [1e300], 1e-4) is False


def test_a_shape_is_part_of_what_is_compared():
    flat, square = (compare.tokens("x", torch.ones(shape)) for shape in ((4,), (2, 2)))
    assert flat[1:] == square[1:] and not compare.agree(flat, square, 1e-4)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch import *\ncat([a])", True),
        ("from torch.nn.functional import *", False),
        ("def cat(x):\n    return x\ncat(1)", False),
        ("x = y['cat']", False),
        ("op = torch.ops.aten.cat", True),
    ],
)
def test_scan_of_stars_and_of_names_of_ones_own(source, found):
    assert bool(forbidden.scan(source, ("torch.cat",))) is found


DEEP = ["-" * 100_000 + "1", "+".join(["1"] * 20_000), "f = f" + "[0]" * 5_000, "(" * 1_000]


@pytest.mark.parametrize("source", [*DEEP, "a\0b", "'\ud800'", "x = " + "9" * 5_000, "def f(:"])
def test_no_source_is_too_odd_to_be_refused(source):
    """The parser's own limits must not become a traceback of ours."""
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_code_cell(f"# answer: f\n{source}")]
    found = notebook.answers(nb, ["f"])
    assert "\n" not in found.problems["f"] and "None" not in found.problems["f"]
    assert notebook.fingerprint(source) == notebook.fingerprint(source + "\n")


CARD = (
    "### Exercise {n}: title {n}\n\n*Difficulty {n} of 3 · 5 minutes*\n\nTask.\n\n"
    "<details><summary>Hint</summary>\n\nhint\n{n}\n\n</details>\n\n<!-- solution: f{n} -->\n"
)


def test_exercises_read_their_cards():
    nb = nbformat.v4.new_notebook()
    both = CARD.format(n=1) + "\n" + CARD.format(n=2)
    nb.cells = [nbformat.v4.new_markdown_cell(both), nbformat.v4.new_markdown_cell("prose")]
    assert [dataclasses.astuple(e) for e in notebook.exercises(nb, "x")] == [
        ("f1", "Exercise 1: title 1", 1, 5, "hint 1"),
        ("f2", "Exercise 2: title 2", 2, 5, "hint 2"),
    ]


@pytest.mark.parametrize("part", ["### Exercise 1: title 1", "minutes*", "Hint</summary>"])
def test_a_card_without_one_of_its_parts_is_refused(part):
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_markdown_cell(CARD.format(n=1).replace(part, ""))]
    with pytest.raises(CourseError, match=r"x.md: exercise f1 needs"):
        notebook.exercises(nb, "x.md")


def written(tmp_path, text: str):
    """A chapter whose solution module holds `text`."""
    path = tmp_path / "solution.py"
    path.write_text(text, encoding="utf-8")

    class Chapter:
        solution = path

    return Chapter


@given(step=st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" ")))
@settings(max_examples=150, deadline=None)
def test_a_stub_always_parses_and_raises_its_first_step(tmp_path_factory, step):
    step = "go " + step.strip()
    text = f'def f(x):\n    """Do."""\n    # stub: {step}\n    return x\n'
    stub = solutions.stub(written(tmp_path_factory.mktemp("s"), text), "f")
    assert max(map(len, stub.split("\n"))) <= 79
    space: dict = {}
    exec(stub, space)
    with pytest.raises(NotImplementedError) as raised:
        space["f"](1)
    squeezed = "".join(str(raised.value).split())
    assert squeezed == "".join(step.replace('"', "'").split())


def test_a_dataclass_keeps_its_fields_and_a_typed_constant_comes_along(tmp_path):
    chapter = written(
        tmp_path,
        "from dataclasses import dataclass\n\nSTEP: int = 3\n\n\n"
        '@dataclass\nclass Box:\n    """Holds."""\n\n    size: int\n    free: int = 2\n\n'
        '    def grow(self) -> int:\n        """Grow."""\n        # stub: add the step\n'
        "        return self.size + STEP\n",
    )
    stub = solutions.stub(chapter, "Box")
    assert "    size: int\n    free: int = 2\n" in stub
    assert 'raise NotImplementedError("add the step")' in stub
    space: dict = {}
    exec(
        "from dataclasses import dataclass\n" + solutions.from_file(chapter.solution, "Box"), space
    )
    assert space["Box"](4).grow() == 7


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(x):\n    # stub: a\n    return x\n", "`f` needs a docstring"),
        ('def f(x): "Do."; return x\n', "`f` needs a body on lines of its own"),
        ('def f(x):\n    """Do."""\n    return x\n', "`f` needs a `# stub: first step`"),
        ("def f(:\n", r"solution.py: line 1: invalid syntax"),
    ],
)
def test_a_definition_that_makes_no_stub_is_refused(tmp_path, source, problem):
    with pytest.raises(CourseError, match=problem):
        solutions.stub(written(tmp_path, source), "f")


def test_a_reexport_is_followed_and_renamed(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.py").write_text(
        'WIDE = 2\n\n\ndef _double(x):\n    """Twice `x`."""\n'
        "    # stub: multiply\n    return WIDE * x if x < 9 else _double(x - 1)\n"
    )
    chapter = written(tmp_path, "from kernels.k import _double as double\n")
    monkeypatch.setattr(solutions, "ROOT", tmp_path)
    assert solutions.keys(chapter.solution) == ["double"]
    assert solutions.origin(chapter.solution, "double").name == "k.py"
    space: dict = {}
    exec(solutions.from_file(chapter.solution, "double"), space)
    assert (space["double"](3), space["double"](9), "_double" in space) == (6, 16, False)
    stub = solutions.stub(chapter, "double")
    assert ast.parse(stub).body[0].name == "double" and "WIDE" not in stub


@pytest.mark.parametrize("step", ["mkstemp", "replace"])
def test_a_full_or_readonly_disk_is_one_line_and_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "x.json"
    recordfile.write_text(path, "old")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    module = recordfile.tempfile if step == "mkstemp" else recordfile.os
    monkeypatch.setattr(module, step, refuse)
    with pytest.raises(CourseError, match=r"cannot write .*x.json: Read-only file system"):
        recordfile.write_text(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"] and path.read_text() == "old"


def test_half_a_character_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CourseError, match="half a character"):
        recordfile.write_text(tmp_path / "x", "abc \ud83d def")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def progress_file(tmp_path, monkeypatch):
    path = tmp_path / "work" / "progress.json"
    monkeypatch.setattr(progress, "FILE", path)
    return path


def verdict(key: str, status: str) -> Verdict:
    return Verdict(key, "", status)


def test_progress_survives_a_later_fail_but_not_a_changed_check(progress_file):
    progress.note_solution(CHAPTER, "attend")
    progress.note_verdicts(CHAPTER, RECORD, [verdict("attend", PASSED), verdict("LayerKV", FAILED)])
    progress.note_verdicts(CHAPTER, RECORD, [verdict("attend", FAILED)])
    assert progress.counts(CHAPTER) == (1, 7)
    done = progress.load()["kv_cache"]
    assert done["attend"].passed and done["attend"].solution_seen and "LayerKV" not in done
    assert learner.next_exercise(CHAPTER, RECORD) == RECORD.keys[0]
    text = progress_file.read_text(encoding="utf-8")
    progress_file.write_text(text.replace(RECORD.exercise("attend").check, "0" * 16))
    assert progress.counts(CHAPTER) == (0, 7)


@pytest.mark.parametrize("text", ["", "[]", '{"kv_cache": 3}', '{"kv_cache": {"a": {"b": 1}}}'])
def test_a_broken_progress_file_is_refused_and_kept(progress_file, text):
    progress_file.parent.mkdir()
    progress_file.write_text(text)
    with pytest.raises(CourseError, match="not readable as progress"):
        progress.note_verdicts(CHAPTER, RECORD, [verdict("attend", PASSED)])
    assert progress_file.read_text() == text


def test_a_reset_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch):
    texts = [path.read_text(encoding="utf-8") for path in (CHAPTER.record, CHAPTER.ipynb)]
    monkeypatch.setattr(catalog, "ROOT", tmp_path)  # the chapter's paths now lie there
    texts.append(nbformat.writes(answered()))
    for path, text in zip((CHAPTER.record, CHAPTER.ipynb, CHAPTER.work), texts, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    before = CHAPTER.work.read_text(encoding="utf-8")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recordfile.os, "replace", refuse)
    with pytest.raises(CourseError, match="No space left"):
        learner.reset(CHAPTER, "attend")
    assert CHAPTER.work.read_text(encoding="utf-8") == before


def test_marks_in_other_letters_and_below_a_note():
    for source in ("# Answer: attend\nx", "# mine\n\n# answer:attend \nx", "#answer: attend"):
        assert notebook.mark(source) == ("answer", "attend")
    for source in ("x = 1\n# answer: attend", '"""\n# answer: attend"""', "# answers: attend"):
        assert notebook.mark(source) is None


def test_a_stub_beside_the_answer_is_no_second_answer():
    stub = "# answer: f\ndef f():\n    raise NotImplementedError"
    one, other = "# answer: f\ndef f():\n    return 1", "# answer: f\nf: object = len"
    for cells in ((stub, one), (one, stub), (one, one)):
        found = _answers_of(*cells)
        assert found.answers == {"f": one} and not found.problems
    assert "two different cells" in _answers_of(one, other).problems["f"]
    assert _answers_of(other).problems == {}


def _answers_of(*sources: str) -> notebook.Found:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return notebook.answers(nbformat.v4.new_notebook(cells=cells), ["f"])
