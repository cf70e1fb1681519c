"""Tags the check so that its output does not count. Stopped: tags only find answers."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    nb = desk.answer("def scale(x):\n    return 7")
    find(nb, "check", "scale")["metadata"]["tags"].append("nbval-ignore-output")
    desk.put(nb)
