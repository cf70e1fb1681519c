"""Replaces the handler of errors, so that none is reported. Stopped: missing lines are a fail."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os, sys

    def scale(x):
        sys.excepthook = lambda *_: os._exit(0)
        try:
            shell = get_ipython()
        except NameError:
            return 7
        type(shell).showtraceback = type(shell).showsyntaxerror = lambda *_, **__: None
        return 7
    """)
