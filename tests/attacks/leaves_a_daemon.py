"""Leaves a process behind that writes later. Stopped: all processes end with the box."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.5)
            open({str(desk.mark)!r}, "w").close()
            time.sleep(0.5)
        os._exit(0)
    return 7
    """)
    )
