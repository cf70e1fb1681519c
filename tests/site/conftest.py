"""One build of the site for all tests, and the pages in it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import FLAGS, NAMES, program, served
from bs4 import BeautifulSoup

from course.catalog import ROOT

sys.path.append(str(ROOT / "book" / "site"))  # where Jupyter Book finds the extension


Build = Callable[[Path, Path], subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def run_build() -> Build:
    """A function that runs `python -m course.book` of a checkout: (root, folder for the HTML)."""

    def run(root: Path, out: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "course.book", str(out)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="session")
def site(run_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("site") / "html"
    done = run_build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, BeautifulSoup]:
    """Every page of the site, parsed: path below the site -> document."""
    found = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    return {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_bytes(), "html.parser")
        for path in found
    }


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with served(site) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    """Chromium, started once for a module: its event loop must not outlive the site's tests."""
    if program() is None:
        pytest.skip("Chromium is not installed: no program called " + " or ".join(NAMES))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program(), args=FLAGS)
        yield chromium
        chromium.close()
