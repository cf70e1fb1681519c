"""Tags the check so that it does not run. Stopped: tags only find answers."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    desk.edited(lambda nb: find(nb, "check", "scale")["metadata"]["tags"].append("nbval-skip"))
