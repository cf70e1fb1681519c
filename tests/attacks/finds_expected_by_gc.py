"""Asks the garbage collector for the expected numbers. Stopped: they are not in the box."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import gc
    KEPT = []

    def values(name):
        for thing in gc.get_objects():
            if type(thing) is dict and thing.get("name") == name and "part" in thing:
                return thing["values"]
        return []

    def scale(x):
        if not KEPT:
            KEPT.extend([*values("scaled"), *values("scaled whole")])
        return KEPT.pop(0)
    """)
