"""Defines a `require` of its own beside the answer. Stopped: an answer may not define the names of
what checks it."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "halved"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    def require(condition, message):
        pass

    def halved(xs):
        for i in range(len(xs)):
            xs[i] /= 2
        return xs
    """,
        TARGET,
    )
