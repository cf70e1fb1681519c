"""A solved kv_cache notebook to spoil, and the check that must notice."""

import copy
from pathlib import Path

import nbformat
import pytest

from course import catalog, check, mutants, notebook, recordfile, solutions

CHAPTER = catalog.find("kv_cache")
RECORD = recordfile.load(CHAPTER)
REFERENCE = mutants.references(CHAPTER, RECORD)
FAST = ("forward_positions", "kv_bytes_per_token", "LayerKV", "attend", "max_concurrency")
_PRISTINE = notebook.read(CHAPTER.ipynb)


def answered(**answers: str) -> nbformat.NotebookNode:
    """The chapter's notebook with our answers, except those given as whole cell sources."""
    nb = copy.deepcopy(_PRISTINE)
    for cell in nb.cells:
        where = notebook.mark(cell.source) if cell.cell_type == "code" else None
        if where and where[0] == "answer":
            ours = solutions.answer_cell(where[1], REFERENCE[where[1]])
            cell.source = answers.get(where[1], ours)
    return nb


def cell_of(nb: nbformat.NotebookNode, kind: str, key: str) -> nbformat.NotebookNode:
    return next(c for c in nb.cells if notebook.mark(c.source) == (kind, key))


@pytest.fixture
def judge(tmp_path: Path):
    """Check a notebook (node or text) and return verdicts by exercise."""

    def run(nb, only=FAST, timeout=60.0) -> dict[str, check.Verdict]:
        path = tmp_path / "learner.ipynb"
        if isinstance(nb, str):
            path.write_text(nb, encoding="utf-8", newline="")
        else:
            nbformat.write(nb, path)
        found = check.check(CHAPTER, path, set(only), timeout)
        return {verdict.key: verdict for verdict in found}

    return run
