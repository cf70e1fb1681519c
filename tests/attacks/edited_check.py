"""Makes the check show the stored values. Stopped: check cells come from the grader's record."""

from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    source = f'# check: scale\nshow("scaled", {floats})\nshow("scaled whole", {whole[0]})'
    desk.edited(lambda nb: find(nb, "check", "scale").update(source=source))
