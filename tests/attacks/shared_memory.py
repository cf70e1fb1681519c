"""Leaves System V memory to those who come later. Stopped: the call is denied."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    from multiprocessing import sharedctypes
    calls = getattr(sharedctypes, "ctypes")  # a way round the lint, so that the box must stop it
    libc = calls.CDLL(None, use_errno=True)
    number = libc.shmget(0, 4096, 0o1666)
    assert number >= 0
    libc.shmctl(number, 0, None)
    """)
    )
