"""Notebooks that learners hand in, whole and broken: the right verdict and a message to act on."""

import json
import time

import nbformat
import pytest

from course import check, notebook
from course.errors import CourseError
from tests.pipeline.conftest import CHAPTER, FAST, REFERENCE, answered, cell_of

POSITIONS = "# answer: forward_positions\n"
BYTES = "# answer: kv_bytes_per_token\n"


def good(key: str) -> str:
    return f"# answer: {key}\n{REFERENCE[key]}"


def instead(key: str, body: str) -> str:
    """A cell that defines `key` with another body."""
    return f"# answer: {key}\ndef {key}(*args, **kwargs):\n    {body}\n"


def statuses(verdicts) -> set[str]:
    return {v.status for v in verdicts.values()}


def test_what_must_not_matter(judge):
    """Order, extra cells, edited and deleted checks, tags, outputs, kernelspec, line ends."""
    nb = answered(
        forward_positions=good("forward_positions") + "\nprint('debug', 1)\nimport warnings\n"
        "warnings.warn('careful')\nprint('\\x1b[31mred\\x1b[0m')",
        attend=good("attend").replace("\n", "\r\n"),
        LayerKV="# answer: LayerKV\n# café, 日本語, naïve\n" + REFERENCE["LayerKV"],
    )
    answers = [c for c in nb.cells if (notebook.mark(c.source) or ("",))[0] == "answer"]
    rest = [c for c in nb.cells if c not in answers]
    nb.cells = rest + answers[::-1]  # moved, out of order, checks before answers
    for cell in nb.cells:
        cell.metadata.pop("tags", None)  # lost tags
    nb.cells.append(nbformat.v4.new_code_cell(good("attend")))  # an identical copy
    cell_of(nb, "check", "attend").source = "# check: attend\npass"
    cell_of(nb, "check", "LayerKV").metadata["tags"] = ["nbval-skip", "raises-exception"]
    nb.cells.remove(cell_of(nb, "check", "forward_positions"))
    cell_of(nb, "check", "kv_bytes_per_token").outputs = []
    nb.metadata["kernelspec"] = {"name": "somewhere-else", "display_name": "?", "language": "R"}
    verdicts = judge(nb)
    assert {k: v.text for k, v in verdicts.items() if v.status != "passed"} == {}
    assert list(verdicts) == [k for k in REFERENCE if k in FAST]


def test_printing_inside_an_answer_does_not_matter(judge):
    noisy = good("kv_bytes_per_token").replace(
        "    if n_layers < 1:", "    print('n_layers', n_layers, end='')\n    if n_layers < 1:", 1
    )
    assert judge(answered(kv_bytes_per_token=noisy), ["kv_bytes_per_token"])[
        "kv_bytes_per_token"
    ].status == ("passed")


def test_a_right_answer_that_grading_would_refuse_says_so(judge):
    keys = ["max_concurrency", "kv_bytes_per_token"]
    more = "\nprint(max_concurrency(80e9, 0.9, 16e9, 131_072, 8192))\n"
    found = judge(answered(max_concurrency=good("max_concurrency") + more), keys)
    assert {verdict.status for verdict in found.values()} == {"passed"}
    assert "`course grade` would refuse it: line" in found["max_concurrency"].text
    assert found["kv_bytes_per_token"].text == ""


def test_broken_cells_fail_alone(judge):
    """Syntax error, renamed function, magics, two versions, deleted cell: one verdict each."""
    nb = answered(
        forward_positions=POSITIONS + "def forward_positions(:\n    pass",
        kv_bytes_per_token=good("kv_bytes_per_token").replace(
            "def kv_bytes_per", "def kv_byte_per"
        ),
        LayerKV="# answer: LayerKV\n!pip list\n" + REFERENCE["LayerKV"],
    )
    nb.cells.append(nbformat.v4.new_code_cell(good("max_concurrency") + "\nextra = 1"))
    nb.cells.remove(cell_of(nb, "answer", "attend"))
    verdicts = judge(nb)
    assert verdicts["forward_positions"].status == "failed"
    assert "line 2 of the answer is not Python" in verdicts["forward_positions"].text
    assert "must define `kv_bytes_per_token`" in verdicts["kv_bytes_per_token"].text
    assert "`kv_byte_per_token`" in verdicts["kv_bytes_per_token"].text
    assert "magics" in verdicts["LayerKV"].text
    assert "two different cells" in verdicts["max_concurrency"].text
    assert verdicts["attend"].status == "not attempted"
    assert "course reset" in verdicts["attend"].text


def test_errors_inside_answers_say_what_happened(judge):
    """input(), sys.exit, a name from another cell, nothing returned."""
    nb = answered(
        forward_positions=instead("forward_positions", "return int(input('how many? '))"),
        kv_bytes_per_token=instead("kv_bytes_per_token", "import sys; sys.exit(0)"),
        max_concurrency=instead("max_concurrency", "return my_helper(*args)"),
        attend=instead("attend", "return None"),
    )
    nb.cells.append(nbformat.v4.new_code_cell("def my_helper(*args):\n    return 1"))
    verdicts = judge(nb)
    assert "input() cannot be used" in verdicts["forward_positions"].text
    assert "sys.exit(0) ends the notebook" in verdicts["kv_bytes_per_token"].text
    assert "move it into the answer cell" in verdicts["max_concurrency"].text
    assert verdicts["attend"].status == "failed" and verdicts["attend"].hint
    assert verdicts["LayerKV"].status == "passed"


