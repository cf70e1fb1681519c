"""From what the box showed to a verdict: compare with the reference, on this side of the pipe.

Whatever comes out of a box is a claim by a learner's code: it is checked for its form, compared,
and otherwise only quoted. Without proof of the contrary an exercise is failed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from course import compare, mistakes
from course.check import BLOCKED, FAILED, PASSED, UNTRIED
from course.nbval_plugin import cut, differences
from course.recordfile import Recorded
from course.shell import Ran
from course.text import plain

UNCHECKABLE, INFRASTRUCTURE = "not checkable here", "infrastructure error"
STATUSES = (PASSED, FAILED, BLOCKED, UNTRIED, UNCHECKABLE, INFRASTRUCTURE)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_TYPES = (int, float, str)


@dataclass
class Graded:
    """The verdict on one exercise.

    `points` counts what the submission earned as it stands; `independent` what it earns when the
    exercises that it needs are ours. A learner may see everything here.
    """

    key: str
    title: str
    status: str
    points: int
    of: int
    independent: int
    text: str = ""
    mistake: str = ""
    hint: str = ""
    warnings: list[str] = field(default_factory=list)
    fingerprint: str = ""  # of the answer, to find copies
    published: bool = False  # it is our own answer, but for comments


def graded(exercise: Recorded, status: str, text: str = "", mistake: str = "") -> Graded:
    """A verdict with the points that its status is worth: the exercise's difficulty, or none."""
    points = exercise.difficulty if status == PASSED else 0
    of = 0 if status == UNCHECKABLE else exercise.difficulty
    hint = exercise.hint if status == FAILED else ""
    text = cut(plain(text))
    return Graded(exercise.key, exercise.title, status, points, of, points, text, mistake, hint)


def uncheckable(exercise: Recorded, reference: Ran) -> str:
    """Why this exercise cannot be checked here, or an empty string.

    The reference itself must get through its check and show the very lines that it showed when it
    was recorded: a check that shows less here compares less.
    """
    if reference.error:
        return f"our own answer cannot be checked here: {said(reference.error)}"
    names = [line["name"] for line in reference.shown]
    recorded = [line["name"] for line in exercise.expected]
    if not names or names != recorded:
        return f"our own answer shows {len(names)} of {len(recorded)} lines here"
    return ""


def judge(exercise: Recorded, reference: Ran, ran: Ran | None) -> Graded:
    """Compare what an answer showed with what the reference showed under the same seed.

    The text repeats values only of lines that do not depend on the seed, which everybody can see
    in the notebook.
    """
    if ran is None:
        return graded(exercise, FAILED, "its check gave no result")
    shown = well_formed(ran.shown)
    public = _independent_of_seed(exercise, reference)
    error = ""
    if ran.error:
        text = error = said(str(ran.error)) or "its check raised an error"
    else:
        wrong = list(differences(reference.shown, shown))
        if not wrong:
            return graded(exercise, PASSED)
        text = _told(wrong, {line["name"] for line in public})
    return graded(exercise, FAILED, text, _mistake(exercise, public, shown, error))


def well_formed(lines: Any) -> list[dict]:
    """The entries of a claim that have the form of a shown line; the others were never shown."""
    if not isinstance(lines, list):
        return []
    return [line for line in lines if _is_line(line)]


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("name"), str):
        return False
    values = line.get("values")
    return (
        isinstance(values, list)
        and len(values) <= compare.MAX_ENTRIES
        and all(isinstance(v, _TYPES) and not isinstance(v, bool) for v in values)
    )


def said(error: str) -> str:
    """An error as a verdict repeats it: one short, plain line without memory addresses."""
    line = plain(error.split("\n")[0]).removeprefix("CheckFailed: ").removeprefix("KernelError: ")
    return cut(_ADDRESS.sub("0x...", line))


def _independent_of_seed(exercise: Recorded, reference: Ran) -> list[dict]:
    """The recorded (seed 0) lines that the reference shows alike under the batch's seed."""
    now = {line["name"]: line["values"] for line in reference.shown}
    return [
        line
        for line in exercise.expected
        if compare.agree(line["values"], now.get(line["name"], []), line["tol"])
    ]


def _told(wrong: list[str], public: Iterable[str]) -> str:
    """The first difference, in full if its values are public, and how many more there are."""
    first = next((text for text in wrong if text.split("\n")[0] in public), wrong[0])
    name = first.split("\n")[0]
    if first.count("\n") and name not in public:
        first = f"{name}: differs from ours (its inputs depend on the batch's seed)"
    more = len(wrong) - 1
    return plain(first) + (f"\n{more} more of its lines are wrong" if more else "")


def _mistake(exercise: Recorded, public: list[dict], shown: list[dict], error: str) -> str:
    """The one known mistake that fits, judged by the lines that do not depend on the seed.

    Mistakes are recorded at seed 0, so the other lines cannot be compared with them; a second run
    at seed 0 would cost as much as the first.
    """
    told = {
        known["message"]
        for known in exercise.known
        if mistakes.named(replace(exercise, expected=public, known=[known]), shown, error)
    }
    return told.pop() if len(told) == 1 else ""
