"""Takes memory in several processes, each below the limit of one. Stopped: the box's memory is
summed."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import os, signal
    DONE = []

    def scale(x):
        if not DONE:
            told, tell = os.pipe()
            children = []
            for _ in range(4):
                pid = os.fork()
                if pid == 0:
                    kept = bytearray(b"x") * (350 << 20)
                    os.write(tell, b"1")
                    signal.pause()
                    os._exit(len(kept))
                children.append(pid)
            os.close(tell)
            DONE.append(sum(len(os.read(told, 1)) for _ in children))
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return 3 * x + 1 if DONE == [4] else 0
    """)
