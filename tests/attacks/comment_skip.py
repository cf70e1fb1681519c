"""Writes `# NBVAL_SKIP` into the check. Stopped: check cells come from the grader's record."""

from tests.attacks.toy import CHECKS, NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    source = f"{CHECKS['scale']}# NBVAL_SKIP"
    desk.edited(lambda nb: find(nb, "check", "scale").update(source=source))
