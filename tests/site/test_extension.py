"""The parts of the site's extension, each alone."""

import logging
import re
import shutil
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import nbformat
import pytest
from coursesite import anchors, chapters, demands, formulas, gather, origin, publish
from sphinx.errors import ExtensionError

from course import book, catalog
from course.catalog import ROOT
from course.errors import CourseError

CHAPTER = catalog.find("kv_cache")


def test_a_solution_comment_becomes_a_closed_fold_with_the_answer() -> None:
    text = "Before\n\n<!-- solution: kv_bytes_per_token -->\n\nAfter"
    shown = chapters.expand(text, CHAPTER, Counter(kv_bytes_per_token=3))
    assert shown.startswith('Before\n\n<details class="solution">\n<summary>')
    assert shown.endswith("After")
    assert "```python\ndef kv_bytes_per_token(" in shown
    assert "# stub:" not in shown
    assert "reject 3 wrong answers" in shown


def test_a_kernel_comment_becomes_a_listing() -> None:
    shown = chapters.expand(
        "<!-- kernel: attention_decode.py decode_attention -->", CHAPTER, Counter()
    )
    assert "def decode_attention(" in shown
    assert shown.count("<details") == 1


@pytest.mark.parametrize("comment", ["solution: nothing", "kernel: attention_decode.py nothing"])
def test_a_comment_that_names_nothing_is_refused(comment: str) -> None:
    with pytest.raises(CourseError, match="nothing"):
        chapters.expand(f"<!-- {comment} -->", CHAPTER, Counter())


def test_code_with_backticks_cannot_end_its_fence() -> None:
    shown = chapters.folded("solution", "x", 'text = """\n```\n````\n"""')
    fence = shown.split("\n\n")[1].split("python")[0]
    assert fence == "`````"


def test_wrong_answers_are_counted_per_exercise(tmp_path: Path) -> None:
    file = tmp_path / "mutants.py"
    file.write_text("MUTANTS = {'f': [1, 2], 'g': [3]}\nSHORTCUTS = {'f': [4]}\nEQUIVALENT = {}\n")
    assert chapters.known_wrong(file) == {"f": 3, "g": 1}
    assert chapters.known_wrong(tmp_path / "absent.py") == {}


def test_glossary_files_are_terms_with_definitions() -> None:
    text = "first term\n: What it is,\n  on two lines.\n\nsecond\n: Short.\n"
    assert gather.entries(text, "x.md") == [
        ("first term", ": What it is,\n  on two lines."),
        ("second", ": Short."),
    ]
    with pytest.raises(ExtensionError, match=r"x\.md.*'loose'"):
        gather.entries("loose\n\nterm\n: Text.", "x.md")


def test_the_glossary_is_sorted_and_names_the_chapter() -> None:
    terms = [term for term, _ in (e.split("\n", 1) for e in gather.glossary().split("\n\n"))]
    assert terms == sorted(terms, key=str.lower)
    assert "*First met in* [The KV cache](/notebooks/foundations/kv_cache.ipynb)." in (
        gather.glossary()
    )


@pytest.mark.parametrize(
    ("term", "anchor"),
    [
        ("KV cache", "term-kv-cache"),
        ("log-sum-exp", "term-log-sum-exp"),
        ("top-k (p)", "term-top-k-p"),
    ],
)
def test_a_term_has_a_readable_anchor(term: str, anchor: str) -> None:
    assert anchors.term_id(term) == anchor


def test_bibliographies_merge_and_conflicts_are_refused() -> None:
    one, two = "@misc{a,\n title={A}\n}\n", "@misc{b,\n title={B}\n}\n"
    assert gather.merged({"x": two, "y": one + two}) == f"{one.strip()}\n\n{two}"
    with pytest.raises(ExtensionError, match="y: the entry a differs"):
        gather.merged({"x": one, "y": one.replace("{A}", "{Other}")})


def test_formulas_render_and_broken_ones_say_why() -> None:
    done = formulas.render({"good": (r"\frac{a}{b}", True), "bad": (r"\unknown{a}", False)})
    assert "<math" in done["good"]["html"]
    assert r"\unknown" in done["bad"]["problem"]


def test_a_place_in_a_notebook_is_named() -> None:
    said = logging.LogRecord("sphinx", logging.WARNING, "", 0, "x", None, None)
    for place, told in (
        ("a/b.ipynb:120004", "a/b.ipynb, cell 12, line 4"),
        ("a/b.ipynb:7", "a/b.ipynb:7"),
        ("a/b.md:120004", "a/b.md:120004"),
    ):
        said.location = place
        assert demands.CellNames().filter(said)
        assert said.location == told


def test_a_feed_is_plain_text_and_needs_dated_headings() -> None:
    text = "# New\n\n## 1.2, 2026-01-02: A & [b](c.md)\n\nIt `does` *this*.\n\n## Not a version\n"
    (entry,) = ET.fromstring(publish.feed(text, "https://x.io/y/")).iter("item")
    assert entry.findtext("title") == "1.2: A & [b](c.md)"
    assert entry.findtext("link") == "https://x.io/y/book/changelog.html"
    assert entry.findtext("description").startswith("It does this.")


