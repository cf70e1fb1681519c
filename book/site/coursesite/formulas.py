"""Maths as HTML and MathML, rendered once per formula by KaTeX while the book is built.

The reader's browser runs no script for it, and a formula that KaTeX refuses is a warning, hence an
error of the build, instead of red text on the page.
"""

import hashlib
import json
import re
import subprocess
from pathlib import Path

from docutils import nodes
from sphinx.locale import _
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

from course.book import node, npm_packages

logger = logging.getLogger(__name__)
POINTS = re.compile(r"[.,;:!?)\]]+")

SCRIPT = """
const katex = require(process.argv[1]);
const jobs = JSON.parse(require("fs").readFileSync(0, "utf8"));
const done = {};
for (const [key, [tex, displayMode]] of Object.entries(jobs)) {
  try {
    const options = {displayMode, output: "htmlAndMathml", throwOnError: true, strict: "ignore"};
    done[key] = {html: katex.renderToString(tex, options)};
  } catch (problem) {
    done[key] = {problem: problem.message};
  }
}
process.stdout.write(JSON.stringify(done));
"""


def render(jobs: dict[str, tuple[str, bool]]) -> dict[str, dict[str, str]]:
    """Render formulas in one run of node.

    Args:
        jobs: key -> (TeX, whether it is a displayed formula).

    Returns: key -> {"html": ...} or {"problem": what KaTeX says}.
    """
    katex = npm_packages() / "katex" / "dist" / "katex.min.js"
    run = subprocess.run(
        [node(), "-e", SCRIPT, katex],
        input=json.dumps(jobs),
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return json.loads(run.stdout)


def job(formula: nodes.Node) -> tuple[str, tuple[str, bool]]:
    """(key, (TeX, displayed)) of a `math` or `math_block` node."""
    tex, display = formula.astext(), isinstance(formula, nodes.math_block)
    if display and r"\\" in tex and not formula.get("nowrap"):
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}" if r"\begin" not in tex else tex
    return hashlib.sha256(f"{display} {tex}".encode()).hexdigest()[:24], (tex, display)


class Formulas:
    """The formulas of a build, and the ones rendered by earlier builds."""

    def __init__(self, cache: Path):
        self.cache = cache
        lock = (npm_packages() / "katex" / "package.json").read_text(encoding="utf-8")
        self.version = json.loads(lock)["version"]
        stored = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
        self.done = stored.get(self.version, {})
        self.jobs: dict[str, tuple[str, bool]] = {}

    def html(self, formula: nodes.Node) -> str:
        """The HTML of a formula; what was not collected before is rendered now."""
        key, wanted = job(formula)
        if key not in self.done:
            self.done.update(render({key: wanted}))
        found = self.done[key]
        if "problem" in found:
            logger.warning("formula %r: %s", wanted[0], found["problem"], location=formula)
        return found.get("html", "")

    def collect(self, app, doctree):
        """`doctree-read`: note the formulas of a page that has just been read."""
        for formula in doctree.findall(lambda n: isinstance(n, (nodes.math, nodes.math_block))):
            key, wanted = job(formula)
            self.jobs[key] = wanted

    def finish(self, app, env):
        """`env-updated`: render all that is new, at once."""
        missing = {key: wanted for key, wanted in self.jobs.items() if key not in self.done}
        if missing:
            self.done.update(render(missing))
            good = {key: found for key, found in self.done.items() if "html" in found}
            self.cache.write_text(json.dumps({self.version: good}), encoding="utf-8")


def prepare(app):
    """`builder-inited`: one store for the build."""
    app.course_formulas = store = Formulas(Path(app.doctreedir) / "formulas.json")
    app.connect("doctree-read", store.collect)
    app.connect("env-updated", store.finish)


def keep_with_point(app, doctree, docname):
    """`doctree-resolved`: a line may not end between a formula and the point or comma after it."""
    for formula in list(doctree.findall(nodes.math)):
        after = formula.next_node(descend=False, siblings=True)
        points = POINTS.match(after.astext()) if isinstance(after, nodes.Text) else None
        if points:
            formula["points"] = points[0]
            formula.parent.replace(after, nodes.Text(after.astext()[points.end() :]))


def visit_inline(self, formula):
    points = formula.get("points", "")
    self.body.append('<span class="with-point">' if points else "")
    self.body.append(self.starttag(formula, "span", "", CLASS="math notranslate nohighlight"))
    self.body.append(self.builder.app.course_formulas.html(formula) + "</span>")
    self.body.append(f"{points}</span>" if points else "")
    raise nodes.SkipNode


def visit_display(self, formula):
    self.body.append(self.starttag(formula, "div", CLASS="math notranslate nohighlight"))
    self.body.append(self.builder.app.course_formulas.html(formula))
    if formula["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, formula)})')
        self.add_permalink_ref(formula, _("Link to this equation"))
        self.body.append("</span>")
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("katex_once", (visit_inline, None), (visit_display, None))
    app.connect("builder-inited", prepare)
    app.connect("doctree-resolved", keep_with_point)
