"""Hands in 3,000 cells. Stopped: a limit on cells."""

from tests.attacks.toy import NAIVE, Desk, cell

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    nb = desk.answer("def scale(x):\n    return 3 * x + 1")
    desk.put(nb | {"cells": [*([cell("pass")] * 3000), *nb["cells"]]})
