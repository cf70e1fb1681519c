"""CI files: least rights, pinned actions, submissions that stay data; and the steps really run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course import catalog
from course.catalog import ROOT
from course.errors import CourseError
from course.grade import summary
from tests.pipeline.conftest import CHAPTER, RECORD, answered

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / ".github" / "actions" / "grade" / "action.yml"
PAGE = ROOT / "book" / "instructors.md"
OURS = catalog.repository().removeprefix("https://github.com/")
# first-party ones go by version; everybody else's by commit
PINNED = re.compile(r"(actions/[\w-]+@v\d+|\./grader/\.github/actions/grade)$|.+@[0-9a-f]{40}$")

each_file = pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)


def parsed(path: Path) -> dict:
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in said.items()}  # YAML's `on`


def steps(path: Path) -> list[dict]:
    said = parsed(path)
    if "runs" in said:
        return said["runs"]["steps"]
    return [step for job in said["jobs"].values() for step in job["steps"]]


@each_file
def test_actions_are_pinned_and_keep_no_credentials(path):
    for step in steps(path):
        if "uses" in step:
            assert PINNED.match(step["uses"]), step
            assert "cache" not in json.dumps(step), "a cache is a way into the next run"
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@each_file
def test_scripts_get_what_others_say_through_the_environment(path):
    for step in steps(path):
        assert "${{" not in step.get("run", ""), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read(path):
    said = parsed(path)
    assert said["permissions"] == {"contents": "read"}
    assert not {"pull_request_target", "workflow_run"} & set(said["on"])
    for name, job in said["jobs"].items():
        assert "secrets" not in job and job["timeout-minutes"] <= 180
        if (path.stem, name) == ("site", "deploy"):  # it runs no code of ours
            assert job["permissions"] == {"pages": "write", "id-token": "write"}
            (step,) = job["steps"]
            assert step["uses"].startswith("actions/deploy-pages@") and "run" not in step
        else:
            assert "permissions" not in job


def test_the_submission_is_checked_out_as_data_beside_the_grader():
    grader, learner = (
        step["with"]
        for step in steps(ROOT / ".github" / "workflows" / "grade.yml")
        if step.get("uses", "").startswith("actions/checkout@")
    )
    assert grader["repository"] == OURS and grader["ref"] == "${{ inputs.commit }}"
    assert learner["path"] == "learner" and "repository" not in learner
    assert not any("learner" in step.get("run", "") for step in steps(ACTION))


@pytest.mark.parametrize("commit", ["main", "v1", "a" * 39, "$(id)", "a" * 40 + "\nb"])
def test_a_commit_that_could_change_is_refused(commit):
    first = steps(ROOT / ".github" / "workflows" / "grade.yml")[0]
    for value, code in ((commit, 2), ("0123456789" * 4, 0)):
        done = bash(first["run"], COMMIT=value)
        assert done.returncode == code, done.stderr


def test_the_page_shows_a_caller_that_fits():
    block = next(b for b in blocks("yaml") if "uses:" in b)
    said = yaml.safe_load(block)
    (job,) = said["jobs"].values()
    path, commit = job["uses"].removeprefix(f"{OURS}/").split("@")
    assert said["permissions"] == {"contents": "read"} and job["with"]["commit"] == commit
    inputs = parsed(ROOT / path)["on"]["workflow_call"]["inputs"]
    assert set(job["with"]) == set(inputs)
    catalog.ready(job["with"]["chapters"])


def blocks(language: str) -> list[str]:
    """The code blocks of the instructors' page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


