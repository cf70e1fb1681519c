"""The box runs honest cells like any shell, and whatever else happens in it, it ends with a status.

`Box(unsafe=True)` is the same child without the wall: it shows that an attack would have worked.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from course.errors import CourseError
from course.grade import box as boxes
from course.grade import cgroup, child, mounts
from course.grade.box import Box, BoxUnavailable, Limits
from course.shell import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
SETUP = ("setup", "", "from course import show\nfrom course.runtime import seed")
# the reply's descriptor, as an attacker would find it
FIND_REPLY = """
import json, os
def reply():
    return json.loads(open("/proc/self/cmdline").read().split("\\0")[-2])["reply"]
"""


def cells(answer: str) -> list[tuple[str, str, str]]:
    """An exercise `f` with this answer, which its check calls, and a second honest one, `g`."""
    answer = textwrap.dedent(answer)
    return [
        SETUP,
        ("answer", "f", answer),
        ("check", "f", "show('f', f())"),
        ("answer", "g", "def g():\n    return 7"),
        ("check", "g", "show('g', g())"),
    ]


def value(boxed: boxes.Boxed, key: str = "f") -> object:
    assert boxed.status == "ok", boxed
    ran = boxed.checks[key]
    assert not ran.error, ran.error
    return ran.shown[0]["values"][0]


@pytest.fixture(scope="module")
def box() -> Box:
    return Box(Limits(seconds=30, cell_seconds=5))


def test_a_box_shows_what_the_warm_shell_shows(box):
    job = [
        SETUP,
        ("answer", "f", "def f(n):\n    print('debugging')\n    return n * seed()"),
        ("check", "f", "show('int', f(3)); show('float', f(0.1)); show('words', ['é😀', 'b'])"),
        ("answer", "g", "def g():\n    raise ValueError('not yet\\nsecond line')"),
        ("check", "g", "show('before', 1); show('g', g())"),
        ("check", "f", "show('again', f(4))"),
        ("answer", "h", "1 +"),
        ("check", "h", "show('h', 1)"),
    ]
    with Worker() as worker:
        expected = worker.run(job, seed=12)
    boxed = box.run(job, 12)
    assert boxed.status == "ok" and boxed.checks == expected
    assert boxed.checks["f"].shown[0]["values"] == [36]
    assert boxed.checks["g"].error == "ValueError: not yet"
    assert Box(unsafe=True).run(job, 12).checks == expected


def test_runs_share_nothing(box):
    first = box.run(cells("def f():\n    return open('/tmp/kept', 'w').write('xyz')"), 0)
    assert value(first) == 3
    second = box.run(cells("import os\ndef f():\n    return os.path.exists('/tmp/kept') + 0"), 0)
    assert value(second) == 0


def test_the_environment_of_the_grader_stays_outside():
    source = """
    import pathlib
    def f():
        found = 0
        for file in pathlib.Path("/proc").glob("*/environ"):
            try:
                found += b"s3cret" in file.read_bytes()
            except OSError:
                pass
        return found
    """
    grader = f"""
from course.grade.box import Box
for unsafe in (False, True):
    print(Box(unsafe=unsafe).run({cells(source)!r}, 0).checks["f"].shown[0]["values"])
"""
    env = {**os.environ, "GRADER_TOKEN": "s3cret-value", "PYTHONPATH": str(mounts.ROOT)}
    ran = subprocess.run([sys.executable, "-c", grader], env=env, capture_output=True, text=True)
    boxed, bare = ran.stdout.split()
    assert boxed == "[0]" and bare != "[0]", ran.stderr


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_process_may_call_itself_anything(unsafe):
    """A name need not be text, and it stands in what we read about all processes."""
    renamed = """
    import time
    def f():
        with open("/proc/self/comm", "wb") as file:
            file.write(bytes([0xff, 0x0b, 0x85]))
        time.sleep({})
        return 1
    """
    assert value(Box(unsafe=unsafe).run(cells(renamed.format(0.5)), 0)) == 1
    loop = textwrap.dedent(renamed.format(600)) + "f()"
    sleeping = subprocess.Popen([sys.executable, "-c", loop])
    try:
        name = Path(f"/proc/{sleeping.pid}/comm")
        assert wait_for(lambda: name.read_bytes().startswith(b"\xff"))
        boxes.reap()
        assert sleeping.poll() is None
    finally:
        sleeping.kill()
        sleeping.wait()


def test_what_goes_wrong_beside_a_box_that_stands_is_a_verdict(monkeypatch):
    """It may be the box's doing: it must cost this run alone, and be no reason to run again."""

    def look(run: child.Run) -> None:
        if run.stood:
            raise ValueError("unheard \x9fof")

    monkeypatch.setattr(child.Run, "_watch", look)
    boxed = Box(unsafe=True).run(cells("import time\ndef f():\n    time.sleep(9)"), 0)
    assert (boxed.status, boxed.detail) == ("died", "ValueError: unheard of")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root chooses the users of boxes")
