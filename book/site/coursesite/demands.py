"""Faults that Sphinx lets pass: images without a description, a catalog that tells another story.

Each is a warning with file and line, and a warning fails the build.
"""

import logging as standard
import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

from course import catalog

logger = logging.getLogger(__name__)
CELL = re.compile(r"\.ipynb:(\d+)(?=:|$)")
_LINES = 10_000  # myst-nb numbers lines by this much per cell


def describe_images(app, doctree):
    """`doctree-read`: every image says what it shows."""
    for image in doctree.findall(nodes.image):
        alt = image.get("alt", "").strip()
        if not alt or alt == image.get("uri"):
            logger.warning("image %s has no alt text", image.get("uri"), location=place(image))


def place(node: nodes.Node) -> nodes.Node:
    """The nearest node around this one that knows its line."""
    while not node.line and node.parent is not None:
        node = node.parent
    return node


def compare_catalog(app, env):
    """`env-check-consistency`: ready chapters have a page, and only they."""
    path = Path(catalog.__file__).with_suffix(".yml")
    shown = {doc for doc in env.found_docs if doc.startswith("notebooks/")}
    for chapter in catalog.chapters():
        doc = f"notebooks/{chapter.part}/{chapter.slug}"
        where = line_of(path, rf"- slug: {chapter.slug}$")
        if chapter.status == "ready" and doc not in shown:
            logger.warning("%s is ready but not in _toc.yml", chapter.slug, location=where)
        if chapter.status == "ready" and not 0 < len(chapter.about) <= 160:
            logger.warning(
                "%s needs `about`, one sentence of at most 160 characters",
                chapter.slug,
                location=where,
            )
        if chapter.status == "ready":
            shown.discard(doc)
    for doc in sorted(shown):
        where = line_of(catalog.ROOT / "_toc.yml", rf"- file: {doc}$")
        logger.warning("%s is no ready chapter of course/catalog.yml", doc, location=where)


def line_of(path: Path, pattern: str) -> str:
    """`file:line` of the first line that ends in `pattern`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((n for n, line in enumerate(lines, 1) if re.search(pattern, line)), 1)
    return f"{path}:{number}"


class CellNames(standard.Filter):
    """Say `x.ipynb, cell 12, line 4` where myst-nb says `x.ipynb:120004`."""

    def filter(self, record: standard.LogRecord) -> bool:
        where = getattr(record, "location", None)
        if isinstance(where, str):
            record.location = CELL.sub(cell_and_line, where)
        return True


def cell_and_line(place: re.Match) -> str:
    cell, line = divmod(int(place[1]), _LINES)
    return f".ipynb, cell {cell}, line {line}" if cell else place[0]


def setup(app):
    for handler in standard.getLogger("sphinx").handlers:
        handler.addFilter(CellNames())
    app.connect("doctree-read", describe_images)
    app.connect("env-check-consistency", compare_catalog)
