"""Writes megabytes wherever somebody may be reading. Stopped: the pipe is capped."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os

    def scale(x):
        for name in range(1, 40):
            try:
                for _ in range(64):
                    os.write(name, b"x" * (1 << 16))
            except OSError:
                pass
        return 3 * x + 1
    """)
