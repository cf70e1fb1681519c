"""Draw the social cards anew: `python book/site/cards.py`, after the catalog's parts have changed.

A card is the course's mark in a form of its part, its name, and what it is about. It needs Chromium
and the built site's fonts; the pictures are committed, so nobody else needs either.
"""

import shutil
import sys
from html import escape
from pathlib import Path

from playwright.sync_api import sync_playwright

from course import catalog
from course.book import npm_packages

OUT = Path(__file__).parent / "static" / "cards"
SIZE = {"width": 1200, "height": 630}  # pixels, as social networks show it
TITLE = "Inference & Serving from Scratch"
ABOUT = "Guess a number, build the idea, have it checked, write the kernel."
# squares from top to bottom: # drawn, o lighter, x in the second colour
MARKS = {
    "course": ["#", "##", "###", "ooox"],  # causal attention, the last row being written
    "foundations": ["#", "##", "###", "ooox"],
    "cache": ["#  o", "# x ", "  # ", "#  #"],  # what is kept of a full cache
    "architecture": ["oooo", "#  x", "#  #", "####"],
    "distillation": ["####", "####", "  ", "  xo"],  # a large model above a small one
    "training": ["   x", "  ##", " ###", "####"],  # a reward that climbs
    "practice": ["#o#o", " x  ", "o#o#", "  x "],  # turns of a conversation
}
COLOURS = {"#": "#17606f", "o": "#2f8f9d", "x": "#d98324"}
PAGE = """<style>
@font-face {{ font-family: S; src: url({fonts}/source-sans-3/files/source-sans-3-latin-wght-normal.woff2); font-weight: 200 900; }}
@font-face {{ font-family: T; src: url({fonts}/source-serif-4/files/source-serif-4-latin-wght-normal.woff2); font-weight: 200 900; }}
body {{ margin: 0; width: 1200px; height: 630px; background: #fbfaf6; color: #23272b; display: flex; align-items: center; gap: 70px; padding: 0 90px; box-sizing: border-box; }}
svg {{ flex: none; width: 180px; height: 180px; }}
p {{ margin: 0; }} .over {{ font: 600 34px S; color: #17606f; margin-bottom: 14px; }}
h1 {{ font: 700 76px/1.1 S; margin: 0 0 26px; letter-spacing: -0.01em; }} .about {{ font: 400 34px/1.4 T; color: #575d63; }}
</style><svg viewBox="0 0 38 38">{squares}</svg><div><p class="over">{over}</p><h1>{title}</h1><p class="about">{about}</p></div>"""  # noqa: E501


def page(name: str) -> str:
    """The HTML of a card."""
    squares = "".join(
        f'<rect x="{10 * column}" y="{10 * row}" width="8" height="8" rx="1.4" '
        f'fill="{COLOURS[letter]}"/>'
        for row, letters in enumerate(MARKS[name])
        for column, letter in enumerate(letters)
        if letter != " "
    )
    over, title, about = "A course in 49 notebooks", TITLE, ABOUT
    if name in catalog.parts():
        title, _, told = catalog.parts()[name].partition(": ")
        over, about = TITLE, f"{told[0].upper()}{told[1:]}." if told else ABOUT
    return PAGE.format(
        fonts=(npm_packages() / "@fontsource-variable").as_uri(),
        squares=squares,
        over=escape(over),
        title=escape(title),
        about=escape(about),
    )


def main() -> int:
    """Draw every card. Exit status 2 without Chromium."""
    program = shutil.which("chromium")
    if program is None:
        print("cards: Chromium is missing: `apt-get install chromium`", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE)
        source = OUT / "card.html"
        for name in MARKS:
            source.write_text(page(name), encoding="utf-8")
            tab.goto(source.as_uri())  # a file may load the fonts, which are files
            tab.evaluate("document.fonts.ready")
            tab.screenshot(path=OUT / f"{name}.png")
        source.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
