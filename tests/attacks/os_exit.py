"""Ends the process with exit status 0. Stopped: no complete reply is a fail."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os

    def scale(x):
        os._exit(0)
    """)
