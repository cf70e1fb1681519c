"""What a chapter's cells call: inputs, checks, and feedback as the cell runs.

State lives in one module-level object because cells share one kernel; `begin` resets it.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course import compare, forbidden

if TYPE_CHECKING:
    from course.recordfile import Recorded

MIME = "application/vnd.course.check+json"


class CheckFailed(Exception):
    """A structural demand of a check that the answer does not meet."""

    def _render_traceback_(self) -> list[str]:
        """IPython prints this instead of a traceback: the message is the lesson."""
        return [f"✗ {self}"]


@dataclass
class _State:
    shown: list[dict] = field(default_factory=list)
    exercises: dict[str, "Recorded"] = field(default_factory=dict)  # shown name -> its exercise
    listener: Callable[[dict], None] | None = None  # the worker's: called with each line


STATE = _State()


def seed() -> int:
    """The seed of this run: 0 unless COURSE_SEED says otherwise."""
    return int(os.environ.get("COURSE_SEED", "0"))


def begin(chapter: str) -> None:
    """Start a chapter in this kernel: forget what was shown, load what to compare with."""
    import torch

    from course.recordfile import load_for_feedback

    # also fills torch.empty with NaN, so that a forgotten write looks the same at every run;
    # use_deterministic_algorithms(True, warn_only=True) does this and imports a second of Inductor
    torch.set_deterministic_debug_mode("warn")
    STATE.shown = []
    STATE.exercises = load_for_feedback(chapter) if seed() == 0 else {}


def rng(name: str) -> Any:
    """A CPU `torch.Generator` keyed on (COURSE_SEED, name).

    Named streams stay the same when another cell draws more, fewer or no numbers.
    """
    import torch

    digest = hashlib.sha256(f"{seed()}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def show(name: str, value: Any, tol: float = 1e-4) -> None:
    """Display `value` and compare it with what the reference answer showed.

    Args:
        name: what the value is; unique in the chapter.
        value: int, float, str, a list of these, or a tensor (`course.compare.tokens`).
        tol: floats agree within `tol * max(1, |expected|)`.
    """
    shown = {"name": name, "values": compare.tokens(name, value), "tol": tol}
    STATE.shown.append(shown)
    _display(shown)
    if STATE.listener:
        STATE.listener(shown)
    if name in STATE.exercises:
        print(_feedback(shown), file=sys.stderr, flush=True)


def _display(shown: dict) -> None:
    text = compare.line(shown["name"], shown["values"])
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import display

        display({"text/plain": text, MIME: shown}, raw=True)
    else:
        print(text)


def _feedback(shown: dict) -> str:
    from course import mistakes

    name = shown["name"]
    exercise = STATE.exercises[name]
    want = next(line for line in exercise.expected if line["name"] == name)
    if compare.agree(want["values"], shown["values"], want["tol"]):
        return f"  ✓ {name} matches"
    lines = [
        f"  ✗ {name}",
        f"    expected {compare.line('', want['values'])[2:]}",
        f"    got      {compare.line('', shown['values'])[2:]}",
    ]
    mistake = mistakes.named(exercise, _this_run(exercise))
    lines.append(f"    {mistake}" if mistake else f"    hint: {exercise.hint}")
    return "\n".join(lines)


def _this_run(exercise: "Recorded") -> list[dict]:
    """The exercise's lines since its check last began: the cell may have run before."""
    names = [line["name"] for line in exercise.expected]
    lines = [line for line in STATE.shown if line["name"] in names]
    starts = [i for i, line in enumerate(lines) if line["name"] == names[0]]
    return lines[starts[-1] :] if starts else lines


def require(condition: Any, message: str) -> None:
    """Demand something of an answer that no value can show; raises before values are shown."""
    if not condition:
        raise CheckFailed(message)


def forbid(answer: Any, *names: str) -> None:
    """Refuse library calls that would solve the exercise, by reading the answer's cell.

    Args:
        answer: the function or class that the learner defined.
        names: dotted names; a call is found by its last part, a module by its import.

    Raises CheckFailed naming the line.
    """
    found = forbidden.scan(forbidden.cell_of(answer), names)
    if found:
        raise CheckFailed(found)


@contextlib.contextmanager
def demo() -> Iterator[None]:
    """Around a demo that uses answers: an unsolved stub becomes one line, not a traceback."""
    try:
        yield
    except NotImplementedError as stub:
        print(f"This demo needs an exercise that is still a stub ({stub}).")
