"""Tags the check so that its error is expected, and stores the error. Stopped: tags only
find answers."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    error = {"output_type": "error", "ename": "NotImplementedError", "evalue": "start"}
    error["traceback"] = []
    edit = {"outputs": [error], "metadata": {"tags": ["check-scale", "raises-exception"]}}
    desk.edited(lambda nb: find(nb, "check", "scale").update(edit))
