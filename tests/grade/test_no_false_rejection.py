"""Whoever solved the chapter gets the points, however they solved it and wherever they saved it.

The answers are second ones, `tests/answers/<part>/<slug>.py`, and all that stand beside it: two
people's who had seen the notebook alone, and others that differ in algorithm, layout, order and
intermediate dtype. `course verify` runs the first file under 20 seeds, this module the others. The
real model costs more than everything else together, so only `make test-all` runs it, for a class
of them under its one seed.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from course import mutants, notebook, solutions, verify
from course.check import PASSED
from course.cli import app
from course.grade import submissions, verdict
from course.shell import Worker
from tests.grade.classes import school, statuses

TAUGHT = school()
SLUG, KEYS = TAUGHT.chapter.slug, TAUGHT.record.keys
BESIDE = sorted(TAUGHT.chapter.second_answers.parent.glob(f"{SLUG}_*.py"))
OTHERS = {path.stem: {k: solutions.from_file(path, k) for k in KEYS} for path in BESIDE}
PRISTINE = json.loads(TAUGHT.chapter.ipynb.read_text(encoding="utf-8"))
ENOUGH = 5
Raw = dict[str, Any]


def solved(answers: dict[str, str]) -> Raw:
    """The published notebook with these answers, as Jupyter saves it: format 4.5, cell ids."""
    raw = copy.deepcopy(PRISTINE)
    for cell in raw["cells"]:
        kind, key = notebook.mark("".join(cell["source"])) or ("", "")
        if kind == "answer":
            source = solutions.answer_cell(key, answers[key])
            cell["source"] = source.splitlines(keepends=True)
    return raw


def text(raw: Raw) -> bytes:
    return json.dumps(raw, indent=1, ensure_ascii=False).encode() + b"\n"


def no_tags(raw: Raw) -> bytes:
    """As tools that know no tags leave it, and copying cell by cell into a new notebook."""
    for cell in raw["cells"]:
        cell["metadata"] = {}
    return text(raw)


def crlf(raw: Raw) -> bytes:
    """An editor on Windows ends lines with CR LF, in the sources and in the file around them."""
    for cell in raw["cells"]:
        cell["source"] = [line.replace("\n", "\r\n") for line in cell["source"]]
    return text(raw).replace(b"\n", b"\r\n")


def crlf_around(raw: Raw) -> bytes:
    """Git with `core.autocrlf` changes the ends of the file's own lines, not those in strings."""
    return text(raw).replace(b"\n", b"\r\n")


def one_string(raw: Raw) -> bytes:
    """The format allows one string for a source; tools that use nbformat's memory form write it."""
    for cell in raw["cells"]:
        cell["source"] = "".join(cell["source"])
    return json.dumps(raw).encode()


