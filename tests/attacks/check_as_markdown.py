"""Turns the check cell into prose. Stopped: every check of the record runs."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    def edit(nb: dict) -> None:
        check = find(nb, "check", "scale")
        check["cell_type"] = "markdown"
        del check["outputs"], check["execution_count"]

    desk.edited(edit)
