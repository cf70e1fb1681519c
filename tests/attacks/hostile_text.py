"""Raises an error whose text talks to terminals, CI logs and browsers. Stopped: control characters
are removed, lines are indented or escaped by whoever prints them."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
# printed as they are
TRACES = ("\x1b[2J", "\x9b2J", "\u202e", "\n::error::mine", "<script>alert(1)</script>")


def attack(desk: Desk) -> None:
    desk.answer("""
    def scale(x):
        text = f"{chr(27)}[2J{chr(155)}2J{chr(0x202e)}<script>alert(1)</script>{chr(0x2028)}"
        raise ValueError(f"{text}{chr(10)}::error::mine{chr(0)}")
    """)
