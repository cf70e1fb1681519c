"""Every command on the instructors' page works: most of them run, from top to bottom."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from course.cli import app
from course.grade import batch, cluster
from course.grade.box import Box, Limits
from tests.grade.classes import School, school
from tests.grade.conftest import CannedBox
from tests.pipeline.test_workflows import PINNED, blocks

# what needs a network, another machine or root; the cluster's commands have a test of their own
ELSEWHERE = {"sudo", "git", "cd", "make", "source", "pip", "gh", "dask", "openssl", "chmod"}


@pytest.fixture(scope="module")
def taught() -> School:
    return school()


def commands() -> list[str]:
    """The commands of the page; one may have several lines."""
    found, part = [], ""
    for line in (line for block in blocks("bash") for line in block.splitlines()):
        part += f"{line}\n"
        whole = subprocess.run(["bash", "-n", "-c", part], capture_output=True).returncode == 0
        if whole and not line.endswith("\\"):
            found.append(part.replace("\\\n", "").strip())
            part = ""
    assert part == ""
    return found


def test_the_commands_work_in_the_order_of_the_page(tmp_path, taught, monkeypatch):
    def notebook(*keys: str) -> str:
        return json.dumps(taught.notebook({key: taught.ours[key] for key in keys}))

    with zipfile.ZipFile(tmp_path / "moodle.zip", "w") as archive:
        inside = "Béla van Barta_1234567_assignsubmission_file/kv_cache.ipynb"
        archive.writestr(inside, notebook("forward_positions"))
    cloned = tmp_path / "kv-cache-submissions" / "kv-cache-anna" / "work" / "kv_cache.ipynb"
    cloned.parent.mkdir(parents=True)
    cloned.write_text(notebook(*taught.record.keys), encoding="utf-8")
    roster = next(block for block in blocks("text") if block.startswith("id,"))
    (tmp_path / "roster.csv").write_text(roster, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch, "Box", lambda limits, unsafe: CannedBox(taught))
    monkeypatch.setattr(batch, "_cores", lambda: 1)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables: dict[str, str] = {}
    ran = []
    for line in commands():
        if line.split()[0] in ELSEWHERE or "--scheduler" in line or line == "course doctor":
            continue
        ran.append(line)
        if line.startswith("course "):
            words = [variables.get(word, word) for word in shlex.split(line)[1:]]
            said = CliRunner().invoke(app, words)
            assert said.exit_code == 0, (line, said.output)
            continue
        done = subprocess.run(
            ["bash", "-ec", f'{line}\necho "${{seed-}}"'],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stderr)
        if line.startswith("seed="):
            variables["$seed"] = done.stdout.strip()
        if "name_of" in line:
            assert (tmp_path / done.stdout.split()[0]).is_file()
    assert len(ran) == 11
    assert {p.name for p in (tmp_path / "submissions").iterdir()} == {"anna", "1234567"}
    grades = (tmp_path / "results" / "grades.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in grades[1:]] == ["1234567", "anna", "bela"]
    seeds = [
        json.loads((tmp_path / name / "batch.json").read_text())["seed"]
        for name in ("results", "results-again", "results-2")
    ]
    assert seeds[0] == seeds[1] != seeds[2]


def test_the_files_that_the_page_names_are_written(tmp_path, taught, monkeypatch):
    page = (Path(batch.__file__).parents[2] / "book" / "instructors.md").read_text("utf-8")
    named = re.findall(r"^\| `([\w./]+)` \|", page, re.M)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "anna.ipynb").write_text(json.dumps(taught.notebook(taught.ours)))
    monkeypatch.setattr(batch, "Box", lambda limits, unsafe: CannedBox(taught))
    words = ["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert len(named) == 7 and all((tmp_path / "out" / name).exists() for name in named)


def test_the_class_workflow_may_only_read_and_is_pinned():
    said = next(yaml.safe_load(b) for b in blocks("yaml") if "upload-artifact" in b)
    assert said["permissions"] == {"contents": "read"}
    for step in said["jobs"]["grade"]["steps"]:
        assert PINNED.match(step.get("uses", "actions/x@v1")) and "${{" not in str(step)
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's scheduler and workers, both here; yields the scheduler's address."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    made = [line for line in commands() if line.split()[0] in ("openssl", "chmod")]
    subprocess.run(["bash", "-ec", "\n".join(made)], cwd=tmp_path, check=True, capture_output=True)
    config = next(block for block in blocks("yaml") if "require-encryption" in block)
    config = config.replace("/home/you", str(tmp_path))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "course.yaml").write_text(config)
    place = tmp_path / "scheduler.json"
    head, hand = (shlex.split(line) for line in commands() if line.startswith("dask "))
    swap = {"10.0.0.1": "127.0.0.1", "8786": "0", "4": "1"}
    head = [swap.get(word, word) for word in head[1:]] + ["--scheduler-file", str(place)]
    env = os.environ | {"DASK_CONFIG": str(tmp_path / "config"), "PYTHONWARNINGS": "ignore"}
    quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen([sys.executable, "-m", "dask", *head], **quiet)]
    try:
        deadline = time.monotonic() + 60
        while not place.exists():
            assert started[0].poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        address = json.loads(place.read_text())["address"]
        hand = [swap.get(w, w).replace("tls://10.0.0.1:8786", address) for w in hand[1:]]
        started.append(subprocess.Popen([sys.executable, "-m", "dask", *hand], **quiet))
        with dask.config.set(dask.config.merge(dask.config.config, yaml.safe_load(config))):
            yield address
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def test_the_page_s_cluster_runs_boxes(machines):
    from distributed import Client

    assert machines.startswith("tls://")
    with Client(machines, set_as_default=False, timeout=30) as client:
        client.wait_for_workers(1, timeout=60)
    cells = [("setup", "", "from course import show"), ("check", "f", "show('x', 41)")]
    with cluster.executor(Box(Limits(seconds=60), unsafe=True), 1, machines) as made:
        boxed = made.run(cells, 0)
    assert (boxed.status, boxed.checks["f"].shown[0]["values"]) == ("ok", [41])
