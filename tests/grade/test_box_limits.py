"""The box proves its denials, and its limits hold for all its processes together."""

import os
import platform
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from course.grade import box as boxes
from course.grade import cgroup, child, seccomp
from course.grade.box import Box, Limits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
MIB = 1 << 20
SETUP = ("setup", "", "from course import show")


def run(answer: str, limits: Limits, unsafe: bool = False) -> boxes.Boxed:
    job = [SETUP, ("answer", "f", textwrap.dedent(answer)), ("check", "f", "show('f', f())")]
    return Box(limits, unsafe).run(job, 0)


def value(boxed: boxes.Boxed) -> object:
    assert boxed.status == "ok" and not boxed.checks["f"].error, boxed
    return boxed.checks["f"].shown[0]["values"][0]


def test_the_box_proves_every_denial():
    denials = Box().prove()
    assert [(d.name, d.detail) for d in denials if not d.ok] == []
    assert len(denials) == len({d.name for d in denials}) == 20


def test_the_probe_notices_a_missing_wall():
    """What `prove` reports outside the box: an attempt that never fails there proves nothing."""
    open_doors = {d.name for d in Box(unsafe=True).prove() if not d.ok}
    assert open_doors >= {
        "an ordinary user without privileges",
        "no other process",
        "no answers to import",
        "no checkout",
        "files in memory are few",
        "processes",
        "no dangerous system call",
        "no lease on a file",
    }


BOMB = """
import os, time
def f():
    for _ in range(8):
        if os.fork() == 0:
            kept = bytearray(b"x") * (60 << 20)
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""
SMALL = Limits(seconds=40, cell_seconds=40, memory=300 * MIB)


def test_memory_is_held_by_summing_alone(monkeypatch):
    monkeypatch.setattr(cgroup, "_parents", list)
    boxed = run(BOMB, SMALL)
    assert (boxed.status, boxed.seconds < 20) == ("memory", True)
    weaker = " ".join(Box().guarantees())
    assert "no memory control group" in weaker and "no cpu control group" in weaker


def test_a_box_has_one_share_of_the_processors_however_many_processes_it_starts():
    """Else a box of 120 busy processes makes an honest one beside it run out of time."""
    group = cgroup.Cgroup(SMALL.memory, SMALL.processes)
    with subprocess.Popen(["sleep", "30"]) as process:
        group.add(process.pid)
        inside = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
        process.kill()
    group.close()
    own = [line for line in inside if cgroup._PREFIX in line]
    shared = [line for line in own if line.startswith("0::") or ":cpu" in line]
    assert bool(shared) == group.share
    if not group.share:
        assert any("no cpu control group" in weaker for weaker in Box().guarantees())


def test_memory_is_held_by_the_control_group_alone(monkeypatch):
    group = cgroup.Cgroup(SMALL.memory, SMALL.processes)
    group.close()
    if not group.memory:
        assert any("no memory control group" in weaker for weaker in Box().guarantees())
        return
    monkeypatch.setattr(child.Run, "_watch", lambda self: None)
    # the process that asks for too much is the notebook's own, so that its end is the box's
    source = """
    import mmap
    def f():
        shared = mmap.mmap(-1, 900 << 20)
        for at in range(0, 900 << 20, 4096):
            shared[at] = 1
        return 1
    """
    boxed = run(source, SMALL)
    assert boxed.status == "memory"


def test_a_control_group_that_takes_no_process_holds_nothing():
    group = cgroup.Cgroup(SMALL.memory, SMALL.processes)
    group.add(1 << 30)  # no process has this id
    assert (group.memory, group.tasks) == (False, False)
    assert not [f for p in cgroup._parents() for f in p.glob(f"{cgroup._PREFIX}{os.getpid()}-*")]


def test_one_process_gets_a_memory_error_of_its_own():
    boxed = run("def f():\n    return len(bytes(8 << 30))", SMALL)
    assert boxed.status == "ok" and boxed.checks["f"].error.startswith("MemoryError")


def test_files_in_memory_are_few_and_count_as_memory(monkeypatch):
    monkeypatch.setattr(cgroup, "_parents", list)
    source = """
    import os
    def f():
        written = 0
        for number in range(100):
            for folder in ("/tmp", "/dev/shm"):
                try:
                    with open(f"{folder}/{number}", "wb") as file:
                        written += file.write(bytes(8 << 20))
                except OSError:
                    pass
        return written >> 20
    """
    assert value(run(source, Limits())) in range(100, 200)
    kept = source.replace("return", "time.sleep(20)\n        return").replace("os", "os, time", 1)
    boxed = run(kept, Limits(memory=150 * MIB))
    assert boxed.status == "memory"


FORKS = """
import os, signal
def f():
    count = 0
    try:
        while count < 400:
            if os.fork() == 0:
                signal.pause()
                os._exit(0)
            count += 1
    except OSError:
        pass
    return count
