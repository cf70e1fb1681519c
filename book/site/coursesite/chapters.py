"""A chapter's page: what a Markdown comment stands for on the site, and what is folded.

The notebook that Colab opens keeps the bare comments, so no answer travels with it.
"""

import json
import math
import re
import runpy
from collections import Counter
from html import escape
from pathlib import Path

from docutils.nodes import make_id
from sphinx.util import logging

from course import catalog, solutions
from course.errors import CourseError
from course.runtime import MIME
from coursesite.origin import places, report

logger = logging.getLogger(__name__)

MARK = re.compile(r"^<!--\s*(solution|kernel):\s*(.+?)\s*-->$", re.MULTILINE)
TITLE = re.compile(r"\A# .+$", re.MULTILINE)
WORDS_PER_MINUTE = 200  # of technical prose
PREDICT = {
    "code_prompt_show": "Write down your guess, then look",
    "code_prompt_hide": "The cell prints",
}


def folded(kind: str, summary: str, code: str) -> str:
    """Python code in a native `<details>`, as MyST."""
    ticks = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, ticks + 1)
    return (
        f'<details class="{kind}">\n<summary>{summary}</summary>\n\n'
        f"{fence}python\n{code.rstrip()}\n{fence}\n\n</details>"
    )


def known_wrong(path: Path) -> Counter:
    """How many wrong answers to each exercise are on file, by key."""
    found: Counter = Counter()
    if path.is_file():
        names = runpy.run_path(str(path))
        for table in ("MUTANTS", "SHORTCUTS"):
            found.update({key: len(rows) for key, rows in names.get(table, {}).items()})
    return found


def expand(text: str, chapter: catalog.Chapter, wrong: Counter) -> str:
    """One Markdown cell with its `solution` and `kernel` comments expanded.

    Raises CourseError if what a comment names does not exist.
    """

    def put(match: re.Match) -> str:
        if match[1] == "kernel":
            file, name = match[2].split()
            code = solutions.from_file(catalog.ROOT / "kernels" / file, name)
            return folded("listing", f"<code>kernels/{file}</code>: <code>{name}</code>", code)
        key = match[2]
        code = solutions.reference(chapter.part, chapter.slug, key)
        shown = folded("solution", f"One answer: <code>{key}</code>", code)
        if wrong[key]:
            answers = "one wrong answer" if wrong[key] == 1 else f"{wrong[key]} wrong answers"
            shown += f'\n\n<p class="mutants">The checks below reject {answers} on file.</p>'
        return shown

    return MARK.sub(put, text)


def chapter_of(docname: str) -> catalog.Chapter | None:
    """The chapter that a page shows; None for any other page."""
    if not docname.startswith("notebooks/"):
        return None
    return catalog.find(docname)


def facts(chapter: catalog.Chapter, cells: list[dict], wrong: Counter) -> str:
    """Two lines about the chapter, for under its title: what it asks, and where to do it."""
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    exercises = sum(mark[1] == "solution" for mark in MARK.finditer(text))
    part = catalog.parts()[chapter.part].split(":")[0]
    items = [
        f'<a href="../../book/parts/{chapter.part}.html">{part}</a>',
        f"{reading(text)} minutes to read, {chapter.minutes} to solve",
        f"{exercises} exercises",
    ]
    if wrong:
        quality = f"../../book/quality.html#{make_id(chapter.title)}"
        items.append(f'<a href="{quality}">{wrong.total()} wrong answers on file</a>')
    name = f"notebooks/{chapter.part}/{chapter.slug}"
    links = [
        f'<a href="{escape(address)}">Open in {place}</a>'
        for place, address in places(f"{name}.ipynb").items()
    ]
    notebook = f"../../_sources/{name}.ipynb"
    links.insert(1, f'<a href="{notebook}" download>Download the notebook</a>')
    links.append(f"<code>course start {chapter.slug}</code>")
    links.append(f'<a href="{escape(report(name))}">Report a problem</a>')
    return (
        f'<p class="facts">{" · ".join(items)}</p>\n<p class="facts places">{" · ".join(links)}</p>'
    )


def reading(text: str) -> int:
    """Minutes to read the prose of a chapter."""
    return math.ceil(len(re.findall(r"\w+", text)) / WORDS_PER_MINUTE)


def depends_on(chapter: catalog.Chapter) -> list[Path]:
    """Files outside the notebook that decide what its page shows."""
    kernels = sorted((catalog.ROOT / "kernels").glob("*.py"))
    course = [Path(catalog.__file__).with_suffix(".yml"), Path(solutions.__file__)]
    wanted = [chapter.solution, chapter.mutants, *kernels, *course]
    return [path for path in wanted if path.is_file()]


def complete(app, docname, source):
    """`source-read`: rewrite the notebook of a chapter before Sphinx parses it."""
    chapter = chapter_of(docname)
    if chapter is None:
        return
    for path in depends_on(chapter):
        app.env.note_dependency(str(path))
    wrong = known_wrong(chapter.mutants)
    notebook = json.loads(source[0])
    line = facts(chapter, notebook["cells"], wrong)
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            try:
                text = TITLE.sub(lambda title: f"{title[0]}\n\n{line}\n", text, count=1)
                cell["source"] = expand(text, chapter, wrong)
            except (CourseError, ValueError) as problem:
                logger.warning("cell %d: %s", number, problem, location=docname)
            continue
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(MIME, None)  # what the checks compare, not for reading
        if "predict" in cell["metadata"].get("tags", []):
            cell["metadata"]["tags"].append("hide-output")
            cell["metadata"].setdefault("mystnb", {}).update(PREDICT)
    source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", complete)
