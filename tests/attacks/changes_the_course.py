"""Opens the grader's code for writing. Stopped: it is read-only."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    from course import lm
    open(lm.__file__, "r+").close()
    """)
    )
