"""The box: one notebook of untrusted code in one fresh process that can hurt nobody.

bubblewrap makes the namespaces and the read-only file system, a seccomp filter takes dangerous
system calls away, limits hold memory, processes, time and output. What the box says is a claim;
only what this side of the wall saw decides `Boxed.status`.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course.errors import CourseError
from course.grade import cgroup, mounts, reply, seccomp
from course.grade.child import (
    DIED,
    INFRASTRUCTURE,
    MEMORY,
    OK,
    OUTPUT,
    TICK,
    Limits,
    Run,
)
from course.shell import Ran
from course.text import plain

FILE_SIZE = 64 << 20  # bytes of one file that boxed code writes
_INSIDE_UID = 1000
# host uids of boxes: above those of users, containers and systemd's dynamic services
_FIRST_UID, _LAST_UID = 0x7000_0000, 0xFFFF_0000


class BoxUnavailable(CourseError):
    """This machine cannot make the box: one line that says why and what to do."""


@dataclass
class Boxed:
    """What became of one run.

    Attributes:
        status: ok; timeout, memory or output (over a limit); died (the process ended, or its reply
            is not one well-formed object); infrastructure (this machine failed: run it again).
        checks: what the box claims that each exercise's check showed; only if `status` is ok.
        detail: one or a few lines for people, without control characters.
        seconds: from the start of the box to its end.
    """

    status: str
    checks: dict[str, Ran] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Denial:
    """One thing that a box must not be able to do, and whether it could not."""

    name: str
    ok: bool
    detail: str = ""


class Box:
    """Runs notebooks, each in a box of its own. Safe to use from several threads at once.

    Args:
        unsafe: no bubblewrap and no filter: a fresh process with limits, which can read and write
            whatever the grader can. For tests and `--unsafe`.

    Raises BoxUnavailable if this machine has no bubblewrap that we can use.
    """

    def __init__(self, limits: Limits = Limits(), unsafe: bool = False):  # noqa: B008 (frozen)
        self.limits, self.unsafe = limits, unsafe
        self._used: set[int] = set()
        self._root = False
        if not unsafe:
            self._bwrap = _bubblewrap()
            self._filter = seccomp.program(seccomp.machine())
            self._root = os.geteuid() == 0 and _owns_all_uids()
            self._mounts = mounts.arguments(shared=self._root)
            cgroup.reap()
            reap()

    def run(self, cells: Iterable[tuple[str, str, str]], seed: int) -> Boxed:
        """Execute (kind, key, source) cells in order and return what each check claims to show."""
        cells = list(cells)
        keys = list(dict.fromkeys(key for kind, key, _ in cells if kind == "check"))
        seen = self._start({"seed": seed, "cells": cells}, self.limits)
        boxed = Boxed(seen.status, detail=seen.detail, seconds=seen.seconds)
        if seen.status == OK:
            try:
                boxed.checks = reply.checks(bytes(seen.data), keys)
            except reply.Malformed as why:
                boxed.status, boxed.detail = DIED, f"no well-formed reply: {plain(str(why))}"
        return boxed

    def prove(self) -> list[Denial]:
        """Try from inside what a box must prevent. Raises BoxUnavailable if no box starts."""
        small = replace(self.limits, memory=256 << 20, seconds=30)
        # as many processes as are allowed: their pages are summed like any box's
        roomy = replace(self.limits, memory=max(self.limits.memory, 3 << 30))
        static = self._start({"probe": "denials", **self._promises()}, roomy)
        if static.status != OK:
            raise BoxUnavailable(_advice(static.detail))
        found = [Denial(*row) for row in reply.parse(bytes(static.data))]
        bomb = self._start({"probe": "memory", "memory": small.memory}, small)
        held = bomb.status == MEMORY or (
            bomb.status == OK and reply.parse(bytes(bomb.data)) is True
        )
        found.append(Denial("memory of all processes together", held, bomb.detail))
        flood = self._start({"probe": "output", "bytes": small.output + 1}, small)
        found.append(Denial("output", flood.status == OUTPUT, flood.detail))
        return found

    def guarantees(self) -> list[str]:
        """What is weaker here than it could be, one sentence each; empty at best.

        Starts a box to see which control groups hold it.
        """
        if self.unsafe:
            return ["--unsafe: submissions ran without a box and could do what the grader can"]
        weaker = []
        if not self._root:
            weaker.append(
                "all boxes ran as one user: what that user may leave in the kernel is shared "
                "between submissions, except for keyrings, which are denied"
            )
        group = self._start({"probe": "output", "bytes": 0}, self.limits).group
        if not (group and group.memory):
            weaker.append(
                f"no memory control group: memory is summed {1 / TICK:.0f} times a second, and "
                "what no process maps (kernel buffers) is not seen"
            )
        if not (group and group.share):
            weaker.append(
                "no cpu control group: a submission that starts many processes slows those that "
                "run beside it; `--workers 1` keeps them apart"
            )
        if not (group and group.tasks) and not self._root and _kernel() < (5, 14):
            weaker.append(
                f"no pids control group: processes are counted {1 / TICK:.0f} times a second"
            )
        return weaker

    def _promises(self) -> dict[str, Any]:
        """What the probe compares with."""
        return {
            "answers": mounts.ANSWERS,
            "hidden": [str(mounts.ROOT / name) for name in mounts.ANSWERS],
            "readonly": [*mounts.packages(), *mounts.libraries(), mounts.INSIDE],
            "environment": sorted(self._environment()),
            "processes": self.limits.processes,
            "file_size": FILE_SIZE,
            "sizes": {"/tmp": mounts.TMP, "/dev/shm": mounts.SHM},
            "calls": {} if self.unsafe else seccomp.numbers(seccomp.machine()),
        }

    def _start(self, job: dict, limits: Limits) -> Run:
        """One box from start to end."""
        start = time.monotonic()
        run = Run(limits, json.dumps(job).encode())
        with contextlib.ExitStack() as stack:
            try:
                self._launch(run, "probe" in job, stack)
                run.follow()
            except Exception as problem:  # once a box stands, it may have brought this about
                what = plain(f"{type(problem).__name__}: {problem}")
                run.end(DIED if run.stood else INFRASTRUCTURE, what)
            finally:
                run.stop()
        run.seconds = time.monotonic() - start
        return run

    def _launch(self, run: Run, probe: bool, stack: contextlib.ExitStack) -> None:
        """Start the child behind its wall; limits are in place before it runs our code."""
        run.replies, reply_end = _pipe(stack)
        config = {
            "reply": reply_end.fileno(),
            "uid": _INSIDE_UID if self._root else None,
            "orphan": os.getpid() if self.unsafe else None,
            "probe": probe,
            "cell_seconds": run.limits.cell_seconds,
            "rlimits": self._rlimits(run.limits),
        }
        path, home = mounts.INSIDE, ""
        if self.unsafe:
            path = str(mounts.COURSE.parent)
            home = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="course-box-", ignore_cleanup_errors=True)
            )
        script = f"{path}/course/grade/_boxrun.py"
        command = [str(mounts.interpreter()), "-S", "-s", "-P", "-B", script, json.dumps(config)]
        given = [reply_end]
        if not self.unsafe:
            told, tell = _pipe(stack)
            wait, gate = _pipe(stack)
            rules, source = _pipe(stack)
            source.write(self._filter)  # less than a pipe holds
            source.close()
            given += [tell, wait, rules]
            command = [
                *(self._bwrap, "--unshare-all", "--unshare-user", "--die-with-parent"),
                *("--new-session", "--hostname", "box", "--cap-drop", "ALL", *self._mounts),
                *("--seccomp", str(rules.fileno()), "--info-fd", str(tell.fileno())),
                *self._user(wait.fileno()),
                *("--", *command),
            ]
        run.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(path, home),
            cwd=home or "/",
            pass_fds=[end.fileno() for end in given],
            start_new_session=self.unsafe,
        )
        for end in given:
            end.close()
        run.init = run.child.pid
        if not self.unsafe:
            run.init = _told_pid(told)
            run.handle = os.pidfd_open(run.init)
            stack.callback(os.close, run.handle)
            run.group = cgroup.Cgroup(run.limits.memory, run.limits.processes)
            run.group.add(run.init)
            if self._root:
                self._map_users(run.init)
            gate.write(b"\n")

    def _user(self, wait: int) -> list[str]:
        if self._root:  # we write the map while bwrap waits
            return ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID",
                    "--userns-block-fd", str(wait)]  # fmt: skip
        uid = str(_INSIDE_UID)
        return ["--disable-userns", "--uid", uid, "--gid", uid, "--block-fd", str(wait)]

    def _map_users(self, init: int) -> None:
        """Give the box a host user that no box of this batch had: nothing is left for the next."""
        uid = _FIRST_UID + secrets.randbelow(_LAST_UID - _FIRST_UID)
        while uid in self._used:
            uid = _FIRST_UID + secrets.randbelow(_LAST_UID - _FIRST_UID)
        self._used.add(uid)
        for kind in ("uid", "gid"):
            Path(f"/proc/{init}/{kind}_map").write_text(f"0 0 1\n{_INSIDE_UID} {uid} 1\n")

    def _rlimits(self, limits: Limits) -> dict[str, int]:
        rlimits = {
            "RLIMIT_AS": limits.memory + (1 << 30),  # code and the mapped model are not memory
            "RLIMIT_FSIZE": FILE_SIZE,
            "RLIMIT_NOFILE": 512,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": int(limits.seconds) + 30,
        }
        if not self.unsafe and (self._root or _kernel() >= (5, 14)):
            # before 5.14 the user's processes outside would count too
            rlimits["RLIMIT_NPROC"] = limits.processes
        return rlimits if sys.platform == "linux" else {"RLIMIT_CORE": 0}

    def _environment(self, path: str = mounts.INSIDE, home: str = "") -> dict[str, str]:
        """All that the child's environment holds, and bwrap's: nothing of the grader's."""
        home = home or "/tmp"
        return {
            "HOME": home,
            "USER": "learner",
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join([path, *mounts.packages()]),
            "PYTHONHASHSEED": "0",
            "IPYTHONDIR": f"{home}/ipython",
            "MPLCONFIGDIR": f"{home}/matplotlib",
            "MPLBACKEND": "agg",
            "TRITON_CACHE_DIR": f"{home}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
            "COURSE_CACHE": str(mounts.model()) if self.unsafe else f"{mounts.INSIDE}/cache",
            "COURSE_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }


def reap() -> None:
    """End what a killed grader or worker left behind.

    bubblewrap's process outside dies with them. If it dies before the one inside has its own order
    to do so, that one waits for it for ever: a process in a namespace whose parent is no bwrap.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or it is not ours
            if (folder / "comm").read_bytes() != b"bwrap\n":  # a name is any bytes
                continue
            handle = os.pidfd_open(int(folder.name))
            try:
                text = (folder / "status").read_text(errors="replace")
                status = dict(re.findall(r"^(\w+):\t(.*)$", text, re.M))
                inside, parent = len(status["NSpid"].split()) > 1, status["PPid"]
                ours = b"/course/grade/_boxrun.py\0" in (folder / "cmdline").read_bytes()
                if inside and ours and Path(f"/proc/{parent}/comm").read_bytes() != b"bwrap\n":
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _pipe(stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """Both ends of a pipe as unbuffered files, closed with the stack."""
    read, write = os.pipe()
    return (
        stack.enter_context(os.fdopen(read, "rb", 0)),
        stack.enter_context(os.fdopen(write, "wb", 0)),
    )


def _bubblewrap() -> str:
    """The path of a bubblewrap that is new enough."""
    ways = "grade in CI instead (the instructors' page shows how), or say `--unsafe`"
    if sys.platform != "linux":
        raise BoxUnavailable(f"the box needs Linux: {ways}")
    path = shutil.which("bwrap")
    if path is None:
        raise BoxUnavailable(f"bubblewrap is missing: `apt-get install bubblewrap`; or {ways}")
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    version = tuple(int(n) for n in re.findall(r"\d+", said)[:2])
    if version < (0, 8):
        raise BoxUnavailable(f"{said.strip() or path} is too old, 0.8 is needed: {ways}")
    return path


def _advice(detail: str) -> str:
    """One line for a box that does not start, from what it said."""
    detail = " ".join(detail.split())
    if "uid map" in detail or "new namespace" in detail.lower() or "userns" in detail:
        return (
            f"bubblewrap may not make namespaces here ({detail[-200:]}): on Ubuntu 24.04 run "
            "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, in a container "
            "allow them, or grade in CI"
        )
    return f"no box starts here ({detail[-300:]}): `course doctor` checks the installation"


def _owns_all_uids() -> bool:
    """Whether root is root of the machine, not of a container that has a few users only."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _kernel() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])


def _told_pid(told: Any) -> int:
    """The process id that bwrap writes when it has made the namespaces."""
    found = re.search(rb'"child-pid": (\d+)', told.read())
    if not found:
        raise OSError("bubblewrap made no namespaces")
    return int(found[1])
