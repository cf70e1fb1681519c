"""Turns a failure into exit status 0 while Python ends. Stopped: status alone means nothing."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import atexit, os

    class Now:
        atexit.register(os._exit, 0)

    def scale(x):
        return 7
    """)