def bash(script: str, **env: str) -> subprocess.CompletedProcess:
    """Run a step as GitHub does."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


HOSTILE = (
    "def forward_positions(*a, **k):\n"
    "    raise ValueError('::error::x | <img src=x> ![a](https://localhost/b) @all %0A*b*')"
)


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    """One exercise failed with a message full of markup, one passed, the others untouched."""
    stubs = {key: source for kind, key, source in RECORD.cells if kind == "answer"}
    stubs.pop("kv_bytes_per_token")
    stubs["forward_positions"] = f"# answer: forward_positions\n{HOSTILE}\n"
    place = tmp_path / "learner" / "work" / f"{CHAPTER.slug}.ipynb"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(answered(**stubs), indent=1), encoding="utf-8")
    return tmp_path / "learner"


def run_grade_step(submission: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    (step,) = [step for step in steps(ACTION) if step.get("name") == "Grade"]
    return bash(
        step["run"],
        GRADER=str(ROOT),
        VENV=sys.prefix,
        SUBMISSION=str(submission),
        CHAPTERS=CHAPTER.slug,
        RESULTS=str(tmp_path / "results"),
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
def test_the_grade_step_annotates_and_sums_up(submission, tmp_path):
    done = run_grade_step(submission, tmp_path)
    assert done.returncode == 1, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("::stop-commands::")
    opened = said.index(f"::{said[0].removeprefix('::stop-commands::')}::")
    assert "1 graded" in "".join(said[1:opened])
    commands = said[opened + 1 :]
    assert len(commands) == len(RECORD.keys) - 1  # one passed
    (error,) = [c for c in commands if c.startswith("::error ")]
    where = re.match(r"::error file=work/kv_cache\.ipynb,line=(\d+),title=[^:]+::", error)
    text = (submission / "work" / "kv_cache.ipynb").read_text()
    assert where and "# answer: forward_positions" in text.splitlines()[int(where[1]) - 1]
    assert "%250A" in error and "::notice file=work/kv_cache.ipynb,line=" in "\n".join(commands)
    table = (tmp_path / "summary.md").read_text()
    assert table.startswith("## 1 of ") and table.count("not attempted") == len(RECORD.keys) - 2
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}
    assert not re.search(r"<img|!\[|https://|@all|\*b\*|::error", table)


def test_the_grade_step_fails_where_nothing_can_be_graded(tmp_path):
    done = run_grade_step(tmp_path / "nothing", tmp_path)
    assert done.returncode == 2 and "does not exist" in done.stderr
    assert not (tmp_path / "summary.md").exists()


def verdict(*statuses: str) -> dict:
    rows = [
        {"key": f"k{n}", "title": f"Exercise {n}: x", "status": status, "points": 0, "of": 1,
         "text": "", "mistake": "", "hint": ""}
        for n, status in enumerate(statuses)
    ]  # fmt: skip
    chapter = {"title": "A", "file": "work/a.ipynb", "problem": "", "exercises": rows}
    return {"id": "x", "problem": "", "points": 0, "of": 1, "chapters": {"a": chapter}}


@pytest.mark.parametrize(
    ("statuses", "passed", "levels"),
    [
        (("passed", "passed"), True, []),
        (("passed", "not checkable here"), True, []),
        (("not checkable here",), False, []),  # nothing was shown to be right
        ((), False, []),
        (("passed", "not attempted"), False, ["notice"]),
        (("blocked", "infrastructure error"), False, ["error", "warning"]),
    ],
)
def test_what_makes_a_run_fail(statuses, passed, levels, tmp_path):
    one = verdict(*statuses)
    assert summary.passed(one) is passed
    said = list(summary.annotations(one, tmp_path))
    assert [line.split(" ")[0].strip(":") for line in said] == levels


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"source": [\n "x",\n "# answer: attend\\n",\n "def"]}', 3),
        ('{"source": "# answer: attend\\r\\ndef attend"}', 1),
        ("\n```{code-cell}\n# answer: attend\n", 3),
        ('"# answer: attend2\\n"\n"see # answer: attend"\n"#answer:attend"\n', 3),
        ('{\n "tags": ["answer-attend"]}', 2),  # the first line was lost
        ("", 1),
    ],
)
def test_the_line_of_an_answer(text, line):
    assert summary.line_of(text, "attend") == line


def test_no_file_outside_the_submission_is_read(tmp_path):
    outside = tmp_path / "secret"
    outside.write_text("\n\n# answer: k0\n")
    (tmp_path / "learner" / "work").mkdir(parents=True)
    (tmp_path / "learner" / "work" / "a.ipynb").symlink_to(outside)
    (said,) = summary.annotations(verdict("failed"), tmp_path / "learner")
    assert ",line=1," in said
    (tmp_path / "learner" / "work" / "a.ipynb").unlink()
    (tmp_path / "learner" / "work" / "a.ipynb").symlink_to("a.ipynb")  # which never ends
    assert list(summary.annotations(verdict("failed"), tmp_path / "learner")) == [said]


def test_no_verdicts_are_an_error(tmp_path):
    with pytest.raises(CourseError, match="holds no verdicts"):
        summary.main(tmp_path, tmp_path, tmp_path / "summary.md")
