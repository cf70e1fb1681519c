"""Pages that are filled while the book is built: from the catalog, and from files beside chapters.

A page says where with a comment: `<!-- route -->`, `<!-- chapters: PART -->`, `<!-- quality -->`,
`<!-- roofline -->`, `<!-- devices -->`, `<!-- glossary -->`, `<!-- resources -->`,
`<!-- gpu-results -->`.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinxcontrib.bibtex.plugin import register_plugin
from sphinxcontrib.bibtex.style.referencing import BracketStyle
from sphinxcontrib.bibtex.style.referencing.author_year import AuthorYearReferenceStyle

from course import catalog
from course.lab import table
from coursesite import overview, roofline
from coursesite.measured import gpu_results

BOOK = catalog.ROOT / "book"
MARK = re.compile(
    r"^<!-- (route|chapters|quality|roofline|devices|glossary|resources|gpu-results)"
    r"(?:: (\w+))? -->$",
    re.MULTILINE,
)
KERNEL = {
    "own": "its own Triton kernel",
    "reuse": "uses another chapter's kernel",
    "read": "reads another chapter's kernel",
}
COLUMNS = {
    "kernel": "kernel",
    "target": "target",
    "registers": "registers",
    "spills": "spills",
    "shared": "shared, bytes",
    "occupancy": "occupancy, %",
    "wide_loads": "16\u2011byte loads, %",
    "tensor_core": "tensor-core instruction",
}
RULE = "|---|---|--:|--:|--:|--:|--:|---|"


def chapter_list(part: str) -> str:
    """The chapters of a part in reading order; only ready ones have a page to link to."""
    titles = {chapter.slug: chapter.title for chapter in catalog.chapters()}
    rows = []
    for chapter in catalog.chapters():
        if chapter.part != part:
            continue
        if chapter.status == "ready":
            name = f"[{chapter.title}](/notebooks/{part}/{chapter.slug}.ipynb)"
        else:
            name = f"{chapter.title} [planned]{{.planned}}"
        said = f"{chapter.about}\\\n   " if chapter.about else ""
        about = [f"{chapter.minutes} minutes", KERNEL[chapter.kernel]]
        if chapter.prerequisites:
            about.append("after " + ", ".join(titles[slug] for slug in chapter.prerequisites))
        if chapter.sources:
            papers = (f"[{key}](https://arxiv.org/abs/{key})" for key in chapter.sources)
            about.append("arXiv " + ", ".join(papers))
        rows.append(f"1. {name}\\\n   {said}[{' · '.join(about)}]{{.about}}")
    return "{.chapters}\n" + "\n".join(rows)


def entries(text: str, where: str) -> list[tuple[str, str]]:
    """The (term, definition) pairs of a glossary file: a term, then a line that begins with `: `.

    Raises ExtensionError if the file holds anything else.
    """
    found = []
    for block in re.split(r"\n{2,}(?=\S)", text.strip()):
        term, _, definition = block.partition("\n")
        if not definition.startswith(": "):
            raise ExtensionError(
                f"{where}: after the term {term!r} comes a line `: its definition`"
            )
        found.append((term.strip(), definition))
    return found


def glossary() -> str:
    """All terms of all chapters as one definition list, in alphabetical order."""
    titles = {
        chapter.slug: f"[{chapter.title}](/notebooks/{chapter.part}/{chapter.slug}.ipynb)"
        for chapter in catalog.chapters()
        if chapter.status == "ready"
    }
    found = []
    for path in sorted((BOOK / "glossary").glob("*.md")):
        origin = f"\n  *First met in* {titles[path.stem]}." if path.stem in titles else ""
        for term, definition in entries(path.read_text(encoding="utf-8"), f"{path.name}"):
            found.append((term.lower(), f"{term}\n{definition}{origin}"))
    return "\n\n".join(entry for _, entry in sorted(found))


def resources() -> str:
    """What each kernel compiles to, from the committed tables."""
    return "\n\n".join(family(path.stem) for path in sorted(table.FOLDER.glob("*.json")))


def family(name: str) -> str:
    """A heading, what the kernels of a family do, and a table for each recorded launch."""
    source = catalog.ROOT / "kernels" / f"{name}.py"
    purpose = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").split("\n")[
        0
    ]
    link = f"[kernels/{name}.py]({catalog.repository()}/blob/main/kernels/{name}.py)"
    shown = [f"### {name}", f"{purpose} The source is {link}."]
    rows = table.load(name)[1]
    for launch in dict.fromkeys(row["launch"] for row in rows):
        body = [line(compiled(row)) for row in rows if row["launch"] == launch]
        shown.append(f"**{launch}**")
        shown.append("\n".join(["{.resources}", line(COLUMNS.values()), RULE, *body]))
    return "\n\n".join(shown)


def compiled(row: dict) -> list[str]:
    """A row of a resource table, as the words to show in `COLUMNS`."""
    kernel = row["kernel"].strip("_").removesuffix("_kernel").replace("_", " ")
    units = ", ".join(row["tensor_core"]) or "none"
    words = {**row, "kernel": kernel, "shared": f"{row['shared']:,}", "tensor_core": units}
    return [str(words[column]) for column in COLUMNS]


def line(words: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(words)} |"


FILL = {
    "route": overview.route,
    "chapters": chapter_list,
    "quality": overview.quality,
    "roofline": roofline.picture,
    "devices": roofline.table,
    "glossary": glossary,
    "resources": resources,
    "gpu-results": lambda: gpu_results(BOOK / "results"),
}


def fill(app, docname, source):
    """`source-read`: expand the comments of a page of the book."""
    if not docname.startswith("book/"):
        return

    def put(mark: re.Match) -> str:
        return FILL[mark[1]](*filter(None, [mark[2]]))

    filled = MARK.sub(put, source[0])
    if filled != source[0]:
        app.env.course_filled.add(docname)
        source[0] = filled


def refill(app, env, added, changed, removed):
    """`env-get-outdated`: these pages depend on whole folders, so they are read each time."""
    if not hasattr(env, "course_filled"):
        env.course_filled = set()
    return [docname for docname in env.course_filled & env.found_docs if docname not in removed]


def merged(texts: dict[str, str]) -> str:
    """One BibTeX file out of several; a key that two chapters share must mean the same entry.

    Args:
        texts: file name -> its content.

    Raises ExtensionError if two entries with one key differ.
    """
    found: dict[str, str] = {}
    for name, text in texts.items():
        for entry in re.split(r"(?m)^(?=@)", text):
            key = re.match(r"@\w+\s*\{\s*([^,\s]+)\s*,", entry)
            if not key:
                continue
            if found.setdefault(key[1], entry.strip()) != entry.strip():
                raise ExtensionError(f"{name}: the entry {key[1]} differs from another chapter's")
    return "\n\n".join(found[key] for key in sorted(found)) + "\n"


@dataclass
class PlainAuthorYear(AuthorYearReferenceStyle):
    """`Kwon et al. 2023` without brackets: the sentence around a citation sets its own."""

    author_year_sep: str = " "

    bracket_parenthetical: BracketStyle = field(default_factory=lambda: BracketStyle("", ""))


def bibliography(app, config):
    """`config-inited`: hand sphinxcontrib-bibtex one file for the whole course."""
    files = sorted((BOOK / "references").glob("*.bib"))
    text = merged({path.name: path.read_text(encoding="utf-8") for path in files})
    target = Path(app.doctreedir) / "references.bib"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")
    config.bibtex_bibfiles = [str(target)]


def setup(app):
    register_plugin("sphinxcontrib.bibtex.style.referencing", "plain_author_year", PlainAuthorYear)
    app.connect("config-inited", bibliography, priority=3)
    app.connect("env-get-outdated", refill)
    app.connect("source-read", fill)
