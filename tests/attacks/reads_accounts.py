"""Reads the machine's accounts. Stopped: /etc is not in the box."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    assert "root" in open("/etc/passwd").read()
    """)
    )
