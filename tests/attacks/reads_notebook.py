"""Reads the expected numbers from notebooks on disk. Stopped: none is in the box."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    desk.answer("""
    import glob, json
    KEPT = []

    def scale(x):
        if not KEPT:
            for path in glob.glob("**/*.ipynb", recursive=True):
                for cell in json.load(open(path))["cells"]:
                    if cell["source"].startswith("# check: scale"):
                        for output in cell["outputs"]:
                            KEPT.extend(output["data"]["application/vnd.course.check+json"]["values"])
        return KEPT.pop(0)
    """)
