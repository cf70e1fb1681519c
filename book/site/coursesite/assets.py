"""Styles, scripts and fonts: all of them served by the site itself, in as few files as may be."""

import hashlib
import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from html import unescape
from importlib import import_module
from pathlib import Path

from myst_nb.sphinx_ext import add_global_html_resources

from course.book import npm_packages
from course.catalog import ROOT
from coursesite import bundle

STATIC = ROOT / "book" / "site" / "static"
CALCULATORS = ROOT / "book" / "site" / "calculators"
KATEX = "katex/dist"
FONTS = (
    "source-serif-4/files/source-serif-4-latin-wght-normal.woff2",
    "source-serif-4/files/source-serif-4-latin-wght-italic.woff2",
    "source-sans-3/files/source-sans-3-latin-wght-normal.woff2",
    "source-code-pro/files/source-code-pro-latin-wght-normal.woff2",
)
# files below `_static`, in the order in which pages would load them
STYLES = (
    "styles/theme.css",
    "styles/pydata-sphinx-theme.css",
    "styles/sphinx-book-theme.css",
    "copybutton.css",
    "mystnb.*.css",
    "katex/katex.min.css",
    "course.css",
    "calculators.css",
)
SCRIPTS = (
    "documentation_options.js",
    "doctools.js",
    "sphinx_highlight.js",
    "clipboard.min.js",
    "copybutton.js",
    "scripts/sphinx-book-theme.js",
    "scripts/bootstrap.js",
    "scripts/pydata-sphinx-theme.js",
    "course.js",
)
BUNDLES = ("course.css", "course.js")
NEEDLESS = ("pygments.css", "scripts", "styles", "vendor", "locales", "*-macros.html")
THEMES = ("pydata_sphinx_theme", "sphinx_book_theme")
ICON = re.compile(r"fa-[a-z0-9-]+")


def collect(app, config):
    """Put styles and fonts from elsewhere into a folder that Sphinx copies to `_static`."""
    modules = npm_packages()
    staged = Path(app.doctreedir) / "assets"
    shutil.rmtree(staged, ignore_errors=True)
    (staged / "katex").mkdir(parents=True)
    style = (modules / KATEX / "katex.min.css").read_text(encoding="utf-8")
    style = re.sub(r"src:[^;}]*?(url\([^)]*\.woff\) format\(\"woff\"\))[^;}]*", r"src:\1", style)
    (staged / "katex" / "katex.min.css").write_text(style, encoding="utf-8")
    (staged / "fonts").mkdir()
    for font in FONTS:
        shutil.copy(modules / "@fontsource-variable" / font, staged / "fonts")
    styles = [path.read_text(encoding="utf-8") for path in sorted(CALCULATORS.rglob("*.css"))]
    (staged / "calculators.css").write_text("\n".join(styles), encoding="utf-8")
    config.html_static_path = [str(STATIC), str(staged)]
    # Sphinx copies static files only when it writes a page: let a changed style write them all
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in sorted([*files, staged / "calculators.css"]))
    config.course_assets = hashlib.sha256(content).hexdigest()


def write_bundles(app, static: Path) -> None:
    """Replace `course.css` and `course.js` by all styles and all scripts."""
    add_global_html_resources(app, None)  # it comes at the end of the build, too late for a bundle
    styles = [(path, name.rpartition("/")[0]) for name in STYLES for path in static.glob(name)]
    scripts = bundle.script(static / name for name in SCRIPTS)
    named = {"fa-github", *ICON.findall(scripts)}  # the theme puts this name together
    for theme in map(import_module, THEMES):
        for path in Path(theme.__file__).parent.rglob("*"):
            if path.suffix in (".html", ".py"):
                named.update(ICON.findall(path.read_text(encoding="utf-8")))
    style = bundle.few_icons(bundle.style(styles), static, named)
    (static / "course.css").write_text(style, encoding="utf-8")
    (static / "course.js").write_text(scripts, encoding="utf-8")


def write_maths_fonts(formulas: Iterable[str], folder: Path) -> None:
    """KaTeX's fonts with the glyphs that the formulas of this book need, and those of ASCII."""
    folder.mkdir(exist_ok=True)
    texts = (unescape(re.sub(r"<[^>]*>", "", formula)) for formula in formulas)
    points = set(range(0x20, 0x7F)).union(*(map(ord, text) for text in texts))
    for font in (npm_packages() / KATEX / "fonts").glob("*.ttf"):
        (folder / f"{font.stem}.woff").write_bytes(bundle.glyphs(font, points))


def needless(file) -> bool:
    """Whether a page need not load a file: a bundle has it, or nothing reads what it sets."""
    if not file.filename:
        return file.attributes["body"].strip().startswith("DOCUMENTATION_OPTIONS.")
    name = str(file.filename).removeprefix("_static/")
    patterns = (*STYLES, *SCRIPTS, *NEEDLESS)
    return name not in BUNDLES and any(fnmatch(name, pattern) for pattern in patterns)


def link(app, pagename, templatename, context, doctree):
    """`html-page-context`, when all others have added their files: the bundles stand for them."""
    if not app.course_bundled:  # the first page: Sphinx has just copied the parts
        static = Path(app.outdir) / "_static"
        write_bundles(app, static)
        done = app.course_formulas.done.values()
        write_maths_fonts((one.get("html", "") for one in done), static / "katex" / "fonts")
        app.course_bundled = True
    for kind in ("css_files", "script_files"):
        context[kind] = [file for file in context[kind] if not needless(file)]


def clear(app, exception):
    """`build-finished`: drop what the bundles made superfluous, most of it source maps."""
    static = Path(app.outdir) / "_static"
    if exception or app.builder.format != "html":
        return
    for name in (*STYLES, *SCRIPTS, *NEEDLESS):
        for path in static.glob(name):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in BUNDLES:
                path.unlink()


def setup(app):
    app.course_bundled = False
    app.add_config_value("course_assets", "", "html")
    app.connect("config-inited", collect, priority=2)
    app.connect("html-page-context", link, priority=960)
    app.connect("build-finished", clear, priority=900)
    app.add_css_file("course.css", priority=900)
    app.add_js_file("course.js", loading_method="defer")
