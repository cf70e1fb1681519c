"""The contents beside every page, written from `_toc.yml`.

The theme resolves, renders and parses Sphinx's table of contents for each page, which takes a
tenth of a large build; the markup here is the same, with a name for each arrow that opens a part.
"""

from collections.abc import Callable
from html import escape

from sphinx.environment import BuildEnvironment

ARROW = '<span class="toctree-toggle" role="presentation"><i class="fa-solid fa-chevron-down"></i>'


def contents(env: BuildEnvironment, page: str, link: Callable[[str], str]) -> str:
    """The contents as HTML, with the branch of `page` open.

    Args:
        link: document -> its address as seen from `page`.
    """
    site = env.external_site_map

    def branch(doc: str, level: int) -> tuple[str, bool]:
        """The entry of a document and of those below it; whether `page` is among them."""
        below = [branch(child, level + 1) for child in site[doc].child_files()]
        current = doc == page or any(found for _, found in below)
        title = escape(env.titles[doc].astext(), quote=False)
        classes = f"toctree-l{level}" + " current active" * current + " has-children" * bool(below)
        here = "current reference internal" if doc == page else "reference internal"
        entry = f'<li class="{classes}"><a class="{here}" href="{link(doc)}">{title}</a>'
        if below:
            entry += (
                f'<details{" open" * current}><summary aria-label="Chapters of {escape(title)}">'
                f"{ARROW}</span></summary><ul>{''.join(text for text, _ in below)}</ul></details>"
            )
        return f"{entry}</li>\n", current

    parts = []
    for tree in site.root.subtrees:
        entries = "".join(branch(doc, 1)[0] for doc in tree.files())
        parts.append(
            f'<p aria-level="2" class="caption" role="heading">'
            f'<span class="caption-text">{escape(tree.caption, quote=False)}</span></p>\n'
            f'<ul class="nav bd-sidenav">\n{entries}</ul>\n'
        )
    return "".join(parts)


def provide(app, pagename, templatename, context, doctree):
    """`html-page-context`, early: the theme renders the sidebar to see whether it is empty."""
    context["course_contents"] = lambda: contents(app.env, pagename, context["pathto"])


def setup(app):
    app.connect("html-page-context", provide, priority=400)
