"""Never ends and swallows what would end it. Stopped: the box is killed from outside."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE
SECONDS = 2.0  # until a grader that still waits is said to hang


def attack(desk: Desk) -> None:
    desk.answer("""
    import faulthandler, signal, time

    def scale(x):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        faulthandler.cancel_dump_traceback_later()
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
    """)
