"""What `course record` refuses, on a toy chapter, and what makes a record stale."""

import dataclasses
from pathlib import Path

import nbformat
import pytest

from course import catalog, mutants, notebook, record, recordfile, skeleton, verify
from course.errors import CourseError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.Chapter:
    """The skeleton of a new chapter, in a tree of its own."""
    kv_cache = catalog.find("kv_cache")
    chapter = dataclasses.replace(kv_cache, slug="toy", prerequisites=(), seconds=40)
    monkeypatch.setattr(catalog, "_load", lambda: ("https://example.org", {}, {"toy": chapter}))
    for module in (catalog, record, skeleton, verify):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    skeleton.new(chapter)
    verify.fix(chapter)
    return chapter


def edit(chapter: catalog.Chapter, old: str, new: str) -> None:
    text = chapter.md.read_text()
    assert old in text
    chapter.md.write_text(text.replace(old, new))


CHECK = 'show("first_step", first_step(torch.randn(3, 5, generator=rng("first_step"))))'
DEMO = "```{{code-cell}} ipython3\n:tags: [demo]\n{options}\n# demo\n{source}\n```\n\n## The kernel"


def demo(source: str, options: str = "") -> str:
    return DEMO.format(source=source, options=options)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (CHECK, "first_step(torch.zeros(1))", "shows nothing"),
        (CHECK, 'show("first_step", first_step(torch.ones(3, 5)))', "0 bits that depend"),
        (CHECK, 'show("x", first_step(torch.randn(3, 5)))', "changes between runs"),
        (CHECK, f"{CHECK}\n{CHECK.replace('3, 5', '2, 2')}", "use the same name"),
        (CHECK, 'show("x", bool(first_step(torch.ones(1)) > 0))', "not whether they agree"),
        ("## The kernel", demo("print('x' * 30_000)"), "prints 30,001 characters"),
        (
            "## The kernel",
            demo("import matplotlib.pyplot as plt\nplt.plot([1, 2]);"),
            "without `mystnb: image: alt:`",
        ),
        ("## The kernel", demo("object()"), "memory address"),
        ("## The kernel", demo("1 / 0"), "fails with the reference: ZeroDivisionError"),
        ("## The kernel", demo("import os\nos._exit(0)"), "the kernel died in cell"),
        (CHECK, f"show(f'{{torch.rand(1, generator=rng(\"n\"))}}', 1)\n{CHECK}", "other names"),
        (CHECK, f"import os\n1 / (os.environ['COURSE_SEED'] == '0')\n{CHECK}", "under seed 1"),
    ],
)
def test_refusals_of_a_run(toy, old, new, message):
    edit(toy, old, new)
    with pytest.raises(CourseError, match=message):
        record.record(toy)
    assert not toy.ipynb.exists() and not toy.record.exists()


def test_a_check_that_needs_a_demo_is_refused(toy):
    """Learners' checks run without the demos."""
    edit(
        toy,
        "### Exercise 1",
        "```{code-cell} ipython3\n:tags: [demo]\n\n# demo\nrows = 3\n```\n\n### Exercise 1",
    )
    edit(toy, CHECK, CHECK.replace("3, 5", "rows, 5"))
    with pytest.raises(CourseError, match="first_step fails alone: NameError: name 'rows'"):
        record.record(toy)


def test_sources_that_are_not_python_are_one_line(toy):
    for path in (toy.solution, toy.mutants):
        text = path.read_text()
        path.write_text(f"{text}\ndef broken(:\n")
        with pytest.raises(CourseError, match=rf"{path.name}: line \d+: invalid syntax"):
            record.record(toy)
        path.write_text(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (":tags: [check-first_step]\n\n# check: first_step", "", "has no kind"),
        (":tags: [check-first_step]", ":tags: [demo]", "two kinds"),
        ("*Difficulty 1 of 3 · 5 minutes*", "", "needs `### Exercise"),
        ("<!-- solution: first_step -->", "", "exercise cards are for"),
        ('begin("toy")', 'begin("other")', "must call begin"),
        ("\n```\n\n## The kernel", "\n\n## The kernel", "is not Python"),
    ],
)
def test_refusals_before_anything_runs(toy, old, new, message):
    edit(toy, old, new)
    with pytest.raises(CourseError, match=message):
        record.record(toy)


