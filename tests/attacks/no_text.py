"""Is no UTF-8, so that reading it raises. Stopped: it is the problem of this submission alone."""

from tests.attacks.toy import NAIVE, PLACE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    place = desk.folder / PLACE
    place.parent.mkdir(parents=True)
    place.write_bytes(b"\xff\xfe{\x00" * 9)
