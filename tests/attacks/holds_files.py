"""Takes a lease on a file, on which everybody else who opens it would wait. Stopped: the call is
denied."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    import fcntl, os, tempfile
    with tempfile.NamedTemporaryFile() as file:
        again = os.open(file.name, os.O_RDONLY)
        file.close()
        fcntl.fcntl(again, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.close(again)
    """)
    )
