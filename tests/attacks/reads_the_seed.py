"""Finds the batch's secret seed in the folder of results. Stopped: no process of the grader and
no file of it is visible."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    import os
    words = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")
    seed = open(words[words.index("--out") + 1] + "/.seed").read()
    assert seed == os.environ["COURSE_SEED"]
    """)
    )
