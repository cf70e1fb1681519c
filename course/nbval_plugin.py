"""Our nbval: the same collector and cell item, re-classed to add what checks need.

nbval executes and compares; this plugin decides which cells are tests (the checks), runs what a
check stands on (setup and answers) first, compares shown lines with tolerance, notices a dead
kernel at once, cuts floods of output, and gives every check a stable name. Notebooks that are not
chapters (no `begin("slug")`) are left to plain nbval.
"""

import ast
import json
import os
import queue
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

from course import compare, notebook, recordfile
from course.catalog import find
from course.errors import CourseError
from course.runtime import MIME
from course.text import plain

MAX_OUTPUT = 1 << 20  # bytes of text that one cell may send
MAX_SAID = 1000  # characters of one value or error that a verdict repeats
DEFAULT_TIMEOUT = 60.0
_NBVAL_TIMEOUT = 2000  # nbval's own default, far too long for an exercise
_FRAME = re.compile(r"^\s*Cell In\[(\d+)\], line (\d+)", re.MULTILINE)
_PRELUDE = f"import course.floodgate; course.floodgate.install({MAX_OUTPUT})"
_FRESH = "%reset -f"  # a warm kernel must not remember helpers that were deleted since


class KernelDied(Exception):
    """The kernel process is gone."""


def cut(text: str) -> str:
    """`text`, or its beginning if it is too long to read."""
    return text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]} [... {len(text):,} characters]"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.nbval and config.option.nbval_cell_timeout == _NBVAL_TIMEOUT:
        config.option.nbval_cell_timeout = DEFAULT_TIMEOUT


def pytest_collectstart(collector: pytest.Collector) -> None:
    if type(collector) is IPyNbFile:
        collector.__class__ = ChapterFile


class ChapterFile(IPyNbFile):
    """A chapter: its checks are the tests; setup and answers run before the first of them."""

    def collect(self) -> Iterator[pytest.Item]:
        try:
            nb = notebook.read(self.path)
        except CourseError as problem:
            raise self.CollectError(str(problem)) from None
        slug = notebook.slug_of(nb)
        if not slug:
            self.__class__ = IPyNbFile
            yield from self.collect()
            return
        cells = list(super().collect())
        self.expected = _expectations(slug, nb)
        self.ground: list[ChapterCell] = []  # setup and answer cells, in order
        self.done = 0  # how many of them have run in this kernel
        self.broken: dict[str, str] = {}  # exercise -> why its answer cell failed
        self.dead = ""
        seen: dict[str, int] = {}
        for item in cells:
            kind = notebook.mark(item.cell.source) or next(iter(notebook.tagged(item.cell)), None)
            if not kind or kind[0] not in notebook.GRADED:
                continue
            if kind[0] != "check":
                self.ground.append(self._cell(item, kind, "ground", len(self.ground)))
                continue
            part = seen[kind[1]] = seen.get(kind[1], -1) + 1
            name = f"check-{kind[1]}" + (f"-{part + 1}" if part else "")
            check = self._cell(item, kind, name, len(self.ground), part)
            check.user_properties.append(("exercise", check.key))
            yield check
        asked = nb.metadata.get("course_checks", self.expected)
        missing = [key for key in asked if key not in seen]
        if missing:
            raise self.CollectError(
                f"{self.path.name}: no check cell for {', '.join(missing)}; "
                f"restore the notebook with `git checkout` or `course start`"
            )

    def _cell(
        self, item: IPyNbCell, kind: tuple[str, str], name: str, before: int, part: int = 0
    ) -> "ChapterCell":
        """nbval's item as ours, under a name that does not depend on its position."""
        cell = ChapterCell.from_parent(
            self, name=name, cell_num=item.cell_num, cell=item.cell, options=item.options
        )
        cell.kind, cell.key = kind
        cell.before, cell.part = before, part
        cell.options["check"] = cell.kind == "check"
        cell.options["skip"] = cell.options["check_exception"] = (
            False  # no tag switches a check off
        )
        return cell

    def setup(self) -> None:
        self.warm = self.config.stash.get(WARM, None)
        with kernel_environment():
            if self.warm:
                self.kernel = self.warm
                self.setup_sanitize_files()
            else:
                super().setup()
        self.received = 0
        kernel = self.kernel
        kernel.execute_cell_input = lambda source, allow_stdin=None: kernel.kc.execute(
            source, store_history=True, allow_stdin=False, stop_on_error=False
        )
        kernel.await_reply = self._await_reply
        self.quietly(_FRESH if self.warm else _PRELUDE)

    def quietly(self, source: str) -> None:
        """Run machinery of ours in the kernel."""
        message = self.kernel.execute_cell_input(source)
        self._await_reply(message, 30)
        self.kernel.await_idle(message, 30)

    def _await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """nbval's wait, in slices, so that a dead kernel is noticed within a second."""
        deadline = time.monotonic() + (timeout or DEFAULT_TIMEOUT)
        while True:
            try:
                msg = self.kernel.get_message("shell", timeout=0.5)
            except queue.Empty:
                if not self.kernel.is_alive():
                    raise KernelDied from None
                if time.monotonic() > deadline:
                    raise
                continue
            if msg["parent_header"].get("msg_id") == msg_id:
                return

    def get_kernel_message(self, timeout: float | None = None, stream: str = "iopub") -> Any:
        """nbval's, but a cell's text beyond the limit is dropped instead of kept."""
        deadline = time.monotonic() + (timeout or 5)
        while True:
            try:
                msg = super().get_kernel_message(timeout=0.5, stream=stream)
            except queue.Empty:
                if not self.kernel.is_alive():
                    raise KernelDied from None
                if time.monotonic() > deadline:
                    raise
                continue
            if msg["msg_type"] == "stream":
                self.received += len(msg["content"]["text"])
                if self.received > MAX_OUTPUT:
                    msg["content"]["text"] = ""
            return msg

    def teardown(self) -> None:
        if not self.warm:
            super().teardown()


