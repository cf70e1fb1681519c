"""What the HTML of every page must hold to, without a browser."""

import ast
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from course import catalog, notebook, solutions
from course.catalog import ROOT, Chapter

READY = [chapter for chapter in catalog.chapters() if chapter.status == "ready"]
LOADS = (("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"))
LOADED_LINKS = {"stylesheet", "icon", "shortcut", "preload", "modulepreload", "prefetch"}
Pages = dict[str, BeautifulSoup]

each_chapter = pytest.mark.parametrize("chapter", READY, ids=lambda chapter: chapter.slug)


def page_of(chapter: Chapter) -> str:
    return f"notebooks/{chapter.part}/{chapter.slug}.html"


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def targets(site: Path, page: str, document: BeautifulSoup):
    """(reference, file it means) for each reference to a file of the site itself."""
    for tag in document.find_all(True):
        for reference in filter(None, (tag.get("href"), tag.get("src"))):
            url = urlsplit(reference)
            if url.scheme or url.netloc:
                continue
            path = unquote(url.path).removeprefix("/course/")  # 404.html uses absolute paths
            below = site if reference.startswith("/") else (site / page).parent
            yield reference, (below / path if path else site / page)


def test_internal_links_lead_to_files_and_ids_that_exist(site: Path, pages: Pages) -> None:
    ids = {
        (site / page).resolve(): {tag["id"] for tag in document.find_all(id=True)}
        for page, document in pages.items()
    }
    broken = []
    for page, document in pages.items():
        for reference, target in targets(site, page, document):
            fragment = unquote(urlsplit(reference).fragment)
            if not target.is_file():
                broken.append(f"{page}: {reference}")
            elif target.suffix == ".html" and fragment:
                known = ids.get(target.resolve(), set())
                broken += [] if fragment in known else [f"{page}: {reference}"]
    assert not broken


def test_ids_occur_once_on_a_page(pages: Pages) -> None:
    counts = {
        page: Counter(tag["id"] for tag in document.find_all(id=True))
        for page, document in pages.items()
    }
    twice = {p: [i for i, n in count.items() if n > 1] for p, count in counts.items()}
    assert not {page: ids for page, ids in twice.items() if ids}


def test_figures_are_described(pages: Pages) -> None:
    missing = []
    for page, document in pages.items():
        for image in document.find_all("img"):
            alt = image.get("alt")
            figure = image.find_parent(class_="cell_output") is not None
            if alt is None or re.search(r"\.(svg|png|jpe?g)$", alt) or (figure and len(alt) < 40):
                missing.append(f"{page}: {image['src']}: {alt!r}")
        for drawing in document.select("svg[role=img]"):
            if len(drawing.get("aria-label", "")) < 40:
                missing.append(f"{page}: {drawing.get('aria-label')!r}")
    assert not missing


def test_figures_have_numbered_captions(pages: Pages) -> None:
    for chapter in READY:
        document = pages[page_of(chapter)]
        captions = [text.get_text() for text in document.select("figcaption .caption-text")]
        assert [caption.split(".")[0] for caption in captions] == [
            f"Figure {number}" for number in range(1, len(captions) + 1)
        ]
        assert len(captions) == len(document.select(".cell_output svg[role=img]")) > 0


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: Pages) -> None:
    foreign = []
    for page, document in pages.items():
        for name, attribute in LOADS:
            for tag in document.find_all(name):
                loaded = name != "link" or LOADED_LINKS & set(tag.get("rel", []))
                if loaded and urlsplit(tag.get(attribute) or "").netloc:
                    foreign.append(f"{page}: {tag[attribute]}")
    styles = [*site.rglob("*.css"), *(site / page for page in pages)]
    for style in styles:
        for url in re.findall(
            r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", style.read_text()
        ):
            foreign.append(f"{style.name}: {url}")
    assert not foreign


def test_styles_name_files_that_exist(site: Path) -> None:
    files = [
        style.parent / url
        for style in site.rglob("*.css")
        for url in re.findall(r"url\([\"']?([^\"')]+)", style.read_text())
        if not url.startswith("data:")
    ]
    assert len(files) > 10
    assert not [file for file in files if not file.is_file()]


def test_no_widget_or_icon_script_is_loaded(pages: Pages) -> None:
    scripts = {tag["src"] for document in pages.values() for tag in document.select("script[src]")}
    assert scripts
    assert not [
        src for src in scripts if re.search(r"fontawesome|require|thebe|mathjax", src, re.I)
    ]


