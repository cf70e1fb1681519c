"""Defines a `show` in the answer cell that replays stored values. Stopped: the secret seed."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer(f"""
    from course import show as real
    KEPT = {{"scaled": {floats}, "scaled whole": {whole[0]}}}

    def scale(x):
        return 0

    def show(name, value):
        real(name, KEPT[name])
    """)
