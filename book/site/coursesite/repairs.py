"""What the theme and its helpers get wrong, mended page by page before it is written."""

import re
from pathlib import Path

BODY = (
    # a list item must be a list item, or screen readers announce an empty list
    (re.compile(r'role="doc-biblioentry"'), 'role="listitem"'),
    # the accessible name of a fold must be the text one sees
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # a term and its definition are two words for the search
    (re.compile(r"</dt><dd>"), "</dt>\n<dd>"),
    # a table of numbers with row names leaves its corner empty
    (re.compile(r"<th></th>"), '<th><span class="visually-hidden">row</span></th>'),
)


def mend(app, pagename, templatename, context, doctree):
    """`html-page-context`, after the theme has added its buttons."""
    body = context.get("body", "")
    for pattern, replacement in BODY:
        body = pattern.sub(replacement, body)
    if body:
        context["body"] = body
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []):
            # a chapter is edited in its Markdown source, the notebook is built from it
            if button.get("label") == "source-edit-button":
                button["url"] = re.sub(r"(/notebooks/.*)\.ipynb$", r"\1.md", button["url"])
            # a logo beside its name costs a request and says nothing
            if button.get("icon", "").startswith("_static/"):
                del button["icon"]


def front_door(app, exception):
    """`build-finished`: `/` leads to the front page, with a title and a link for all."""
    if exception or app.builder.format != "html":
        return
    page = f"{app.config.master_doc}.html"
    Path(app.outdir, "index.html").write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{app.config.project}</title>
<meta http-equiv="refresh" content="0; url={page}">
<link rel="canonical" href="{app.config.html_baseurl}{page}">
</head>
<body><main><h1>{app.config.project}</h1>
<p><a href="{page}">Go to the front page</a></p></main></body>
</html>
""",
        encoding="utf-8",
    )


def setup(app):
    app.connect("html-page-context", mend, priority=950)
    app.connect("build-finished", front_door, priority=100)