def test_no_two_boxes_have_the_same_host_user(box):
    source = "def f():\n    return open('/proc/self/uid_map').read().split()[4]"
    users = {value(box.run(cells(source), 0)) for _ in range(2)}
    assert len(users) == 2 and all(int(user) >= 0x7000_0000 for user in users)


def test_threads_may_run_boxes_at_once(box):
    def one(number: int) -> object:
        return value(box.run(cells("def f():\n    return seed()"), number))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(6))) == list(range(6))


def test_a_cell_over_its_time_ends_alone():
    box = Box(Limits(seconds=60, cell_seconds=1))
    boxed = box.run(cells("def f():\n    while True:\n        pass"), 0)
    assert boxed.checks["f"].error == "TimeoutError: still running after 1 s: an endless loop?"
    assert value(boxed, "g") == 7
    stubborn = """
    def f():
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass
    """
    assert box.run(cells(stubborn), 0).checks["f"].error.startswith("TimeoutError")


def test_a_cell_that_cannot_be_interrupted_ends_the_box():
    held = """
    import ctypes, signal
    def f():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        return ctypes.PyDLL(None).sleep(600)  # as a long operation in C holds the interpreter
    """
    boxed = Box(Limits(seconds=60, cell_seconds=0.2)).run(cells(held), 0)
    assert (boxed.status, boxed.checks) == ("timeout", {})
    assert "could not be stopped" in boxed.detail


