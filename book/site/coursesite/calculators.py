"""Calculators: `<!-- calculator: NAME -->` becomes a form that computes in the reader's browser.

In `book/site/calculators/`, NAME.js declares and computes, NAME.py computes with the functions of
the chapter, and NAME.json holds what NAME.py returns (`python book/site/calculators` writes it, a
test compares). The build stops when NAME.js disagrees with NAME.json, and writes the first entry
into the page: what stands there without JavaScript, and where the form starts with it.
"""

import inspect
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinx.util import logging

from course.book import node
from course.catalog import ROOT

logger = logging.getLogger(__name__)

FOLDER = ROOT / "book" / "site" / "calculators"
KINDS = (".js", ".json", ".py")
SHARED = ("values.js", "chart.js", "element.js")  # in this order
MARK = re.compile(r"^<!--\s*calculator:\s*(.+?)\s*-->$", re.MULTILINE)
USED = re.compile(r'<course-calculator id="[^"]*" name="(\w+)">')


def names(folder: Path) -> list[str]:
    """The calculators there are. Raises ExtensionError unless each has its three files."""
    found = {path.stem for kind in KINDS for path in folder.glob(f"[!_]*{kind}")}
    for name in sorted(found):
        have = [kind for kind in KINDS if (folder / f"{name}{kind}").is_file()]
        for kind in KINDS:
            if kind not in have:
                raise ExtensionError(f"{folder / name}{have[0]} has no {name}{kind} beside it")
    return sorted(found)


def written(folder: Path) -> dict[str, str]:
    """Name -> the calculator as MyST: its formula, then its form in the state of the first vector.

    Raises ExtensionError if a declaration is broken, or disagrees with its vectors.
    """
    run = subprocess.run(
        [node(), FOLDER / "shared" / "build.js", folder, *names(folder)],
        capture_output=True,
        encoding="utf-8",
    )
    if run.returncode:
        raise ExtensionError(f"{folder}/{run.stderr.strip()}")
    return {name: page(name, **parts) for name, parts in json.loads(run.stdout).items()}


def page(name: str, formula: str, form: str, note: str = "") -> str:
    """One calculator as MyST."""
    note = f'<p class="calc-note">{note}</p>\n' if note else ""
    return (
        f'<course-calculator id="calculator-{name}" name="{name}">\n\n'
        f"$$\n{formula}\n$$\n\n{note}{form}\n</course-calculator>"
    )


def vectors(path: Path) -> str:
    """The content of NAME.json: what `compute` in NAME.py returns for each of its INPUTS."""
    module = runpy.run_path(str(path))
    compute = module["compute"]
    keys = list(inspect.signature(compute).parameters)
    rows = [
        {"inputs": dict(zip(keys, row, strict=True)), "outputs": compute(*row)}
        for row in module["INPUTS"]
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def prepare(app, config):
    """`config-inited`: write the forms, and put the scripts where Sphinx finds them.

    The style is one of those that `assets` bundles.
    """
    app.course_calculators = written(FOLDER)
    staged = Path(app.doctreedir) / "calculators"
    shutil.rmtree(staged, ignore_errors=True)
    (staged / "calculators").mkdir(parents=True)
    for name in app.course_calculators:
        shutil.copy(FOLDER / f"{name}.js", staged / "calculators")
    shared = [(FOLDER / "shared" / name).read_text(encoding="utf-8") for name in SHARED]
    (staged / "calculators" / "_shared.js").write_text("\n".join(shared), encoding="utf-8")
    config.html_static_path.append(str(staged))


def expand(text: str, known: dict[str, str], where: str) -> str:
    """Markdown with its `calculator` comments expanded; what is wrong with them is a warning."""
    seen = set()

    def put(mark: re.Match) -> str:
        name = mark[1]
        line = text.count("\n", 0, mark.start()) + 1
        if name not in known:
            logger.warning(
                "no calculator is called %r: there is no %s",
                name,
                (FOLDER / f"{name}.js").relative_to(ROOT),
                location=f"{where}:{line}",
            )
        elif name in seen:
            logger.warning("calculator %r stands here twice", name, location=f"{where}:{line}")
        else:
            seen.add(name)
            return f"\n{known[name]}\n"
        return ""

    return MARK.sub(put, text)


def fill(app, docname, source):
    """`source-read`: expand the comments of a page or of a notebook's Markdown cells."""
    if not re.search(r"<!--\s*calculator:", source[0]):
        return
    known, path = app.course_calculators, app.env.doc2path(docname)
    for part in FOLDER.rglob("*"):
        if part.is_file():
            app.env.note_dependency(str(part))
    if not path.endswith(".ipynb"):
        source[0] = expand(source[0], known, path)
        return
    notebook = json.loads(source[0])
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            cell["source"] = expand(text, known, f"{path}, cell {number}")
    source[0] = json.dumps(notebook)


def load(app, pagename, templatename, context, doctree):
    """`html-page-context`: the scripts, on pages that need them."""
    used = USED.findall(context.get("body", ""))
    for name in used:
        app.add_js_file(f"calculators/{name}.js", loading_method="defer", priority=700)
    if used:
        app.add_js_file("calculators/_shared.js", loading_method="defer", priority=701)


def setup(app):
    app.connect("config-inited", prepare, priority=4)  # after the other styles
    app.connect("source-read", fill)
    app.connect("html-page-context", load)
