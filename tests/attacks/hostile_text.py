"""Raises an error whose text talks to terminals, CI logs and browsers. Stopped: control characters
are removed, lines are indented or escaped by whoever prints them."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
TRACES = ("\x1b[2J", "\n::error::mine", "<script>alert(1)</script>")  # printed as they are


def attack(desk: Desk) -> None:
    desk.answer("""
    def scale(x):
        raise ValueError(f"{chr(27)}[2J<script>alert(1)</script>{chr(10)}::error::mine{chr(0)}")
    """)
