"""Walks up the frames to the expected numbers. Stopped: they are in no process of the box."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import sys
    KEPT = []

    def scale(x):
        frame = sys._getframe()
        while frame and not KEPT:
            found = frame.f_globals.get("job") or frame.f_locals.get("job")
            if isinstance(found, dict) and found.get("expected"):
                for line in found["expected"]["scale"]:
                    KEPT.extend(line["values"])
            frame = frame.f_back
        return KEPT.pop(0)
    """)
