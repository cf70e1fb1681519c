"""What search engines, feed readers and people who find a fault need of each page."""

import datetime
import email.utils
import re
import textwrap
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path

from docutils import nodes

from course import catalog
from coursesite.chapters import chapter_of
from coursesite.origin import VERSION, report

CHANGELOG = "book/changelog"
FEED = "changelog.xml"
DESCRIPTION = 200  # characters that search engines show
ENTRY = re.compile(r"^## (?P<version>\S+), (?P<date>\d{4}-\d\d-\d\d): (?P<title>.+)$", re.MULTILINE)
OPEN_GRAPH = re.compile(r'(<meta (?:property="og:|name=")description" content=")[^"]*(")')
OWN = re.compile(r'<meta content="([^"]*)" name="description" />')  # from the page's front matter
CARD = re.compile(r"(_static/cards/)course\.png")
LOST = """<h1>There is no such page</h1>
<p>It may have moved. <a href="{0}book/index.html">The front page</a> shows all chapters, and
<a href="{0}search.html">the search</a> finds every page by its words.</p>"""


def card(pagename: str) -> str:
    """The social card of a page: its part's, or the course's."""
    part = re.match(r"(?:notebooks|book/parts)/(\w+)", pagename)
    return part[1] if part and part[1] in catalog.parts() else "course"


def first_words(doctree) -> str:
    """The first paragraph of a page, cut at a word where it is long; empty for a page without."""
    for first in doctree.findall(nodes.paragraph) if doctree else ():
        return escape(textwrap.shorten(first.astext(), DESCRIPTION, placeholder=" ..."))
    return ""


def describe(app, pagename, templatename, context, doctree):
    """`html-page-context`, after the Open Graph extension: description, card, feed, report link."""
    tags = context.get("metatags", "")
    tags = CARD.sub(rf"\g<1>{card(pagename)}.png", tags)
    chapter, own = chapter_of(pagename), OWN.search(tags)
    about = escape(chapter.about) if chapter else own[1] if own else first_words(doctree)
    if about:
        tags = OPEN_GRAPH.sub(lambda tag: f"{tag[1]}{about}{tag[2]}", tags)
    context["metatags"] = tags + (
        f'<link rel="alternate" type="application/rss+xml" title="What is new" '
        f'href="{context["pathto"](FEED, 1)}" />\n'
    )
    to, source = context["pathto"], catalog.repository()
    context["theme_extra_footer"] = (
        f"<p>The course authors, {app.config.copyright}. Code under MIT, text under CC BY 4.0.</p>"
        f'<p>Version {VERSION} · <a href="{to(CHANGELOG)}">What is new</a> · '
        f'<a href="{to(FEED, 1)}">Feed</a> · <a href="{source}">Source</a> · '
        f'<a href="{escape(report(pagename))}">Report a problem on this page</a></p>'
    )
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []):
            if button.get("label") == "source-issues-button":
                button["url"] = report(pagename)


def feed(text: str, site: str) -> bytes:
    """The changelog as RSS 2.0.

    Args:
        text: the page's Markdown; a version begins with `## VERSION, YYYY-MM-DD: title`.
        site: the address of the site.
    """
    rss = ET.Element("rss", version="2.0")
    channel = ET.SubElement(rss, "channel")
    page = f"{site}{CHANGELOG}.html"
    about = "New chapters and changes of the course."
    named = {"title": "Inference & Serving from Scratch", "link": page, "description": about}
    for name, value in named.items():
        ET.SubElement(channel, name).text = value
    parts = ENTRY.split(text)[1:]
    for number, day, title, body in zip(*[iter(parts)] * 4, strict=True):
        entry = ET.SubElement(channel, "item")
        noon = datetime.datetime.fromisoformat(f"{day}T12:00:00+00:00")
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*]", r"\1", " ".join(body.split()))
        told = {
            "title": f"{number}: {title}",
            "link": page,
            "guid": f"{page}?version={number}",
            "pubDate": email.utils.format_datetime(noon),
            "description": plain,
        }
        for name, value in told.items():
            ET.SubElement(entry, name).text = value
        entry.find("guid").set("isPermaLink", "false")
    return ET.tostring(rss, encoding="utf-8", xml_declaration=True)


def write(app, exception):
    """`build-finished`: the files beside the pages."""
    if exception or app.builder.format != "html":
        return
    out, site = Path(app.outdir), app.config.html_baseurl
    text = Path(app.srcdir, f"{CHANGELOG}.md").read_text(encoding="utf-8")
    (out / FEED).write_bytes(feed(text, site))
    (out / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {site}sitemap.xml\n")


def configure(app, config):
    """Before other extensions read the configuration; after `origin`."""
    config.ogp_image = f"{config.html_baseurl}_static/cards/course.png"
    config.notfound_context = {
        "title": "There is no such page",
        "body": LOST.format(config.notfound_urls_prefix),
    }


def setup(app):
    app.connect("config-inited", configure, priority=2)
    app.connect("html-page-context", describe, priority=940)
    app.connect("build-finished", write)
