"""Reports: every format escapes what a submission brought along, and the sums are right."""

import csv
import io
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from bs4 import BeautifulSoup

from course.grade import grader, report, results
from course.grade.submissions import Student, Submission

EVIL = "=cmd|' /C calc'!A0 <script>alert(1)</script> & \" ' \x00\x1b[2J ]]> \ufffe"
EVIL += " \x9b2J \u202e \u2028"
UNSEEN = set("\x00\x1b\x9b\u202e\u2028")
NAMES = ["anna", "=1+1", "<b>&\"'", "\udcff\udcfe", "bob"]
WANTED = {"chapters": ["kv_cache"], "unsafe": False, "seconds": 1.0, "memory": 1}
SLUG = "kv_cache"


@pytest.fixture
def references(taught, box) -> dict[str, grader.Reference]:
    return {SLUG: grader.reference(taught.chapter, box.run, 1)}


def outcome(taught, id: str, passed: set[str], text: str = "", mistake: str = "", **status):
    rows = []
    for e in taught.record.exercises:
        good = e.key in passed
        rows.append(
            {
                "key": e.key,
                "title": e.title,
                "status": status.get(e.key, "passed" if good else "failed"),
                "points": e.difficulty * good,
                "of": e.difficulty,
                "independent": e.difficulty * good,
                "text": "" if good else text,
                "mistake": "" if good else mistake,
                "hint": "" if good else e.hint,
                "warnings": [text] if text else [],
                "fingerprint": f"{id!a} {e.key}",
                "published": False,
            }
        )
    sums = {name: sum(row[name] for row in rows) for name in ("points", "of", "independent")}
    chapter = {"title": "The KV cache", "file": text, "problem": "", **sums, "exercises": rows}
    verdict = {"id": id, "digest": "", "problem": text, **sums, "chapters": {SLUG: chapter}}
    boxes = [{"chapter": SLUG, "what": "all", "status": "ok", "seconds": len(id), "detail": text}]
    boxes[0]["checks"] = {} if id == "bob" else {"attend": len(id) - 0.5}
    timing = {"seconds": len(id), "boxes": boxes}
    return grader.Outcome(Submission(id, taught.chapter.md), verdict, timing)


def write(tmp_path, outcomes, references, students=None, guarantees=()) -> report.Class:
    with results.opened(tmp_path / "out", False, 12345, WANTED) as kept:
        for one in outcomes:
            kept.add(one)
        kept.close()
        ids = [one.submission.id for one in outcomes]
        return report.write(kept, ids, students, references, list(guarantees))


def test_points_rates_mistakes_and_slowest_cells(tmp_path, taught, references):
    keys = set(taught.record.keys)
    outcomes = [
        outcome(taught, "anna", keys),
        outcome(taught, "bob", keys - {"attend"}, mistake="top-left mask"),
        outcome(taught, "carolina", set(), mistake="top-left mask"),
    ]
    students = [Student("anna", "Anna A"), Student("dora", "Dora D", "d@x", "dd"), Student("bob")]
    total = write(tmp_path, outcomes, references, students)
    assert [(r.id, r.total, r.state, r.stranger) for r in total.rows] == [
        ("anna", 12, "graded", False),
        ("bob", 10, "graded", False),
        ("carolina", 0, "graded", True),
        ("dora", 0, "missing", False),
    ]
    attend = next(t for t in total.tallies if t.key == "attend")
    assert attend.counts == Counter({"passed": 1, "failed": 2, "not attempted": 1})
    assert attend.rate == 0.25 and attend.mistakes == {"top-left mask": 2}
    assert [(seconds, id, cells) for seconds, id, _, cells in total.slowest] == [
        (7.5, "carolina", "check: attend"),
        (3.5, "anna", "check: attend"),
        (3, "bob", "all"),  # its box never replied
    ]
    rows = list(csv.DictReader((tmp_path / "out" / "grades.csv").open(encoding="utf-8")))
    assert [row["total (of 12)"] for row in rows] == ["12", "10", "0", "0"]
    assert [row["kv_cache/attend (of 2)"] for row in rows] == ["2", "0", "0", "0"]
    assert [row["on the roster"] for row in rows] == ["yes", "yes", "no", "yes"]
    moodle = list(csv.DictReader((tmp_path / "out" / "moodle.csv").open(encoding="utf-8")))
    assert moodle[3]["Email address"] == "d@x" and moodle[1]["The KV cache"] == "10"
    rows = list(csv.DictReader((tmp_path / "out" / "github_classroom.csv").open(encoding="utf-8")))
    assert rows[3]["github_username"] == "dd" and rows[0]["points_available"] == "12"
    index = (tmp_path / "out" / "report" / "index.html").read_text(encoding="utf-8")
    assert "top-left mask" in index and "12345" in index and "Dora D" in index


