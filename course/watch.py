"""Check again on every save, with a kernel that stays warm."""

from collections.abc import Iterator
from pathlib import Path

from watchfiles import watch as changes

from course import check, nbval_plugin, notebook, recordfile
from course.catalog import Chapter
from course.check import Verdict
from course.errors import CourseError
from course.recordfile import Record


def watch(chapter: Chapter, path: Path, timeout: float) -> Iterator[list[Verdict] | CourseError]:
    """Yield verdicts: of all exercises at first, then of those that a save could have changed.

    A save that leaves the notebook unreadable yields the CourseError and waits for the next one.
    """
    record = recordfile.load(chapter)
    before: dict[str, str] = {}
    kernel = nbval_plugin.warm_kernel()
    try:
        for _ in _saves(path):
            try:
                now = _prints(record, path)
            except CourseError as problem:
                yield problem
                continue
            only = _affected(record, before, now)
            before = now
            if not only:
                continue
            if not kernel.is_alive():
                kernel = nbval_plugin.warm_kernel()
            yield check.check(chapter, path, only, timeout, kernel)
    finally:
        if kernel.is_alive():
            kernel.stop()


def _saves(path: Path) -> Iterator[None]:
    """Once at the start, then after each change of the file; editors may replace it whole."""
    yield
    for batch in changes(path.parent, debounce=200, step=50, recursive=False):
        if any(Path(name).name == path.name for _, name in batch):
            yield


def _prints(record: Record, path: Path) -> dict[str, str]:
    found = notebook.answers(notebook.read(path), record.keys)
    return {
        key: found.problems.get(key, "") + notebook.fingerprint(found.answers.get(key, ""))
        for key in record.keys
    }


def _affected(record: Record, before: dict[str, str], now: dict[str, str]) -> set[str]:
    """The exercises whose answer changed, and those that use such an answer."""
    changed = {key for key in now if before.get(key) != now[key]}
    return changed | {e.key for e in record.exercises if changed & set(e.needs)}