"""


def test_a_fork_bomb_is_held():
    assert value(run(FORKS, Limits(processes=40))) < 40


def test_a_fork_bomb_is_noticed_where_the_kernel_does_not_hold_it(monkeypatch):
    monkeypatch.setattr(cgroup, "_parents", list)
    monkeypatch.setattr(boxes, "_kernel", lambda: (5, 4))
    monkeypatch.setattr(boxes, "_owns_all_uids", lambda: False)  # as an ordinary user
    source = FORKS.replace("return count", "signal.pause()")
    boxed = run(source, Limits(seconds=30, processes=40))
    assert boxed.status == "died" and "more than 40 processes" in boxed.detail


def test_a_flood_goes_nowhere():
    flood = "import os, sys\ndef f():\n    {}\n    return 1"
    for write in (
        "print('x' * (4 << 20))",
        "print('x' * (4 << 20), file=sys.stderr)",
        "os.system('head -c 4000000 /dev/zero >&2')",
    ):
        assert value(run(flood.format(write), Limits())) == 1


def test_the_first_process_of_the_box_cannot_be_rewritten():
    """It is bubblewrap's and dies with the grader; an ordinary user shares its user id."""
    source = "import os\ndef f():\n    return os.path.exists('/proc/1/mem') + 0"
    assert value(run(source, Limits())) == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="32-bit calls exist on x86_64")
def test_calls_of_another_architecture_end_the_process():
    source = """
    import ctypes, mmap
    def f():
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
        at = ctypes.addressof(ctypes.c_char.from_buffer(code))
        return ctypes.CFUNCTYPE(ctypes.c_int)(at)()
    """
    boxed = run(source, Limits())
    assert (boxed.status, boxed.checks) == ("died", {})


ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def decide(program: bytes, arch: int, number: int, argument: int = 0, second: int = 0) -> int:
    """What the kernel would return for a call: the few instructions that the filter uses."""
    memory = {0: number, 4: arch, 16: argument & 0xFFFFFFFF, 24: second & 0xFFFFFFFF}
    steps = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        at += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            accumulator = memory[operand]
            continue
        test = {
            0x15: accumulator == operand,
            0x35: accumulator >= operand,
            0x45: bool(accumulator & operand),
        }[operation]
        at += if_true if test else if_false


@pytest.mark.parametrize("arch", ARCHES)
def test_the_filter_decides_as_it_says(arch):
    program, audit = seccomp.program(arch), ARCHES[arch]
    denied = seccomp.numbers(arch)
    assert len(set(denied.values())) == len(denied)
    assert {decide(program, audit, number) for number in denied.values()} == {EPERM}
    assert decide(program, audit, seccomp.CLONE3[arch]) == ENOSYS
    sigchld, thread, user, network = 17, 0x3D0F00, 0x10000011, 0x40000011
    clone = seccomp.CLONE[arch]
    assert [decide(program, audit, clone, flags) for flags in (sigchld, thread)] == [ALLOW] * 2
    assert [decide(program, audit, clone, flags) for flags in (user, network)] == [EPERM] * 2
    families = [decide(program, audit, seccomp.SOCKET[arch], family) for family in range(46)]
    assert [n for n, verdict in enumerate(families) if verdict == ALLOW] == [1, 2, 10, 16]
    commands = [decide(program, audit, seccomp.FCNTL[arch], 3, n) for n in range(2000)]
    assert [n for n, verdict in enumerate(commands) if verdict == EPERM] == [1024, 1026]
    special = {*denied.values(), clone, seccomp.CLONE3[arch], seccomp.SOCKET[arch]}
    others = {decide(program, audit, n) for n in range(600) if n not in special}
    assert others == {ALLOW}
    assert decide(program, ARCHES["x86_64" if arch == "aarch64" else "aarch64"], 0) == KILL
    assert decide(program, 0x40000003, 0) == KILL  # 32-bit
    if arch == "x86_64":
        assert decide(program, audit, 0x40000000) == KILL  # x32


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("arch", [arch for arch, header in HEADERS.items() if header.exists()])
def test_the_numbers_are_those_of_the_kernel_headers(arch):
    lines = [line.split() for line in HEADERS[arch].read_text().splitlines()]
    known = dict(line[1:3] for line in lines if line[:1] == ["#define"] and len(line) == 3)
    known = {name: known.get(number, number) for name, number in known.items()}
    ours = seccomp.numbers(arch) | {"clone": seccomp.CLONE[arch], "socket": seccomp.SOCKET[arch]}
    ours["fcntl"] = seccomp.FCNTL[arch]
    wrong = {n: v for n, v in ours.items() if int(known.get(f"__NR_{n}", v)) != v}
    assert wrong == {}
    assert len(ours.keys() & {name.removeprefix("__NR_") for name in known}) > 40
