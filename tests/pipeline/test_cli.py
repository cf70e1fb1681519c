"""The `course` command: one line and exit status 2 for a bad input, and what each command does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course import catalog, cli
from course.catalog import ROOT
from tests.pipeline.conftest import REFERENCE, answered

EASY = "kv_bytes_per_token"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a learner has, to spoil; the packages come from this environment."""
    copy = tmp_path / "course-copy"
    for name in ("course", "solutions", "kernels", "notebooks", "book/glossary"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "resources")
        )
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def course(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "course.cli", *words],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=str(checkout), COLUMNS="120", **environment),
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Like `course`, in this process and this checkout: for what ends before anything is read."""

    def run(*words: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["course", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, end.value.code, said.out, said.err)

    return run


def refused(done: subprocess.CompletedProcess, *parts: str) -> None:
    """One line on stderr, exit status 2, no traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    for part in parts:
        assert part in lines[0], lines[0]


def solve(checkout: Path, **answers: str) -> Path:
    path = checkout / "work" / "kv_cache.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(answered(**answers), path)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("start", "--no-browser"),
        ("check",),
        ("watch",),
        ("hint",),
        ("solution", "--yes", "attend"),
        ("reset", "attend"),
        ("status",),
        ("record",),
        ("verify",),
        ("new",),
    ],
)
def test_an_unknown_chapter_suggests_the_nearest(here, words):
    command, *rest = words
    slug_last = [w for w in rest if w != "attend"]
    done = here(command, *slug_last, "kvcache", *(w for w in rest if w == "attend"))
    refused(done, "`kvcache`", "did you mean `kv_cache`?")


def test_planned_chapter_and_unknown_exercise(here):
    planned = next(c.slug for c in catalog.chapters() if c.status == "planned")
    refused(here("check", planned), "planned", "course list")
    for words in (("check", "kv_cache", "--exercise", "atend"), ("hint", "kv_cache", "atend")):
        refused(here(*words), "no exercise `atend`", "did you mean `attend`?")
    refused(here("new", "kv_cache"), "exists already")
    refused(here("record"), "--all")


def test_not_a_checkout(checkout):
    shutil.rmtree(checkout / "notebooks")
    refused(course(checkout, "check", "kv_cache"), "not a checkout", "clone")


def test_broken_files(checkout):
    work = checkout / "work"
    work.mkdir()
    (work / "kv_cache.ipynb").write_text("{ not a notebook")
    for command in ("check", "start"):
        refused(course(checkout, command, "kv_cache"), "is not a notebook", "restore it")
    (work / "kv_cache.ipynb").unlink()
    (work / "progress.json").write_text("[1")
    refused(course(checkout, "status"), "progress")
    assert (work / "progress.json").read_text() == "[1"
    (work / "progress.json").unlink()
    record = checkout / "notebooks" / "foundations" / "kv_cache.record.json"
    record.write_text('{"chapter": 1}')
    refused(course(checkout, "check", "kv_cache"), "is broken", "git checkout")
    record.unlink()
    refused(course(checkout, "check", "kv_cache"), "no record file", "course record kv_cache")
    done = course(checkout, "--debug", "check", "kv_cache")
    assert "Traceback" in done.stderr


def test_no_kernel_and_no_model(checkout, tmp_path):
    solve(checkout)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "ipykernel_launcher.py").write_text("raise SystemExit(3)")
    done = course(checkout, "check", "kv_cache", "--exercise", EASY)
    assert done.returncode == 0, done.stdout + done.stderr
    path = os.pathsep.join([str(broken), str(checkout)])
    done = subprocess.run(
        [sys.executable, "-m", "course.cli", "check", "kv_cache", "--exercise", EASY],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ, PYTHONPATH=path),
    )
    refused(done, "no Jupyter kernel starts", "course doctor")
    done = course(
        checkout,
        *("check", "kv_cache", "--exercise", "generate_cached"),
        COURSE_OFFLINE="1",
        COURSE_CACHE=str(tmp_path / "empty"),
    )
    assert done.returncode == 1
    assert "make model" in done.stdout


def test_a_notebook_that_is_none(here, tmp_path):
    for path in (tmp_path / "gone.ipynb", tmp_path):
        refused(here("check", "kv_cache", "--notebook", str(path)), str(path))


def test_verdicts_are_told_even_if_progress_cannot_be_kept(checkout):
    solve(checkout)
    (checkout / "work" / "progress.json").write_text("[1")
    done = course(checkout, "check", "kv_cache", "--exercise", EASY)
    assert "1 of 1 passed" in done.stdout
    refused(done, "progress.json", "move it away")


