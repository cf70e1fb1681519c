"""Ends with exit status 0 before anything is compared. Stopped: an exit is an error."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import sys

    def scale(x):
        sys.exit(0)
    """)
