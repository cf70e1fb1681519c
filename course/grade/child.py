"""One boxed child while it runs: read what it says, hold it to its limits, end it, judge its end.

Nothing here believes the child. What it wrote is kept as bytes; its end is judged by what the
system says of it.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course.grade import cgroup
from course.text import plain

OK, TIMEOUT, MEMORY, OUTPUT, DIED = "ok", "timeout", "memory", "output", "died"
INFRASTRUCTURE = "infrastructure"
START_SECONDS = 60.0  # until our own code runs in the box; a host that needs longer is overloaded
TICK = 0.05  # seconds between two looks at a box
PATIENCE = 3  # on a busy machine a run may last this many times its limit, waiting for a processor
_PAUSE = 0.001  # after each read: a box that sends byte by byte must not keep us busy
_TAIL = 4000  # characters of what a box says on stderr that are kept
_OWN_TASKS = 2  # bubblewrap's own process in the box, and one for the limit's edge


@dataclass(frozen=True)
class Limits:
    """What one run may use. Bytes and seconds; `memory` is of all processes and files together."""

    seconds: float = 120.0
    cell_seconds: float = 30.0
    memory: int = 3 << 30
    output: int = 1 << 20
    processes: int = 128


@dataclass
class Run:
    """One child while it runs: what we read from it, what it uses, how it ended."""

    limits: Limits
    job: bytes
    replies: Any = None  # our end of the pipe
    child: subprocess.Popen | None = None
    init: int = 0  # the process whose death ends the box, as seen from here
    handle: int = -1  # its pidfd: a number that is taken again cannot be killed by mistake
    group: cgroup.Cgroup | None = None
    status: str = ""
    detail: str = ""
    data: bytearray = field(default_factory=bytearray)
    said: bytes = b""  # the last of stderr
    heard: int = 0  # bytes of stderr
    stood: bool = False  # our code in the box is ready, no learner's code has run
    runner: int = 0  # the process that runs the cells, once the box stands
    starved: float = 0.0  # seconds that it was ready and got no processor: not the learner's
    ended: bool = False  # the reply is complete
    seconds: float = 0.0
    oom_kills: int = field(default_factory=lambda: _oom_kills())

    def end(self, status: str, detail: str) -> None:
        """Set the status; the first one stands."""
        if not self.status:
            self.status, self.detail = status, detail

    def follow(self) -> None:
        """Read until the reply is complete, the child has ended or a limit is passed."""
        assert self.child and self.child.stdin and self.child.stderr
        poll = select.poll()
        replies, errors = self.replies.fileno(), self.child.stderr.fileno()
        for source in (replies, errors):
            os.set_blocking(source, False)
            poll.register(source, select.POLLIN)
        look = time.monotonic()
        deadline = look + START_SECONDS
        while not self.status and not self.ended:
            gone = self.child.poll() is not None
            ready = poll.poll(0 if gone else TICK * 1000)
            for source, _ in ready:
                if not self._read(source, errors):
                    poll.unregister(source)
            if ready:
                time.sleep(_PAUSE)
            if self.data and not self.stood:
                self.stood, deadline = True, time.monotonic() + self.limits.seconds
                # bubblewrap's process has one child as yet; without bubblewrap it is the runner
                self.runner = list(descendants(self.init))[-1]
                with contextlib.suppress(BrokenPipeError), self.child.stdin as jobs:
                    jobs.write(self.job)
            if gone and not ready:
                return
            now = time.monotonic()
            if now > deadline + self._starved():
                self._late()
            if now > look:
                self._watch()
                look = now + max(TICK, 10 * (time.monotonic() - now))

    def _read(self, source: int, errors: int) -> bool:
        """Take what is there; False at the end of a stream."""
        try:
            part = os.read(source, 1 << 16)
        except BlockingIOError:  # a box may open our pipes too and take back what it wrote
            return True
        if source == errors:
            self.heard += len(part)
            self.said = (self.said + part)[-_TAIL:]
        else:
            self.data += part
            self.ended = not part
        if max(self.heard, len(self.data)) > self.limits.output:
            self.end(OUTPUT, f"more than {self.limits.output:,} bytes of output")
        return bool(part)

    def _starved(self) -> float:
        """What the runner has waited so far, up to what patience allows; it may have ended."""
        if self.stood:
            self.starved = max(self.starved, waited(self.runner))
        return min(self.starved, (PATIENCE - 1) * self.limits.seconds)

    def _late(self) -> None:
        if self.stood:
            self.end(TIMEOUT, f"still running after {self.limits.seconds:g} s")
        else:
            self.end(INFRASTRUCTURE, f"the box did not stand after {START_SECONDS:g} s")

    def _watch(self) -> None:
        """Hold the whole box to its limits, whether or not there is a control group."""
        memory = tasks = 0
        for pid in descendants(self.init):
            status = _status(pid)
            memory += status.get("RssAnon", 0) + status.get("RssShmem", 0) + status.get("VmSwap", 0)
            tasks += status.get("Threads", 0)
        if self.handle >= 0:
            memory += sum(_held(f"/proc/{self.init}/root{path}") for path in ("/tmp", "/dev/shm"))
        # processes first: a fork bomb's memory is one page counted once for each process
        if tasks > self.limits.processes + _OWN_TASKS:
            self.end(DIED, f"more than {self.limits.processes} processes")
        if memory > self.limits.memory:
            self._end_for_memory()

    def _end_for_memory(self) -> None:
        self.end(MEMORY, f"more than {self.limits.memory >> 20:,} MiB of memory")

    def stop(self) -> None:
        """End every process of the box, wait until it is gone, say how it ended."""
        if self.child is None:
            return
        if not self.status:  # the reply is complete, or the child has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(2)
        code = self.child.poll()
        with contextlib.suppress(ProcessLookupError):
            if self.handle >= 0:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            else:
                os.killpg(self.child.pid, signal.SIGKILL)
        self.child.kill()
        self.child.wait()
        if self.handle >= 0:
            select.select([self.handle], [], [], 5)  # readable when the whole box is dead
        self._explain(code)
        for pipe in (self.child.stdin, self.child.stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self.group:
            self.group.close()

    def _explain(self, code: int | None) -> None:
        """Turn the exit status, None if we ended the child, into a status of ours."""
        assert self.child and self.child.stderr
        os.set_blocking(self.child.stderr.fileno(), False)
        last = self.child.stderr.read(_TAIL) or b""  # of a child that never stood
        said = plain((self.said + last).decode("utf-8", "replace")).strip()
        if not self.stood:
            self.status = INFRASTRUCTURE
            self.detail = f"the box did not start: {said or self.detail or f'exit status {code}'}"
        if code and self.group and self.group.killed():
            self._end_for_memory()
        if code and self.handle >= 0 and (code < 0 or _oom_kills() > self.oom_kills):
            self.end(INFRASTRUCTURE, "the machine ended the box, perhaps for lack of memory")
        if not code and self.data.strip():
            self.end(OK, "")
        if "Timeout (" in said[:20]:  # what faulthandler writes when it ends the process
            self.end(TIMEOUT, f"a cell could not be stopped after {self.limits.cell_seconds:g} s")
        self.end(DIED, said or f"the process ended with exit status {code}")


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it; what a box starts stays below its first process."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                waiting += map(int, children.split())


def waited(pid: int | str) -> float:
    """Seconds that a process's first thread has waited for a processor; 0.0 where it is unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _status(pid: int) -> dict[str, int]:
    """The numbers of /proc/PID/status, sizes in bytes; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")  # a name is any bytes
    except OSError:
        return {}
    rows = re.findall(r"^(\w+):\s+(\d+)( kB)?$", text, re.M)
    return {name: int(n) << (10 if unit else 0) for name, n, unit in rows}


def _held(path: str) -> int:
    """Bytes that the files of a file system in memory take."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    files = (stat.f_files - stat.f_ffree) * 1024  # about what the kernel keeps for each
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize + files


def _oom_kills() -> int:
    """How often this machine's kernel has ended a process for lack of memory."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
        return int(found[1]) if found else 0
    return 0