@pytest.mark.skipif(child.waited("self") == 0.0, reason="this kernel counts no waiting")
def test_waiting_for_a_busy_machine_is_not_the_learners_time():
    """Eight others want the only processor; the answer's own second passes all the same."""
    source = """
    import time
    def f():
        start = time.thread_time()
        while time.thread_time() < start + 1:
            pass
        return 1
    """
    here = os.sched_getaffinity(0)
    hogs = []
    try:
        os.sched_setaffinity(0, [min(here)])  # of this thread, and of what it starts
        loop = [sys.executable, "-c", "while True: pass"]
        hogs = [subprocess.Popen(loop) for _ in range(8)]
        boxed = Box(Limits(seconds=4, cell_seconds=1.3)).run(cells(source), 0)
    finally:
        os.sched_setaffinity(0, here)
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert value(boxed) == 1
    assert boxed.checks["f"].seconds > 1.3


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("stay", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_run_over_its_time_is_ended(stay, unsafe):
    source = f"""
    import faulthandler, os, signal, time
    def f():
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        {stay}
    """
    boxed = Box(Limits(seconds=1, cell_seconds=1), unsafe).run(cells(source), 0)
    assert boxed.status == "timeout" and boxed.seconds < 30


@pytest.mark.parametrize(
    "end, said",
    [
        ("import os\ndef f():\n    os._exit(3)", "exit status 3"),
        ("import os\ndef f():\n    os.kill(os.getpid(), 9)", "exit status"),
        ("import ctypes\ndef f():\n    ctypes.string_at(0)", "Segmentation fault"),
    ],
)
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_process_that_ends_itself_has_died(end, said, unsafe):
    boxed = Box(unsafe=unsafe).run(cells(end), 0)
    assert (boxed.status, boxed.checks) == ("died", {}) and said in boxed.detail


def test_leaving_by_exception_is_an_error_of_one_exercise(box):
    for end in ("raise SystemExit", "raise KeyboardInterrupt", "exit()"):
        boxed = box.run(cells(f"def f():\n    {end}"), 0)
        assert value(boxed, "g") == 7 and not boxed.checks["f"].shown
    rude = """
    class Rude(Exception):
        def __str__(self):
            raise MemoryError
    def f():
        raise Rude
    """
    boxed = box.run(cells(rude), 0)
    assert boxed.checks["f"].error and value(boxed, "g") == 7


@pytest.mark.parametrize(
    "sent, status",
    [
        ('b\'{"setup": "", "checks": {}}\'', "died"),
        ("b'[' * 100000", "died"),
        ("b'x' * (4 << 20)", "output"),
        ('b\'{"setup": "\\\\u001b[2J", "checks": {}}\'', "died"),
    ],
)
def test_a_forged_reply_is_never_a_result(box, sent, status):
    forged = f"{FIND_REPLY}\ndef f():\n    os.write(reply(), {sent})\n    os._exit(0)"
    boxed = box.run(cells(forged), 0)
    assert (boxed.status, boxed.checks) == (status, {})
    assert boxed.detail.isprintable()


def test_text_before_the_reply_spoils_it(box):
    boxed = box.run(cells(f"{FIND_REPLY}\ndef f():\n    return os.write(reply(), b'{{}}')"), 0)
    assert boxed.status == "died"


def test_a_box_that_takes_its_bytes_back_is_not_the_hosts_fault():
    """Where boxes run as the grader's user, they can open our pipes for reading, and race us."""
    drain = """
    import os, time
    def f():
        pairs = []
        for fd in range(3, 50):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                    read = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
                    pairs.append((fd, read))
            except OSError:
                pass
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for write, read in pairs:
                try:
                    os.write(write, b" ")
                    os.read(read, 9)
                except OSError:
                    pass
        return len(pairs)
    """
    assert value(Box(unsafe=True).run(cells(drain), 0)) >= 2


def test_what_is_shown_is_limited_by_exercise(box):
    boxed = box.run(
        [
            SETUP,
            ("check", "long", "for i in range(100): show(f'n{i}', 'x' * 1900)"),
            ("check", "digits", "show('big', 1 << 40_000)"),
            ("check", "half", "show('half', '\\ud800')"),
            ("check", "error", "raise ValueError('\\ud800 \\\\ud800')"),
            ("check", "fine", "show('fine', 1)"),
        ],
        0,
    )
    assert value(boxed, "fine") == 1
    assert "more than 64 KiB" in boxed.checks["long"].error
    assert "cannot be sent" in boxed.checks["digits"].error
    assert "cannot be sent" in boxed.checks["half"].error
    assert boxed.checks["error"].error == "ValueError: ? \\ud800"


def alive(mark: str) -> list[int]:
    """Processes of this machine whose command line holds `mark`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


DAEMON = """
import os, subprocess, time
def f():
    subprocess.Popen(
        ["sleep", "600", "{mark}"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3
    )
    time.sleep({then})
    return 1
"""


def sleeper(tag: str) -> str:
    """An argument of `sleep` that names one test."""
    return f"0.{os.getpid()}{abs(hash(tag)) % 10**6}"


def test_a_daemon_does_not_outlive_its_box(box):
    mark = sleeper("daemon")
    assert value(box.run(cells(DAEMON.format(mark=mark, then=0)), 0)) == 1
    assert alive(mark) == []


@pytest.mark.parametrize("unsafe", [False, True])
def test_nothing_outlives_a_killed_grader(unsafe, tmp_path):
    """Boxes run in threads, as they do in a Dask worker; `kill -9` must reach them all."""
    mark = sleeper(f"killed{unsafe}")
    # unsafe boxes do not contain daemons: there the child itself is the mark
    grader = tmp_path / "grader.py"
    source = cells(DAEMON.format(mark=mark, then=600))
    if unsafe:
        source = cells(f"import time\ndef f():\n    time.sleep(600)  # {mark}")
    grader.write_text(
        "import sys, threading\n"
        "from course.grade.box import Box\n"
        f"box, job = Box(unsafe={unsafe}), {source!r}\n"
        "for _ in range(2):\n"
        "    threading.Thread(target=box.run, args=(job, 0)).start()\n"
    )
    root = str(mounts.ROOT)
    process = subprocess.Popen(
        [sys.executable, str(grader)], env={**os.environ, "PYTHONPATH": root}
    )
    try:
        below = lambda: list(child.descendants(process.pid))[1:]  # noqa: E731
        if unsafe:
            assert wait_for(lambda: len(below()) == 2)
        else:
            assert wait_for(lambda: len(alive(mark)) == 2)
        children = below()
        assert len(children) >= 2
    finally:
        process.kill()
        process.wait()
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    assert alive(mark) == []
    cgroup.reap()  # as the next grader does: the killed one could not remove its groups
    left = f"{cgroup._PREFIX}{process.pid}-*"
    assert [folder for parent in cgroup._parents() for folder in parent.glob(left)] == []


def waiting_box(*inside: str) -> tuple[subprocess.Popen, int]:
    """A box that is never let go on: bubblewrap's two processes, the inner one by its id.

    The outer one waits for a pipe before it tells the inner one to die with it.
    """
    (told, tell), (wait, gate) = os.pipe(), os.pipe()
    command = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"]
    command += ["--ro-bind", "/", "/", "--info-fd", str(tell), "--userns-block-fd", str(wait)]
    outer = subprocess.Popen(
        [*command, "--", sys.executable, *inside], pass_fds=(tell, wait, gate)
    )  # the outer one holds its own gate, so that it stays shut
    for end in (tell, wait, gate):
        os.close(end)
    with os.fdopen(told, "rb", 0) as said:
        return outer, boxes._told_pid(said)


def test_what_a_worker_leaves_that_died_while_a_box_began_is_ended():
    ours, other = "/somewhere/course/grade/_boxrun.py", "/somewhere/else.py"
    orphan, kept, foreign = waiting_box(ours), waiting_box(ours), waiting_box(other)

    def exists(pid: int) -> bool:
        return Path(f"/proc/{pid}").exists()

    try:
        for outer, _ in (orphan, foreign):
            outer.kill()
            outer.wait()
        boxes.reap()  # as the next grader does
        assert wait_for(lambda: not exists(orphan[1]), 10)
        assert exists(kept[1])  # its box is about to start
        assert exists(foreign[1])  # somebody else's; that it waits for ever is the hole
    finally:
        for outer, inner in (orphan, kept, foreign):
            outer.kill()
            outer.wait()
            if exists(inner):
                os.kill(inner, signal.SIGKILL)


def test_a_box_that_the_machine_kills_is_no_verdict(box):
    """Somebody else, as the kernel may, ends bubblewrap: the submission is not to blame."""
    done: list[boxes.Boxed] = []
    source = cells("import time\ndef f():\n    time.sleep(600)")
    thread = threading.Thread(target=lambda: done.append(box.run(source, 0)))
    thread.start()
    task = f"/proc/self/task/{thread.native_id}/children"
    assert wait_for(lambda: Path(task).read_text().split())
    bwrap = int(Path(task).read_text().split()[0])
    assert wait_for(lambda: "_boxrun" in str(_commands(bwrap)))
    time.sleep(0.5)
    os.kill(bwrap, signal.SIGKILL)
    thread.join(30)
    assert done[0].status == "infrastructure"


def _commands(pid: int) -> list[bytes]:
    return [Path(f"/proc/{p}/cmdline").read_bytes() for p in child.descendants(pid)]


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BoxUnavailable, match="apt-get install bubblewrap"):
        Box()
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    fake.chmod(0o755)
    with pytest.raises(BoxUnavailable, match=r"0\.6\.1 is too old"):
        Box()
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit\n'
        'echo "bwrap: setting up uid map: Permission denied" >&2; exit 1\n'
    )
    box = Box()
    boxed = box.run(cells("def f():\n    return 1"), 0)
    assert boxed.status == "infrastructure" and "uid map: Permission denied" in boxed.detail
    with pytest.raises(BoxUnavailable, match="apparmor_restrict_unprivileged_userns=0") as why:
        box.prove()
    assert isinstance(why.value, CourseError) and "\n" not in str(why.value)


def test_other_systems_are_sent_to_ci(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BoxUnavailable, match=r"needs Linux.*CI"):
        Box()


def test_no_control_group_is_left_behind(box):
    value(box.run(cells("def f():\n    return 1"), 0))
    ours = f"{cgroup._PREFIX}{os.getpid()}-*"
    assert [folder for parent in cgroup._parents() for folder in parent.glob(ours)] == []
