"""`python -m course.bench.site`: what the website costs to build and to read.

The chapters that are not written yet are copies of the first one in a checkout of its own, so the
build is as large as the whole course. Weights are what a server sends that compresses text; paint
and shift come from Chromium on a processor slowed down four times.
"""

import functools
import gzip
import http.server
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from course import catalog
from course.book import npm_packages
from course.catalog import ROOT, Chapter

MODEL = "kv_cache"
PARTS = ("book", "course", "kernels", "notebooks", "solutions", "tests/mutants")
FILES = ("_config.yml", "_toc.yml", "package.json", "package-lock.json", "pyproject.toml")
PACKED = (".woff", ".woff2", ".png")  # compressed already
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SLOWER = 4
REPEATS = 3
SHIFT = """new Promise(done => {
  let sum = 0;
  new PerformanceObserver(list => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) sum += entry.value;
  }).observe({type: "layout-shift", buffered: true});
  setTimeout(() => done(sum), 500);
})"""
PAINT = 'performance.getEntriesByName("first-contentful-paint")[0].startTime'
Row = tuple[str, float, str]  # what, how much, the aim


def main() -> None:
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"the website: {os.cpu_count()} cores, load {load}")
    with tempfile.TemporaryDirectory(prefix="course-bench-") as name:
        root = Path(name)
        whole(root)
        for measure in (builds, pages):
            for what, value, aim in measure(root):
                print(f"{what:58} {value:8.2f}  {aim}", flush=True)


def whole(root: Path) -> None:
    """A checkout in which every chapter is ready; the missing ones are copies of MODEL."""
    skip = shutil.ignore_patterns("__pycache__", "*.lock")
    for part in PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=skip)
    for file in FILES:
        shutil.copy(ROOT / file, root)
    (root / "node_modules").symlink_to(npm_packages(), target_is_directory=True)
    model = catalog.find(MODEL)
    rows = yaml.safe_load((root / "course" / "catalog.yml").read_text(encoding="utf-8"))
    for row in rows["chapters"]:
        if row["status"] != "ready":
            row |= {"status": "ready", "about": f"Stands for a chapter: {row['title']}"[:160]}
            _copy(root, model, catalog.find(row["slug"]))
    text = yaml.safe_dump(rows, sort_keys=False, allow_unicode=True)
    (root / "course" / "catalog.yml").write_text(text, encoding="utf-8")
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    for entry in (entry for part in toc["parts"] for entry in part["chapters"]):
        sections = {section["file"]: section for section in entry.get("sections", [])}
        part = entry["file"].removeprefix("book/parts/")
        docs = [f"notebooks/{c.part}/{c.slug}" for c in catalog.chapters() if c.part == part]
        if docs:
            entry["sections"] = [sections.get(doc, {"file": doc}) for doc in docs]
    (root / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False), encoding="utf-8")


def _copy(root: Path, model: Chapter, chapter: Chapter) -> None:
    """Put the files of `model` where those of `chapter` belong, with names of their own."""
    for old, new in (
        (model.ipynb, chapter.ipynb),
        (model.record, chapter.record),
        (model.solution, chapter.solution),
        (model.mutants, chapter.mutants),
    ):
        text = old.read_text(encoding="utf-8")
        text = re.sub(r"\b(eq|fig)-kv-", rf"\1-{chapter.slug.replace('_', '-')}-", text)
        path = root / new.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("# The KV cache", f"# {chapter.title}"), encoding="utf-8")


def builds(root: Path) -> Iterator[Row]:
    """Seconds of a build from empty and of a build after one chapter changed."""
    page = root / "notebooks" / "foundations" / f"{MODEL}.ipynb"
    wall, processor = _build(root)
    count = sum(1 for _ in (root / "_build" / "html").rglob("*.html"))
    yield f"cold build, {count} pages, seconds", wall, "aim <= 25"
    yield "  of processor, all cores together", processor, "reported"
    page.write_text(page.read_text(encoding="utf-8").replace("one token", "a token", 1))
    wall, processor = _build(root)
    yield "one chapter changed, seconds", wall, "aim <= 8"
    yield "  of processor, all cores together", processor, "reported"


def _build(root: Path) -> tuple[float, float]:
    """(seconds on the clock, seconds of processor) of one build."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "course.book"], cwd=root, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def pages(root: Path) -> Iterator[Row]:
    """Weight, requests, paint and shift of each chapter that is written."""
    from playwright.sync_api import sync_playwright

    site = root / "_build" / "html"
    program = next(filter(None, map(shutil.which, CHROMIUM)))
    with served(site) as address, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        for chapter in catalog.chapters():
            if chapter.status != "ready":
                continue
            page = f"notebooks/{chapter.part}/{chapter.slug}.html"
            files = loaded(browser, address, page)
            weight = sum(sent(site / file) for file in files)
            yield f"{chapter.slug}: weight, KB", weight / 1000, "aim <= 450"
            yield f"{chapter.slug}: requests", len(files), "aim <= 35"
            runs = [slowed(browser, address + page) for _ in range(REPEATS)]
            paints, shifts = zip(*runs, strict=True)
            paint = statistics.median(paints) / 1000
            yield f"{chapter.slug}: first paint, seconds, {SLOWER}x slower", paint, "aim < 1.5"
            yield f"{chapter.slug}: layout shift", max(shifts), "aim < 0.05"
        browser.close()


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine; yields its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def loaded(browser: Any, address: str, page: str) -> list[str]:
    """The files that a first visit to a page asks for, read to its end, below `address`."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    urls: list[str] = []
    tab.on("requestfinished", lambda request: urls.append(request.url))
    tab.goto(address + page, wait_until="load")
    tab.evaluate("scrollTo(0, document.body.scrollHeight)")
    tab.evaluate("document.fonts.ready")
    tab.wait_for_load_state("networkidle")
    tab.close()
    return [unquote(urlsplit(url[len(address) :]).path) for url in urls if url.startswith(address)]


def sent(path: Path) -> int:
    """Bytes that a server sends for a file: text is compressed."""
    content = path.read_bytes()
    return len(content if path.suffix in PACKED else gzip.compress(content, 6))


def slowed(browser: Any, url: str) -> tuple[float, float]:
    """(milliseconds to the first paint, layout shift) of a first visit by a slow machine."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.context.new_cdp_session(tab).send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    tab.goto(url, wait_until="load")
    tab.evaluate("document.fonts.ready")
    shift, paint = tab.evaluate(SHIFT), tab.evaluate(PAINT)
    tab.close()
    return paint, shift


if __name__ == "__main__":
    main()
