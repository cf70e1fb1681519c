"""Leaves a file on the machine. Stopped: the box has a file system of its own."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    open({str(desk.mark)!r}, "w").close()
    """)
    )
