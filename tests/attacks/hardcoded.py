"""Returns the numbers that everybody can read in the notebook. Stopped: another, secret seed."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer(f"KEPT = {[*floats, *whole]}\n\ndef scale(x):\n    return KEPT.pop(0)")