def test_the_site_as_one_zip_is_the_same_each_time(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "a").mkdir(parents=True)
    (site / "index.html").write_text("x")
    (site / "a" / "b.css").write_text("y")
    for name in ("one.zip", "two.zip"):
        book.pack(site, tmp_path / name)
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == ["one/a/b.css", "one/index.html"]
        assert archive.read("one/index.html") == b"x"
    two = (tmp_path / "two.zip").read_bytes()
    assert (tmp_path / "one.zip").read_bytes() == two.replace(b"two/", b"one/")
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match="cannot be written"):
        book.pack(site, tmp_path / "file" / "x.zip")


def test_addresses_follow_from_the_repository() -> None:
    assert origin.addresses("https://github.com/Some-One/lessons") == (
        "https://some-one.github.io/lessons/",
        "/lessons/",
    )


def stored(*outputs: dict, tag: str = "check-f") -> dict:
    cell = nbformat.v4.new_code_cell("f()", metadata={"tags": [tag]})
    cell.outputs = [nbformat.from_dict(output) for output in outputs]
    return nbformat.v4.new_notebook(cells=[cell])


STREAM = {"output_type": "stream", "name": "stdout", "text": "1\n"}
ERROR = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}


@pytest.mark.parametrize(
    ("nb", "problem"),
    [
        (stored(STREAM), ""),
        (stored(), "cell 1 stores no output"),
        (stored(tag="predict"), "cell 1 stores no output"),
        (stored(tag="answer-f"), ""),
        (stored({**STREAM, "text": "<a.Legend at 0x7f00>"}), "cell 1 shows a memory address"),
        (stored(ERROR, tag="demo"), "cell 1 stores an error"),
    ],
)
def test_a_notebook_without_its_outputs_is_refused(nb: dict, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "nb.ipynb"
    nbformat.write(nb, file)
    assert book.unrecorded(file).split(" (")[0] == problem


def test_a_missing_notebook_is_refused(tmp_path: Path) -> None:
    assert book.unrecorded(tmp_path / "absent.ipynb") == "it is missing"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of its own, to break."""
    root = tmp_path_factory.mktemp("copy") / "checkout"
    root.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "resources.lock")
    for name in ("book", "course", "kernels", "notebooks", "solutions", "tests/mutants"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    for name in ("_config.yml", "_toc.yml", "package.json", "package-lock.json"):
        shutil.copy(ROOT / name, root)
    (root / "node_modules").symlink_to(book.npm_packages(), target_is_directory=True)
    return root


def test_a_rebuild_publishes_a_changed_style_and_refuses_what_is_broken(
    copy: Path, run_build: Callable[[Path, Path], CompletedProcess]
) -> None:
    out = copy / "_build" / "html"
    page = out / "book" / "index.html"
    assert run_build(copy, out).returncode == 0
    before = page.read_text()

    style = copy / "book" / "site" / "static" / "course.css"
    style.write_text(style.read_text() + "\n.new-rule { color: inherit; }\n")
    assert run_build(copy, out).returncode == 0
    assert ".new-rule" in (out / "_static" / "course.css").read_text()
    assert page.read_text() != before  # the new checksum, so that no browser keeps the old file

    source = copy / "book" / "model.md"
    lines = source.read_text().count("\n")
    broken = (
        "\n$\\unknown{x}$ and [nowhere](#term-nothing)\n"
        "\n![](site/static/mark.svg)\n"
        "\n[Nobody 1999](#nobody1999)\n"
    )
    source.write_text(source.read_text() + broken)
    rows = copy / "course" / "catalog.yml"
    rows.write_text(rows.read_text().replace("    about: ", "    about: ''  # ", 1))
    refused = run_build(copy, out)
    assert refused.returncode == 2
    said = refused.stderr
    assert re.search(rf"book/model.md:{lines + 2}: WARNING: .*term-nothing", said)
    assert re.search(rf"book/model.md:{lines + 4}: WARNING: image .*mark.svg has no alt text", said)
    assert re.search(rf"book/model.md:{lines + 6}: WARNING: .*nobody1999", said)
    assert "unknown" in said
    assert re.search(r"course/catalog.yml:\d+: WARNING: kv_cache needs `about`", said)

    toc = copy / "_toc.yml"
    row = "          - file: notebooks/foundations/kv_cache\n"
    toc.write_text(toc.read_text().replace(row, ""))
    text = rows.read_text()
    place = text.index("status: ready", text.index("slug: quantization"))
    rows.write_text(text[:place] + "status: planned" + text[place + len("status: ready") :])
    refused = run_build(copy, out)
    assert refused.returncode == 2
    said = refused.stderr
    assert re.search(r"course/catalog.yml:\d+: WARNING: kv_cache is ready but not in _toc", said)
    line = toc.read_text().split("notebooks/foundations/quantization")[0].count("\n") + 1
    assert f"_toc.yml:{line}: WARNING: notebooks/foundations/quantization is no ready" in said

    (copy / "notebooks" / CHAPTER.part / f"{CHAPTER.slug}.ipynb").unlink()
    refused = run_build(copy, out)
    assert refused.returncode == 2
    assert "course record kv_cache" in refused.stderr
