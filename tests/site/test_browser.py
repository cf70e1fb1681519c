"""Every page in a real browser, in both colour modes, and on a phone."""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from course.book import npm_packages
from course.catalog import repository

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
UNDER = f"/{urlsplit(repository()).path.split('/')[-1]}/"  # as on GitHub Pages
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
AXE = """async (rules) => (await axe.run(document, {runOnly: rules})).violations.map(
  v => v.id + ": " + v.nodes.map(n => n.target.join(" ")).slice(0, 3).join(", "))"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site under the path that it has on GitHub Pages."""

    def translate_path(self, path: str) -> str:
        inside = path.removeprefix(UNDER)
        return super().translate_path("/" + inside if inside != path else "/outside")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}{UNDER}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    """Chromium, started once."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed: no program called " + " or ".join(NAMES))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A browser window that notes what goes wrong in it."""

    def __init__(self, browser, address: str, **options):
        self.address, self.problems = address, []
        self.context = browser.new_context(**options)
        self.context.route("**/*", self._only_here)
        self.tab = self.context.new_page()
        self.tab.on("console", self._message)
        self.tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.tab.on("requestfailed", lambda request: self.problems.append(f"failed: {request.url}"))
        self.tab.on("response", self._response)

    def _only_here(self, route) -> None:
        if route.request.url.startswith((self.address, "data:", "blob:")):
            route.continue_()
        else:
            self.problems.append(f"outside: {route.request.url}")
            route.abort()

    def _message(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _response(self, response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def open(self, page: str) -> None:
        self.tab.goto(self.address + page, wait_until="load")
        self.tab.evaluate("document.fonts.ready")


def stays(pages: dict) -> list[str]:
    """All pages but the front door, which leads on at once."""
    return [page for page in pages if page != "index.html"]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_pages_are_accessible_and_quiet(browser, address: str, pages: dict, mode: str) -> None:
    visit = Visit(browser, address, color_scheme=mode, viewport={"width": 1280, "height": 900})
    axe = (npm_packages() / "axe-core" / "axe.min.js").read_text()
    found = {}
    for page in stays(pages):
        visit.open(page)
        assert visit.tab.evaluate("document.documentElement.dataset.theme") == mode
        visit.tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        visit.tab.add_script_tag(content=axe)
        problems = visit.tab.evaluate(AXE, RULES) + visit.problems
        visit.problems.clear()
        if problems:
            found[page] = problems
    visit.context.close()
    assert not found


def test_no_page_scrolls_sideways_on_a_phone(browser, address: str, pages: dict) -> None:
    visit = Visit(browser, address, viewport={"width": 390, "height": 844})
    widths = {}
    for page in stays(pages):
        visit.open(page)
        visit.tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        widths[page] = visit.tab.evaluate("document.documentElement.scrollWidth")
    visit.context.close()
    assert {page: width for page, width in widths.items() if width > 390} == {}


def test_a_fold_opens_with_the_keyboard(browser, address: str) -> None:
    visit = Visit(browser, address)
    visit.open("notebooks/foundations/kv_cache.html")
    fold = visit.tab.locator("details.solution").first
    code = fold.locator("pre")
    assert not code.is_visible()
    fold.locator("summary").focus()
    visit.tab.keyboard.press("Enter")
    assert code.is_visible()
    visit.context.close()


def test_answers_stay_folded_without_scripts(browser, address: str) -> None:
    visit = Visit(browser, address, java_script_enabled=False)
    visit.tab.goto(address + "notebooks/foundations/kv_cache.html")
    answers = visit.tab.locator("details.solution pre")
    assert answers.count() > 0
    assert not any(answers.nth(i).is_visible() for i in range(answers.count()))
    visit.context.close()


def test_the_search_finds_a_term(browser, address: str) -> None:
    visit = Visit(browser, address)
    visit.open("search.html?q=prefill")
    hit = visit.tab.locator("#search-results li a").first
    hit.wait_for(timeout=10_000)
    assert visit.tab.locator("#search-results li").count() > 0
    assert visit.problems == []
    visit.context.close()


def test_a_chapter_is_light_to_load(browser, address: str) -> None:
    visit = Visit(browser, address)
    sizes = []
    visit.tab.on(
        "requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"])
    )
    visit.open("notebooks/foundations/kv_cache.html")
    visit.tab.wait_for_load_state("networkidle")
    assert len(sizes) <= 60
    assert sum(sizes) <= 2_500_000  # not compressed, as this server sends it
    visit.context.close()
