"""Writes more files than its room holds. Stopped: a small file system in memory."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os, tempfile
    DONE = []

    def scale(x):
        if not DONE:
            with tempfile.TemporaryDirectory() as folder:
                for n in range(4):
                    with open(f"{folder}/{n}", "wb") as file:
                        file.write(bytes(48 << 20))
            DONE.append(1)
        return 3 * x + 1
    """)
