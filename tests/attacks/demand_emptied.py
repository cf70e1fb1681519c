"""Gives `require` another body, from within a class. Stopped: an answer may not change what it did
not make, nor touch the code of a function."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "halved"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    class Now:
        require.__code__ = (lambda condition, message: None).__code__

    def halved(xs):
        for i in range(len(xs)):
            xs[i] /= 2
        return xs
    """,
        TARGET,
    )
