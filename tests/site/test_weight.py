"""What a page weighs and how it looks: one stylesheet, figures in both modes, no jumps."""

import base64
import io
import json
import re
from html import unescape
from pathlib import Path

import pytest
from browsing import Visit
from bs4 import BeautifulSoup
from coursesite import bundle, figures
from fontTools.ttLib import TTFont

from course import catalog
from course.bench.site import loaded, sent, slowed
from course.catalog import ROOT, Chapter

READY = [chapter for chapter in catalog.chapters() if chapter.status == "ready"]
MODES = ("light", "dark")
SEARCH = {"searchtools.js", "language_data.js", "searchindex.js"}
Pages = dict[str, BeautifulSoup]

each_chapter = pytest.mark.parametrize("chapter", READY, ids=lambda chapter: chapter.slug)


def page_of(chapter: Chapter) -> str:
    return f"notebooks/{chapter.part}/{chapter.slug}.html"


@pytest.fixture(scope="module")
def style(site: Path) -> str:
    return (site / "_static" / "course.css").read_text()


# What travels


@each_chapter
def test_a_chapter_is_light(browser, site: Path, address: str, chapter: Chapter) -> None:
    files = loaded(browser, address, page_of(chapter))
    assert page_of(chapter) in files
    assert len(files) <= 35
    assert sum(sent(site / file) for file in files) <= 450_000


def test_pages_load_the_bundles_and_little_else(pages: Pages) -> None:
    for page in set(pages) - {"index.html"}:
        styles = [tag["href"] for tag in pages[page].select("link[rel=stylesheet]")]
        assert [re.sub(r".*/|\?.*", "", style) for style in styles] == ["course.css"], page
        scripts = [tag["src"] for tag in pages[page].select("script[src]")]
        assert all(tag.has_attr("defer") for tag in pages[page].select("script[src]")), page
        names = {re.sub(r".*_static/|.*/|\?.*", "", script) for script in scripts}
        own = {name for name in names if name.startswith(("_shared", "calculators"))}
        assert names - own - (
            {"kv_cache.js", "quantization.js", "serving.js"} if own else set()
        ) == ({"course.js"} | (SEARCH if page == "search.html" else set())), page


def test_nothing_is_published_twice(site: Path) -> None:
    left = [path.name for path in (site / "_static").rglob("*") if path.suffix in (".map", ".ttf")]
    assert not left
    assert not list((site / "_static").glob("**/fontawesome*"))
    assert not list((site / "_images").glob("*.svg"))


def points(font: bytes) -> set[int]:
    return set(TTFont(io.BytesIO(font)).getBestCmap())


def test_every_icon_has_its_rule_and_its_glyph(pages: Pages, style: str) -> None:
    fonts = re.findall(r"font/woff;base64,([\w+/=]+)", style)
    known = set().union(*(points(base64.b64decode(font)) for font in fonts))
    kinds = {"fa-solid", "fa-regular", "fa-brands", "fa-lg", "fa-fw"}
    named = {
        name
        for document in pages.values()
        for tag in document.select("i[class]")
        for name in tag["class"]
        if name.startswith("fa-")
    }
    assert len(named) > 8
    for name in named - kinds:
        rule = re.search(rf'\.{name}:+before[^{{}}]*\{{content:"\\([0-9a-f]+)"', style)
        assert rule and int(rule[1], 16) in known, name
    assert len(known) < 100


def test_every_sign_of_a_formula_has_its_glyph(site: Path, pages: Pages) -> None:
    fonts = (site / "_static" / "katex" / "fonts").glob("*.woff")
    known = set().union(*(points(font.read_bytes()) for font in fonts))
    spaces = {0x200B, 0x2061, 0x2063, 0xA0}
    signs = {
        sign
        for document in pages.values()
        for formula in document.select(".katex-html")
        for sign in formula.get_text()
    }
    assert len(signs) > 50
    assert not [sign for sign in signs if ord(sign) not in known | spaces]


# Figures


