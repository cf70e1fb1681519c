"""Brings a `course` package of its own that records nothing wrong. Stopped: no learner's file is
in the box, and the grader's children start in its own checkout."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("def scale(x):\n    return 7")
    place = desk.folder / "course"
    place.mkdir()
    (place / "__init__.py").write_text("import os\nos._exit(0)\n")
