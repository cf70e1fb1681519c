"""`course watch`: what a save changes is checked again, in a kernel that stays warm."""

import queue
import threading
from pathlib import Path

import nbformat

from course import watch
from course.errors import CourseError
from tests.pipeline.conftest import CHAPTER, REFERENCE, answered


class Watched:
    """Runs the generator in a thread; `next` waits for its next result."""

    def __init__(self, path: Path):
        self.results: queue.Queue = queue.Queue()
        self.path = path
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for result in watch.watch(CHAPTER, self.path, 20):
            self.results.put(result)

    def next(self):
        return self.results.get(timeout=60)

    def save(self, **answers: str) -> None:
        temporary = self.path.with_suffix(".tmp")
        nbformat.write(answered(**answers), temporary)
        temporary.rename(self.path)


STUBS = {
    key: f"# answer: {key}\ndef {key}(*a, **k):\n    raise NotImplementedError"
    for key in ("generate_cached", "decode_attention_kernel")
}  # keep the model and Triton out


def test_watch(tmp_path):
    path = tmp_path / "learner.ipynb"
    nbformat.write(answered(**STUBS), path)
    watched = Watched(path)
    first = {v.key: v.status for v in watched.next()}
    assert len(first) == 7 and first["attend"] == "passed"
    helped = "# answer: attend\ndef scale(d):\n    return d**0.5\n\n\n" + REFERENCE[
        "attend"
    ].replace("math.sqrt(", "scale(")
    watched.save(**STUBS, attend=helped)
    again = {v.key: v.status for v in watched.next()}
    assert again == {"attend": "passed", "generate_cached": "failed"}  # and who uses it
    helper_gone = helped.replace("def scale(d):\n    return d**0.5", "")
    watched.save(**STUBS, attend=helper_gone)
    verdict = next(v for v in watched.next() if v.key == "attend")
    assert verdict.status == "failed" and "scale" in verdict.text
    path.write_text("{")
    assert isinstance(watched.next(), CourseError)
    dying = "# answer: attend\ndef attend(q, K, V):\n    import os; os._exit(0)"
    watched.save(**STUBS, attend=dying)
    verdict = next(v for v in watched.next() if v.key == "attend")
    assert verdict.status == "failed" and "the kernel died" in verdict.text
    watched.save(**STUBS)
    verdict = next(v for v in watched.next() if v.key == "attend")
    assert verdict.status == "passed"
