"""The catalog, `_toc.yml`, the part pages and the set-up page tell one story."""

import re
import tomllib

import yaml
from bs4 import BeautifulSoup
from coursesite import publish

from course import catalog, mutants
from course.catalog import ROOT


def contents() -> dict[str, list[str]]:
    """Part page -> pages of its chapters, in the order of `_toc.yml`."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    return {
        entry["file"].removeprefix("book/parts/"): [
            section["file"] for section in entry.get("sections", [])
        ]
        for entry in entries
        if entry["file"].startswith("book/parts/")
    }


def test_the_contents_list_the_ready_chapters_in_order() -> None:
    expected: dict[str, list[str]] = {part: [] for part in catalog.parts()}
    for chapter in catalog.chapters():
        if chapter.status == "ready":
            expected[chapter.part].append(f"notebooks/{chapter.part}/{chapter.slug}")
    assert contents() == expected
    assert list(contents()) == list(expected)


def test_a_part_page_lists_every_chapter_and_links_the_ready_ones(
    pages: dict[str, BeautifulSoup],
) -> None:
    listed = 0
    for part in catalog.parts():
        rows = pages[f"book/parts/{part}.html"].select("ol.chapters > li")
        chapters = [chapter for chapter in catalog.chapters() if chapter.part == part]
        listed += len(rows)
        assert len(rows) == len(chapters)
        for row, chapter in zip(rows, chapters, strict=True):
            text = " ".join(row.get_text(" ").split())
            assert text.startswith(" ".join(chapter.title.split()))
            assert f"{chapter.minutes} minutes" in text
            links = [tag["href"] for tag in row.select("a[href*=notebooks]")]
            page = f"../../notebooks/{part}/{chapter.slug}.html"
            assert links == ([page] if chapter.status == "ready" else [])
            assert ("planned" in text) == (chapter.status != "ready")
    assert listed == len(catalog.chapters())


def test_the_route_shows_every_chapter_at_its_length(pages: dict[str, BeautifulSoup]) -> None:
    front = pages["book/index.html"]
    rows = front.select("ol.route > li")
    assert [row.select_one("p > a")["href"] for row in rows] == [
        f"parts/{part}.html" for part in catalog.parts()
    ]
    bars = [bar for row in rows for bar in row.select("ol.bars > li")]
    for bar, chapter in zip(bars, catalog.chapters(), strict=True):
        assert bar["class"] == [chapter.status]
        text = " ".join(bar.get_text().split())
        assert text.startswith(f"{chapter.title}, {chapter.minutes} minutes")
        assert bar["style"] == f"flex-grow: {chapter.minutes}"
        links = [tag["href"] for tag in bar.select("a")]
        page = f"../notebooks/{chapter.part}/{chapter.slug}.html"
        assert links == ([page] if chapter.status == "ready" else [])
    widths = [float(row.select_one("ol.bars")["style"].split()[1][:-1]) for row in rows]
    minutes = dict.fromkeys(catalog.parts(), 0)
    for chapter in catalog.chapters():
        minutes[chapter.part] += chapter.minutes
    longest = max(minutes.values())
    for width, total in zip(widths, minutes.values(), strict=True):
        assert abs(width - 100 * total / longest) < 0.1
    assert f"{len(catalog.chapters())} chapters" in front.get_text()


def test_the_quality_page_counts_what_is_on_file(pages: dict[str, BeautifulSoup]) -> None:
    tables = pages["book/quality.html"].select("table")
    ready = [chapter for chapter in catalog.chapters() if chapter.status == "ready"]
    for table, chapter in zip(tables, ready, strict=True):
        rows = [[td.get_text() for td in row.select("td")] for row in table.select("tbody tr")]
        *exercises, total = rows
        assert total[0] == "all"
        for column in range(1, 5):
            assert sum(int(row[column]) for row in exercises) == int(total[column])
        written = mutants.written(chapter)
        assert int(total[1]) == sum(not m.shortcut for m in written)
        assert int(total[2]) == sum(m.shortcut for m in written)
        keys = [row[0] for row in exercises]
        made = sum(len(list(mutants.automatic(chapter, key))) for key in keys)
        assert int(total[3]) + int(total[4]) == made


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "book" / "changelog.md").read_text()
    newest = publish.ENTRY.search(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert newest and newest["version"] == project["version"]


def named(program: str) -> set[str]:
    """The words that follow `program` in the code of the book's pages."""
    text = "\n".join(page.read_text() for page in sorted((ROOT / "book").glob("*.md")))
    code = [
        *re.findall(r"```bash\n(.*?)```", text, re.DOTALL),
        *re.findall(r"(?<!`)`([^`]+)`", text),
    ]
    return {m for part in code for m in re.findall(rf"(?m)^{program} ([a-z-]+)", part)}


def test_the_pages_name_commands_that_exist() -> None:
    from typer.main import get_command

    from course.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert named("course") >= {"check", "start"}
    assert named("course") <= known


def test_the_pages_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named("make") >= {"book", "start"}
    assert named("make") <= targets


def test_the_set_up_page_names_the_conda_environment() -> None:
    name = yaml.safe_load((ROOT / "environment.yml").read_text())["name"]
    page = (ROOT / "book" / "setup.md").read_text()
    assert re.findall(r"conda activate (\S+)", page) == [name]
