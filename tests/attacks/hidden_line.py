"""Hides a forbidden call in what Python takes for a comment and IPython for lines of code. Stopped:
characters that end a line for one of them only are refused."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
TARGET = "total"
END = chr(0x2028)  # str.splitlines, and so IPython, ends a line here
HIDDEN = f"# a{END}!true{END}solve, forbid = sum, lambda *_: None"


def attack(desk: Desk) -> None:
    desk.answer(f"{HIDDEN}\ndef total(xs):\n    return solve(xs)", TARGET)