@each_chapter
def test_answers_are_shown_only_in_folds(pages: Pages, chapter: Chapter) -> None:
    document = BeautifulSoup(str(pages[page_of(chapter)]), "html.parser")
    nb = json.loads(chapter.ipynb.read_text())
    given = {
        line
        for cell in nb["cells"]
        if cell["cell_type"] == "code"
        for line in lines("".join(cell["source"]))
    }
    folded = " ".join(pre.get_text() for pre in document.select("details.solution pre"))
    for fold in document.select("article details"):
        assert not fold.has_attr("open")
        fold.decompose()
    open_lines = {line for pre in document.find_all("pre") for line in lines(pre.get_text())}
    keys = [exercise.key for exercise in notebook.exercises(notebook.read(chapter.ipynb), "")]
    assert keys
    for key in keys:
        source = solutions.reference(chapter.part, chapter.slug, key)
        own = [line for line in lines(source) if line not in given]
        assert own, key
        assert not [line for line in own if line in open_lines], key
        assert [line for line in own if line in folded] == own, key


@each_chapter
def test_the_notebook_that_travels_holds_no_answer(site: Path, chapter: Chapter) -> None:
    travels = site / "_sources" / "notebooks" / chapter.part / f"{chapter.slug}.ipynb"
    assert travels.read_bytes() == chapter.ipynb.read_bytes()


@each_chapter
def test_predictions_are_folded(pages: Pages, chapter: Chapter) -> None:
    cells = pages[page_of(chapter)].select("div.cell.tag_predict")
    assert cells
    for cell in cells:
        outputs = cell.select(".cell_output")
        assert outputs
        assert all(output.find_parent("details") is not None for output in outputs)


@each_chapter
def test_pages_show_values_and_no_failures(pages: Pages, chapter: Chapter) -> None:
    document = pages[page_of(chapter)]
    shown = " ".join(output.get_text() for output in document.select(".cell_output"))
    assert len(document.select("div.cell[class*=tag_check-] .cell_output")) > 0
    assert not re.search(r"Traceback|NotImplementedError|still a stub|✗", shown)


def test_no_markup_is_left_over(pages: Pages) -> None:
    left = []
    for page, document in pages.items():
        html = str(document.select_one("article") or "")
        text = BeautifulSoup(html, "html.parser")
        for code in text.find_all(["pre", "code"]):
            code.decompose()
        for found in re.findall(
            r"<!--\s*(?:solution|kernel|calculator|route|chapters|quality|roofline|devices|glossary"
            r"|resources|gpu-results)",
            html,
        ):
            left.append(f"{page}: {found}")
        pattern = r"```|:::|\{code-cell\}|\]\(#|\{\.[a-z]|\$\$|\\\(|system-message"
        for found in re.findall(pattern, text.get_text()):
            left.append(f"{page}: {found}")
    assert not left


@each_chapter
def test_maths_is_rendered(pages: Pages, chapter: Chapter) -> None:
    formulas = pages[page_of(chapter)].select("article .math")
    assert formulas
    assert all(formula.select_one("math, .katex") for formula in formulas)


@each_chapter
def test_launch_and_edit_links_name_files_of_the_repository(pages: Pages, chapter: Chapter) -> None:
    links = [tag["href"] for tag in pages[page_of(chapter)].select(".article-header-buttons a")]
    name = urlsplit(catalog.repository()).path
    places = [
        match[1]
        for link in links
        if (match := re.search(rf"{name}/(?:blob|edit)/main/(.+)$", urlsplit(link).path))
    ]
    here = f"notebooks/{chapter.part}/{chapter.slug}"
    assert sorted(places) == [f"{here}.ipynb", f"{here}.md"]
    assert all((ROOT / place).is_file() for place in places)
    assert any("colab" in link for link in links)


def test_every_mention_of_the_repository_agrees(pages: Pages) -> None:
    owner = urlsplit(catalog.repository()).path.split("/")[1]
    sources = [*(ROOT / "book").rglob("*.md"), *(chapter.md for chapter in READY)]
    found = {
        match
        for source in sources
        for match in re.findall(rf"https://github\.com/{owner}/[\w-]+", source.read_text())
    }
    assert found == {catalog.repository()}


def test_the_front_door_leads_in(site: Path) -> None:
    html = (site / "index.html").read_text()
    target = re.search(r'content="0; url=([^"]+)"', html)
    assert target and (site / target[1]).is_file()


