"""Looks a forbidden name up in a namespace. Stopped: where names are forbidden, so is looking
them up."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "total"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    def total(xs):
        return getattr(print.__self__, "s" + "um")(xs)
    """,
        TARGET,
    )
