"""What instructors and learners get to see: CSV, JUnit and HTML from the verdict files.

Everything that a submission brought along, its name included, is escaped for the format it goes
into. Verdicts are read one by one, so that a class of any size fits.
"""

import csv
import io
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from course.check import PASSED, UNTRIED
from course.errors import CourseError
from course.grade.grader import Reference
from course.grade.results import Results, name_of
from course.grade.submissions import Student, normal
from course.grade.verdict import INFRASTRUCTURE, STATUSES, UNCHECKABLE
from course.recordfile import write_text
from course.text import line, plain

_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FORMULA = tuple("=+-@|%＝＋－＠")
_SLOWEST = 10
_MISTAKES = 10


@dataclass
class Row:
    """One line of the class: a submission, a student without one, or a stranger."""

    id: str
    student: Student | None
    points: dict[str, int]
    total: int
    independent: int
    note: str
    state: str
    page: str = ""
    stranger: bool = False  # there is a roster, and this id is not on it


@dataclass
class Tally:
    """What the class did with one exercise."""

    slug: str
    key: str
    title: str
    of: int
    counts: Counter = field(default_factory=Counter)
    mistakes: Counter = field(default_factory=Counter)

    @property
    def checkable(self) -> int:
        return sum(n for status, n in self.counts.items() if status != UNCHECKABLE)

    @property
    def rate(self) -> float:
        """The share of the class that passed, 0 to 1."""
        return self.counts[PASSED] / self.checkable if self.checkable else 0.0


@dataclass
class Class:
    """Everything that the index shows, gathered in one pass over the verdict files."""

    rows: list[Row]
    tallies: list[Tally]
    slowest: list[tuple[float, str, str, str]]  # seconds, id, chapter, which cells
    copies: dict[str, list[str]]  # exercise -> ids that handed in the same or our answer


def write(
    results: Results,
    ids: list[str],
    students: list[Student] | None,
    references: dict[str, Reference],
    guarantees: list[str],
) -> Class:
    """Write grades.csv, moodle.csv, github_classroom.csv, junit.xml and report/.

    Args:
        ids: the submissions, in order.
        students: the roster, if there is one; who is not on it is reported, and who handed
            nothing in gets a row with 0 points.
        guarantees: sentences on what was weaker than it could be.
    """
    total = _gather(results, ids, students, references)
    write_text(results.folder / "grades.csv", _grades(total, references))
    write_text(results.folder / "moodle.csv", _moodle(total, references))
    write_text(results.folder / "github_classroom.csv", _classroom(total, references))
    _junit(results, total, results.folder / "junit.xml")
    pages = _templates()
    pages_folder = results.folder / "report"
    wanted = {"index.html"}
    for row in total.rows:
        verdict = _verdict(results, row.id) if row.page else None
        if verdict:
            wanted.add(row.page)
            html = pages.get_template("submission.html").render(
                verdict=verdict, row=row, state=results.batch["state"]
            )
            write_text(pages_folder / row.page, html)
    html = pages.get_template("index.html").render(
        total=total,
        batch=results.batch,
        guarantees=guarantees,
        statuses=STATUSES,
        of=_available(references),
        closed={slug: ref.closed for slug, ref in references.items() if ref.closed},
    )
    write_text(pages_folder / "index.html", html)
    for old in pages_folder.glob("*.html"):
        if old.name not in wanted:
            old.unlink()
    return total


def _verdict(results: Results, id: str) -> dict | None:
    return results.verdict(id) or results.lost(id)


