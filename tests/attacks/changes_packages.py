"""Adds a start-up file to the installed packages. Stopped: they are read-only."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    import os
    import traitlets
    folder = os.path.dirname(os.path.dirname(traitlets.__file__))
    path = f"{{folder}}/{desk.folder.name}.pth"
    open(path, "w").close()
    os.unlink(path)
    """)
    )
