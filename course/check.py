"""Check a learner's answers: transplant them into the recorded cells and let nbval judge.

The learner's notebook is data: only its answer cells are used. Setup, checks and expectations come
from the chapter's record file, so that edits elsewhere, deleted checks and overwritten outputs
change nothing.
"""

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from course import lint, mistakes, notebook, recordfile
from course.catalog import Chapter
from course.errors import CourseError
from course.recordfile import Record, Recorded

PASSED, FAILED, UNTRIED, BLOCKED = "passed", "failed", "not attempted", "blocked"


@dataclass
class Verdict:
    """What became of one exercise. `text` may have several lines; `mistake` names a known one."""

    key: str
    title: str
    status: str
    text: str = ""
    mistake: str = ""
    hint: str = ""


def find_notebook(chapter: Chapter, explicit: Path | None = None) -> Path:
    """The notebook that holds the learner's answers.

    `work/` or, when edited in place, `notebooks/`; the content decides, never file times. An
    edited .md counts as well. CourseError if two of them hold different answers.
    """
    if explicit:
        return explicit
    record = recordfile.load(chapter)
    stubs = {k: notebook.fingerprint(s) for kind, k, s in record.cells if kind == "answer"}
    edited: dict[str, Path] = {}
    for path in (chapter.work, chapter.ipynb, chapter.md):
        if not path.exists():
            continue
        answers = notebook.answers(notebook.read(path), record.keys).answers
        prints = {k: notebook.fingerprint(s) for k, s in answers.items()}
        if any(prints.get(k) != p for k, p in stubs.items()):
            edited.setdefault(json.dumps(prints, sort_keys=True), path)
    if len(edited) > 1:
        names = " and ".join(str(p) for p in edited.values())
        raise CourseError(
            f"{names} hold different answers: say which one with `--notebook PATH`, or undo the "
            f"other with `git checkout notebooks`"
        )
    if edited:
        return next(iter(edited.values()))
    return chapter.work if chapter.work.exists() else chapter.ipynb


def check(
    chapter: Chapter,
    path: Path,
    only: set[str] | None = None,
    timeout: float = 60,
    kernel: Any = None,
    progress: Callable[[str], None] = lambda key: None,
) -> list[Verdict]:
    """Judge the answers in the notebook at `path`, one verdict per exercise in order.

    Args:
        only: check these exercises alone.
        timeout: seconds that one cell may run.
        kernel: a warm nbval kernel to use instead of starting one.
        progress: called with the key of each exercise whose check has ended.

    Raises CourseError for an unknown exercise or a notebook that cannot be read.
    """
    record = recordfile.load(chapter)
    for key in only or ():
        recordfile.known_exercise(chapter, record, key)
    learner = notebook.read(path)
    found = notebook.answers(learner, record.keys)
    stubs = {key: source for kind, key, source in record.cells if kind == "answer"}
    usable = {
        key: found.answers[key] if key in found.answers and key not in found.problems else stub
        for key, stub in stubs.items()
    }
    asked = [e for e in record.exercises if only is None or e.key in only]
    verdicts, tried = {}, []
    for exercise in asked:
        verdict = _untried(exercise, found, stubs[exercise.key])
        if verdict:
            verdicts[exercise.key] = verdict
            progress(exercise.key)
        else:
            tried.append(exercise.key)
    if tried:
        outcomes = run(_notebook(record, usable, tried), timeout, kernel, progress)
        for key in tried:
            verdicts[key] = _verdict(record.exercise(key), outcomes[key], learner)
            if verdicts[key].status == PASSED:
                verdicts[key].text += _refused_elsewhere(usable[key])
        _rerun_alone(chapter, record, usable, verdicts, timeout, kernel)
    return [verdicts[e.key] for e in asked]


def changed_elsewhere(record: Record, path: Path) -> int:
    """How many setup and check cells of the learner's notebook differ from the recorded ones."""
    theirs = {
        (where[0], notebook.clean(cell.source))
        for cell in notebook.read(path).cells
        if cell.cell_type == "code"
        and (where := notebook.mark(cell.source))
        and where[0] in ("setup", "check")
    }
    ours = {(kind, source) for kind, _, source in record.cells if kind != "answer"}
    return len(theirs - ours)


