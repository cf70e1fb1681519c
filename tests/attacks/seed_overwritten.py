"""Sets the seed back to the public 0 and returns what is known there. Stopped: the values that
count come from the reference's own run."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer(f"""
    import os
    KEPT = {[*floats, *whole]}

    class Now:
        os.environ["COURSE_SEED"] = "0"

    def scale(x):
        return KEPT.pop(0)
    """)
