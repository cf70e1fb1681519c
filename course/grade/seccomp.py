"""The system calls that boxed code does not get, as a seccomp filter for `bwrap --seccomp`.

Namespaces hide the host; this closes what they leave open: keyrings, which outlive a box; memory
that no limit counts (memfd, System V); reading other processes; making namespaces, which brings
back privileges; sockets to a hypervisor; leases on files that all boxes open.
Numbers are those of the kernel's `unistd` headers.
"""

import platform
import struct
from collections.abc import Iterator

from course.errors import CourseError

EPERM, ENOSYS = 1, 38
CLONE3 = {"x86_64": 435, "aarch64": 435}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
FCNTL = {"x86_64": 72, "aarch64": 25}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; not vsock, alg, packet …
# F_SETLEASE: who opens the file then waits for us, a classmate too; F_NOTIFY: who reads the folder
_COMMANDS = (1024, 1026)

# name: (x86_64, aarch64)
DENIED = {
    # keyrings survive the box, and the next box of the same user could read them
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory that the limits do not see
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # parts of the kernel that a notebook never needs and that have had many holes
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "reboot": (169, 142),
}

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; low halves


def machine() -> str:
    """This machine's architecture; CourseError if the filter has no numbers for it."""
    name = platform.machine()
    if name not in _AUDIT_ARCH:
        raise CourseError(f"no system call filter for {name}: grade on x86_64 or aarch64")
    return name


def numbers(arch: str) -> dict[str, int]:
    """The denied calls' numbers on `arch` ("x86_64" or "aarch64")."""
    column = 0 if arch == "x86_64" else 1
    return {name: pair[column] for name, pair in DENIED.items()}


def program(arch: str) -> bytes:
    """The filter as an array of struct sock_filter.

    A call made under another architecture's numbers ends the process. Denied calls return EPERM;
    clone3, whose flags a filter cannot read, returns ENOSYS, on which libraries fall back to clone.
    """
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(arch))


def _steps(arch: str) -> Iterator[tuple[int, int, int, int]]:
    """(operation, jump if true, jump if false, operand), jumps counted from the next step."""
    yield _LOAD, 0, 0, _ARCH
    yield _JEQ, 1, 0, _AUDIT_ARCH[arch]
    yield _RET, 0, 0, _KILL_PROCESS
    yield _LOAD, 0, 0, _NUMBER
    if arch == "x86_64":  # the x32 numbers share the architecture
        yield _JGE, 0, 1, 0x40000000
        yield _RET, 0, 0, _KILL_PROCESS
    for number in numbers(arch).values():
        yield _JEQ, 0, 1, number
        yield _RET, 0, 0, _ERRNO | EPERM
    yield _JEQ, 0, 1, CLONE3[arch]
    yield _RET, 0, 0, _ERRNO | ENOSYS
    yield _JEQ, 0, 4, CLONE[arch]
    yield _LOAD, 0, 0, _ARG0
    yield _JSET, 0, 1, _NEW_NAMESPACES
    yield _RET, 0, 0, _ERRNO | EPERM
    yield _RET, 0, 0, _ALLOW
    yield _JEQ, 0, 3 + len(_COMMANDS), FCNTL[arch]
    yield _LOAD, 0, 0, _ARG1
    for left, command in zip(range(len(_COMMANDS), 0, -1), _COMMANDS, strict=True):
        yield _JEQ, left, 0, command
    yield _RET, 0, 0, _ALLOW
    yield _RET, 0, 0, _ERRNO | EPERM
    yield _JEQ, 0, 2 + len(_FAMILIES), SOCKET[arch]
    yield _LOAD, 0, 0, _ARG0
    for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        yield _JEQ, left, 0, family
    yield _RET, 0, 0, _ERRNO | EPERM
    yield _RET, 0, 0, _ALLOW
