"""What a box claims becomes a verdict only where it agrees with the reference."""

import math

import pytest

from course.grade import verdict
from course.recordfile import Recorded
from course.shell import Ran


def line(name: str, *values, tol: float = 1e-4) -> dict:
    return {"name": name, "values": list(values), "tol": tol, "part": 0}


def known(message: str, name: str, *values, seen=("fixed", "drawn"), error="") -> dict:
    differs = [{"name": name, "values": list(values)}]
    return {
        "mutant": message,
        "message": message,
        "error": error,
        "seen": list(seen),
        "differs": differs,
    }


# recorded at seed 0: `fixed` does not depend on the seed, `drawn` does
EXERCISE = Recorded(
    key="f",
    title="Exercise 1: f",
    difficulty=2,
    minutes=5,
    hint="think",
    needs=[],
    check="x",
    expected=[line("fixed", 3, 0.5), line("drawn", 7.25)],
    known=[known("off by one", "fixed", 4, 0.5), known("sign", "drawn", -7.25)],
)
REFERENCE = Ran([line("fixed", 3, 0.5), line("drawn", 123.5)])


def judge(*shown: dict, error: str = "") -> verdict.Graded:
    return verdict.judge(EXERCISE, REFERENCE, Ran(list(shown), error))


def test_the_right_lines_pass_and_earn_the_difficulty():
    row = judge(line("extra", 1), line("drawn", 123.5001), line("fixed", 3, 0.5))
    assert (row.status, row.points, row.of, row.independent) == ("passed", 2, 2, 2)
    assert row.text == row.hint == ""


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [line("fixed", 3, 0.5)],
        [line("fixed", 3.0, 0.5), line("drawn", 123.5)],  # an integer demands an integer
        [line("fixed", True, 0.5), line("drawn", 123.5)],
        [line("fixed", "3", 0.5), line("drawn", 123.5)],
        [line("fixed", 3, 0.5, 1), line("drawn", 123.5)],
        [line("fixed", 3, 0.5), line("drawn", 7.25)],  # copied from the notebook
        [line("fixed", 3, 0.5), line("drawn", 9.0, tol=1e9)],  # a tolerance of its own
        [line("fixed", 3, 0.5), line("drawn", math.nan)],
        [line("fixed", 3, 0.5), line("drawn", math.inf)],
        [line("fixed", 3, 0.5), line("drawn", 10**400)],
        [line("fixed", 3, 0.5), line("drawn", [123.5])],
        [line("fixed", 3, 0.5), line("drawn", None)],
        [line("fixed", 3, 0.5), {"name": "drawn"}],
        [line("fixed", 3, 0.5), {"name": ["drawn"], "values": [123.5]}],
        [line("fixed", 3, 0.5), {"name": "drawn", "values": {"0": 123.5}}],
        [line("fixed", 3, 0.5), "drawn", 7, None],
    ],
)
def test_everything_else_fails(shown):
    row = judge(*shown)
    assert (row.status, row.points, row.independent, row.hint) == ("failed", 0, 0, "think")
    assert row.text


def test_claims_that_are_no_lists_or_no_result_fail():
    assert verdict.judge(EXERCISE, REFERENCE, None).status == "failed"
    for shown in (None, {}, "fixed", 3):
        assert verdict.judge(EXERCISE, REFERENCE, Ran(shown)).status == "failed"


@pytest.mark.parametrize("error", ["ValueError: x", "CheckFailed: ", "\x1b[0m", "\n"])
def test_an_error_fails_even_with_the_right_lines(error):
    row = judge(*REFERENCE.shown, error=error)
    assert row.status == "failed" and row.text


def test_values_under_the_secret_seed_are_never_told():
    row = judge(line("fixed", 3, 0.5), line("drawn", 55.5))
    assert "drawn" in row.text and "123.5" not in row.text and "55.5" not in row.text
    row = judge(line("fixed", 4, 0.5), line("drawn", 55.5))
    assert "expected 3 0.5" in row.text and "got      4 0.5" in row.text
    assert "1 more" in row.text and "123.5" not in row.text and "55.5" not in row.text


def test_a_mistake_is_named_by_the_lines_that_do_not_depend_on_the_seed():
    assert judge(line("fixed", 4, 0.5), line("drawn", 55.5)).mistake == "off by one"
    assert judge(line("fixed", 5, 0.5), line("drawn", 55.5)).mistake == ""
    # only seed 0 shows this one: nothing is named rather than something guessed
    assert judge(line("fixed", 3, 0.5), line("drawn", -7.25)).mistake == ""


def test_no_mistake_is_named_where_two_fit():
    EXERCISE.known.append(known("another", "fixed", 4, 0.5))
    try:
        assert judge(line("fixed", 4, 0.5), line("drawn", 1.0)).mistake == ""
    finally:
        EXERCISE.known.pop()


def test_errors_are_told_plainly():
    assert verdict.said("CheckFailed: use views") == "use views"
    text = verdict.said("X: \x1b[31m<a at 0x7f0123456789>\x00\x07" + "y" * 5000 + "\nmore")
    assert text.startswith("X: <a at 0x...>") and "more" not in text and len(text) < 1100


def test_what_the_reference_cannot_do_here_is_not_checkable():
    assert verdict.uncheckable(EXERCISE, REFERENCE) == ""
    assert "NameError: tl" in verdict.uncheckable(EXERCISE, Ran([], "NameError: tl"))
    assert "1 of 2 lines" in verdict.uncheckable(EXERCISE, Ran([line("fixed", 3, 0.5)]))
    assert "0 of 2 lines" in verdict.uncheckable(EXERCISE, Ran([]))
    row = verdict.graded(EXERCISE, verdict.UNCHECKABLE)
    assert (row.points, row.of) == (0, 0)
