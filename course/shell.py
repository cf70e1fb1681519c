"""Run cells in a plain IPython shell inside one warm child process, without a Jupyter kernel.

Recording's second runs, mutants and second answers use it: hundreds of short runs that share one
import of torch and one loaded model. Each job gets a fresh namespace and its own seed.
"""

import functools
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from course.errors import CourseError

MAX_ERROR = 2000  # characters of an error; more than `nbval_plugin` tells, so that both can match


@dataclass
class Ran:
    """What the checks of one exercise did: the lines they showed and the first error."""

    shown: list[dict] = field(default_factory=list)
    error: str = ""  # "ValueError: text", or empty
    seconds: float = field(default=0.0, compare=False)  # of its check cells, by the clock


class WorkerLost(Exception):
    """The child ended or went over its time; the next job gets a new one."""


class Worker:
    """A warm child process. Use as a context manager; not safe for concurrent jobs."""

    def __init__(self, threads: int = 1):
        self._threads = threads
        self.seconds = 0.0  # CPU time that jobs took: a busy machine does not stretch it
        self._child: subprocess.Popen | None = None
        self._home: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        cells: Iterable[tuple[str, str, str]],
        seed: int = 0,
        expected: dict[str, dict] | None = None,
        enough: int = 1,
        timeout: float = 60,
    ) -> dict[str, Ran]:
        """Execute (kind, key, source) cells in order and return what each check showed.

        Args:
            expected: with it, a check stops when `enough` of its lines differ (error `Mismatch`).

        Raises WorkerLost if the child dies or takes longer than `timeout` seconds, CourseError
        if the setup cell fails.
        """
        jobs, replies = self._pipes()
        job = {"seed": seed, "cells": list(cells), "expected": expected, "enough": enough}
        try:
            jobs.write(json.dumps(job).encode() + b"\n")
            jobs.flush()
            line = self._read_line(replies.fileno(), timeout)
        except (BrokenPipeError, WorkerLost) as lost:
            self.close()
            raise WorkerLost(str(lost) or "the process ended") from None
        answer = json.loads(line)
        self.seconds += answer["seconds"]
        if answer["setup"]:
            raise CourseError(f"the setup cell fails: {answer['setup']}")
        return {key: Ran(**ran) for key, ran in answer["checks"].items()}

    def close(self) -> None:
        if self._child:
            self._child.kill()
            self._child.wait()
            for pipe in self._pipes():
                pipe.close()
            self._child = None
        if self._home:
            self._home.cleanup()
            self._home = None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Where jobs go and replies come from; starts the child if there is none."""
        if self._child is None:
            self._home = tempfile.TemporaryDirectory(prefix="course-shell-")
            env = dict(
                os.environ,
                IPYTHONDIR=self._home.name,
                PYTHONHASHSEED="0",
                OMP_WAIT_POLICY="PASSIVE",
                OMP_NUM_THREADS=str(self._threads),
                TOKENIZERS_PARALLELISM="false",
                MPLBACKEND="agg",
            )
            self._child = subprocess.Popen(
                [sys.executable, "-m", "course.shell"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self._home.name,
                env=env,
            )
        jobs, replies = self._child.stdin, self._child.stdout
        assert jobs and replies  # PIPE was asked for
        return jobs, replies

    @staticmethod
    def _read_line(replies: int, timeout: float) -> bytes:
        deadline, data = time.monotonic() + timeout, b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([replies], [], [], left)[0]:
                raise WorkerLost(f"no end after {timeout:g} s")
            part = os.read(replies, 1 << 16)
            if not part:
                raise WorkerLost("the process ended")
            data += part
        return data


class Mismatch(Exception):
    """Raised inside `show` when enough lines differ and nothing more is needed."""


def _serve() -> None:
    """The child: one JSON job per line in, one JSON answer per line out."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever cells print goes nowhere
    shell = make_shell()
    for number, line in enumerate(sys.stdin):
        start = time.process_time()
        answer = run_job(shell, json.loads(line))
        answer["seconds"] = time.process_time() - start
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        if number == 0:  # each reset collects garbage: do not walk torch's modules again
            gc.collect()
            gc.freeze()


def make_shell() -> Any:
    """The IPython shell that cells run in: no history, no colours, no tracebacks."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Quiet(InteractiveShell):
        def showtraceback(self, *_: Any, **__: Any) -> None:
            """Nobody reads them here, and they cost 0.1 s each."""

        def _format_exception_for_storage(self, *_: Any, **__: Any) -> None:
            """Nor in the history. Rendering one keeps the trees of all its cells alive, which
            each collection of garbage then walks: hundreds of wrong answers get ever slower."""

        @functools.lru_cache(maxsize=64)  # noqa: B019 -- there is one shell, for good
        def transform_cell(self, raw_cell: str) -> str:
            """Setup, checks and most answers come again with each job: read them once."""
            return super().transform_cell(raw_cell)

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return Quiet.instance(config=config)


def execute(shell: Any, source: str) -> str:
    """Run one cell; return its error as "Type: text", or an empty string."""
    result = shell.run_cell(source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    return f"{type(error).__name__}: {error}".split("\n")[0][:MAX_ERROR] if error else ""


def run_job(shell: Any, job: dict, execute: Callable[[Any, str], str] = execute) -> dict:
    """Run a job's cells in a fresh namespace; `execute` runs one and returns its error.

    Returns `setup`, the setup cell's error, and `checks`, a `Ran` as a dict for each exercise.
    """
    from course import compare
    from course.runtime import STATE

    wrong = 0

    def stop_when_wrong(shown: dict) -> None:
        nonlocal wrong
        want = job["expected"].get(shown["name"])
        if want is None or not compare.agree(want["values"], shown["values"], want["tol"]):
            wrong += 1
            if wrong == job["enough"]:
                raise Mismatch(shown["name"])

    os.environ["COURSE_SEED"] = str(job["seed"])
    shell.reset(new_session=False)
    shell.history_manager.outputs.clear()  # reset keeps what `show` displayed, for ever
    STATE.listener = stop_when_wrong if job.get("expected") is not None else None
    checks: dict[str, dict] = {}
    broken: dict[str, str] = {}
    parts: dict[str, int] = {}
    for kind, key, source in job["cells"]:
        if kind == "check" and (checks.get(key, {}).get("error") or key in broken):
            checks.setdefault(key, {"shown": [], "error": broken.get(key, ""), "seconds": 0.0})
            continue
        STATE.shown = []
        start = time.monotonic()
        error = execute(shell, source)
        if kind == "setup" and error:
            return {"setup": error, "checks": {}}
        if kind == "answer" and error:
            broken[key] = error
        if kind == "check":
            ran = checks.setdefault(key, {"shown": [], "error": "", "seconds": 0.0})
            ran["seconds"] += time.monotonic() - start
            part = parts[key] = parts.get(key, -1) + 1
            ran["shown"] += [dict(line, part=part) for line in STATE.shown]
            ran["error"] = error
    return {"setup": "", "checks": checks}


if __name__ == "__main__":
    _serve()
