"""What a learner's own CI says: a job summary, and an annotation on the line of each open exercise.

`python -m course.grade.summary RESULTS SUBMISSION SUMMARY` appends Markdown to the file SUMMARY,
prints annotations as GitHub's workflow commands, and exits with 0 if every exercise that can be
checked passed, else 1. Whatever a submission said is escaped for both.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from course.check import PASSED, UNTRIED
from course.errors import CourseError
from course.grade.report import xml
from course.grade.submissions import MAX_FILE
from course.grade.verdict import INFRASTRUCTURE, UNCHECKABLE

_LEVEL = {UNTRIED: "notice", INFRASTRUCTURE: "warning"}
_MARKS = {PASSED: "✅", UNTRIED: "⬜", UNCHECKABLE: "➖", INFRASTRUCTURE: "⚠️"}
_STRUCTURE = re.compile(r"[\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e]")  # ASCII punctuation


def verdicts(results: Path) -> list[dict]:
    """The verdicts in a folder of results, those on lost submissions included, ordered by id.

    CourseError if there are none.
    """
    files = [*results.glob("verdicts/*.json"), *results.glob("lost/*.json")]
    if not files:
        raise CourseError(f"{results} holds no verdicts: `course grade --out` makes them")
    return sorted((json.loads(f.read_text(encoding="utf-8")) for f in files), key=lambda v: v["id"])


def passed(verdict: dict) -> bool:
    """Whether every exercise that can be checked passed, and there is one."""
    states = [e["status"] for c in verdict["chapters"].values() for e in c["exercises"]]
    return PASSED in states and set(states) <= {PASSED, UNCHECKABLE}


def markdown(verdict: dict) -> str:
    """One table for each chapter of a verdict, with points and what went wrong."""
    lines = [f"## {verdict['points']} of {verdict['of']} points"]
    if verdict["problem"]:
        lines += ["", _inert(verdict["problem"])]
    for chapter in verdict["chapters"].values():
        lines += ["", f"### {_inert(chapter['title'])}", ""]
        lines += ["| exercise | verdict | points | |", "| --- | --- | ---: | --- |"]
        for e in chapter["exercises"]:
            mark = _MARKS.get(e["status"], "❌")
            cells = [_inert(e["title"]), f"{mark} {e['status']}", f"{e['points']}/{e['of']}"]
            lines.append(f"| {' | '.join([*cells, _inert(_told(e))])} |")
    return "\n".join(lines) + "\n"


def annotations(verdict: dict, submission: Path) -> Iterator[str]:
    """A workflow command for each exercise that did not pass, at the line of its answer cell.

    Paths are relative to the submission, which is how GitHub finds the file in the repository.
    """
    for chapter in verdict["chapters"].values():
        text = _text(submission, chapter["file"])
        for e in chapter["exercises"]:
            if e["status"] in (PASSED, UNCHECKABLE):
                continue
            where = {"title": f"{e['title']}: {e['status']}"}
            if chapter["file"]:
                where = {"file": chapter["file"], "line": str(line_of(text, e["key"]))} | where
            said = ",".join(f"{name}={_property(value)}" for name, value in where.items())
            level = _LEVEL.get(e["status"], "error")
            yield f"::{level} {said}::{_data(_told(e) or e['status'])}"


def line_of(text: str, key: str) -> int:
    """The line, from 1, of a notebook's text where `# answer: KEY` stands; JSON or Markdown.

    Else the line of the cell's tag, else 1.
    """
    name = re.escape(key)
    first = re.compile(rf'(?:^|")[ \t]*#[ \t]*answer:[ \t]*{name}[ \t]*(?:\\[nr]|"|$)')
    tag = re.compile(rf'"answer-{name}"')
    lines = text.splitlines()
    for pattern in (first, tag):
        for number, line in enumerate(lines, 1):
            if pattern.search(line):
                return number
    return 1


def _told(exercise: dict) -> str:
    return "\n".join(filter(None, (exercise["text"], exercise["mistake"] or exercise["hint"])))


def _text(submission: Path, name: str) -> str:
    """The notebook as text, for its line numbers; empty if it is no ordinary file in there."""
    path = submission / name
    whole = Path(os.path.realpath(submission))  # `resolve` raises for a link to itself
    inside = Path(os.path.realpath(path)).is_relative_to(whole)
    if not (name and inside and path.is_file() and path.stat().st_size <= MAX_FILE):
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _inert(text: str) -> str:
    """Text that Markdown shows as it is, in one table cell: no link, image, HTML or mention."""
    return "<br>".join(
        _STRUCTURE.sub(lambda found: f"&#{ord(found[0])};", line) for line in xml(text).splitlines()
    )


def _data(text: str) -> str:
    """Text as the message of a workflow command."""
    return xml(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Text as a property of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def main(results: Path, submission: Path, summary: Path) -> int:
    """See the module. Returns the exit status."""
    found = verdicts(results)
    with summary.open("a", encoding="utf-8") as out:
        out.writelines(markdown(verdict) for verdict in found)
    for verdict in found:
        for line in annotations(verdict, submission):
            print(line)
    return 0 if all(map(passed, found)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(*map(Path, sys.argv[1:])))
    except CourseError as problem:
        print(f"course: {problem}", file=sys.stderr)
        sys.exit(2)
