"""Stores in the notebook what a wrong answer shows. Stopped: stored outputs are never read."""

from course.runtime import MIME
from tests.attacks.toy import NBVAL, Desk, find

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    nb = desk.answer("def scale(x):\n    return 7")
    for output, values in zip(find(nb, "check", "scale")["outputs"], [[7, 7, 7], [7]], strict=True):
        line = output["data"][MIME]
        line["values"] = values
        output["data"]["text/plain"] = f"{line['name']}: {' '.join(map(str, values))}"
    desk.put(nb)
