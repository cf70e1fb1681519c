"""Reads the grader's secrets from process environments. Stopped: the box's is empty and others'
processes are not visible."""

from tests.attacks.toy import SECRET, UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    import glob
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            found.append({SECRET!r}.encode() in open(path, "rb").read())
        except OSError:
            pass
    assert any(found)
    """)
    )
