"""Is a link to a notebook that somebody else solved. Stopped: links are not followed."""

import json

from tests.attacks.toy import NAIVE, OURS, PLACE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    theirs = desk.toy.folder.parent / "theirs.ipynb"
    theirs.write_text(json.dumps(desk.toy.notebook({"scale": OURS["scale"]})))
    place = desk.folder / PLACE
    place.parent.mkdir(parents=True)
    place.symlink_to(theirs)
