"""What the box sees of this machine, as arguments for bubblewrap.

Read-only: the system's programs and libraries, this interpreter, its packages, `course` and the
prepared model. Nothing of the checkout besides: no solutions, no recorded outputs. All else is a
small private file system in memory.
"""

import os
import site
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from course.catalog import ROOT

COURSE = Path(__file__).resolve().parent.parent
INSIDE = "/box"  # where `course` and the model lie in the box
TMP, SHM = 128 << 20, 64 << 20  # bytes of /tmp and /dev/shm
ANSWERS = ("solutions", "kernels", "engine", "tests", "notebooks")  # what a box must not import
_SYSTEM = ("bin", "lib", "lib32", "lib64", "libexec", "include", "share")


def interpreter() -> Path:
    """The real Python binary under this environment, beyond venvs and links."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def packages() -> list[str]:
    """The folders that hold this environment's packages, in the order of `sys.path`."""
    found = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    real = [os.path.realpath(p) for p in found if os.path.isdir(p)]
    return list(dict.fromkeys(real))


def libraries() -> list[str]:
    """The folders of the standard library and of what the interpreter links to."""
    prefix = os.path.realpath(sys.base_prefix)
    real = [os.path.realpath(f"{prefix}/{name}") for name in ("lib", "lib64")]
    return [path for path in dict.fromkeys(real) if os.path.isdir(path)]


def model() -> Path:
    """The folder of prepared models, as `course.lm.weights` finds it without importing torch."""
    cache = os.environ.get("COURSE_CACHE") or platformdirs.user_cache_dir("inference-from-scratch")
    return Path(cache).resolve()


def arguments(shared: bool) -> list[str]:
    """bwrap's arguments that make the box's file system.

    Args:
        shared: the box runs as another user than the grader, who must be able to read the model.
    """
    # these first: an environment may lie below /tmp
    args = ["--proc", "/proc", *_cover("/proc/1")]  # through which bwrap's memory can be written
    args += ["--dev", "/dev", "--perms", "1777", "--size", str(SHM), "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev"]
    args += ["--perms", "1777", "--size", str(TMP), "--tmpfs", "/tmp"]
    args += ["--perms", "0755", "--dir", INSIDE]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            args += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            args += ["--ro-bind", f"/{name}", f"/{name}"]
    bound: list[str] = []  # shown so far
    hidden = ["/proc/1"]  # and what is covered again
    for name in _SYSTEM:
        args += _bind(f"/usr/{name}", bound, hidden)
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        args += ["--ro-bind-try", path, path]
    if _shown(str(ROOT), bound, hidden):  # a checkout below /usr, as some containers have it
        hidden.append(str(ROOT))
        args += _cover(str(ROOT))
    for path in _python():
        args += _bind(path, bound, hidden)
    for folder in [*packages(), *_base_packages()]:
        for name in ANSWERS:  # a course that is installed rather than used from its checkout
            if os.path.isdir(f"{folder}/{name}"):
                hidden.append(f"{folder}/{name}")
                args += _cover(f"{folder}/{name}")
    args += ["--ro-bind", str(COURSE), f"{INSIDE}/course"]
    if model().is_dir():
        if shared:
            _open_to_all(model())
        args += ["--ro-bind", str(model()), f"{INSIDE}/cache"]
    for path in ["/", *hidden]:
        args += ["--remount-ro", path]
    return [*args, "--chdir", "/tmp"]


def _python() -> Iterator[str]:
    """The files of this interpreter and its packages; a whole prefix could hold anything."""
    yield str(interpreter())
    yield from libraries()
    yield from packages()


def _base_packages() -> Iterator[str]:
    """Package folders that lie in a bound library folder, though this environment ignores them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for library in libraries():
        for name in (f"{version}/site-packages", f"{version}/dist-packages"):
            if os.path.isdir(f"{library}/{name}"):
                yield f"{library}/{name}"


def _bind(path: str, bound: list[str], hidden: list[str]) -> Iterator[str]:
    """Show `path` where it is, unless it is shown already; folders above it are made readable."""
    if not os.path.exists(path) or _shown(path, bound, hidden):
        return
    for parent in map(str, reversed(Path(path).parents)):
        if parent != "/" and parent not in hidden and not _shown(parent, bound, hidden):
            yield from ("--perms", "0755", "--dir", parent)
    yield from ("--ro-bind", path, path)
    bound.append(path)


def _shown(path: str, bound: list[str], hidden: list[str]) -> bool:
    """Whether the nearest folder above `path` that we treat specially is a shown one."""
    above = [f for f in (*bound, *hidden) if path == f or path.startswith(f + "/")]
    return bool(above) and max(above, key=len) in bound


def _cover(path: str) -> list[str]:
    """An empty folder over another."""
    return ["--perms", "0755", "--size", "4096", "--tmpfs", path]


def _open_to_all(folder: Path) -> None:
    """Let every user read the model, which is public; older versions wrote its weights privately.

    Where that is not allowed, the proof of the box says that the model cannot be read.
    """
    for path in [folder, *folder.rglob("*")]:
        mode = path.stat().st_mode
        wanted = mode | (0o055 if stat.S_ISDIR(mode) else 0o044)
        if wanted != mode and os.access(path, os.W_OK):
            path.chmod(stat.S_IMODE(wanted))
