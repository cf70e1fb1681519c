"""A browser window on the site, and the server behind it."""

import contextlib
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

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

    def copyfile(self, source, outputfile) -> None:
        with contextlib.suppress(ConnectionError):  # the page was left before it had all
            super().copyfile(source, outputfile)


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the folder of a site; yields its address."""
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}{UNDER}"
        server.shutdown()
        thread.join()


def program() -> str | None:
    """Where Chromium is, under one of its names."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Visit:
    """A browser window that notes what goes wrong in it."""

    def __init__(self, browser, address: str, **options):
        self.address, self.problems = address, []
        self.context = browser.new_context(**options)
        self.context.route("**/*", self._only_here)
        self.tab = self.context.new_page()
        self.tab.on("console", self._message)
        self.tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.tab.on("requestfailed", self._failed)
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

    def _failed(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # what is given up when the page is left
            self.problems.append(f"failed: {request.url}")

    def _response(self, response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def open(self, page: str) -> None:
        self.tab.goto(self.address + page, wait_until="load")
        self.tab.evaluate("document.fonts.ready")

    def axe(self) -> list[str]:
        """What axe-core objects to on the page as it stands, one line for each rule."""
        self.tab.add_script_tag(content=(npm_packages() / "axe-core" / "axe.min.js").read_text())
        return self.tab.evaluate(AXE, RULES)
