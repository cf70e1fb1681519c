"""Brings a pytest.ini that switches comparing off. Stopped: no pytest, no learner's file."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
OWN = True  # its folder is where pytest runs


def attack(desk: Desk) -> None:
    desk.answer("def scale(x):\n    return 7")
    (desk.folder / "pytest.ini").write_text("[pytest]\naddopts = --nbval-lax\n")