class ChapterCell(IPyNbCell):
    """One cell of a chapter; only check cells are reported."""

    kind: str
    key: str
    before: int  # how many setup and answer cells stand above this one
    part: int = 0  # which of the exercise's check cells, from 0

    def setup(self) -> None:
        """nbval would mark what follows a timeout as an expected failure; we say `blocked`."""

    def runtest(self) -> None:
        chapter = self.parent
        try:
            self._run_ground(chapter)
            if self.key in chapter.broken:
                raise Verdict("error", chapter.broken[self.key])
            if chapter.dead:
                raise Verdict("blocked", chapter.dead)
            self._execute()
        except Verdict as verdict:
            self._report(verdict.status, verdict.text)
            raise
        cut_short = chapter.received > MAX_OUTPUT
        self._report("passed", f"its output was cut after {MAX_OUTPUT:,} characters" * cut_short)

    def _run_ground(self, chapter: ChapterFile) -> None:
        while chapter.done < self.before and not chapter.dead:
            cell = chapter.ground[chapter.done]
            chapter.done += 1
            try:
                cell._execute()
            except Verdict as verdict:
                if cell.kind == "setup":
                    chapter.dead = f"the setup cell failed: {verdict.text}"
                else:
                    chapter.broken[cell.key] = f"the answer cell: {verdict.text}"

    def _execute(self) -> None:
        """Let nbval run and compare this cell; turn whatever goes wrong into one Verdict."""
        chapter = self.parent
        chapter.received, chapter.timed_out = 0, False
        lines = chapter.expected.get(self.key, []) if self.kind == "check" else []
        self.reference = [line for line in lines if line["part"] == self.part]
        self.cell.outputs, self.cell.execution_count = [], 1  # expectations come from the record
        self.output_timeout = 10
        self.shown: list[dict] = []
        option = self.config.option
        allowed = option.nbval_cell_timeout
        if self.kind == "setup":  # it imports torch, and a slow machine is nobody's endless loop
            option.nbval_cell_timeout = max(allowed, DEFAULT_TIMEOUT)
        limit = f"{option.nbval_cell_timeout:g} s"
        try:
            super().runtest()
        except KernelDied:
            raise self._died() from None
        except NbCellError as error:
            self.shown = _shown(self.test_outputs)
            if chapter.timed_out:
                if not chapter.kernel.is_alive():
                    chapter.dead = f"the cell `{self._label()}` could not be stopped"
                raise Verdict("timeout", f"still running after {limit}: an endless loop?") from None
            problem = next((o for o in self.test_outputs if o.output_type == "error"), None)
            if problem is not None:
                raise Verdict("error", self._told(problem)) from None
            raise Verdict("mismatch", "\n".join(self.comparison_traceback) or str(error)) from None
        except Exception as problem:  # nbval stumbles over a kernel that ends at the wrong moment
            if not chapter.kernel.is_alive():
                raise self._died() from None
            raise Verdict("error", f"this cell could not be checked: {problem!r}") from None
        finally:
            option.nbval_cell_timeout = allowed

    def _told(self, problem: Any) -> str:
        """An exception in words; in a check also where it came from and what differed before."""
        text = _explain(problem)
        if self.kind != "check":
            return text
        wrong = next(differences(self.reference, self.shown, only_shown=True), None)
        parts = [text, *_places(problem, self.cell.source)]
        return "\n".join([*parts, f"  before that: {wrong}"] if wrong else parts)

    def _died(self) -> "Verdict":
        self.parent.dead = f"the kernel died in the cell `{self._label()}`"
        return Verdict("died", f"the kernel died while this cell ran ({self._label()})")

    def compare_outputs(self, test: list, ref: list, skip_compare: Any = None) -> bool:
        """Compare shown lines only; ordinary output, images and stderr never matter."""
        self.shown = _shown(test)
        self.comparison_traceback = list(differences(self.reference, self.shown))
        return not self.comparison_traceback

    def _label(self) -> str:
        return f"{self.kind}: {self.key}" if self.key else self.kind

    def _report(self, status: str, text: str) -> None:
        outcome = {"status": status, "text": text, "shown": getattr(self, "shown", [])}
        self.user_properties.append(("outcome", json.dumps(outcome)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo, style: Any = None) -> str:
        if isinstance(excinfo.value, Verdict):
            return f"exercise {self.key}: {excinfo.value.status}\n{excinfo.value.text}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Any, int, str]:
        return self.path, 0, self.name


class Verdict(Exception):
    """Why a check did not pass: status (error, mismatch, timeout, died, blocked) and text."""

    def __init__(self, status: str, text: str):
        super().__init__(status, text)
        self.status, self.text = status, plain(text)


WARM: pytest.StashKey = pytest.StashKey()


def differences(expected: list[dict], shown: list[dict], only_shown: bool = False) -> Iterator[str]:
    """Sentences about every expected line that differs or, unless `only_shown`, is missing.

    Extra lines do not matter.
    """
    got = {line["name"]: line for line in shown}
    if not expected:
        yield "this check has no recorded lines to compare with"
    for want in expected:
        have = got.get(want["name"])
        if have is None:
            if not only_shown:
                yield f"{want['name']}: nothing was shown"
        elif not compare.agree(want["values"], have["values"], want["tol"]):
            yield (
                f"{want['name']}\n  expected {compare.line('', want['values'])[2:]}"
                f"\n  got      {cut(compare.line('', have['values'])[2:])}"
            )


def _expectations(slug: str, nb: Any) -> dict[str, list[dict]]:
    """Exercise -> recorded lines: from the chapter's record file, else from stored outputs."""
    try:
        record = recordfile.load(find(slug))
        return {e.key: e.expected for e in record.exercises}
    except CourseError:
        stored: dict[str, list[dict]] = {}
        parts: dict[str, int] = {}
        for cell in nb.cells:
            where = notebook.mark(cell.source)
            if where and where[0] == "check":
                part = parts[where[1]] = parts.get(where[1], -1) + 1
                lines = [dict(line, part=part) for line in _shown(cell.outputs)]
                stored.setdefault(where[1], []).extend(lines)
        return stored


def _shown(outputs: list) -> list[dict]:
    """The lines that `show` displayed. What a cell displays by itself is not trusted to be one."""
    lines = [o["data"].get(MIME) for o in outputs if "data" in o]
    return [line for line in lines if _is_line(line)]


def _is_line(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("name"), str)
        and isinstance(line.get("values"), list)
        and isinstance(line.get("tol"), (int, float))
    )


