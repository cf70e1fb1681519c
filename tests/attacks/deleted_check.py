"""Deletes the check cell. Stopped: every check of the record runs, and no verdict is a fail."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    desk.edited(lambda nb: nb["cells"].remove(find(nb, "check", "scale")))
