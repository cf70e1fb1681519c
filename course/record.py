"""Record a chapter: execute it with the reference answers, keep stubs and outputs.

Writes the .ipynb (stubs, outputs, stable ids) and the record file, both or neither.
"""

import ast
import copy
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat

from course import compare, mutants, notebook, solutions
from course.catalog import ROOT, Chapter
from course.errors import CourseError
from course.notebook import Cell
from course.recordfile import Record, Recorded, save, write_text
from course.runtime import MIME
from course.shell import Worker, WorkerLost
from course.text import plain

MAX_TEXT, MAX_IMAGE = 20 << 10, 150 << 10
MIN_BITS = 32
CELL_TIMEOUT = 300
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
PINNED = ("torch", "triton", "numpy", "tokenizers")
# The kernel keeps what it frees: fresh pages for large tensors cost up to a quarter of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
IMAGES = ("image/svg+xml", "image/png", "image/jpeg")


def record(chapter: Chapter, progress: Callable[[str], None] = lambda what: None) -> Record:
    """Record `chapter` and return what was written.

    Raises CourseError for anything that makes the chapter unfit to be checked: a cell without a
    kind, a check that shows nothing or does not depend on the seed, outputs that change between
    runs, an image without alt text, too much output.
    """
    nb, new = build(chapter, progress)
    write_text(chapter.ipynb, nbformat.writes(nb) + "\n")
    save(chapter, new)
    return new


def build(
    chapter: Chapter, progress: Callable[[str], None] = lambda what: None
) -> tuple[nbformat.NotebookNode, Record]:
    """Everything that `record` does, without writing."""
    where = chapter.md.name
    nb = notebook.read(chapter.md)
    cells = notebook.cells(nb, where)
    new = skeleton(chapter, nb, cells)
    mutants.written(chapter)  # an edit that does not match should fail before minutes of work
    outputs = _execute(chapter, nb, cells, progress)
    for cell in cells:
        shown = [o["data"][MIME] for o in outputs.get(cell.index, []) if MIME in o.get("data", {})]
        if cell.kind == "check":
            _collect(new.exercise(cell.key), shown)
    with Worker() as worker:
        progress("second seed, one thread")
        _second_runs(chapter, new, worker)
        progress("known mistakes")
        for key, known in mutants.fingerprints(worker, chapter, new).items():
            new.exercise(key).known = known
    for exercise in new.exercises:
        exercise.automatic = mutants.unequal(chapter, exercise.key)
    return _finished(chapter, nb, cells, outputs), new


def show_checks(chapter: Chapter, new: Record, worker: Worker, key: str) -> None:
    """Fill in what the check of one exercise shows with the reference answers; nothing else runs.

    Raises CourseError if it fails or shows nothing.
    """
    job = mutants.cells(new, mutants.references(chapter, new), key)
    ran = worker.run(job, timeout=CELL_TIMEOUT)[key]
    if ran.error:
        raise CourseError(f"the check of {key} fails with the reference: {ran.error}")
    _collect(new.exercise(key), ran.shown)


def skeleton(chapter: Chapter, nb: nbformat.NotebookNode, cells: list[Cell]) -> Record:
    """The record before anything ran. CourseError if cards, cells and solutions disagree."""
    cards = notebook.exercises(nb, chapter.md.name)
    order = [card.key for card in cards]
    for kind in ("answer", "check"):
        found = list(dict.fromkeys(c.key for c in cells if c.kind == kind))
        if found != order:
            raise CourseError(
                f"{chapter.md.name}: exercise cards are for {', '.join(order)}, but {kind} cells "
                f"for {', '.join(found)}"
            )
    missing = set(order) - set(solutions.keys(chapter.solution))
    if missing:
        raise CourseError(f"{chapter.solution} lacks {', '.join(sorted(missing))}")
    if not cells or cells[0].kind != "setup" or notebook.slug_of(nb) != chapter.slug:
        raise CourseError(
            f'{chapter.md.name}: the first code cell must call begin("{chapter.slug}")'
        )
    checks: dict[str, str] = {}
    for cell in cells:
        if cell.kind == "check":
            checks[cell.key] = checks.get(cell.key, "") + cell.source
    stand_alone(chapter, cells)
    return Record(
        chapter.slug,
        depends(chapter),
        [[c.kind, c.key, c.source] for c in cells if c.kind in notebook.GRADED],
        [
            Recorded(
                card.key,
                card.title,
                card.difficulty,
                card.minutes,
                card.hint,
                _needs(chapter, card.key, order, checks),
                notebook.fingerprint(checks[card.key]),
            )
            for card in cards
        ],
    )


