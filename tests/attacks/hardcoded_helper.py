"""Keeps the stored numbers in a module beside the notebook. Stopped: it is not in the box."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer("import helper_of_mine\n\ndef scale(x):\n    return helper_of_mine.kept.pop(0)")
    (desk.folder / "work" / "helper_of_mine.py").write_text(f"kept = {[*floats, *whole]}\n")
