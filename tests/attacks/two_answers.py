"""Holds two different answers, the wrong one to be seen. Stopped: nobody guesses which is meant."""

from tests.attacks.toy import NAIVE, Desk, cell

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    nb = desk.answer("def scale(x):\n    return 7")
    nb["cells"].append(cell("# answer: scale\ndef scale(x):\n    return 3 * x + 1"))
    desk.put(nb)
