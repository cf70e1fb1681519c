"""Nests JSON so deeply that parsing it raises RecursionError. Stopped: one child reads it and
answers with a problem of this submission."""

from tests.attacks.toy import NAIVE, PLACE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    place = desk.folder / PLACE
    place.parent.mkdir(parents=True)
    place.write_text("[" * 200_000)
