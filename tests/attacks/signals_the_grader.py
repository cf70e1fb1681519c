"""May send signals to the grader. Stopped: it has no number in the box."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    import os
    words = open(f"/proc/{os.getppid()}/cmdline").read()
    assert "course.cli" in words
    os.kill(os.getppid(), 0)
    """)
    )
