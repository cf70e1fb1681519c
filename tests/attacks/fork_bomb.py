"""Starts 200 processes. Stopped: a limit on processes."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os, signal

    def scale(x):
        children = []
        try:
            for _ in range(200):
                sleep = ["/bin/sleep", "9"]
                children.append(os.posix_spawn(sleep[0], sleep, {}))
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return 3 * x + 1
    """)