def _untried(exercise: Recorded, found: notebook.Found, stub: str) -> Verdict | None:
    """The verdict of an exercise whose check need not run."""
    key, title = exercise.key, exercise.title
    answer = found.answers.get(key)
    if answer is not None and notebook.fingerprint(answer) == notebook.fingerprint(stub):
        return Verdict(key, title, UNTRIED)
    if key in found.problems:
        status = FAILED if answer is not None else UNTRIED
        return Verdict(key, title, status, found.problems[key])
    return None


def _notebook(record: Record, answers: dict[str, str], keys: list[str]) -> nbformat.NotebookNode:
    """Setup, all answers, and the checks of `keys`."""
    nb = nbformat.v4.new_notebook()
    for kind, key, source in record.cells:
        if kind == "answer":
            source = answers[key]
        if kind != "check" or key in keys:
            nb.cells.append(nbformat.v4.new_code_cell(_marked(kind, key, source)))
    return nb


def _marked(kind: str, key: str, source: str) -> str:
    """The source under its marker line, which a learner's cell may have lost to its tag."""
    if notebook.mark(source):
        return source
    return f"# {kind}: {key}\n{source}" if key else f"# {kind}\n{source}"


def run(
    nb: nbformat.NotebookNode,
    timeout: float,
    kernel: Any = None,
    progress: Callable[[str], None] = lambda key: None,
) -> dict[str, dict]:
    """Run the checks of a notebook through pytest and nbval in this process.

    Returns, per exercise, `status` (passed, error, mismatch, timeout, died, blocked), `text` and
    the `shown` lines. An exercise whose check gave no result counts as blocked.
    """
    import pytest

    from course import nbval_plugin

    keys = [
        where[1] for c in nb.cells if (where := notebook.mark(c.source)) and where[0] == "check"
    ]
    outcomes: dict[str, dict] = {}
    stopped: list[BaseException] = []

    class Collect:
        def pytest_configure(self, config: pytest.Config) -> None:
            if kernel is not None:
                config.stash[nbval_plugin.WARM] = kernel

        def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo) -> None:
            if excinfo.type is KeyboardInterrupt:  # pytest would call it a result
                stopped.append(excinfo.value)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            said = {name: str(value) for name, value in report.user_properties}
            if report.when == "call" and "outcome" in said:
                _merge(outcomes, said["exercise"], json.loads(said["outcome"]))
                progress(said["exercise"])

    with tempfile.TemporaryDirectory(prefix="course-check-") as folder:
        file = Path(folder) / "notebook.ipynb"
        nb.metadata["course_checks"] = keys  # the plugin need not ask for the others
        nbformat.write(nb, file)
        arguments = [
            *("-p", "nbval.plugin", "-p", "course.nbval_plugin", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", folder, "--nbval", "--nbval-current-env"),
            *("--nbval-cell-timeout", str(timeout), "--color", "no", "-q", str(file)),
        ]
        said = io.StringIO()
        autoload = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                pytest.main(arguments, plugins=[Collect()])
        finally:
            if autoload is None:
                del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
            else:
                os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = autoload
    if stopped:
        raise KeyboardInterrupt
    if keys and not outcomes:
        raise CourseError(f"the checks could not run: {_reason(said.getvalue())}")
    nothing = {"status": BLOCKED, "text": "this check gave no result", "shown": []}
    return {key: outcomes.get(key, nothing) for key in keys}


def _merge(outcomes: dict[str, dict], key: str, outcome: dict) -> None:
    """An exercise with several check cells passes only if all of them do."""
    first = outcomes.setdefault(key, outcome)
    if first is not outcome:
        first["shown"] += outcome["shown"]
        if first["status"] == PASSED:
            first["status"], first["text"] = outcome["status"], outcome["text"]


def _reason(output: str) -> str:
    errors = re.findall(r"^(?:E\s+|pytest plugin exception: )(.+)$", output, re.MULTILINE)
    if any("NoSuchKernel" in e or "kernel" in e.lower() for e in errors):
        return "no Jupyter kernel starts here; `course doctor` says what is missing"
    lines = errors or [line for line in output.splitlines() if line.strip()] or ["no output"]
    return lines[-1][:200]


def _verdict(exercise: Recorded, outcome: dict, learner: nbformat.NotebookNode) -> Verdict:
    key, title, status = exercise.key, exercise.title, outcome["status"]
    if status == "passed":
        return Verdict(key, title, PASSED, outcome["text"])
    if status == "blocked":
        return Verdict(key, title, BLOCKED, outcome["text"])
    mistake = mistake_of(exercise, outcome)
    text = outcome["text"] + _elsewhere(outcome["text"], learner)
    return Verdict(key, title, FAILED, text, mistake, exercise.hint)


def mistake_of(exercise: Recorded, outcome: dict) -> str:
    """The message of the known mistake that an outcome shows, or an empty string."""
    error = "" if outcome["status"] == "mismatch" else outcome["text"]
    return mistakes.named(exercise, outcome["shown"], error)


def _refused_elsewhere(answer: str) -> str:
    """A line for who hands a right answer in that `course grade` would not run."""
    with contextlib.suppress(*notebook.UNPARSABLE):
        refused = lint.lint(answer).refused
        return f"\nbut `course grade` would refuse it: {refused}" if refused else ""
    return ""


def _elsewhere(text: str, learner: nbformat.NotebookNode) -> str:
    """Advice when an answer needs a name that another cell of the notebook defines."""
    missing = re.match(r"NameError: name '(\w+)' is not defined", text)
    if not missing:
        return ""
    for cell in learner.cells:
        if cell.cell_type == "code" and not notebook.mark(cell.source):
            with contextlib.suppress(*notebook.UNPARSABLE):
                if missing[1] in notebook.defined(ast.parse(cell.source)):
                    return (
                        f"\n  `{missing[1]}` is defined in a cell of your own, which checks do "
                        f"not run: move it into the answer cell"
                    )
    return ""


def _rerun_alone(
    chapter: Chapter,
    record: Record,
    answers: dict[str, str],
    verdicts: dict[str, Verdict],
    timeout: float,
    kernel: Any,
) -> None:
    """Run each failed check once more with our answers in the other exercises it uses.

    Only exercises that use others need it; the result is told, the verdict stays a fail unless
    nothing but the others was wrong, which makes it blocked.
    """
    from course import solutions

    failed = [e for e in record.exercises if e.key in verdicts and verdicts[e.key].status == FAILED]
    failed = [e for e in failed if e.needs]
    if not failed or not chapter.solution.exists():
        return
    ours = {
        key: solutions.answer_cell(key, solutions.from_file(chapter.solution, key))
        for key in record.keys
    }
    nb = nbformat.v4.new_notebook()
    for kind, key, source in record.cells:
        if kind == "setup":
            nb.cells.append(nbformat.v4.new_code_cell(source))
        elif kind == "answer":
            nb.cells.append(nbformat.v4.new_code_cell(ours[key]))
    for exercise in failed:
        key = exercise.key
        nb.cells.append(nbformat.v4.new_code_cell(_marked("answer", key, answers[key])))
        for kind, where, source in record.cells:
            if kind == "check" and where == key:
                nb.cells.append(nbformat.v4.new_code_cell(source))
        nb.cells.append(nbformat.v4.new_code_cell(ours[key]))
    outcomes = run(nb, timeout, kernel)
    for exercise in failed:
        verdict, again = verdicts[exercise.key], outcomes[exercise.key]["status"]
        if again == "blocked":  # another exercise killed this run: it tells nothing
            continue
        if again == "passed":
            asked = [k for k in exercise.needs if k in verdicts]
            guilty = [k for k in asked if verdicts[k].status != PASSED]
            names = ", ".join(f"`{k}`" for k in guilty or exercise.needs)
            verdict.status = BLOCKED
            verdict.text = f"fails because of {names}; with ours it passes"
            verdict.mistake = verdict.hint = ""
        else:
            verdict.text += "\n  (fails alone: also with our answers in the other exercises)"
