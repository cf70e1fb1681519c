"""Numbers for figures, page by page, and anchors for the glossary's terms."""

import re

from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)

GLOSSARY = "book/glossary"


def term_id(term: str) -> str:
    """`KV cache` -> `term-kv-cache`: what a chapter links to as `[KV cache](#term-kv-cache)`."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def number_figures(app, doctree):
    """Begin each caption with its number. Numbers run within a page, so they stay put."""
    captions = [figure.next_node(nodes.caption) for figure in doctree.findall(nodes.figure)]
    for number, caption in enumerate(filter(None, captions), start=1):
        caption.insert(0, nodes.inline("", f"Figure {number}. ", classes=["caption-lead"]))


def name_terms(app, doctree):
    """Give every term of the glossary an id that other pages can link to."""
    if app.env.docname != GLOSSARY:
        return
    domain = app.env.get_domain("std")
    seen = set()
    for term in doctree.findall(nodes.term):
        anchor = term_id(term.astext())
        if anchor in seen:
            logger.warning("%r is defined twice", term.astext(), location=term)
        seen.add(anchor)
        term["ids"].append(anchor)
        domain.labels[anchor] = (GLOSSARY, anchor, term.astext())
        domain.anonlabels[anchor] = (GLOSSARY, anchor)
        app.env.get_domain("course").note("term", term.astext(), GLOSSARY, anchor)


def setup(app):
    app.connect("doctree-read", number_figures)
    app.connect("doctree-read", name_terms)
