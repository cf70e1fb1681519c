"""Calls what is forbidden without writing its name. Stopped: where names are forbidden, so is
looking them up."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "total"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    def total(xs):
        return eval("su" + "m")(xs)
    """,
        TARGET,
    )
