"""Is a zip with two notebooks of one name: people see one, a grader takes the other. Stopped:
repeated names are refused."""

import json
import warnings
import zipfile

from tests.attacks.toy import NAIVE, OURS, PLACE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    stub, solved = desk.toy.notebook({}), desk.toy.notebook({"scale": OURS["scale"]})
    desk.folder.rmdir()
    with (
        zipfile.ZipFile(desk.folder.with_suffix(".zip"), "w") as archive,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for nb in (stub, solved):
            archive.writestr(PLACE, json.dumps(nb))
