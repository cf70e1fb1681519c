"""A control group for one box where the system lets us make one: version 1 or 2.

It holds what no limit of a single process sees: the memory of all processes together, files in
memory and kernel buffers, the number of tasks, and a box's share of the processors, which else
grows with its processes. Where none can be made, the watch in `child.py` is all there is.
"""

import contextlib
import itertools
import os
import re
from pathlib import Path

_PREFIX = "course-grade-"  # then the grader's process id and a number
_numbers = itertools.count()


class Cgroup:
    """The groups of one box. `memory`, `tasks` and `share` say which limits hold."""

    def __init__(self, memory: int, tasks: int):
        self._folders: dict[Path, set[str]] = {}  # what each group limits
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        for parent in _parents():
            self._make(parent / name, memory, tasks)

    @property
    def memory(self) -> bool:
        return any("memory" in held for held in self._folders.values())

    @property
    def tasks(self) -> bool:
        return any("tasks" in held for held in self._folders.values())

    @property
    def share(self) -> bool:
        return any("share" in held for held in self._folders.values())

    def add(self, pid: int) -> None:
        """Move a process, which has no children yet, into the groups that take it."""
        for folder in list(self._folders):
            if not _set(folder, "cgroup.procs", pid):
                self._drop(folder)

    def killed(self) -> bool:
        """Whether the kernel ended a process of the box for lack of memory."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.M)
                    if found and int(found[1]):
                        return True
        return False

    def close(self) -> None:
        """Remove the groups; their processes must have ended."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _make(self, folder: Path, memory: int, tasks: int) -> None:
        """Make one group with the limits that it offers and that no other holds."""
        try:
            folder.mkdir()
        except OSError:
            return
        held = set()
        if not self.memory:
            if _set(folder, "memory.max", memory):  # version 2
                _set(folder, "memory.swap.max", 0)
                _set(folder, "memory.oom.group", 1)
                held.add("memory")
            elif _set(folder, "memory.limit_in_bytes", memory):  # version 1
                _set(folder, "memory.memsw.limit_in_bytes", memory)
                held.add("memory")
        if not self.tasks and _set(folder, "pids.max", tasks):
            held.add("tasks")
        if not self.share and (
            _set(folder, "cpu.weight", 100) or _set(folder, "cpu.shares", 1024)
        ):  # what every group has by itself: boxes are equals, however many processes they start
            held.add("share")
        self._folders[folder] = held
        if not held:
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        del self._folders[folder]
        with contextlib.suppress(OSError):
            folder.rmdir()


def reap() -> None:
    """Remove groups that graders which are gone have left behind."""
    for parent in _parents():
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).split("-")[0]
            if not os.path.exists(f"/proc/{owner}"):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _parents() -> list[Path]:
    """Where groups may be made: beside our own processes, so that limits on us hold for boxes."""
    try:
        ours = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in ours:
        _, names, path = line.split(":", 2)
        for mount in mounts:
            fields, _, system = mount.partition(" - ")
            kind, _, options = system.split(" ", 2)
            wanted = (
                kind == "cgroup2"
                if not names
                else kind == "cgroup"
                and bool({"memory", "pids", "cpu"} & set(names.split(",")))
                and set(names.split(",")) <= set(options.split(" ")[-1].split(","))
            )
            if wanted:
                root, point = fields.split(" ")[3:5]
                inside = "" if path == root else path.removeprefix(root.rstrip("/"))
                found.append(Path(point + inside))
                if kind == "cgroup2" and os.geteuid() == 0:
                    found.append(Path(point))  # a group of version 2 that holds us offers no limits
    return list(dict.fromkeys(found))


def _set(folder: Path, name: str, value: int) -> bool:
    """Whether the group has this limit and took it."""
    path = folder / name
    try:
        if not path.exists():
            return False
        path.write_text(str(value))
    except OSError:
        return False
    return True
