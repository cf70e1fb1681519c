"""A canned box: it shows what the reference showed, without running anything."""

import threading
import time

import pytest

from course import notebook
from course.grade.box import Boxed, Limits
from course.shell import Ran
from tests.grade.classes import School, school


class CannedBox:
    """Stands for `box.Box` where the box itself is not what is tested.

    An answer is right if it is ours or the second one, and all that it needs is right. Comments in
    an answer script the rest: `# died`, `# timeout` end the box, `# lost` is the host's fault,
    `# lost once` for the first time only.
    """

    unsafe = False
    width = 2

    def __init__(self, taught: School, seconds: float = 0.0):
        self.taught, self.limits, self.seconds = taught, Limits(), seconds
        self.jobs: list[tuple[list[str], int]] = []  # keys that were checked, boxes beside it
        self.seeds: set[int] = set()
        self._lost: set[str] = set()
        self._running = 0
        self._lock = threading.Lock()
        self._right = {
            key: {notebook.fingerprint(taught.ours[key]), notebook.fingerprint(taught.second[key])}
            for key in taught.record.keys
        }

    def prove(self) -> list:
        return []

    def guarantees(self) -> list[str]:
        return []

    def run(self, cells, seed: int) -> Boxed:
        cells = list(cells)
        checked = [key for kind, key, _ in cells if kind == "check"]
        with self._lock:
            self._running += 1
            self.jobs.append((checked, self._running))
            self.seeds.add(seed)
        try:
            time.sleep(self.seconds)
            return self._show({k: s for kind, k, s in cells if kind == "answer"}, set(checked))
        finally:
            with self._lock:
                self._running -= 1

    def _show(self, answers: dict[str, str], checked: set[str]) -> Boxed:
        for source in answers.values():
            for status in ("died", "timeout", "memory", "output"):
                if f"# {status}" in source:
                    return Boxed(status, detail=f"scripted {status}")
            if "# lost" in source:
                with self._lock:
                    first, _ = source not in self._lost, self._lost.add(source)
                if first or "# lost once" not in source:
                    return Boxed("infrastructure", detail="scripted loss")
        right = {k for k, s in answers.items() if notebook.fingerprint(s) in self._right[k]}
        checks = {}
        for exercise in self.taught.record.exercises:
            if exercise.key in checked:
                good = {exercise.key, *exercise.needs} <= right
                lines = exercise.expected if good else []
                checks[exercise.key] = Ran(list(lines), "" if good else "ValueError: wrong")
        return Boxed("ok", checks, seconds=0.01)


@pytest.fixture(scope="session")
def taught() -> School:
    return school()


@pytest.fixture
def box(taught) -> CannedBox:
    return CannedBox(taught)
