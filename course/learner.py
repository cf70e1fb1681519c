"""A learner's own copy of a chapter: start it, reset a stub, find what to do next."""

import shutil
from pathlib import Path

import nbformat

from course import notebook, recordfile, solutions
from course.catalog import Chapter
from course.check import find_notebook
from course.errors import CourseError
from course.recordfile import Record, write_text


def start(chapter: Chapter) -> tuple[Path, bool]:
    """The learner's copy in `work/`, made if there is none. Returns (path, newly made).

    The copy has the recorded stubs and checks, even if the original was edited in place, and the
    outputs of `predict` cells are taken out: they would give the number away.
    """
    if chapter.work.exists():
        notebook.read(chapter.work)  # refuse a broken one here rather than in the browser
        return chapter.work, False
    nb, record = notebook.read(chapter.ipynb), recordfile.load(chapter)
    pristine = iter(source for _, _, source in record.cells)
    for cell in nb.cells:
        where = notebook.mark(cell.source) if cell.cell_type == "code" else None
        if where and where[0] in notebook.GRADED:
            cell.source = next(pristine)
        if where and where[0] == "predict":
            cell.outputs = []
    write_text(chapter.work, nbformat.writes(nb) + "\n")
    return chapter.work, True


def reset(chapter: Chapter, key: str) -> tuple[Path, Path]:
    """Put the stub of `key` back. Returns (notebook, backup of what was there)."""
    record = recordfile.load(chapter)
    recordfile.known_exercise(chapter, record, key)
    path = find_notebook(chapter)
    if path.suffix == ".md":
        raise CourseError(f"{path} is the source text: edit the stub there by hand")
    nb = notebook.read(path)
    stub = next(source for kind, k, source in record.cells if (kind, k) == ("answer", key))
    answer_cells = [c for c in nb.cells if c.cell_type == "code" and _answers(c, key)]
    if answer_cells:
        answer_cells[0].source = stub
        nb.cells = [c for c in nb.cells if not any(c is other for other in answer_cells[1:])]
    else:
        fresh = nbformat.v4.new_code_cell(stub, metadata={"tags": [f"answer-{key}"]})
        nb.cells.insert(_after_card(nb, key), fresh)
    backup = _backup(path)
    shutil.copy2(path, backup)
    write_text(path, nbformat.writes(nb) + "\n")
    return path, backup


def next_exercise(chapter: Chapter, record: Record) -> str:
    """The first exercise that has not passed yet, or the last one."""
    from course import progress

    row = progress.load().get(chapter.slug, {})
    return next((k for k in record.keys if k not in row or not row[k].passed), record.keys[-1])


def reference(chapter: Chapter, key: str) -> str:
    """The reference answer to `key`, for reading."""
    recordfile.known_exercise(chapter, recordfile.load(chapter), key)
    return solutions.from_file(chapter.solution, key)


def _answers(cell: nbformat.NotebookNode, key: str) -> bool:
    return (notebook.mark(cell.source) or next(iter(notebook.tagged(cell)), None)) == (
        "answer",
        key,
    )


def _after_card(nb: nbformat.NotebookNode, key: str) -> int:
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "markdown" and f"<!-- solution: {key} -->" in cell.source:
            return index + 1
    return len(nb.cells)


def _backup(path: Path) -> Path:
    number = 1
    while (backup := path.with_name(f"{path.stem}.backup-{number}{path.suffix}")).exists():
        number += 1
    return backup
