"""Is a small zip that unpacks to 64 MiB. Stopped: no more than a notebook's size is unpacked."""

import json
import zipfile

from tests.attacks.toy import NAIVE, OURS, PLACE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    text = json.dumps(desk.toy.notebook({"scale": OURS["scale"]})) + " " * (64 << 20)
    desk.folder.rmdir()
    path = desk.folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(PLACE, text)
