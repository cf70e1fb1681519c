"""Inside the box: try what a submission must not be able to do, and report what happened.

Runs before any grading. Each attempt is real: a denial that is only configured proves nothing.
"""

import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, bool, str]
_CHUNK = 8 << 20
_BOMBS = 4  # processes that share the memory to be taken


def run(job: dict[str, Any]) -> Any:
    """Rows (name, denied, detail) of every denial, or one of the two bombs."""
    if job["probe"] == "memory":
        return memory_held(job["memory"])
    if job["probe"] == "output":
        os.write(2, b"x" * job["bytes"])
        return True
    return [_row(*attempt) for attempt in _attempts(job)]


def memory_held(limit: int) -> bool:
    """Whether processes that together want twice the limit do not all get it.

    Each alone stays below the limit, so that no limit of a single process is enough.
    """
    children, told = [], []
    for _ in range(_BOMBS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(MemoryError):
                kept = [bytearray(b"x") * _CHUNK for _ in range(limit * 2 // _BOMBS // _CHUNK)]
                os.write(write, bytes([len(kept) > 0]))
                time.sleep(30)
            os._exit(1)
        os.close(write)
        children.append(pid)
        told.append(read)
    full = sum(bool(os.read(read, 1)) for read in told)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return full < _BOMBS


def _row(name: str, attempt: Callable[..., str], *arguments: Any) -> Row:
    """`attempt` returns what it could do, or nothing; an error is what a denial looks like."""
    try:
        could = attempt(*arguments)
    except OSError as denied:
        return name, True, os.strerror(denied.errno) if denied.errno else str(denied)[:100]
    return name, not could, could[:300]


def _attempts(job: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield "an ordinary user without privileges", _privileges
    yield "no network", _network
    yield "no other process", _processes
    yield "no secret in an environment", _environment, job["environment"]
    yield "no open file of the grader", _descriptors
    yield "no terminal", os.open, "/dev/tty", os.O_RDWR
    yield "no answers to import", _importable, job["answers"]
    yield "no checkout", _existing, [*job["hidden"], "/etc/shadow", "/etc/passwd", "/sys", "/run"]
    yield "packages and system are read-only", _writable, job["readonly"]
    yield "files in memory are few", _mounts, job["sizes"]
    yield "file size", _file_size, job["file_size"]
    yield "processes", _fork_bomb, job["processes"]
    yield "memory of one process", _limitless, "RLIMIT_AS"
    yield "the model can be read and not written", _model
    yield "no dangerous system call", _calls, job["calls"]
    yield "no lease on a file", _lease
    yield "no new namespace", _new_namespace
    yield "no socket to a hypervisor", _socket, 40  # AF_VSOCK, which no namespace hides


def _privileges() -> str:
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    held = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")}
    if os.getuid() == 0 or any(int(value, 16) for value in held.values()):
        return f"uid {os.getuid()}, {held}"
    if status["NoNewPrivs"] != "1" or status["Seccomp"] != "2":
        return f"NoNewPrivs {status['NoNewPrivs']}, Seccomp {status['Seccomp']}"
    with contextlib.suppress(OSError):
        os.setuid(0)
        return "became root"
    return ""


def _network() -> str:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:
        return f"interfaces {others}"
    with contextlib.suppress(OSError):
        socket.getaddrinfo("example.org", 80)
        return "resolved a name"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("192.0.2.1", 53))  # needs a route, sends nothing
    return "has a route"


def _processes() -> str:
    """Our own, and the box's first process, which is covered."""
    own = {os.getpid(), os.getppid(), 1}
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]
    if others:
        return f"sees processes {others}"
    visible = os.listdir("/proc/1")
    return f"/proc/1 holds {visible[:5]}" if visible else ""


def _environment(expected: list[str]) -> str:
    known = {*expected, "LC_CTYPE", "PWD"}  # Python and bwrap set these
    names = set(os.environ)
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            names |= {part.split("=")[0] for part in file.read_text("utf-8", "replace").split("\0")}
    return ", ".join(sorted(names - known - {""}))


def _descriptors() -> str:
    """stdin, stdout, stderr, the reply's pipe and the listing itself."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    strange = [f for f in found if not f.startswith(("pipe:", "/dev/null", "/proc/"))]
    return ", ".join(strange) if strange or len(found) > 5 else ""


def _importable(names: list[str]) -> str:
    """A covered package is an empty folder, which Python finds and has nothing to import from."""
    specs = {name: importlib.util.find_spec(name) for name in names}
    return ", ".join(
        name
        for name, spec in specs.items()
        if spec is not None
        and (spec.loader or any(os.listdir(p) for p in spec.submodule_search_locations or ()))
    )


def _existing(paths: list[str]) -> str:
    return ", ".join(path for path in paths if os.path.exists(path))


def _writable(paths: list[str]) -> str:
    could = []
    for path in ["/", "/usr", "/etc", "/dev", "/proc/sys/kernel", *paths]:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path):
            could.append(path)
        if os.access(path, os.W_OK):
            could.append(path)
    return ", ".join(could)


def _mounts(sizes: dict[str, int]) -> str:
    """Everything that can be written to is a device, /proc or a file system of the given size."""
    could = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, system = line.partition(" - ")
        point, options = fields.split(" ")[4:6]
        kind = system.split(" ")[0]
        if "rw" not in options.split(",") or kind in ("proc", "devpts"):
            continue
        if point.startswith("/dev/") and point not in sizes and not os.path.isdir(point):
            continue
        stat = os.statvfs(point)
        if stat.f_blocks * stat.f_frsize > sizes.get(point, 0):
            could.append(f"{point} ({kind})")
    return ", ".join(could)


def _file_size(limit: int) -> str:
    """Writing one byte past the limit fails with EFBIG, since Python ignores SIGXFSZ."""
    with tempfile.TemporaryFile() as file:
        file.seek(limit)
        file.write(b"x")
        file.flush()
    return f"a file of more than {limit:,} bytes"


def _fork_bomb(limit: int) -> str:
    children = []
    try:
        for _ in range(limit + 1):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            children.append(pid)
    except OSError as denied:
        if denied.errno != errno.EAGAIN:
            raise
        return ""
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    return f"{limit + 1} processes"


def _limitless(name: str) -> str:
    soft, hard = resource.getrlimit(getattr(resource, name))
    with contextlib.suppress(MemoryError):
        bytearray(hard)  # never touched: only address space is asked for
        return f"{hard:,} bytes"
    return "" if 0 < soft == hard else "no limit"


def _model() -> str:
    files = [f for f in Path(os.environ["COURSE_CACHE"]).rglob("*") if f.is_file()]
    if not any(f.name == "model.safetensors" for f in files):
        return "there is no model: run `make model`"
    for file in files:
        if os.access(file, os.W_OK):
            return f"{file.name} can be written"
        if not os.access(file, os.R_OK):
            return f"{file.name} cannot be read: let all users read the model's files"
    return ""


def _calls(numbers: dict[str, int]) -> str:
    """Calls with impossible arguments: a kernel that considers them says something but EPERM."""
    if not numbers:
        return "nothing filters them"
    libc = ctypes.CDLL(None, use_errno=True)
    could = []
    for name, number in numbers.items():
        ctypes.set_errno(0)
        result = libc.syscall(*[ctypes.c_long(x) for x in (number, -1, 0, -1, 0, -1, 0)])
        if result != -1 or ctypes.get_errno() != errno.EPERM:
            could.append(name)
    return ", ".join(could)


def _lease() -> str:
    """On a file of our own, of which every user may have one."""
    with tempfile.NamedTemporaryFile() as file, open(file.name, "rb") as again:
        file.close()  # who writes to it is in the way
        fcntl.fcntl(again, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return "holds up whoever opens it"


def _new_namespace() -> str:
    from course.grade import seccomp

    libc = ctypes.CDLL(None, use_errno=True)
    number = seccomp.CLONE[seccomp.machine()]
    new_user = 0x10000000 | signal.SIGCHLD
    pid = libc.syscall(*[ctypes.c_long(x) for x in (number, new_user, 0, 0, 0, 0)])
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
        return "made a user namespace"
    return ""


def _socket(family: int) -> str:
    with socket.socket(family, socket.SOCK_STREAM):
        return f"made a socket of family {family}"