def test_a_record_is_stable_and_knows_when_it_is_stale(toy):
    first = record.record(toy)
    text, notebook_text = toy.record.read_text(), toy.ipynb.read_text()
    record.record(toy)
    assert (toy.record.read_text(), toy.ipynb.read_text()) == (text, notebook_text)
    assert [m["mutant"] for m in first.exercises[0].known] == ["not doubled", "tripled"]
    nb = notebook.read(toy.ipynb)
    assert [c.id for c in nb.cells if c.cell_type == "code"][1:] == [
        "answer-first_step",
        "check-first_step",
    ]
    nbformat.validate(nb)
    edit(toy, "What you build", "What one builds")
    ticks = {t.name: t for t in verify.verify(toy)}
    assert not ticks[".md and .ipynb agree"].ok
    assert not ticks["the record is of these sources"].ok
    assert "course record toy" in ticks["the record is of these sources"].detail


def test_verify_sees_what_is_missing(toy):
    """Drifted stub, surviving mutant, stale equivalent, wrong second answer: each a cross."""
    record.record(toy)
    toy.solution.write_text(toy.solution.read_text().replace("say what", "say it: what"))
    toy.mutants.write_text(
        toy.mutants.read_text()
        .replace('"2 * x", "3 * x"', '"2 * x", "x * 2"')
        .replace("EQUIVALENT: dict = {}", 'EQUIVALENT: dict = {"first_step": {"gone#1": "why"}}')
    )
    toy.second_answers.write_text(toy.second_answers.read_text().replace("x + x", "x + x + 1e-2"))
    crosses = " | ".join(f"{t.name}: {t.detail}" for t in verify.verify(toy) if not t.ok)
    for part in (
        "course verify toy --fix",
        "first_step: tripled",
        "listed, but gone: first_step: gone#1",
        "first_step, seed 1",
    ):
        assert part in crosses, crosses
    assert recordfile.load(toy).keys == ["first_step"]


def test_a_loop_of_a_check_may_go_on_for_longer_than_the_reference(toy):
    """The surplus lines are differences like any other."""
    loop = "for i in range(int(first_step(torch.ones(1)))):\n    show(f'step {i}', i)"
    edit(toy, CHECK, f"{CHECK}\n{loop}")
    tripled = next(m for m in record.record(toy).exercises[0].known if m["mutant"] == "tripled")
    assert tripled["differs"][-1]["name"] == "step 2"
    assert [t.name for t in verify.verify(toy) if not t.ok] == []


def test_one_exercise_is_verified_without_a_record(toy):
    edit(toy, "## The kernel", demo("raise SystemExit('demos are left out')"))
    ticks = list(verify.exercise(toy, "first_step"))
    assert len(ticks) > 5 and all(tick.ok for tick in ticks)
    assert not toy.record.exists()
    edit(toy, CHECK, 'show("x", float(first_step(torch.ones(1)) > 0))')
    crosses = " | ".join(f"{t.name}: {t.detail}" for t in verify.exercise(toy, "first_step"))
    assert "first_step: tripled" in crosses
    with pytest.raises(CourseError, match="no exercise `second_step`: first_step"):
        list(verify.exercise(toy, "second_step"))


def test_names_are_not_borrowed_from_another_check():
    def cells(*sources: str) -> list[notebook.Cell]:
        kinds = [("setup", ""), ("check", "one"), ("check", "two")]
        return [
            notebook.Cell(*k, s, i) for i, (k, s) in enumerate(zip(kinds, sources, strict=True))
        ]

    chapter = catalog.find("kv_cache")
    record.stand_alone(chapter, cells("import torch", "def play(x): return x", "torch.ones(1)"))
    record.stand_alone(chapter, cells("def play(): ...", "play()", "x = play()"))
    record.stand_alone(chapter, cells("", "x = 1", "[x for x in range(3)]"))
    with pytest.raises(CourseError, match="check of two uses `play`, which only the check of one"):
        record.stand_alone(chapter, cells("", "def play(): ...", "play()"))


def test_a_mutant_edits_code_and_not_the_docstring(toy):
    """The docstring of the skeleton says `x` too."""
    text = toy.mutants.read_text()
    for old, matches in (("Double", "matches 0 times"), ("x\\n", "ends in a line break")):
        toy.mutants.write_text(text.replace('"2 * x", "3 * x"', f'"{old}", "3 * x"'))
        with pytest.raises(CourseError, match=matches):
            mutants.written(toy)
    toy.mutants.write_text(text)
    assert [m.name for m in mutants.written(toy)] == ["not doubled", "tripled"]


def test_two_mistakes_that_look_alike_need_one_message(toy):
    text = toy.mutants.read_text()
    toy.mutants.write_text(text.replace('"2 * x", "3 * x"', '"2 * x", "x * 1"'))
    record.record(toy)
    crosses = [t.detail for t in verify.verify(toy) if not t.ok]
    assert crosses == ["first_step: `tripled` gets another's message"]