def _explain(problem: Any) -> str:
    """An exception in one line."""
    name, value = problem["ename"], cut(plain(problem["evalue"]).strip())
    if name in ("CheckFailed", "KernelError"):
        return value
    if name in ("StdinNotImplementedError", "EOFError"):
        return "input() cannot be used in an answer: nobody is there to type"
    if name == "SystemExit":
        return f"sys.exit({value}) ends the notebook: return or raise ValueError instead"
    return f"{name}: {value}" if value else name


def _places(problem: Any, check: str) -> Iterator[str]:
    """Where an exception came from: the statement of the check, the line of the answer."""
    frames = _FRAME.findall(plain("\n".join(problem.get("traceback", []))))
    if not frames or problem["ename"] in ("CheckFailed", "KernelError", "NotImplementedError"):
        return
    (cell, number), deepest = frames[0], frames[-1]
    for statement in ast.parse(check).body:
        if statement.lineno <= int(number) <= (statement.end_lineno or 0):
            match statement:
                case ast.Expr(ast.Call(ast.Name("show"), [ast.Constant(label), *_])):
                    yield f"  in the check at show({label!r}, ...)"
                case _:
                    said = " ".join((ast.get_source_segment(check, statement) or "").split())
                    yield f"  in the check at `{said if len(said) < 60 else said[:56] + ' ...'}`"
    if deepest[0] != cell:
        yield f"  in line {deepest[1]} of the answer cell"


def warm_kernel() -> Any:
    """A kernel that stays up between checks (`course watch`); the caller stops it."""
    with kernel_environment():
        kernel = RunningKernel(CURRENT_ENV_KERNEL_NAME, cwd=tempfile.gettempdir())
    message = kernel.kc.execute(_PRELUDE, allow_stdin=False)
    kernel.await_reply(message, 30)
    kernel.await_idle(message, 30)
    return kernel


@cache
def _ipython_folder() -> tempfile.TemporaryDirectory:
    """An empty profile, so that no startup file of the user runs; removed when we exit."""
    return tempfile.TemporaryDirectory(prefix="course-ipython-", ignore_cleanup_errors=True)


@contextmanager
def kernel_environment() -> Iterator[None]:
    """The environment that a kernel of ours starts in; restored for this process afterwards."""
    wanted = {
        "IPYTHONDIR": _ipython_folder().name,
        "PYTHONHASHSEED": "0",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve each other on a busy machine
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "COURSE_SEED": os.environ.get("COURSE_SEED", "0"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