def stand_alone(chapter: Chapter, cells: list[Cell]) -> None:
    """CourseError if a check uses a name that only another exercise's check defines."""

    def names(kind: str, key: str, store: bool) -> set[str]:
        trees = [ast.parse(c.source) for c in cells if (c.kind, c.key) == (kind, key)]
        return {name for tree in trees for name in (_bound(tree) if store else _used(tree))}

    keys = dict.fromkeys(c.key for c in cells if c.kind == "check")
    given = names("setup", "", True) | {n for k in keys for n in names("answer", k, True)}
    for key in keys:
        missing = names("check", key, False) - names("check", key, True) - given
        for other in keys:
            if borrowed := missing & names("check", other, True):
                raise CourseError(
                    f"{chapter.md.name}: the check of {key} uses `{min(borrowed)}`, which only "
                    f"the check of {other} defines, and checks run alone: define it in the setup "
                    f"cell"
                )


def _bound(tree: ast.AST) -> set[str]:
    """Every name that a cell binds, in whatever scope: a wide net, so that nothing is refused
    for a parameter or a loop variable."""
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and _stores(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _stores(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _used(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not _stores(n)}


def depends(chapter: Chapter) -> str:
    """A hash of what the outputs depend on: texts, the modules they import, pinned versions."""
    digest = hashlib.sha256()
    paths = {chapter.md, chapter.solution, chapter.mutants}
    paths |= {solutions.origin(chapter.solution, k) for k in solutions.keys(chapter.solution)}
    paths |= {ROOT / "course" / f"{name}.py" for name in ("runtime", "compare", "forbidden")}
    for cell in notebook.read(chapter.md).cells:
        if cell.cell_type == "code":
            paths |= _imported(cell.source)
    for path in sorted(paths):
        if path.exists():
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_text(encoding="utf-8").replace("\r\n", "\n").encode())
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    digest.update("\n".join(re.findall(rf"^(?:{'|'.join(PINNED)})==\S+", pins, re.M)).encode())
    return digest.hexdigest()[:16]


def _imported(source: str) -> set[Path]:
    """The files of `course` and `kernels` that a cell imports by name."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    dotted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = set()
    for name in dotted:
        if name.split(".")[0] in ("course", "kernels") and "." in name:
            place = ROOT / name.replace(".", "/")
            found |= set(place.glob("*.py")) if place.is_dir() else {place.with_suffix(".py")}
    return found


def _needs(chapter: Chapter, key: str, keys: list[str], checks: dict[str, str]) -> list[str]:
    """The other exercises whose names the reference answer or the check of `key` uses."""

    def uses(source: str) -> set[str]:
        return _used(ast.parse(source)) & set(keys)

    needed: set[str] = set()
    queue = [uses(checks[key]) | uses(solutions.from_file(chapter.solution, key))]
    while queue:
        for other in queue.pop() - needed - {key}:
            needed.add(other)
            queue.append(uses(solutions.from_file(chapter.solution, other)))
    return [k for k in keys if k in needed]


def _execute(
    chapter: Chapter,
    nb: nbformat.NotebookNode,
    cells: list[Cell],
    progress: Callable[[str], None],
) -> dict[int, list]:
    """Run all cells with the reference answers. Returns outputs by cell index."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    from course.nbval_plugin import kernel_environment

    filled = copy.deepcopy(nb)
    for cell in cells:
        if cell.kind == "answer":
            source = solutions.from_file(chapter.solution, cell.key)
            filled.cells[cell.index].source = solutions.answer_cell(cell.key, source)
    kept = _outputs_to_keep(chapter)
    outputs: dict[int, list] = {}
    with tempfile.TemporaryDirectory(prefix="course-record-") as folder, kernel_environment():
        client = NotebookClient(
            filled,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,  # a busy machine may send what a cell prints in two pieces
            resources={"metadata": {"path": folder}},
        )
        # the second runs have one thread, whatever the author's shell says
        env = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "2"}
        with client.setup_kernel(stderr=subprocess.DEVNULL, env=env):
            for cell in cells:
                progress(f"{cell.kind} {cell.key}".strip())
                if cell.kind == "gpu" and not _cuda():
                    outputs[cell.index] = kept.get(cell.source, [])
                    continue
                try:
                    ran = client.execute_cell(filled.cells[cell.index], cell.index)
                except CellTimeoutError:
                    raise CourseError(
                        f"{chapter.md.name}: cell {cell.index} runs over {CELL_TIMEOUT} s"
                    ) from None
                except DeadKernelError:
                    raise CourseError(
                        f"{chapter.md.name}: the kernel died in cell {cell.index} "
                        f"({cell.kind} {cell.key})"
                    ) from None
                except CellExecutionError as problem:
                    raise CourseError(
                        f"{chapter.md.name}: cell {cell.index} ({cell.kind} {cell.key}) fails "
                        f"with the reference: "
                        f"{plain(f'{problem.ename}: {problem.evalue}')[:300]}"
                    ) from None
                outputs[cell.index] = _tidy(cell, ran.outputs)
                if cell.varies and cell.source in kept:
                    outputs[cell.index] = kept[cell.source]
                _limits(chapter, nb.cells[cell.index], cell, outputs[cell.index])
    return outputs


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _outputs_to_keep(chapter: Chapter) -> dict[str, list]:
    """Outputs of the last recording by cell source: of times, and of GPU cells without a GPU."""
    if not chapter.ipynb.exists():
        return {}
    old = notebook.read(chapter.ipynb)
    return {
        notebook.clean(c.source): c.outputs
        for c in old.cells
        if c.cell_type == "code" and c.outputs
    }


