"""Clears outputs and counts, so that nothing is compared. Stopped: the record is compared."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    nb = desk.answer("def scale(x):\n    return 7")
    find(nb, "check", "scale").update(outputs=[], execution_count=None)
    desk.put(nb)