@each_chapter
def test_figures_are_part_of_the_page(pages: Pages, chapter: Chapter) -> None:
    cells = json.loads(chapter.ipynb.read_text())["cells"]
    drawn = [
        cell["metadata"]["mystnb"]["image"]["alt"]
        for cell in cells
        if any("image/svg+xml" in output.get("data", {}) for output in cell.get("outputs", []))
    ]
    document = pages[page_of(chapter)]
    found = document.select("article figure svg.drawing")
    assert [svg["aria-label"] for svg in found] == drawn
    assert not document.select(".cell_output img")
    for svg in found:
        assert svg["role"] == "img" and int(svg["width"]) > 200 and int(svg["height"]) > 100
        own = {tag["id"] for tag in svg.find_all(id=True)}
        text = str(svg)
        meant = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
        assert {a or b for a, b in meant} == own
        assert "metadata" not in text and "<style" not in text and "xlink" not in text


@each_chapter
def test_figures_name_the_colours_of_the_palette(pages: Pages, chapter: Chapter) -> None:
    for svg in pages[page_of(chapter)].select("svg.drawing"):
        text = re.sub(r"var\(--fig-\w+,#[0-9a-f]{6}\)", "", str(svg))
        left = set(re.findall(r"#[0-9a-f]{6}", text)) & set(figures.COLOURS)
        assert left <= {"#ffffff"}
        white = [
            tag
            for tag in svg.find_all(style=True)
            if "#ffffff" in re.sub(r"var\([^)]*\)", "", tag["style"])
        ]
        assert all(tag.name == "g" for tag in white)  # texts
        if white:  # they lie on a heat map, whose colours do not change with the mode
            assert len(set(re.findall(r"fill:(#[0-9a-f]{6})", text))) > 10


def colour(style: str, name: str, mode: str) -> str:
    """The value of a variable of course.css in one mode."""
    value = re.findall(rf"--{name}:\s*([^;}}]+)", style)[-1]
    named = re.fullmatch(r"var\(--([\w-]+)\)", value)
    if named:
        return colour(style, named[1], mode)
    both = re.fullmatch(r"light-dark\((#[0-9a-f]{6}),\s*(#[0-9a-f]{6})\)", value)
    assert both, value
    return both[1 + MODES.index(mode)]


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", MODES)
def test_lines_and_texts_of_figures_stand_out(style: str, mode: str) -> None:
    paper = colour(style, "paper", mode)
    assert colour(style, "fig-paper", mode) == paper
    for name in set(figures.COLOURS.values()) - {"paper", "grid"}:
        # 3 would do for a line, but any of them may colour a word
        assert contrast(colour(style, f"fig-{name}", mode), paper) >= 4.5, name
    assert contrast(colour(style, "fig-grid", mode), paper) < 2  # it stays behind
    for name in ("ink", "quiet", "accent", "second", "string"):
        for ground in ("paper", "sheet", "accent-sheet", "second-sheet"):
            pair = colour(style, name, mode), colour(style, ground, mode)
            assert contrast(*pair) >= 4.5, (name, ground)


def test_a_figure_keeps_its_shape_and_loses_its_ballast() -> None:
    source = (
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300.4 150" '
        'xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>x</metadata><defs><style>*{}</style>'
        '</defs><g id="a"><g id="b"><path id="c" d="M 1 2 L 3.14159 4" style="fill: #0b6aa8"/></g>'
        '<use xlink:href="#c" x="1.000001"/><g style="fill: #ffffff"/>'
        '<path d="M 0 0" style="fill: url(#h)"/><pattern id="h" fill="#123456"/>'
        '<g style="fill: #ffffff"><use xlink:href="#c"/></g></g></svg>'
    )
    assert figures.inline(source, "f2", 'a "quoted" < name') == (
        '<svg class="drawing" role="img" aria-label="a &quot;quoted&quot; &lt; name" '
        'viewBox="0 0 300.4 150" width="401" height="200" stroke-linejoin="round">'
        '<path id="f2-1" d="m1 2 2.14 2" style="fill:var(--fig-blue,#0b6aa8)"/>'
        '<use href="#f2-1" x="1"/><path d="m0 0" style="fill:url(#f2-2)"/>'
        '<pattern id="f2-2" fill="#123456"/>'
        '<g style="fill:#ffffff"><use href="#f2-1"/></g></svg>'
    )
    with pytest.raises(ValueError, match="not an SVG"):
        figures.inline("<p", "f1", "")


