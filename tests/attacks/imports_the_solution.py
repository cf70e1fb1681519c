"""Imports the reference answer. Stopped: it is not in the box."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    from solutions.toys.toy import scale
    return scale(x)
    """)
    )
