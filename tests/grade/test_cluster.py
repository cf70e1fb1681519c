"""Boxes on Dask workers: a worker that dies, hangs or differs costs time and no verdict."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from course.catalog import ROOT
from course.errors import CourseError
from course.grade import cluster
from course.grade.box import Box, Boxed, Denial, Limits
from course.grade.cluster import Dask

pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def dask() -> Iterator[Dask]:
    with cluster.executor(Box(Limits(seconds=60), unsafe=True), 2) as made:
        assert isinstance(made, Dask)
        yield made


def cells(source: str) -> list[tuple[str, str, str]]:
    return [("setup", "", "import os\nfrom course import show"), ("check", "f", source)]


def works(dask: Dask) -> None:
    boxed = dask.run(cells("show('seed', int(os.environ['COURSE_SEED']))"), 41)
    assert (boxed.status, boxed.checks["f"].shown[0]["values"]) == ("ok", [41]), boxed


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_box_runs_on_a_worker_and_says_what_it_showed(dask):
    assert dask.width == 2
    works(dask)
    failed = dask.run(cells("show('x', 1.5)\nraise ValueError('no')"), 0).checks["f"]
    assert failed.error == "ValueError: no" and failed.shown[0]["name"] == "x"
    assert dask.run(cells("import os\nos._exit(0)"), 0).status == "died"


STANDING = """
from course.grade import cluster
from course.grade.box import Box, Limits
if __name__ == "__main__":
    with cluster.executor(Box(Limits(seconds=60), unsafe=True), 2) as dask:
        print(dask.run([("setup", "", "")], 0).status)
