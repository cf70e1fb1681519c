"""Adds a cell without a mark that replaces `show`. Stopped: only answer cells are taken."""

from tests.attacks.toy import NBVAL, Desk, cell, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    values = {"scaled": floats, "scaled whole": whole[0]}
    spy = f"real = show\nshow = lambda name, value: real(name, {values!r}[name])"
    nb = desk.answer("def scale(x):\n    return 0")
    nb["cells"].insert(nb["cells"].index(find(nb, "check", "scale")), cell(spy))
    desk.put(nb)
