"""Name a known mistake from all that a check showed, not from its first difference alone."""

from course import compare
from course.recordfile import Recorded


def named(exercise: Recorded, shown: list[dict], error: str | None = None) -> str:
    """The message of the known mistake that looks like this, or an empty string.

    Args:
        shown: the lines so far; lines of other exercises are passed over.
        error: how the check ended, empty if it ran through; None while it still runs. Then a
            message is given only if all mistakes that fit so far have the same.
    """
    fitting = [m["message"] for m in exercise.known if _fits(exercise, m, shown, error)]
    return fitting[0] if fitting and (error is not None or len(set(fitting)) == 1) else ""


def _fits(exercise: Recorded, mistake: dict, shown: list[dict], error: str | None) -> bool:
    """Whether every line is the mistake's own, and at least one gives it away.

    A line that the mistake was not seen to show (its check ended before) says nothing.
    """
    expected = {line["name"]: line for line in exercise.expected}
    wrong = {line["name"]: line["values"] for line in mistake["differs"]}
    given_away = False
    for line in shown:
        want = expected.get(line["name"])
        if want is None or line["name"] not in mistake["seen"]:
            continue
        own = wrong.get(line["name"], want["values"])
        if not compare.agree(own, line["values"], want["tol"]):
            return False
        given_away |= line["name"] in wrong
    if error is None or mistake["error"] is None:
        return given_away
    if bool(error) != bool(mistake["error"]):
        return False
    return given_away or (bool(error) and error.split("\n")[0] == mistake["error"])
