"""The site in a real browser: every page, and what a reader does on it."""

import os
import zipfile
from pathlib import Path

import pytest
from browsing import Visit

from course import book, catalog, notebook
from course.catalog import ROOT

CHAPTER = "notebooks/foundations/kv_cache.html"
# one page of each kind, which `make test` opens in every view; the others in light at 1280 px
KINDS = {
    *("book/index.html", "book/how_it_works.html", "book/parts/foundations.html", CHAPTER),
    *("book/notes/serving.html", "book/kernels.html", "book/calculators.html"),
    *("book/glossary.html", "book/references.html", "search.html", "404.html"),
}
VIEWS = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
SHOTS = ROOT / "_build" / "screenshots"


def opened(view: tuple[str, int], pages: dict) -> list[str]:
    """The pages to open in a view: all of them in the first, and in each for `make test-all`."""
    everything = view == VIEWS[0] or os.environ.get("COURSE_TEST_ALL")
    # the front door leads on at once
    return [page for page in pages if page != "index.html" and (everything or page in KINDS)]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_pages_are_accessible_and_quiet(browser, address: str, pages: dict, view) -> None:
    mode, width = view
    assert set(pages) >= KINDS
    visit = Visit(browser, address, color_scheme=mode, viewport={"width": width, "height": 900})
    found = {}
    for page in opened(view, pages):
        visit.open(page)
        assert visit.tab.evaluate("document.documentElement.dataset.theme") == mode
        visit.tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        problems = visit.axe() + visit.problems
        wide = visit.tab.evaluate("document.documentElement.scrollWidth")
        problems += [f"scrolls sideways: {wide} px"] if wide > width else []
        visit.problems.clear()
        if problems:
            found[page] = problems
    visit.context.close()
    assert not found


@pytest.mark.parametrize("page", ["book/index.html", CHAPTER])
def test_screenshots_are_kept(browser, address: str, page: str) -> None:
    """For people: continuous integration keeps them, and the README shows them."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    for mode, width in VIEWS:
        visit = Visit(browser, address, color_scheme=mode, viewport={"width": width, "height": 860})
        visit.open(page)
        path = SHOTS / f"{Path(page).stem}-{mode}-{width}.png"
        assert len(visit.tab.screenshot(path=path)) > 10_000
        visit.context.close()


def test_an_exercise_card_can_be_walked_with_the_keyboard(browser, address: str) -> None:
    visit = Visit(browser, address, viewport={"width": 1280, "height": 900})
    visit.open(CHAPTER)
    card = visit.tab.locator("section[id^=exercise-]").first
    hint, answer = card.locator("details:not(.solution)").first, card.locator("details.solution")
    for fold in (hint, answer):
        inside = fold.locator(":scope > :not(summary)").first
        assert not inside.is_visible()
    card.locator("h3").click()  # the walk begins at the heading
    reached = []
    for _ in range(12):
        visit.tab.keyboard.press("Tab")
        reached.append(visit.tab.evaluate("document.activeElement.innerText.trim()"))
        if visit.tab.evaluate("document.activeElement.tagName") == "SUMMARY":
            ring = "getComputedStyle(document.activeElement).outlineWidth"
            assert float(visit.tab.evaluate(ring).removesuffix("px")) >= 2
            visit.tab.keyboard.press("Enter" if len(reached) % 2 else "Space")
        if answer.get_attribute("open") is not None:
            break
    assert "Hint" in reached and reached[-1].startswith("One answer")
    for fold in (hint, answer):
        assert fold.locator(":scope > :not(summary)").first.is_visible()
    visit.tab.keyboard.press("Enter")
    assert answer.get_attribute("open") is None
    visit.context.close()


def test_answers_stay_folded_without_scripts(browser, address: str) -> None:
    visit = Visit(browser, address, java_script_enabled=False)
    visit.tab.goto(address + CHAPTER)
    answers = visit.tab.locator("details.solution pre")
    assert answers.count() > 0
    assert not any(answers.nth(i).is_visible() for i in range(answers.count()))
    visit.tab.locator("details.solution summary").first.click()
    assert answers.first.is_visible()
    visit.context.close()


def test_a_copy_button_copies_code_and_nothing_else(browser, address: str) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    visit = Visit(browser, address, permissions=allowed)
    visit.open(CHAPTER)
    cell = visit.tab.locator("div.cell[class*=tag_answer-]").first
    cell.locator(".highlight").first.hover()
    cell.locator("button.copybtn").first.click()
    copied = visit.tab.evaluate("navigator.clipboard.readText()")
    nb = notebook.read(catalog.find("kv_cache").ipynb)
    assert copied.strip() in {c.source.strip() for c in nb.cells if c.cell_type == "code"}
    visit.context.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("prefill", "glossary.html#term-prefill"),  # a term
        ("count positions", "kv_cache.html"),  # an exercise
        ("max_concurrency", "kv_cache.html#exercise-6"),  # by the name that its answer defines
        ("attention_decode", "kernels.html"),  # a kernel
    ],
)
def test_the_search_finds(browser, address: str, words: str, page: str) -> None:
    visit = Visit(browser, address)
    visit.open(f"search.html?q={words.replace(' ', '+')}")
    hit = visit.tab.locator(f"#search-results li a[href*='{page}']").first
    hit.wait_for(timeout=10_000)
    assert visit.problems == []
    visit.context.close()


def test_the_zip_reads_from_a_folder_without_a_server(browser, site: Path, tmp_path: Path) -> None:
    book.pack(site, tmp_path / "offline.zip")
    with zipfile.ZipFile(tmp_path / "offline.zip") as archive:
        archive.extractall(tmp_path)
    home = (tmp_path / "offline").as_uri() + "/"
    visit = Visit(browser, home)
    visit.context.set_offline(True)
    visit.tab.goto(home + "index.html")
    visit.tab.wait_for_url("**/book/index.html")
    visit.tab.locator("ol.route a[href*=kv_cache]").click()
    visit.tab.wait_for_url("**/kv_cache.html")
    assert visit.tab.locator("article h1").inner_text().startswith("The KV cache")
    family = "getComputedStyle(document.querySelector('.bd-article p:not(.facts)')).fontFamily"
    assert "Source Serif" in visit.tab.evaluate(family)
    assert visit.tab.evaluate("document.fonts.check('16px \"Source Serif\"')")
    assert visit.problems == []
    visit.context.close()