def _tidy(cell: Cell, outputs: list) -> list:
    """What a page shows: of checks the shown lines, of the rest everything but stderr."""
    keep = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if cell.kind == "check" and MIME not in output.get("data", {}):
            continue
        output = copy.deepcopy(output)
        output.pop("execution_count", None)
        if output.output_type == "execute_result":
            output["execution_count"] = None
        if any(image in output.get("data", {}) for image in IMAGES):
            output.data = {k: v for k, v in output.data.items() if k in IMAGES}
        keep.append(output)
    return keep


def _limits(chapter: Chapter, source_cell, cell: Cell, outputs: list) -> None:
    where = f"{chapter.md.name}: cell {cell.index} ({cell.kind} {cell.key})"
    text = sum(len(str(o.get("text", ""))) for o in outputs)
    images = [v for o in outputs for k, v in o.get("data", {}).items() if k in IMAGES]
    text += sum(len(str(o["data"].get("text/plain", ""))) for o in outputs if "data" in o)
    if text > MAX_TEXT:
        raise CourseError(f"{where} prints {text:,} characters; at most {MAX_TEXT:,}")
    printed = "".join(str(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs)
    if ADDRESS.search(printed):
        raise CourseError(
            f"{where} prints a memory address, which changes at every run: end the line with `;`"
        )
    if any(len(image) > MAX_IMAGE for image in images):
        raise CourseError(f"{where} shows an image over {MAX_IMAGE >> 10} KiB")
    alt = source_cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
    if images and not alt.strip():
        raise CourseError(f"{where} shows an image without `mystnb: image: alt:` text")


def _collect(exercise: Recorded, shown: list[dict]) -> None:
    if not shown:
        raise CourseError(f"the check of {exercise.key} shows nothing: call show(...) in it")
    part = exercise.expected[-1]["part"] + 1 if exercise.expected else 0
    exercise.expected += [dict(line, part=part) for line in shown]


def _second_runs(chapter: Chapter, new: Record, worker: Worker) -> None:
    """Run setup and checks again: the same under one thread, different under another seed."""
    from course.nbval_plugin import differences

    shown_by: dict[str, str] = {}
    for exercise in new.exercises:
        for name in (line["name"] for line in exercise.expected):
            if name in shown_by:
                raise CourseError(
                    f"{chapter.slug}: two `show` calls use the same name, {name!r}, in the checks "
                    f"of {shown_by[name]} and {exercise.key}"
                )
            shown_by[name] = exercise.key
    job = mutants.cells(new, mutants.references(chapter, new))
    try:
        again, other = (worker.run(job, seed, timeout=CELL_TIMEOUT) for seed in (0, 1))
    except WorkerLost as lost:
        raise CourseError(f"the checks of {chapter.slug} without demos: {lost}") from None
    for exercise in new.exercises:
        ran = again[exercise.key]
        if ran.error:
            raise CourseError(f"the check of {exercise.key} fails alone: {ran.error}")
        for change in differences(exercise.expected, ran.shown):
            raise CourseError(f"the check of {exercise.key} changes between runs: {change}")
        if other[exercise.key].error:
            raise CourseError(
                f"the check of {exercise.key} fails under seed 1: {other[exercise.key].error}"
            )
        moved = {line["name"]: line["values"] for line in other[exercise.key].shown}
        if changed := moved.keys() ^ {line["name"] for line in exercise.expected}:
            raise CourseError(
                f"the check of {exercise.key} shows other names under seed 1: {min(changed)!r}"
            )
        seeded = [
            line
            for line in exercise.expected
            if not compare.agree(line["values"], moved[line["name"]], line["tol"])
        ]
        told = sum(compare.bits(line["values"], line["tol"]) for line in seeded)
        if told < MIN_BITS:
            raise CourseError(
                f"the check of {exercise.key} shows {told:.0f} bits that depend on the seed; it "
                f"needs {MIN_BITS}: show more values computed from course.rng inputs"
            )


def _finished(
    chapter: Chapter, nb: nbformat.NotebookNode, cells: list[Cell], outputs: dict[int, list]
) -> nbformat.NotebookNode:
    """The notebook as committed: stubs, outputs, ids that only change with their cell."""
    kinds = {cell.index: cell for cell in cells}
    used: set[str] = set()
    for index, cell in enumerate(nb.cells):
        known = kinds.get(index)
        if known and known.key:
            name = f"{known.kind}-{known.key}"
        else:
            name = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        base, number = name[:60], 2
        while name in used:
            name, number = f"{base}-{number}", number + 1
        used.add(name)
        cell.id = name
        if known:
            cell.outputs = outputs[index]
            cell.execution_count = None
    nb.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    nb.nbformat, nb.nbformat_minor = 4, 5
    nbformat.validate(nb)
    return nb
