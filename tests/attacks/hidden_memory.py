"""Holds memory that belongs to no process (memfd). Stopped: the call is denied."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    import os
    file = os.memfd_create("x")
    os.ftruncate(file, 1 << 20)
    """)
    )
