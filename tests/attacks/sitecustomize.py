"""Brings a sitecustomize.py, which Python runs by itself. Stopped: no learner's
file is in the box."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("def scale(x):\n    return 7")
    (desk.folder / "sitecustomize.py").write_text("import os\nos._exit(0)\n")