def absolute(data: str) -> list[tuple[float, float]]:
    """The points of path data, relative or not."""
    here, start, points = (0.0, 0.0), (0.0, 0.0), []
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", data):
        if command in "zZ":
            here = start
            continue
        values = [float(n) for n in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", numbers)]
        size = {"m": 2, "l": 2, "q": 4, "c": 6}[command.lower()]
        for at in range(0, len(values), size):
            base = here if command.islower() else (0.0, 0.0)
            for i in range(at, at + size, 2):
                points.append((base[0] + values[i], base[1] + values[i + 1]))
            here = points[-1]
            start = here if command in "mM" and at == 0 else start
    return points


@pytest.mark.parametrize(
    "data",
    [
        "M 0 0 L 0.004 0.004 L 0.008 0.008 L 0.012 0.012",
        "M 10.126 -3.5 L 10.124 -3.5 Q 1 2 3 4 Q 5 6 7 8 z M 1 1 C 1 2 3 4 5.555 6 z",
        "M -0.001 0.5 L 100000.128 1e-05 L 3 3 z",
    ],
)
def test_a_short_path_stays_within_half_a_hundredth(data: str) -> None:
    short = figures.short_path(data)
    assert len(short) < len(data)
    for old, new in zip(absolute(data.replace("1e-05", "0.00001")), absolute(short), strict=True):
        assert new == pytest.approx(old, abs=0.0051)


def test_an_unknown_path_command_is_refused() -> None:
    with pytest.raises(ValueError, match="'A'"):
        figures.short_path("M 0 0 A 1 2 3 4 5 6 7")


# The bundle


def test_a_stylesheet_shrinks_and_means_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.css"
    path.write_text(
        '/* gone */ a  >  b , c { color : red ; content : "/* stays ;  */" ; }\n'
        "/*! a licence;  kept */\n@media (a) and (b) { p { margin: calc( 1px + 2px ) } }"
    )
    assert bundle.style([(path, "")]) == (
        '@charset "UTF-8";a>b,c{color:red;content:"/* stays ;  */"}/*! a licence;  kept */'
        "@media (a) and (b){p{margin:calc(1px + 2px)}}\n"
    )


def test_references_follow_a_stylesheet(tmp_path: Path) -> None:
    (tmp_path / "styles").mkdir()
    (tmp_path / "base.css").write_text("i { background: url(minus.png) }")
    (tmp_path / "styles" / "a.css").write_text(
        '@charset "UTF-8";@import "../base.css";\n'
        'b { c: url("../d/e.woff2"), url(data:x), url(#f) }'
    )
    whole = bundle.style([(tmp_path / "styles" / "a.css", "styles")])
    assert whole == (
        '@charset "UTF-8";i{background:url(minus.png)}b{c:url(d/e.woff2),url(data:x),url(#f)}\n'
    )


# In the browser


def test_nothing_jumps_on_a_slow_machine(browser, address: str) -> None:
    for page in ("book/index.html", page_of(READY[-1])):
        _, shift = slowed(browser, address + page)
        assert shift < 0.05, page


@pytest.mark.parametrize("mode", MODES)
def test_figures_have_no_card(browser, address: str, style: str, mode: str) -> None:
    visit = Visit(browser, address, color_scheme=mode, viewport={"width": 1280, "height": 900})
    visit.open(page_of(READY[0]))
    ground = visit.tab.evaluate(
        "getComputedStyle(document.querySelector('svg.drawing > path')).fill"
    )
    paper = colour(style, "paper", mode)
    assert ground == "rgb({}, {}, {})".format(*(int(paper[i : i + 2], 16) for i in (1, 3, 5)))
    assert visit.tab.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    visit.context.close()


def test_code_of_79_columns_and_lines_of_75_letters(browser, address: str) -> None:
    visit = Visit(browser, address, viewport={"width": 1280, "height": 900})
    for chapter in READY:
        visit.open(page_of(chapter))
        scrolling = visit.tab.evaluate(
            """[...document.querySelectorAll(".cell_input pre")].filter(
                 pre => pre.scrollWidth > pre.clientWidth + 1).map(pre => pre.innerText)"""
        )
        assert not [code for code in scrolling if max(map(len, code.split("\n"))) <= 79]
        letters = visit.tab.evaluate(
            """[...document.querySelectorAll(".bd-article section > p")].map(p => {
                 const high = parseFloat(getComputedStyle(p).lineHeight);
                 const lines = Math.round(p.clientHeight / high);
                 return lines > 3 ? p.innerText.length / lines : 0;
               }).filter(Boolean)"""
        )
        assert len(letters) > 5
        assert 55 < sum(letters) / len(letters) <= 75
    visit.context.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_page_reads_without_scripts(browser, address: str, mode: str) -> None:
    visit = Visit(browser, address, java_script_enabled=False, color_scheme=mode)
    visit.tab.goto(address + page_of(READY[0]))
    paper, ink = visit.tab.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    channels = [list(map(int, re.findall(r"\d+", value)))[:3] for value in (paper, ink)]
    assert contrast(*("#" + "".join(f"{c:02x}" for c in rgb) for rgb in channels)) > 10
    assert (sum(channels[0]) > 380) == (mode == "light")
    for figure in visit.tab.locator("svg.drawing").all():
        assert figure.bounding_box()["width"] > 300
    fold = visit.tab.locator("details.solution").first
    assert not fold.locator("pre").is_visible()
    fold.locator("summary").click()
    assert fold.locator("pre").is_visible()
    assert visit.problems == []
    visit.context.close()


def test_paper_is_light(browser, address: str) -> None:
    visit = Visit(browser, address, color_scheme="dark")
    visit.open(page_of(READY[0]))
    visit.tab.emulate_media(media="print", color_scheme="dark")
    ink = visit.tab.evaluate(
        "getComputedStyle(document.querySelector('section > p:not([class])')).color"
    )
    assert sum(map(int, re.findall(r"\d+", ink))) < 200
    visit.context.close()


def test_a_reader_may_choose_the_mode(browser, address: str) -> None:
    visit = Visit(browser, address, color_scheme="light", viewport={"width": 1280, "height": 900})
    visit.open(page_of(READY[0]))
    mode = "document.documentElement.dataset.theme"
    seen = {visit.tab.evaluate(mode)}
    for _ in range(2):
        visit.tab.locator(".theme-switch-button").first.click()
        seen.add(visit.tab.evaluate(mode))
    chosen = visit.tab.evaluate("document.documentElement.dataset.mode")
    assert seen == set(MODES) and chosen != "auto"
    visit.open("book/index.html")
    assert visit.tab.evaluate(mode) == chosen
    assert visit.problems == []
    visit.context.close()


@pytest.mark.parametrize("page", ["book/index.html", page_of(READY[0]), "search.html?q=prefill"])
def test_a_page_from_disk_reports_no_error(browser, site: Path, page: str) -> None:
    visit = Visit(browser, site.as_uri() + "/")
    visit.open(page)
    if "search" in page:
        visit.tab.locator("#search-results li a").first.wait_for(timeout=10_000)
    assert visit.problems == []
    assert visit.tab.evaluate("document.fonts.check('16px \"Source Serif\"')")
    visit.context.close()


def test_the_contents_show_where_one_is(pages: Pages) -> None:
    for chapter in READY:
        nav = pages[page_of(chapter)].select_one("nav.bd-links")
        (here,) = nav.select("a.current")
        assert here["href"] == "#"
        part = here.find_parent("details")
        assert part.has_attr("open")
        assert part.find_previous_sibling("a")["href"].endswith(f"parts/{chapter.part}.html")
        assert unescape(part.summary["aria-label"]).startswith("Chapters of ")
    titles = [a.get_text() for a in pages["book/index.html"].select("nav.bd-links a")]
    assert all(chapter.title in titles for chapter in READY)
    assert (ROOT / "_toc.yml").read_text().count("file:") == len(titles)