def test_no_format_lets_a_submission_out(tmp_path, taught, references):
    outcomes = [outcome(taught, id, set(), EVIL, EVIL) for id in NAMES]
    students = [Student(id, EVIL, EVIL, EVIL) for id in NAMES if "\udcff" not in id]
    total = write(tmp_path, outcomes, references, students, [EVIL])
    out = tmp_path / "out"
    for name in ("grades", "moodle", "github_classroom"):
        text = (out / f"{name}.csv").read_text(encoding="utf-8")
        head, *rows = csv.reader(io.StringIO(text))
        assert len(rows) == len(NAMES)
        for row in rows:
            assert len(row) == len(head)
            assert not any(value.lstrip().startswith(tuple("=+-@|%")) for value in row)
            assert not any(set(value) & UNSEEN for value in row)
    assert not set((out / "junit.xml").read_text(encoding="utf-8")) & UNSEEN
    root = ET.parse(out / "junit.xml").getroot()
    assert len(root) == len(NAMES) and root.get("failures") == str(7 * len(NAMES))
    pages = list((out / "report").glob("*.html"))
    assert len(pages) == len(NAMES) + 1 and len({r.page for r in total.rows}) == len(NAMES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        soup = BeautifulSoup(text, "html.parser")
        assert not soup.find_all(["script", "b", "img", "iframe", "form", "base", "object"])
        assert not set(text) & UNSEEN
        assert "default-src 'none'" in soup.find("meta", {"http-equiv": True})["content"]
        links = [a["href"] for a in soup.find_all("a")]
        assert all((out / "report" / link).is_file() for link in links)
        assert not any(t.get("src") or str(t.get("href", "")).startswith("http") for t in soup())


def test_a_learners_page_says_nothing_about_others(tmp_path, taught, references):
    outcomes = [outcome(taught, "anna", set(), "her text"), outcome(taught, "bob", set(), "his")]
    total = write(tmp_path, outcomes, references)
    page = (tmp_path / "out" / "report" / total.rows[0].page).read_text(encoding="utf-8")
    assert "her text" in page and "bob" not in page and "index.html" not in page
    assert taught.record.exercises[0].hint.split()[0] in page


def test_junit_counts(tmp_path, taught, references):
    states = {"attend": "infrastructure error", "LayerKV": "not checkable here"}
    keys = set(taught.record.keys) - set(states) - {"max_concurrency"}
    write(tmp_path, [outcome(taught, "anna", keys, "x", **states)], references)
    suite = ET.parse(tmp_path / "out" / "junit.xml").getroot()[0]
    wanted = {"name": "anna", "tests": "7", "failures": "1", "errors": "1", "skipped": "1"}
    assert suite.attrib == wanted
    tags = {case.get("name"): [child.tag for child in case] for case in suite}
    assert tags["attend"] == ["error"] and tags["LayerKV"] == ["skipped"]
    assert tags["max_concurrency"] == ["failure"] and tags["generate_cached"] == []


def test_answers_that_are_alike_are_told(tmp_path, taught, references):
    outcomes = [outcome(taught, id, set(taught.record.keys)) for id in ("a", "b", "c", "d")]
    for one, print_ in zip(outcomes, ("same", "same", "own", "own2"), strict=True):
        for row in one.verdict["chapters"][SLUG]["exercises"]:
            row["fingerprint"] = print_
    rows = {r["key"]: r for r in outcomes[3].verdict["chapters"][SLUG]["exercises"]}
    rows["attend"]["published"] = True
    total = write(tmp_path, outcomes, references)
    assert total.copies["kv_cache/attend: the same answer"] == ["a", "b"]
    assert total.copies["kv_cache/attend: the published answer"] == ["d"]
    assert not any("forward_positions" in name for name in total.copies)  # short ones look alike


def test_roster_ids_match_in_either_way_of_storing_accents(tmp_path, taught, references):
    students = [Student("Jose\u0301")]
    total = write(tmp_path, [outcome(taught, "Jos\u00e9", set())], references, students)
    assert [(r.state, r.stranger) for r in total.rows] == [("graded", False)]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("=1", "'=1"),
        ("\xad=1", "'=1"),
        (" +1", "' +1"),
        ("-x", "'-x"),
        ("＝1", "'＝1"),
        ("a=b", "a=b"),
        (-3, -3),
    ],
)
def test_cells_are_no_formulas(value, wanted):
    assert report.cell(value) == wanted
