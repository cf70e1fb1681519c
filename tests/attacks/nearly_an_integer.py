"""Returns an integer as a float nearby. Stopped: the reference's token decides the type."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    def scale(x):
        return float(3 * x + 1) if isinstance(x, int) else 3 * x + 1
    """)