def _gather(
    results: Results,
    ids: list[str],
    students: list[Student] | None,
    references: dict[str, Reference],
) -> Class:
    known = {normal(s.id): s for s in students or ()}
    tallies = {
        (slug, e.key): Tally(slug, e.key, e.title, 0 if e.key in ref.closed else e.difficulty)
        for slug, ref in references.items()
        for e in ref.record.exercises
    }
    rows: list[Row] = []
    slow: list[tuple[float, str, str, str]] = []
    prints: dict[str, dict[str, list[str]]] = {}
    seen: set[str] = set()
    for id in ids:
        verdict = _verdict(results, id)
        if verdict is None:
            raise CourseError(f"the verdict on {line(id)} is missing: say `--resume`")
        student = known.get(normal(id))
        seen.add(normal(id))
        points = {}
        for slug, chapter in verdict["chapters"].items():
            for exercise in chapter["exercises"]:
                tally = tallies[slug, exercise["key"]]
                tally.counts[exercise["status"]] += 1
                if exercise["mistake"]:
                    tally.mistakes[exercise["mistake"]] += 1
                points[f"{slug}/{exercise['key']}"] = exercise["points"]
                if exercise["status"] == PASSED and tally.of > 1:
                    place = prints.setdefault(f"{slug}/{exercise['key']}", {})
                    print_ = "ours" if exercise["published"] else exercise["fingerprint"]
                    place.setdefault(print_, []).append(id)
            points[slug] = chapter["points"]
        for box in results.timing(id)["boxes"]:
            # a box that ended before its reply has no cells to tell of
            cells = {f"check: {key}": s for key, s in box["checks"].items()}
            for what, seconds in (cells or {box["what"]: box["seconds"]}).items():
                slow.append((seconds, id, box["chapter"], what))
        slow = sorted(slow, reverse=True)[:_SLOWEST]
        rows.append(
            Row(
                *(id, student, points, verdict["points"], verdict["independent"]),
                *(_problems(verdict), _state(verdict), f"{name_of(id)}.html"),
                stranger=students is not None and student is None,
            )
        )
    for student in students or ():
        if normal(student.id) not in seen:
            rows.append(Row(student.id, student, {}, 0, 0, "nothing was handed in", "missing"))
            for tally in tallies.values():
                tally.counts[UNTRIED if tally.of else UNCHECKABLE] += 1
    return Class(rows, list(tallies.values()), slow, _copied(prints))


