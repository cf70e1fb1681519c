"""Switches off the reading of answers in the check, then calls what is forbidden. Stopped: the
grader reads answers itself, outside the box."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "total"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    import course.forbidden

    class Now:
        course.forbidden.scan = lambda *_: ""

    def total(xs):
        return sum(xs)
    """,
        TARGET,
    )
