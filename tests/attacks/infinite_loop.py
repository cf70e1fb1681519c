"""Never ends. Stopped: a time limit for the box."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
SECONDS = 2.0  # until a grader that still waits is said to hang


def attack(desk: Desk) -> None:
    desk.answer("""
    import time

    def scale(x):
        while True:
            time.sleep(1)
    """)
