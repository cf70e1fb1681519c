"""Keeps 60 processes busy, so that the machine is slow for everybody. Stopped: they end with the
cell's time; meanwhile a control group, where there is one, gives all boxes equal shares."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
SECONDS = 2.0  # until a grader that still waits is said to hang


def attack(desk: Desk) -> None:
    desk.answer("""
    import os

    def scale(x):
        for _ in range(60):
            if os.fork() == 0:
                while True:
                    pass
        os.wait()
        return 3 * x + 1
    """)
