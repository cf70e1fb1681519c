"""One stylesheet and one script out of the many that the theme and its helpers bring.

Styles lose comments and white space, their references to files are made to fit the new place, and
of the icon font only the glyphs stay that something names; scripts stay as they are.
"""

import base64
import io
import logging
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from rcssmin import cssmin

CHARSET = re.compile(r'^@charset "[^"]*";', re.IGNORECASE)
IMPORT = re.compile(r'@import\s+"([^"]+)";?')
URL = re.compile(r"url\(\s*([\"']?)(?!data:|#)([^\"')]+)\1\s*\)")
ICON = re.compile(r"((?:\.fa-[a-z0-9-]+:+before,?)+)(\{content:\"\\[0-9a-f]+\"\})")
FACE = re.compile(r"@font-face\{[^}]*?url\(([^)?#]*/fa-[\w-]+)\.woff2[^}]*\}")
SOURCE = re.compile(r"src:[^;}]*")
PRIVATE = re.compile(r"\\([ef][0-9a-f]{3})(?![0-9a-f])|([\ue000-\uf8ff])")


def style(files: Iterable[tuple[Path, str]]) -> str:
    """One stylesheet of several, in their order.

    Args:
        files: for each the file and the folder that its references start from, as seen from the
            folder of the result.
    """
    css = "\n".join(rules(*file) for file in files)
    return f'@charset "UTF-8";{cssmin(css, keep_bang_comments=True)}\n'  # `/*!` holds a licence


def rules(path: Path, folder: str) -> str:
    """A stylesheet with what it imports in place and its references as seen from elsewhere."""
    css = path.read_text(encoding="utf-8").lstrip("\ufeff")
    css = CHARSET.sub("", css)
    css = URL.sub(lambda m: f"url({moved(m[2], folder)})", css)
    return IMPORT.sub(
        lambda m: rules(path.parent / m[1], moved(posixpath.dirname(m[1]), folder)), css
    )


def moved(reference: str, folder: str) -> str:
    """A relative reference of a stylesheet in `folder`, for one in the folder above."""
    return posixpath.normpath(posixpath.join(folder, reference))


def few_icons(css: str, folder: Path, named: set[str]) -> str:
    """A stylesheet that knows only some of Font Awesome's icons and has their glyphs inside.

    Args:
        folder: what the references of the stylesheet start from.
        named: the classes (`fa-moon`) of the icons to keep, among others.
    """

    def keep(rule: re.Match) -> str:
        selectors = [s for s in rule[1].split(",") if s.split(":")[0].strip(".") in named]
        return ",".join(selectors) + rule[2] if selectors else ""

    css = ICON.sub(keep, css)
    points = {int(m[1], 16) if m[1] else ord(m[2]) for m in PRIVATE.finditer(css)}

    def reduce(face: re.Match) -> str:
        font = base64.b64encode(glyphs(folder / f"{face[1]}.ttf", points)).decode()
        return SOURCE.sub(f'src:url(data:font/woff;base64,{font}) format("woff")', face[0])

    return FACE.sub(reduce, css)


def glyphs(font: Path, points: set[int]) -> bytes:
    """A font (WOFF) with the glyphs of `points` only, as far as it has them."""
    from fontTools import subset

    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it minds KaTeX's dates
    options = subset.Options(flavor="woff", layout_features=[], hinting=False, name_IDs=[])
    loaded = subset.load_font(font, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=points)
    subsetter.subset(loaded)
    result = io.BytesIO()
    subset.save_font(loaded, result, options)
    return result.getvalue()


def script(files: Iterable[Path]) -> str:
    """One script of several, in their order."""
    texts = (path.read_text(encoding="utf-8") for path in files)
    whole = (re.sub(r"(?m)^//# sourceMappingURL=.*$", "", text).strip() for text in texts)
    return "".join(f"{text};\n" for text in whole)