def test_brackets_are_text_and_any_terminal_will_do(checkout):
    """Rich's markup must not eat a hint's `[t, d]`; a check mark must not end the command."""
    record = checkout / "notebooks" / "foundations" / "kv_cache.record.json"
    text = json.loads(record.read_text(encoding="utf-8"))
    text["exercises"][0]["hint"] = "reshape to [t, d] and [/close] it \u2713"
    record.write_text(json.dumps(text), encoding="utf-8")
    done = course(checkout, "hint", "kv_cache", "forward_positions", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "reshape to [t, d] and [/close] it ?" in done.stdout, done


def test_a_folder_that_cannot_be_written(checkout):
    (checkout / "work").write_text("a file where the folder should be")
    refused(course(checkout, "start", "kv_cache", "--no-browser"), "cannot write", "work")


def test_check_tells_and_remembers(checkout):
    wrong = REFERENCE[EASY].replace("return 2 * n_layers", "return n_layers")
    solve(checkout, **{EASY: f"# answer: {EASY}\n{wrong}"})
    done = course(checkout, "check", "kv_cache", "--exercise", EASY)
    assert done.returncode == 1
    assert "0 of 1 passed" in done.stdout and "→" in done.stdout and "expected" in done.stdout
    solve(checkout)
    done = course(checkout, "check", "kv_cache", "--exercise", EASY, "--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert (said["passed"], said["of"], said["exercises"][0]["status"]) == (1, 1, "passed")
    progress = json.loads((checkout / "work" / "progress.json").read_text())
    assert progress["kv_cache"][EASY]["passed"]
    assert "1/7" in course(checkout, "list").stdout
    assert EASY in course(checkout, "status", "kv_cache").stdout
    assert "forward_positions" in course(checkout, "hint", "kv_cache").stdout


def test_start_gives_stubs_without_the_predicted_numbers(checkout):
    original = checkout / "notebooks" / "foundations" / "kv_cache.ipynb"
    nbformat.write(answered(), original)  # somebody solved it in place
    done = course(checkout, "start", "kv_cache", "--no-browser")
    assert done.returncode == 0 and "copied" in done.stdout, done.stderr
    nb = nbformat.read(checkout / "work" / "kv_cache.ipynb", 4)
    predicts = [c for c in nb.cells if c.source.startswith("# predict")]
    assert predicts and all(not c.outputs for c in predicts)
    answers = [c.source for c in nb.cells if c.source.startswith("# answer: ")]
    assert len(answers) == 7 and sum("NotImplementedError" in a for a in answers) == 6
    assert "continuing" in course(checkout, "start", "kv_cache", "--no-browser").stdout


def test_reset_keeps_a_backup_and_brings_back_a_deleted_cell(checkout):
    path = solve(checkout)
    before = path.read_text()
    done = course(checkout, "reset", "kv_cache", "attend")
    assert done.returncode == 0, done.stderr
    assert (path.parent / "kv_cache.backup-1.ipynb").read_text() == before
    nb = nbformat.read(path, 4)
    (cell,) = [c for c in nb.cells if c.source.startswith("# answer: attend")]
    assert "NotImplementedError" in cell.source
    nb.cells.remove(cell)
    nbformat.write(nb, path)
    assert course(checkout, "reset", "kv_cache", "attend").returncode == 0
    back = nbformat.read(path, 4).cells
    index = next(i for i, c in enumerate(back) if c.source.startswith("# answer: attend"))
    assert "<!-- solution: attend -->" in back[index - 1].source
    assert (path.parent / "kv_cache.backup-2.ipynb").exists()


def test_solution_asks_first_and_is_noted(checkout):
    done = course(checkout, "solution", "kv_cache", "attend")
    assert done.returncode == 1 and "def attend" not in done.stdout
    assert not (checkout / "work").exists()
    done = course(checkout, "solution", "kv_cache", "attend", "--yes")
    assert done.returncode == 0 and "def attend" in done.stdout
    progress = json.loads((checkout / "work" / "progress.json").read_text())
    assert progress["kv_cache"]["attend"]["solution_seen"]


def test_doctor_and_kernels():
    done = course(ROOT, "doctor")
    assert done.returncode == 0, done.stdout
    assert "SmolLM2" in done.stdout and "Jupyter kernel" in done.stdout
    done = course(ROOT, "kernels")
    assert done.returncode == 0 and "sm_90" in done.stdout and "gfx942" in done.stdout


def test_new_chapters_record_and_verify(checkout):
    """The skeleton of `course new` is a chapter that already meets every demand."""
    catalog = checkout / "course" / "catalog.yml"
    with catalog.open("a") as rows:
        rows.write(
            "  - {slug: toy, part: foundations, title: A toy, sources: [], prerequisites: [],\n"
            "     minutes: 5, seconds: 40, kernel: read, status: planned}\n"
        )
    done = course(checkout, "new", "toy")
    assert done.returncode == 0, done.stderr
    catalog.write_text(
        catalog.read_text().replace("kernel: read, status: planned", "kernel: read, status: ready")
    )
    done = course(checkout, "record", "toy")
    assert done.returncode == 0, done.stderr
    done = course(checkout, "verify", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    done = course(checkout, "check", "toy")
    assert done.returncode == 1 and "0 of 1 passed" in done.stdout