def _copied(prints: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """Who handed in the published answer, or the same as somebody else, word for word.

    Only exercises of difficulty 2 and 3 are looked at: short answers come out alike by themselves.
    """
    out = {}
    for exercise, groups in prints.items():
        for print_, ids in groups.items():
            if print_ == "ours":
                out[f"{exercise}: the published answer"] = ids
            elif len(ids) > 1:
                out[f"{exercise}: the same answer"] = [
                    *out.get(f"{exercise}: the same answer", []),
                    *ids,
                ]
    return out


def _state(verdict: dict) -> str:
    every = [e["status"] for c in verdict["chapters"].values() for e in c["exercises"]]
    if INFRASTRUCTURE in every:
        return INFRASTRUCTURE
    readable = [not chapter["problem"] for chapter in verdict["chapters"].values()]
    return "graded" if any(readable) else "unreadable"


def _problems(verdict: dict) -> str:
    """What is wrong with a submission as a whole or with the notebook of a chapter."""
    found = [verdict["problem"], *(c["problem"] for c in verdict["chapters"].values())]
    return "; ".join(dict.fromkeys(filter(None, found)))


def cell(value: Any) -> Any:
    """A CSV cell that no spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return value
    text = xml(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def xml(text: str) -> str:
    """Plain text without the characters that XML forbids even as escapes."""
    return _XML.sub("", plain(text))


def _csv(header: list[str], rows: Iterable[list[Any]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([cell(value) for value in row] for row in rows)
    return out.getvalue()


def _available(references: dict[str, Reference]) -> dict[str, int]:
    return {
        slug: sum(e.difficulty for e in ref.record.exercises if e.key not in ref.closed)
        for slug, ref in references.items()
    }


def _grades(total: Class, references: dict[str, Reference]) -> str:
    of = _available(references)
    columns: list[str] = []
    names: list[str] = []
    for slug, ref in references.items():
        for e in ref.record.exercises:
            columns.append(f"{slug}/{e.key}")
            names.append(f"{slug}/{e.key} (of {0 if e.key in ref.closed else e.difficulty})")
        columns.append(slug)
        names.append(f"{slug} (of {of[slug]})")
    last = [f"total (of {sum(of.values())})", "with independent credit", "state", "note"]
    last += ["on the roster"]
    return _csv(
        ["id", "name", "email", *names, *last],
        (
            [
                *(row.id, row.student.name if row.student else "", _email(row)),
                *(row.points.get(column, 0) for column in columns),
                *(row.total, row.independent, row.state, row.note, "no" if row.stranger else "yes"),
            ]
            for row in total.rows
        ),
    )


def _email(row: Row) -> str:
    return row.student.email if row.student else ""


def _moodle(total: Class, references: dict[str, Reference]) -> str:
    """For Moodle's gradebook: Grades, Import, CSV file; map `ID number` or `Email address`."""
    header = ["ID number", "Full name", "Email address"]
    header += [ref.chapter.title for ref in references.values()] + ["Feedback"]
    return _csv(
        header,
        (
            [
                *(row.id, row.student.name if row.student else "", _email(row)),
                *(row.points.get(slug, 0) for slug in references),
                row.note,
            ]
            for row in total.rows
            if row.state != INFRASTRUCTURE
        ),
    )


def _classroom(total: Class, references: dict[str, Reference]) -> str:
    """The columns that GitHub Classroom's own grade file has."""
    of = _available(references)
    header = ["assignment_name", "github_username", "roster_identifier", "points_awarded"]
    return _csv(
        [*header, "points_available"],
        (
            [
                slug,
                (row.student.github if row.student else "") or row.id,
                row.id,
                row.points.get(slug, 0),
                of[slug],
            ]
            for row in total.rows
            if row.state != INFRASTRUCTURE
            for slug in references
        ),
    )


def _junit(results: Results, total: Class, path: Path) -> None:
    """One suite for each row; written suite by suite, since elements take far more than text."""
    suites, sums = [], Counter(tests=0, failures=0, errors=0, skipped=0)
    for row in total.rows:
        suite = ET.Element("testsuite", name=xml(row.id))
        counts = dict.fromkeys(sums, 0)
        for case, kind, text in _cases(_verdict(results, row.id) if row.page else None, row):
            counts["tests"] += 1
            element = ET.SubElement(suite, "testcase", {k: xml(v) for k, v in case.items()})
            if kind:
                counts[kind] += 1
                tag = {"failures": "failure", "errors": "error"}.get(kind, kind)
                ET.SubElement(element, tag, message=xml(text.split("\n")[0])).text = xml(text)
        sums.update(counts)
        for name, count in counts.items():
            suite.set(name, str(count))
        ET.indent(suite)
        suites.append(ET.tostring(suite, encoding="unicode"))
    head = ET.tostring(
        ET.Element("testsuites", {"name": "course grade"} | {k: str(v) for k, v in sums.items()}),
        encoding="unicode",
    )
    write_text(path, "\n".join([head.replace(" />", ">"), *suites, "</testsuites>\n"]))


def _cases(verdict: dict | None, row: Row) -> Iterator[tuple[dict[str, str], str, str]]:
    """Test cases of a submission: attributes, which count it adds to (empty: passed), text."""
    if verdict is None:
        yield {"classname": row.id, "name": "submission"}, "failures", row.note
        return
    for slug, chapter in verdict["chapters"].items():
        for exercise in chapter["exercises"]:
            case = {"classname": f"{row.id}.{slug}", "name": exercise["key"]}
            status = exercise["status"]
            kind = {PASSED: "", UNCHECKABLE: "skipped", INFRASTRUCTURE: "errors"}.get(
                status, "failures"
            )
            yield (
                case,
                kind,
                "\n".join(filter(None, [status, exercise["text"], exercise["mistake"]])),
            )


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: xml(value) if isinstance(value, str) else value,
    )
    environment.filters["page"] = name_of
    environment.globals["most_mistakes"] = _MISTAKES
    return environment
