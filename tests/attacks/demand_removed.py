"""Replaces `require`, which would refuse its right numbers. Stopped: an answer may not reach into
what checks it."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TARGET = "halved"


def attack(desk: Desk) -> None:
    desk.answer(
        """
    import sys

    def halved(xs):
        frame = sys._getframe(1)
        frame.f_globals["require"] = lambda *_: None
        for i in range(len(xs)):
            xs[i] /= 2
        return xs
    """,
        TARGET,
    )
