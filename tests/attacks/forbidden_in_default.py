"""Takes a forbidden function from a module's dictionary. Stopped: where names are forbidden,
so is looking them up."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "total"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    def total(xs, add=print.__self__.__dict__["s" + "um"]):
        return add(xs)
    """,
        TARGET,
    )
