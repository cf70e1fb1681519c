"""A notebook's figures as part of its page: inline SVG that takes the colours of the reader's mode.

A figure in the notebook is what matplotlib wrote, with the palette of `course.plots` on white. On
the page each colour of that palette becomes a CSS variable with the original as fallback, so that
a feed reader or a browser without the site's style shows the figure as Jupyter does. Any other
colour stays: those of a heat map, and the white of text, which is taken to lie on one.
"""

import re
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path

from docutils import nodes

from course import plots

COLOURS = {
    plots.INK: "ink",
    plots.BLUE: "blue",
    plots.ORANGE: "orange",
    plots.GREEN: "green",
    plots.PINK: "pink",
    plots.GREY: "grey",
    plots.GRID: "grid",
    "#ffffff": "paper",
}
HREF = "{http://www.w3.org/1999/xlink}href"
DROPPED = ("metadata", "style")
LENGTHS = ("x", "y", "width", "height")
REFERENCE = re.compile(r"(^#|url\(#)([\w-]+)")  # of `href`, and of any attribute
TOKEN = re.compile(r"[A-Za-z]|-?[\d.]+(?:e-?\d+)?")
TRANSLATE = re.compile(r"(?<=translate\()[^)]*")
ARGUMENTS = {"M": 2, "L": 2, "Q": 4, "C": 6}
PIXELS = 4 / 3  # in a point


class drawing(nodes.Element):
    """A figure where the page will have an SVG."""


def shortest(hundredths: int) -> str:
    """`150` -> `1.5`."""
    text = f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def short(number: str) -> str:
    """A length rounded to two decimals."""
    return shortest(round(float(number) * 100))


def short_path(data: str) -> str:
    """Path data with points rounded to two decimals, each relative to the rounded one before it.

    Errors therefore do not add up: every point is within 0.005 of where it was.
    Raises ValueError at a command that matplotlib does not write.
    """
    tokens = TOKEN.findall(data)
    parts: list[str] = []
    here, start, last, at = (0, 0), (0, 0), "", 0
    while at < len(tokens):
        command = tokens[at]
        at += 1
        if command in "zZ":
            parts.append("z")
            here, last = start, "z"
            continue
        if command not in ARGUMENTS:
            raise ValueError(f"path command {command!r} is none of {' '.join(ARGUMENTS)} z")
        count = ARGUMENTS[command]
        points = [round(float(token) * 100) for token in tokens[at : at + count]]
        at += count
        body = "".join(
            step if step[0] == "-" or not number else " " + step
            for number, step in enumerate(shortest(p - here[i % 2]) for i, p in enumerate(points))
        )
        here = (points[-2], points[-1])
        start = here if command == "M" else start
        implied = {"": "", "m": "l"}.get(last, last)  # the command of numbers without one
        command = command.lower()
        separator = "" if body[0] == "-" else " "
        parts.append((separator if command == implied else command) + body)
        last = command
    return "".join(parts)


def themed(style: str, tag: str) -> str:
    """A `style` attribute with the palette's colours as variables."""
    declarations = []
    for declaration in filter(None, (part.strip() for part in style.split(";"))):
        key, value = (part.strip() for part in declaration.split(":", 1))
        name = COLOURS.get(value)
        if name and not (name == "paper" and tag == "g"):  # a group with a colour is a text
            value = f"var(--fig-{name},{value})"
        declarations.append(f"{key}:{value}")
    return ";".join(declarations)


def inline(source: str, prefix: str, label: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        prefix: begins every id, so that no two figures of a page share one.
        label: what a screen reader says.

    Raises ValueError if it is not such a file.
    """
    try:
        root = ET.fromstring(source)
    except ET.ParseError as problem:
        raise ValueError(f"not an SVG file: {problem}") from None
    targets = {
        found[2]
        for element in root.iter()
        for key, value in element.attrib.items()
        for found in REFERENCE.finditer(value)
        if key == HREF or found[1] != "#"
    }
    names = {old: f"{prefix}-{number}" for number, old in enumerate(sorted(targets), start=1)}
    size = root.get("viewBox", "").split()
    if len(size) != 4:
        raise ValueError("an SVG without a viewBox")
    width, height = (round(float(points) * PIXELS) for points in size[2:])
    # matplotlib's own `* {stroke-linejoin: round}` would reach the whole page
    opening = (
        f'<svg class="drawing" role="img" aria-label="{escape(label)}" '
        f'viewBox="{" ".join(map(short, size))}" width="{width}" height="{height}" '
        'stroke-linejoin="round">'
    )
    return opening + "".join(markup(child, names) for child in root) + "</svg>"


def markup(element: ET.Element, names: dict[str, str]) -> str:
    """One element and what is in it; groups and ids that nothing needs are left out."""
    tag = element.tag.rpartition("}")[2]
    if tag in DROPPED:
        return ""
    inside = "".join(markup(child, names) for child in element)
    given = "".join(
        f' {name}="{escape(value)}"'
        for key, old in element.attrib.items()
        if (value := attribute(key, old, tag, names)) and (name := key.rpartition("}")[2])
    )
    if tag in ("g", "defs") and not inside:
        return ""
    if tag == "g" and not given:
        return inside
    return f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>"


def attribute(key: str, value: str, tag: str, names: dict[str, str]) -> str:
    """The new value of an attribute; an empty one means that it goes."""
    if key == "id":
        return names.get(value, "")
    if key == "d":
        return short_path(value)
    if key in LENGTHS:
        return short(value)
    if key == "transform":
        return TRANSLATE.sub(lambda m: " ".join(map(short, m[0].split())), value)
    value = REFERENCE.sub(lambda m: m[1] + names.get(m[2], m[2]), value)
    return themed(value, tag) if key == "style" else value


def embed(app, doctree, docname):
    """`doctree-resolved`: mark the figures of a page, which then need no file of their own."""
    images = [image for image in doctree.findall(nodes.image) if drawn(image["uri"])]
    for number, image in enumerate(images, start=1):
        path = Path(app.srcdir, image["uri"])
        image.replace_self(drawing(path=path, number=number, label=image.get("alt", "")))


def drawn(uri: str) -> bool:
    """Whether an image is the output of a notebook's cell."""
    return uri.endswith(".svg") and "jupyter_execute/" in uri


def visit(self, figure):
    source = figure["path"].read_text(encoding="utf-8")
    self.body.append(inline(source, f"f{figure['number']}", figure["label"]))
    raise nodes.SkipNode


def setup(app):
    app.add_node(drawing, html=(visit, None))
    app.connect("doctree-resolved", embed)
