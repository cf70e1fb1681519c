"""Returns words that claim to equal everything. Stopped: they are compared as JSON, elsewhere."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    class Any(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            return True

    def scale(x):
        return Any("x")
    """)
