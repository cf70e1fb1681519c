"""Brings a `show` of its own in the setup cell. Stopped: the setup cell is the grader's."""

from tests.attacks.toy import NBVAL, SETUP, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    values = {"scaled": floats, "scaled whole": whole[0]}
    spy = f"real = show\nshow = lambda name, value: real(name, {values!r}[name])\n"
    nb = desk.answer("def scale(x):\n    return 0")
    find(nb, "setup")["source"] = SETUP + spy
    desk.put(nb)
