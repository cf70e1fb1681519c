"""Styles, scripts and fonts: all of them served by the site itself."""

import hashlib
import re
import shutil
from pathlib import Path

from course.book import npm_packages
from course.catalog import ROOT

STATIC = ROOT / "book" / "site" / "static"
FONTS = (
    "source-serif-4/files/source-serif-4-latin-wght-normal.woff2",
    "source-serif-4/files/source-serif-4-latin-wght-italic.woff2",
    "source-sans-3/files/source-sans-3-latin-wght-normal.woff2",
    "source-code-pro/files/source-code-pro-latin-wght-normal.woff2",
)


def collect(app, config):
    """Put the KaTeX style and the fonts into a folder that Sphinx copies to `_static`."""
    modules = npm_packages()
    staged = Path(app.doctreedir) / "assets"
    shutil.rmtree(staged, ignore_errors=True)
    (staged / "katex" / "fonts").mkdir(parents=True)
    katex = modules / "katex" / "dist"
    style = (katex / "katex.min.css").read_text(encoding="utf-8")
    style = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\(\"\w+\"\)", "", style)  # woff2 suffices
    (staged / "katex" / "katex.min.css").write_text(style, encoding="utf-8")
    for font in (katex / "fonts").glob("*.woff2"):
        shutil.copy(font, staged / "katex" / "fonts")
    (staged / "fonts").mkdir()
    for font in FONTS:
        shutil.copy(modules / "@fontsource-variable" / font, staged / "fonts")
    config.html_static_path = [str(STATIC), str(staged)]
    # Sphinx copies static files only when it writes a page: let a changed style write them all
    files = sorted(path for path in STATIC.rglob("*") if path.is_file())
    config.course_assets = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def setup(app):
    app.add_config_value("course_assets", "", "html")
    app.connect("config-inited", collect, priority=2)
    app.add_css_file("katex/katex.min.css")
    app.add_css_file("course.css", priority=900)
    app.add_js_file("course.js", loading_method="defer")
