"""Attaches to a process of its own as a debugger. Stopped: the call is denied."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can("""
    import os, signal
    from multiprocessing import sharedctypes
    calls = getattr(sharedctypes, "ctypes")  # a way round the lint, so that the box must stop it
    pid = os.fork()
    if pid == 0:
        signal.pause()
    libc = calls.CDLL(None, use_errno=True)
    done = libc.ptrace(0x4206, pid, 0, 0)  # PTRACE_SEIZE
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert done == 0
    """)
    )