def vscode(raw: Raw) -> bytes:
    """VS Code sorts all keys, names the kernel after its environment, keeps tags and cell ids, and
    notes the language of cells where it had to be chosen by hand."""
    raw["metadata"] = {
        "kernelspec": {"display_name": ".venv (3.12.3)", "language": "python", "name": "python3"},
        "language_info": {
            "codemirror_mode": {"name": "ipython", "version": 3},
            "file_extension": ".py",
            "mimetype": "text/x-python",
            "name": "python",
            "nbconvert_exporter": "python",
            "pygments_lexer": "ipython3",
            "version": "3.12.3",
        },
    }
    for number, cell in enumerate(raw["cells"]):
        if cell["cell_type"] == "code":
            cell["execution_count"] = number + 1
            cell["metadata"]["vscode"] = {"languageId": "python"}
    return json.dumps(raw, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def older_vscode(raw: Raw) -> bytes:
    """Until 2023 it added `orig_nbformat` and the interpreter's hash; a notebook that it had made
    itself, into which somebody pasted the cells, is in format 4.2, without cell ids."""
    vscode = {"interpreter": {"hash": "0" * 64}}
    raw["metadata"] = {"language_info": {"name": "python"}, "orig_nbformat": 4, "vscode": vscode}
    raw["nbformat_minor"] = 2
    for cell in raw["cells"]:
        del cell["id"]
    return json.dumps(raw, indent=1, sort_keys=True).encode() + b"\n"


def colab(raw: Raw) -> bytes:
    """Colab writes format 4.0: the ids of a cell and of its output are metadata, beside where its
    output lived; the notebook tells the accelerator and where it came from. Tags may get lost."""
    return _colab(raw, lambda about: {})


def colab_with_tags(raw: Raw) -> bytes:
    """The same with the metadata kept that it found."""
    return _colab(raw, lambda about: about)


def _colab(raw: Raw, kept: Callable[[Raw], Raw]) -> bytes:
    cells = []
    for number, cell in enumerate(raw["cells"]):
        about = {**kept(cell["metadata"]), "id": f"Xy{number:010d}"}
        if cell["cell_type"] == "code":
            about["colab"] = {"base_uri": "https://localhost:8080/", "height": 35}
            about["outputId"] = f"5f0c6a52-0000-4000-8000-{number:012d}"
            cell = {**cell, "execution_count": None, "outputs": []}
        cells.append({k: v for k, v in cell.items() if k != "id"} | {"metadata": about})
    about = {
        "colab": {"provenance": [], "toc_visible": True, "gpuType": "T4"},
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python"},
        "accelerator": "GPU",
    }
    first = {"nbformat": 4, "nbformat_minor": 0, "metadata": about, "cells": cells}
    return json.dumps(first, indent=2, ensure_ascii=False).encode()


def jupyterlab(raw: Raw) -> bytes:
    """JupyterLab that records times and trust, saved after a run that printed."""
    when = {"iopub.execute_input": "2026-01-02T03:04:05.678901Z", "shell.execute_reply": "..."}
    for number, cell in enumerate(raw["cells"]):
        cell["metadata"] |= {"editable": True, "slideshow": {"slide_type": ""}}
        if cell["cell_type"] == "code":
            cell["execution_count"] = number
            cell["metadata"] |= {"execution": when, "scrolled": True, "trusted": True}
            printed = {"name": "stdout", "output_type": "stream", "text": ["# answer: attend\n"]}
            cell["outputs"] = [printed]
    raw["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    return text(raw)


FORMS = {
    form.__name__: form
    for form in (
        *(no_tags, colab, crlf, vscode),  # in which the class hands in
        *(crlf_around, one_string, older_vscode, colab_with_tags, jupyterlab),
    )
}


def test_there_are_enough_answers_and_no_two_are_one():
    for key in KEYS:
        answers = [TAUGHT.second[key], *(answers[key] for answers in OTHERS.values())]
        assert len(answers) >= ENOUGH
        prints = {notebook.fingerprint(source) for source in [TAUGHT.ours[key], *answers]}
        assert len(prints) == len(answers) + 1, key


def test_every_answer_passes_under_every_seed():
    """As the grader judges them, but in one warm process without the box."""
    wrong = []
    with Worker() as worker:
        for seed in range(1, verify.SEEDS + 1):
            want = worker.run(
                mutants.cells(TAUGHT.record, TAUGHT.ours, light=True), seed, timeout=120
            )
            assert all(want[key].shown and not want[key].error for key in KEYS)
            for name, answers in OTHERS.items():
                got = worker.run(
                    mutants.cells(TAUGHT.record, answers, light=True), seed, timeout=120
                )
                for exercise in TAUGHT.record.exercises:
                    row = verdict.judge(exercise, want[exercise.key], got.get(exercise.key))
                    if row.status != PASSED:
                        wrong.append(f"{name}, {exercise.key}, seed {seed}: {row.text}")
    assert wrong == []


if os.environ.get("COURSE_TEST_ALL"):

    @pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
    def test_a_class_of_them_gets_full_points_in_the_box(tmp_path):
        """The whole command, with a secret seed, the real model and a form of file for each."""
        handed = {
            name: form(solved(OTHERS[name]))
            for name, form in zip(OTHERS, FORMS.values(), strict=False)
        }
        for name, data in handed.items():
            place = tmp_path / "class" / name / "work" / f"{SLUG}.ipynb"
            place.parent.mkdir(parents=True)
            place.write_bytes(data)
        out = tmp_path / "out"
        options = ("--workers", "1", "--timeout", "600")  # two at once on a busy machine are slow
        said = CliRunner().invoke(
            app, ["grade", str(tmp_path / "class"), "--out", str(out), *options]
        )
        assert said.exit_code == 0, said.output
        verdicts = [json.loads(path.read_text()) for path in (out / "verdicts").iterdir()]
        assert {v["id"] for v in verdicts} == set(handed)
        for one in verdicts:
            assert one["points"] == one["of"] == 12, one
            assert statuses(one) == dict.fromkeys(KEYS, PASSED)


@pytest.mark.parametrize("form", FORMS)
def test_where_a_notebook_was_saved_does_not_matter(tmp_path, form):
    """The grader and `course check` read the same answers from it as from the plain one."""
    raw, read = solved(TAUGHT.second), {}
    for name, data in (("plain", text(raw)), (form, FORMS[form](copy.deepcopy(raw)))):
        path = tmp_path / f"{name}.ipynb"
        path.write_bytes(data)
        read[name] = _answers(path)
    assert read[form] == read["plain"]
    graded, checked = read["plain"]
    assert all(graded[key]["tried"] and not graded[key]["problem"] for key in KEYS)
    assert not checked.problems


def test_the_paired_markdown_with_windows_line_ends_reads_the_same(tmp_path):
    """What jupytext keeps beside the notebook can be handed in alone."""
    pages = TAUGHT.chapter.md.read_text(encoding="utf-8")
    for cell in notebook.cells(notebook.read(TAUGHT.chapter.md), SLUG):
        if cell.kind == "answer":
            source = solutions.answer_cell(cell.key, TAUGHT.second[cell.key])
            pages = pages.replace(f"{cell.source}\n```", f"{source}\n```")
    path, plain = tmp_path / "mine.md", tmp_path / "plain.ipynb"
    path.write_bytes(pages.replace("\n", "\r\n").encode())
    plain.write_bytes(text(solved(TAUGHT.second)))
    assert _answers(path) == _answers(plain)


def _answers(path: Path) -> tuple[dict, notebook.Found]:
    said = submissions.read(path, [SLUG])["chapters"][SLUG]
    assert said["problem"] == ""
    return said["answers"], notebook.answers(notebook.read(path), KEYS)
