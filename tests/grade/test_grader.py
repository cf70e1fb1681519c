"""One submission from its cells to its points: what runs, and what runs again."""

from collections.abc import Callable

import pytest

from course.errors import CourseError
from course.grade import grader
from course.grade.box import Boxed
from course.grade.submissions import Answer, Submission
from course.shell import Ran
from tests.grade.conftest import CannedBox

SLUG, SEED = "kv_cache", 7
KEYS = ("forward_positions", "LayerKV", "attend", "generate_cached")


class Desk:
    """Hands out answers as the reader would, with no files behind them."""

    def __init__(self, taught):
        self.taught, self.handed = taught, {}

    def put(self, id: str, **answers: str) -> Submission:
        self.handed[id] = answers
        return Submission(id, self.taught.chapter.md.parent / id)

    def read(self, path, slugs) -> dict:
        said = {}
        for key in self.taught.record.keys:
            source = self.handed[path.name].get(key)
            answer = (
                Answer(source, True, "", [], "f") if source else Answer("stub", fingerprint="f")
            )
            said[key] = vars(answer)
        chapter = {"file": "work/x.ipynb", "problem": "", "answers": said}
        return {"digest": "d", "problem": "", "chapters": {SLUG: chapter}}


@pytest.fixture
def desk(taught) -> Desk:
    return Desk(taught)


@pytest.fixture
def grade(taught, box, desk) -> Callable[..., grader.Outcome]:
    batch = make(taught, box, desk)
    box.jobs.clear()

    def run(**answers: str) -> grader.Outcome:
        return grader.grade(desk.put("one", **answers), batch)

    return run


def make(taught, box, desk) -> grader.Batch:
    ours = grader.reference(taught.chapter, box.run, SEED)
    return grader.Batch(SEED, {SLUG: ours}, desk, box)


def rows(outcome: grader.Outcome) -> dict[str, dict]:
    return {row["key"]: row for row in outcome.verdict["chapters"][SLUG]["exercises"]}


def status(outcome: grader.Outcome, *keys: str) -> list[str]:
    return [rows(outcome)[key]["status"] for key in keys]


def test_right_answers_run_once_together(taught, box, grade):
    outcome = grade(**taught.second)
    assert outcome.verdict["points"] == outcome.verdict["of"] == 12
    assert len(box.jobs) == 1 and set(box.jobs[0][0]) == set(taught.record.keys)
    assert box.seeds == {SEED}


def test_only_what_was_tried_runs(taught, box, grade):
    assert status(grade(), *KEYS) == ["not attempted"] * 4 and box.jobs == []
    outcome = grade(attend=taught.ours["attend"])
    assert status(outcome, "attend", "LayerKV") == ["passed", "not attempted"]
    assert box.jobs == [(["attend"], 1)]
    assert rows(outcome)["attend"]["published"] is False  # the desk's fingerprints are no real ones


def test_credit_for_an_exercise_whose_needs_failed(taught, box, grade):
    answers = {**taught.ours, "LayerKV": "class LayerKV: pass"}
    outcome = grade(**answers)
    assert status(outcome, "LayerKV", "generate_cached") == ["failed", "blocked"]
    row = rows(outcome)["generate_cached"]
    assert (row["points"], row["independent"]) == (0, 2) and "`LayerKV`" in row["text"]
    assert "attend" not in row["text"]
    assert outcome.verdict["independent"] == outcome.verdict["points"] + 2
    assert [sorted(set(job)) for job, _ in box.jobs][1:] == [["generate_cached"]]


def test_no_credit_for_what_fails_alone(taught, box, grade):
    wrong = {"generate_cached": "def generate_cached(): pass"}
    assert status(grade(**(taught.ours | wrong)), "generate_cached") == ["failed"]
    assert len(box.jobs) == 1  # what it needs passed: there is nothing to try again
    outcome = grade(**(taught.ours | wrong | {"LayerKV": "class LayerKV: pass"}))
    assert status(outcome, "LayerKV", "generate_cached") == ["failed", "failed"]
    # delegating to an exercise that it does not declare earns nothing
    outcome = grade(**{**taught.ours, "attend": "def attend(*a): return LayerKV"})
    assert status(outcome, "attend") == ["failed"]


@pytest.mark.parametrize("how", ["died", "timeout", "memory", "output"])
def test_an_answer_that_ends_the_box_costs_itself_and_what_needs_it(taught, box, grade, how):
    outcome = grade(**{**taught.ours, "LayerKV": f"class LayerKV: pass  # {how}"})
    assert status(outcome, "LayerKV", "attend", "generate_cached") == [
        "failed",
        "passed",
        "blocked",
    ]
    assert outcome.verdict["points"] == 8 and outcome.verdict["independent"] == 10
    assert rows(outcome)["LayerKV"]["text"] == grader.ENDED[how]
    assert "scripted" not in str(outcome.verdict)  # details are for the timing file