"""


def test_nothing_is_imported_from_the_folder_that_the_grader_stands_in(tmp_path):
    """`cd submissions; course grade .`: a learner's folder may be called like a library."""
    place, mark = tmp_path / "class" / "multiprocessing", tmp_path / "ran outside the box"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (tmp_path / "grader.py").write_text(STANDING)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ran = subprocess.run(
        [sys.executable, tmp_path / "grader.py"],
        cwd=place.parent,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert not mark.exists()
    assert ran.stdout == "ok\n", ran.stderr


def test_nobody_else_on_this_machine_gets_in(dask):
    from distributed import Client

    head = dask._client.cluster.scheduler
    address = head.address
    assert address.startswith("tls://127.0.0.1:")
    assert head.http_server.address == "127.0.0.1"
    for path in ("health", "info/main/workers.html", "json/identity.json", "proxy/1/x/", "metrics"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{head.http_server.port}/{path}", timeout=20)
    with pytest.raises((OSError, TypeError)):
        Client(address.replace("tls://", "tcp://"), timeout=3)


def in_worker(dask: Dask, tmp_path: Path, act: Callable[[int], None]) -> Boxed:
    """Do something to the worker whose box is running; without a wall it tells its number."""
    told, said = tmp_path / "worker", []
    source = (
        f"import os, time\nopen({str(told)!r}, 'w').write(f'{{os.getppid()}}.')\ntime.sleep(50)"
    )
    thread = threading.Thread(target=lambda: said.append(dask.run(cells(source), 0)))
    thread.start()
    until(lambda: told.exists() and told.read_text().endswith("."))
    act(int(told.read_text()[:-1]))
    thread.join(120)
    assert said
    return said[0]


def test_a_killed_worker_is_the_hosts_fault_and_is_replaced(dask, tmp_path):
    boxed = in_worker(dask, tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))
    assert boxed.status == "infrastructure" and "worker failed" in boxed.detail
    works(dask)
    until(lambda: len(dask._client.nthreads()) == 2)


def test_a_worker_that_hangs_is_replaced(dask, tmp_path, monkeypatch):
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    monkeypatch.setattr(dask, "_patience", 8.0)
    boxed = in_worker(dask, tmp_path, stop)
    monkeypatch.undo()
    assert (boxed.status, boxed.detail) == ("infrastructure", "its worker did not answer")
    assert not alive(stopped[0])
    until(lambda: len(dask._client.nthreads()) == 2)
    works(dask)
    works(dask)


def test_a_worker_with_other_code_is_refused(dask, monkeypatch):
    monkeypatch.setitem(dask._plan, "course", "another")
    boxed = dask.run(cells("show('x', 1)"), 0)
    assert boxed.status == "infrastructure" and "another version" in boxed.detail
    monkeypatch.setattr(cluster, "code_hash", lambda: "another")
    with pytest.raises(CourseError, match="another version"):
        Dask(dask._client, Box(unsafe=True), prove=False)


def test_only_encrypted_schedulers():
    for address in ("tcp://127.0.0.1:8786", "127.0.0.1:8786", "ucx://x:1"):
        with (
            pytest.raises(CourseError, match="not encrypted"),
            cluster.executor(Box(unsafe=True), 1, address),
        ):
            pass
    with (
        pytest.raises(CourseError, match="no scheduler answers"),
        cluster.executor(Box(unsafe=True), 1, "tls://127.0.0.1:1"),
    ):
        pass


def test_one_worker_needs_no_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with cluster.executor(Box(unsafe=True), 1) as made:
        assert made.width == 1
    with pytest.raises(CourseError, match="needs Dask"), cluster.executor(Box(unsafe=True), 2):
        pass


def test_open_doors_are_named():
    good, bad = Denial("network", True), Denial("repository", False, "solutions is there")
    assert cluster.unproven([good]) == ""
    assert "repository (solutions is there)" in cluster.unproven([good, bad])


SCRIPT = """
import os, sys, threading, time
from course.grade import cluster
from course.grade.box import Box
if __name__ == "__main__":
    with cluster.executor(Box(unsafe=True), 2) as dask:
        source = f"import os, time\\nopen({sys.argv[1]!r} + str(os.getpid()), 'w').close()\\n"
        job = [("check", "f", source + "time.sleep(300)")]
        for _ in range(2):
            threading.Thread(target=dask.run, args=(job, 0), daemon=True).start()
        while len(os.listdir(sys.argv[1])) < 2:
            time.sleep(0.05)
        for pid in dask._client.run(os.getpid).values():
            open(sys.argv[1] + str(pid), "w").close()
        print("ready", flush=True)
        time.sleep(300)
"""


def test_nothing_is_left_when_the_grader_is_killed(tmp_path):
    script, pids = tmp_path / "grader.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.mkdir()
    grader = subprocess.Popen([sys.executable, str(script), f"{pids}/"], stdout=subprocess.PIPE)
    try:
        assert grader.stdout and grader.stdout.readline() == b"ready\n"
    finally:
        grader.kill()
        grader.communicate()
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 4  # two workers, two boxes
    until(lambda: not any(alive(pid) for pid in started), 30)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def scheduler(tmp_path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A scheduler and a worker of their own, with certificates in Dask's configuration."""
    import dask as dask_package
    from distributed.security import Security

    made, tls = Security.temporary(), {}
    for name, text in (
        ("ca-file", made.tls_ca_file),
        ("client.cert", made.tls_client_cert),
        ("client.key", made.tls_client_key),
        ("scheduler.cert", made.tls_scheduler_cert),
        ("scheduler.key", made.tls_scheduler_key),
        ("worker.cert", made.tls_worker_cert),
        ("worker.key", made.tls_worker_key),
    ):
        path = tmp_path / f"{name}.pem"
        path.write_text(str(text))
        tls[f"distributed.comm.tls.{name}"] = str(path)
    names = {n.upper().replace(".", "__").replace("-", "_"): p for n, p in tls.items()}
    env = os.environ | {f"DASK_{name}": path for name, path in names.items()}
    place = tmp_path / "scheduler.json"
    run = [sys.executable, "-m", "dask"]
    where = ["--scheduler-file", str(place)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    options = ["--protocol", "tls", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    head = subprocess.Popen([*run, "scheduler", *options, *where], **quiet)
    worker = [*run, "worker", *where, "--nthreads", "1", "--no-dashboard", "--no-nanny"]
    hand = subprocess.Popen([*worker, "--death-timeout", "30"], **quiet)
    try:
        until(place.exists)
        with dask_package.config.set(tls):
            yield json.loads(place.read_text())["address"], head
    finally:
        for process in (hand, head):
            process.kill()
            process.wait()


def test_a_scheduler_of_its_own_and_what_happens_when_it_dies(scheduler):
    address, head = scheduler
    assert address.startswith("tls://")
    with cluster.executor(Box(Limits(seconds=60), unsafe=True), 8, address) as made:
        assert made.width == 1  # the scheduler's workers, not the option
        works(made)
        head.kill()
        head.wait()
        with pytest.raises(CourseError, match="the scheduler is gone"):
            for _ in range(20):  # the connection may not have noticed yet
                made.run(cells("show('x', 1)"), 0)
