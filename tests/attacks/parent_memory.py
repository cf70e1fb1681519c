"""Reads the expected numbers out of the memory of other processes. Stopped: nothing that holds them
is visible, and the box sees itself alone."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
PTRACE = True  # works where a process may read its parent's memory
ANSWER = """
import os, re
KEPT = []

def search(pid):
    floats = whole = None
    for line in open(f"/proc/{pid}/maps"):
        span, mode = line.split()[:2]
        start, end = (int(n, 16) for n in span.split("-"))
        if not mode.startswith("rw") or end - start > 1 << 28:
            continue
        try:
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                memory.seek(start)
                data = memory.read(end - start)
        except (OSError, ValueError):
            continue
        floats = floats or re.search(rb"scaled: ([0-9]+[.][0-9]+(?: [0-9]+[.][0-9]+){2})", data)
        whole = whole or re.search(rb"scaled whole: ([0-9]{4,})", data)
        if floats and whole:
            return [*map(float, floats[1].split()), int(whole[1])]
    return []

def scale(x):
    others = [os.getppid(), *filter(str.isdigit, os.listdir("/proc"))]
    while not KEPT:
        try:
            KEPT.extend(search(others.pop(0)))
        except OSError:
            continue
    return KEPT.pop(0)
"""


def attack(desk: Desk) -> None:
    desk.answer(ANSWER)