def test_an_endless_loop_is_stopped_and_the_rest_goes_on(judge):
    nb = answered(forward_positions=instead("forward_positions", "while True: pass"))
    verdicts = judge(nb, timeout=20)
    assert verdicts["forward_positions"].status == "failed"
    assert "still running after 20 s" in verdicts["forward_positions"].text
    assert {verdicts[k].status for k in FAST[1:]} == {"passed"}


@pytest.mark.parametrize("death", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_dead_kernel_is_noticed_at_once(judge, death):
    body = f"import os; {death}"
    start = time.monotonic()
    verdicts = judge(answered(kv_bytes_per_token=instead("kv_bytes_per_token", body)), timeout=300)
    assert time.monotonic() - start < 100, "waited for the cell timeout"
    assert verdicts["forward_positions"].status == "passed"
    assert verdicts["kv_bytes_per_token"].status == "failed"
    assert "the kernel died" in verdicts["kv_bytes_per_token"].text
    assert {verdicts[k].status for k in FAST[2:]} == {"blocked"}


def test_a_loop_that_cannot_be_interrupted_ends_too(judge):
    body = "\n    ".join(
        ["while True:", "    try:", "        while True: pass", "    except BaseException: pass"]
    )
    verdicts = judge(answered(LayerKV=instead("LayerKV", body)), timeout=20)
    assert verdicts["LayerKV"].status == "failed"
    assert "still running after 20 s" in verdicts["LayerKV"].text
    # whether the kernel survives its second interrupt is a race; nobody may hang on it
    assert verdicts["attend"].status in ("blocked", "passed")


def test_a_flood_of_output_is_cut(judge):
    body = "for _ in range(100): print('x' * (1 << 20))"
    noisy = good("forward_positions").replace(
        "    if prompt_len < 1:", f"    {body}\n    if prompt_len < 1:", 1
    )
    verdicts = judge(answered(forward_positions=noisy), ["forward_positions"], timeout=60)
    assert statuses(verdicts) == {"passed"}  # its values are right; only its noise is cut


def test_wrong_answers_are_named(judge):
    wrong = REFERENCE["kv_bytes_per_token"].replace("return 2 * n_layers", "return n_layers")
    verdict = judge(answered(kv_bytes_per_token=BYTES + wrong), ["kv_bytes_per_token"])[
        "kv_bytes_per_token"
    ]
    assert verdict.status == "failed"
    assert "expected" in verdict.text and "got" in verdict.text
    assert verdict.mistake


def test_an_exercise_that_fails_because_of_another_is_blocked(judge):
    wrong = REFERENCE["attend"].replace("math.sqrt", "(lambda x: 2 * x)", 1)
    assert wrong != REFERENCE["attend"]
    only = ["attend", "generate_cached"]
    verdicts = judge(answered(attend="# answer: attend\n" + wrong), only)
    assert verdicts["attend"].status == "failed"
    assert verdicts["generate_cached"].status == "blocked"
    assert "because of `attend`" in verdicts["generate_cached"].text


def test_the_untouched_chapter_is_not_attempted(judge):
    verdicts = judge(notebook.read(CHAPTER.ipynb), REFERENCE)
    assert statuses(verdicts) == {"not attempted"}
    assert len(verdicts) == 7


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', "not JSON \u00e9"])
def test_what_is_not_a_notebook_is_one_line(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CourseError, match="is not a notebook") as problem:
        check.check(CHAPTER, path)
    assert "\n" not in str(problem.value)


def test_crlf_file_and_byte_order_mark(judge):
    text = json.dumps(answered(), ensure_ascii=False, indent=1).replace("\n", "\r\n")
    assert statuses(judge("\ufeff" + text, ["LayerKV"])) == {"passed"}


def test_a_cell_of_two_kinds_is_refused():
    nb = answered()
    cell_of(nb, "check", "attend").metadata["tags"] = ["demo"]
    with pytest.raises(CourseError, match="two kinds: "):
        notebook.cells(nb, "x.md")


def test_the_content_decides_which_copy_is_checked(tmp_path, monkeypatch):
    """A stale .ipynb with the newer file time does not hide an edited .md; two answers conflict."""
    from course import catalog

    home = CHAPTER.md.parent
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    for name in ("md", "ipynb", "record.json"):
        source = home / f"kv_cache.{name}"
        target = tmp_path / "notebooks" / "foundations" / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    # the path properties read catalog.ROOT, so they now lie in the copy
    assert check.find_notebook(CHAPTER) == CHAPTER.ipynb
    md = CHAPTER.md.read_text(encoding="utf-8")
    edited = md.replace("raise NotImplementedError", "return 1  # raise NotImplementedError", 1)
    CHAPTER.md.write_text(edited, encoding="utf-8")
    CHAPTER.ipynb.touch()
    assert check.find_notebook(CHAPTER) == CHAPTER.md
    nbformat.write(answered(), tmp_path / "work.ipynb")
    CHAPTER.work.parent.mkdir()
    (tmp_path / "work.ipynb").rename(CHAPTER.work)
    with pytest.raises(CourseError, match="hold different answers"):
        check.find_notebook(CHAPTER)