def test_a_helper_in_another_cell_outlives_an_answer_that_ends_the_box(taught, box, grade):
    """Each alone lacks what stands in the others' cells; together with those it is judged again."""
    show = box._show

    def without_helpers(answers, checked):
        boxed = show(answers, checked)
        if "attend" in checked and "max_concurrency" not in answers and boxed.status == "ok":
            boxed.checks["attend"] = Ran([], "NameError: name 'need' is not defined")
        return boxed

    box._show = without_helpers
    answers = {**taught.ours, "kv_bytes_per_token": "def kv_bytes_per_token(): pass  # died"}
    outcome = grade(**answers)
    assert status(outcome, "kv_bytes_per_token", "attend") == ["failed", "passed"]
    assert outcome.verdict["points"] == 11


def test_a_submission_may_end_only_so_many_boxes(taught, box, grade):
    outcome = grade(**{key: f"{source}  # died" for key, source in taught.ours.items()})
    assert outcome.verdict["points"] == 0 and len(box.jobs) == grader.MAX_ENDED


def test_a_refused_answer_does_not_run_and_costs_nothing_else(taught, box, desk, grade):
    original = desk.read

    def read(path, slugs) -> dict:
        said = original(path, slugs)
        said["chapters"][SLUG]["answers"]["attend"]["problem"] = "no"
        return said

    desk.read = read
    outcome = grade(**taught.ours)
    assert status(outcome, "attend", "LayerKV", "generate_cached") == [
        "failed",
        "passed",
        "blocked",
    ]
    assert all("attend" not in job for job, _ in box.jobs)


def test_an_unreadable_submission_is_failed_without_running(taught, box, grade, desk):
    batch = make(taught, box, desk)
    box.jobs.clear()
    one = Submission("x", taught.chapter.md, "it is a link")
    outcome = grader.grade(one, batch)
    assert set(status(outcome, *KEYS)) == {"failed"} and box.jobs == []
    assert outcome.verdict["problem"] == "it is a link" and outcome.verdict["of"] == 12


def test_what_the_host_lost_is_tried_once_more_alone(taught, desk):
    box = CannedBox(taught, seconds=0.02)
    batch = make(taught, box, desk)
    ours = taught.ours
    handed = [desk.put(f"s{n}", **ours) for n in range(4)]
    handed.insert(1, desk.put("once", **{**ours, "attend": f"{ours['attend']}  # lost once"}))
    handed.insert(2, desk.put("twice", **{**ours, "attend": f"{ours['attend']}  # lost"}))
    box.jobs.clear()
    done = {o.submission.id: o for o in grader.grade_all(handed, batch)}
    assert len(done) == 6 and max(beside for _, beside in box.jobs) == 2
    assert [beside for _, beside in box.jobs[-2:]] == [1, 1]
    assert done["once"].verdict["points"] == 12 and not done["once"].lost
    assert done["twice"].lost and set(status(done["twice"], *KEYS)) == {"infrastructure error"}
    assert all(done[f"s{n}"].verdict["points"] == 12 for n in range(4))
    assert len(box.jobs) == 8


def test_a_box_cannot_claim_to_be_the_hosts_fault(taught, box, grade):
    source = taught.ours["attend"] + "\n    raise OSError('infrastructure error')"
    assert status(grade(**{**taught.ours, "attend": source}), "attend") == ["failed"]


def test_chapters_without_a_working_check_are_an_error(taught, box):
    def broken(cells, seed):
        return Boxed("ok", {key: Ran([], "NameError: tl") for key in taught.record.keys})

    with pytest.raises(CourseError, match="no check that works here"):
        grader.reference(taught.chapter, broken, SEED)
    with pytest.raises(CourseError, match="cannot be graded here"):
        grader.reference(taught.chapter, lambda *_: Boxed("died", detail="boom"), SEED)


def test_an_exercise_that_our_answer_cannot_pass_here_counts_for_nobody(taught, box, desk):
    def partly(cells, seed):
        boxed = box.run(cells, seed)
        boxed.checks["decode_attention_kernel"] = Ran([], "NameError: name 'tl' is not defined")
        return boxed

    ours = grader.reference(taught.chapter, partly, SEED)
    batch = grader.Batch(SEED, {SLUG: ours}, desk, box)
    for answers in (taught.ours, {}):
        outcome = grader.grade(desk.put("one", **answers), batch)
        assert status(outcome, "decode_attention_kernel") == ["not checkable here"]
        assert outcome.verdict["of"] == 9


def test_a_problem_of_the_grader_itself_is_not_swallowed(taught, box, desk):
    def gone(cells, seed):
        raise CourseError("the scheduler is gone")

    batch = make(taught, box, desk)
    box.run = gone
    with pytest.raises(CourseError, match="the scheduler is gone"):
        list(grader.grade_all([desk.put("a", **taught.ours)], batch))
