"""Inside the box: take limits on, run one job's cells, reply with one JSON object.

The host starts this file with a JSON configuration as its only argument. A line break on the reply
descriptor says that the box stands and no learner's code has run yet; what follows is only a claim.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import time
from types import FrameType
from typing import IO, Any

CHECK_LIMIT = 64 << 10  # bytes of JSON that one exercise may show: it must not cost the others
GRACE = 5.0  # seconds from a cell's time limit to the end of the whole box
ALMOST = 0.05  # seconds by which an alarm may come early
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CAPABILITY_VERSION = 0x20080522


class TimeoutError(BaseException):
    """A cell's time is over. No `Exception`: a learner's `except Exception` must not keep it."""


def main() -> None:
    config = json.loads(sys.argv[1])
    reply = config["reply"]
    os.set_inheritable(reply, False)
    _confine(config)
    if config["probe"]:
        from course.grade import _probe

        os.write(reply, b"\n")
        answer: Any = _probe.run(json.load(sys.stdin))
    else:
        from course import shell
        from course.grade.reply import INT_DIGITS

        trouble = os.fdopen(os.dup(2), "w")  # ours: cells print to nowhere
        faulthandler.enable(trouble)
        ipython = shell.make_shell()
        os.write(reply, b"\n")
        job = json.load(sys.stdin)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        answer = shell.run_job(ipython, job, _Limited(config["cell_seconds"], trouble))
        sys.set_int_max_str_digits(INT_DIGITS)
        answer["checks"] = {key: _sent(ran) for key, ran in answer["checks"].items()}
    data = memoryview(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))
    while data:
        data = data[os.write(reply, data) :]
    os._exit(0)  # no learner's exit handler, no tearing down of torch


def _confine(config: dict) -> None:
    """Take limits on, then the box's own user; everything here is for good."""
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # a full host ends boxes first
    for name, value in config["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[config["uid"]] * 3)
        os.setresuid(*[config["uid"]] * 3)
        _prctl(_PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root now
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())  # the inheritable ones remain
    if config["orphan"] is not None:  # without bubblewrap, which does this otherwise
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != config["orphan"]:
            sys.exit("the grader ended")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Limited:
    """`course.shell.execute` with a time limit for each cell."""

    def __init__(self, seconds: float, trouble: IO[str]):
        self._seconds, self._trouble, self._running = seconds, trouble, False
        self._end = 0.0
        signal.signal(signal.SIGALRM, self._alarm)

    def _own(self) -> float:
        """The clock without the time that this process waited for a processor."""
        from course.grade.child import waited

        return time.monotonic() - waited("self")

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if not self._running:
            return
        left = self._end - self._own()
        if left < ALMOST:
            raise TimeoutError(f"still running after {self._seconds:g} s: an endless loop?")
        self._last_resort(left)

    def _last_resort(self, seconds: float) -> None:
        """End the whole box when a cell does not react to its alarm."""
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=self._trouble)

    def __call__(self, ipython: Any, source: str) -> str:
        from course import shell

        self._end = self._own() + self._seconds
        self._last_resort(self._seconds)
        self._running = True
        try:
            # again each second: a bare `except:` in a loop swallows the first
            signal.setitimer(signal.ITIMER_REAL, self._seconds, 1.0)
            return shell.execute(ipython, source)
        except BaseException as error:  # the alarm, or the `__str__` of what a cell raised
            return f"{type(error).__name__}: {error if type(error) is TimeoutError else '?'}"
        finally:
            self._running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()


def _sent(ran: dict) -> dict:
    """What one exercise did in a form that the host accepts; too much becomes its error."""
    error = ran["error"].encode("utf-8", "replace").decode()
    try:
        if (
            len(json.dumps(ran["shown"], ensure_ascii=False, allow_nan=False).encode())
            < CHECK_LIMIT
        ):
            return {**ran, "error": error}
        problem = f"more than {CHECK_LIMIT >> 10} KiB"
    except (ValueError, TypeError, RecursionError) as unfit:
        problem = f"something that cannot be sent ({type(unfit).__name__})"
    error = f"ValueError: the check showed {problem}"
    return {"shown": [], "error": error, "seconds": ran["seconds"]}


if __name__ == "__main__":
    main()
