"""The catalog, `_toc.yml`, the part pages and the set-up page tell one story."""

import re

import yaml
from bs4 import BeautifulSoup

from course import catalog
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


def test_the_front_page_counts_the_chapters(pages: dict[str, BeautifulSoup]) -> None:
    front = pages["book/index.html"]
    rows = [row.get_text(" ") for row in front.select("ol.parts > li")]
    counts = [int(match[1]) for row in rows if (match := re.search(r"(\d+) chapters", row))]
    assert len(counts) == len(catalog.parts())
    assert sum(counts) == len(catalog.chapters())
    assert f"{len(catalog.chapters())} chapters" in front.get_text()


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