def test_sitemap_lists_the_pages(site: Path, pages: Pages) -> None:
    listed = re.findall(r"<loc>([^<]+)</loc>", (site / "sitemap.xml").read_text())
    paths = sorted(urlsplit(url).path.removeprefix("/course/") for url in listed)
    assert paths == sorted(set(pages) - {"index.html", "404.html", "search.html"})


def tag(document: BeautifulSoup, **wanted: str) -> str:
    """The content of the one meta tag with these attributes."""
    (found,) = document.find_all("meta", attrs=wanted)
    return found["content"]


def test_every_page_is_described_and_has_a_card(site: Path, pages: Pages) -> None:
    about = {page_of(chapter): chapter.about for chapter in READY}
    told = []
    for page in sorted(set(pages) - {"index.html", "404.html", "search.html"}):
        document = pages[page]
        description = tag(document, name="description")
        assert description == tag(document, property="og:description")
        assert description == about.get(page, description)
        assert 40 <= len(description) <= 200 and "$" not in description, page
        if page.startswith("book/parts/"):
            assert description in " ".join(document.select_one("article p").text.split())
        told.append(description)
        card = urlsplit(tag(document, property="og:image")).path.removeprefix("/course/")
        part = page.split("/")[1 if page.startswith("notebooks/") else -1].removesuffix(".html")
        assert card == f"_static/cards/{part if part in catalog.parts() else 'course'}.png"
        assert (site / card).read_bytes()[16:24] == bytes.fromhex("000004b000000276")  # 1200 x 630
        canonical = document.select_one("link[rel=canonical]")["href"]
        assert urlsplit(canonical).path.removeprefix("/course/") == page
    assert len(set(told)) == len(told)


def test_the_feed_lists_the_versions(site: Path) -> None:
    channel = ET.parse(site / "changelog.xml").getroot().find("channel")
    items = channel.findall("item")
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "book" / "changelog.md").read_text())
    assert len(items) == len(headings) > 0
    for item, heading in zip(items, headings, strict=True):
        number, day, title = re.match(r"(\S+), (\S+): (.+)", heading).groups()
        assert item.findtext("title") == f"{number}: {title}"
        assert parsedate_to_datetime(item.findtext("pubDate")).date().isoformat() == day
        assert "](" not in item.findtext("description")


def test_robots_are_shown_the_sitemap(site: Path) -> None:
    text = (site / "robots.txt").read_text()
    assert f"{tag_of(site)}sitemap.xml" in text and "Disallow" not in text


def tag_of(site: Path) -> str:
    """The address of the site, from its front door."""
    door = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    return door.select_one("link[rel=canonical]")["href"].removesuffix("book/index.html")


def test_the_404_page_leads_back_from_anywhere(site: Path, pages: Pages) -> None:
    document = pages["404.html"]
    assert "There is no such page" in document.get_text()
    loads = [t.get("href") or t.get("src") for t in document.select("link, script[src], img")]
    local = [url for url in loads if not urlsplit(url).scheme]
    assert local and all(url.startswith("/course/") for url in local)


def test_every_page_can_be_reported(pages: Pages) -> None:
    for page in sorted(set(pages) - {"index.html", "404.html"}):
        links = [a["href"] for a in pages[page].select("footer a, .bd-footer-content a")]
        (link,) = {url for url in links if "/issues/new" in url}
        filled = parse_qs(urlsplit(link).query)
        assert f"{page}\nVersion: " in filled["body"][0], page


@each_chapter
def test_a_chapter_says_where_it_can_be_solved(site: Path, pages: Pages, chapter: Chapter) -> None:
    document = pages[page_of(chapter)]
    links = {a.get_text(): a["href"] for a in document.select("p.places a")}
    name = f"notebooks/{chapter.part}/{chapter.slug}.ipynb"
    assert links["Open in Colab"].endswith(f"/blob/main/{name}")
    assert unquote(links["Open in Binder"]).endswith(f"lab/tree/{name}")
    download = (site / page_of(chapter)).parent / links["Download the notebook"]
    assert download.read_bytes() == chapter.ipynb.read_bytes()
    facts = document.select_one("p.facts").get_text()
    assert re.search(rf"\b\d+ minutes to read, {chapter.minutes} to solve", facts)


def test_stubs_on_the_page_are_python(pages: Pages) -> None:
    for chapter in READY:
        for pre in pages[page_of(chapter)].select("div.cell[class*=tag_answer-] pre"):
            ast.parse(pre.get_text())
