"""The calculators: their numbers are those of the chapters' functions, however they are set."""

import json
import re
import runpy
import shutil
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import torch
import yaml
from browsing import Visit
from bs4 import BeautifulSoup
from coursesite import calculators
from sphinx.errors import ExtensionError

from course.catalog import ROOT
from solutions.foundations.quantization import dequantize, quantize_groups

FOLDER = calculators.FOLDER
NAMES = calculators.names(FOLDER)
PAGE = "book/calculators.html"
SETTLED = 900  # ms: the announcement waits for 600 without a change

each_calculator = pytest.mark.parametrize("name", NAMES)


def vectors(name: str) -> list[dict]:
    return json.loads((FOLDER / f"{name}.json").read_text())


# The numbers


@each_calculator
def test_vectors_are_what_the_functions_return(name: str) -> None:
    computed = json.loads(calculators.vectors(FOLDER / f"{name}.py"))
    advice = f"book/site/calculators/{name}.json: run `python book/site/calculators`"
    stored = vectors(name)
    assert [row["inputs"] for row in stored] == [row["inputs"] for row in computed], advice
    for number, (one, other) in enumerate(zip(stored, computed, strict=True), start=1):
        wanted = pytest.approx(other["outputs"], rel=1e-9)
        assert one["outputs"] == wanted, f"vector {number} of {advice}"


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(4, 64, False), (2, 8, False), (2, 16, True), (8, 128, True), (3, 128, False)],
)
def test_the_rounding_error_is_that_of_the_chapter(bits: int, group: int, symmetric: bool) -> None:
    rounding_error = runpy.run_path(str(FOLDER / "quantization.py"))["rounding_error"]
    draw = torch.Generator().manual_seed(bits)
    W = torch.randn(2**20 // group, group, generator=draw)
    W_hat = dequantize(*quantize_groups(W, bits, group, symmetric), group)
    measured = (W_hat - W).double().square().mean().sqrt().item()
    assert rounding_error(bits, group, symmetric) == pytest.approx(measured, rel=0.005)
    assert rounding_error(bits, 1 if symmetric else 2, symmetric) == 0  # all on marks


# Bad input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of one calculator, to break."""
    for kind in calculators.KINDS:
        shutil.copy(FOLDER / f"kv_cache{kind}", tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("kind", calculators.KINDS)
def test_a_missing_file_is_named(folder: Path, kind: str) -> None:
    assert calculators.names(folder) == ["kv_cache"]
    (folder / f"kv_cache{kind}").unlink()
    with pytest.raises(ExtensionError, match=rf"kv_cache\.\w+ has no kv_cache\{kind} beside it"):
        calculators.written(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            ".json",
            '"sequences": 52',
            '"sequences": 53',
            r"json, vector 1: sequences is 53, but .*52",
        ),
        (
            ".json",
            '"context": 8192',
            '"context": 4096',
            r"json, vector 1: context is 4096, .* 8192",
        ),
        (
            ".json",
            '"layers": 30',
            '"layers": 300',
            r"json, vector 3: Layers: 128 in place of “300”",
        ),
        (".json", '"util"', '"use"', r"json, vector 1: its inputs are not "),
        (".json", '"per_token"', '"each"', r"json, vector 1: the outputs are not "),
        (".json", "[", "{", r"json: .*JSON"),
        (
            ".js",
            "2 * layers",
            "3 * layers",
            r"json, vector 1: per_token is 131072, but kv_cache\.js",
        ),
        (".js", 'name: "layers"', 'name: "length"', r'js: "length" cannot name an input'),
        (".js", 'name: "kv_cache"', 'name: "other"', r"js: declares no calculator called kv_cache"),
        (".js", "compute({", "compute({{", r"js: .*"),
    ],
)
def test_a_contradiction_stops_the_build(
    folder: Path, file: str, old: str, new: str, said: str
) -> None:
    edit(folder / f"kv_cache{file}", old, new)
    with pytest.raises(
        ExtensionError, match=rf"^{re.escape(str(folder))}/kv_cache\.{said}"
    ) as error:
        calculators.written(folder)
    assert "\n" not in str(error.value)


def test_a_comment_that_names_no_calculator_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(
        calculators.logger, "warning", lambda text, *a, location: said.append((text % a, location))
    )
    text = "One\n\n<!-- calculator: a -->\n\n<!-- calculator: b -->\n<!-- calculator: a -->\n"
    assert calculators.expand(text, {"a": "FORM"}, "x.md").count("FORM") == 1
    assert said == [
        ("no calculator is called 'b': there is no book/site/calculators/b.js", "x.md:5"),
        ("calculator 'a' stands here twice", "x.md:6"),
    ]


def test_a_notebook_may_hold_a_calculator() -> None:
    cells = [
        {"cell_type": "code", "source": ["# <!-- calculator: kv_cache -->"]},
        {"cell_type": "markdown", "source": ["Text\n", "\n", "<!-- calculator: kv_cache -->"]},
    ]
    noted = []
    env = SimpleNamespace(doc2path=lambda name: f"{name}.ipynb", note_dependency=noted.append)
    app = SimpleNamespace(env=env, course_calculators={"kv_cache": "FORM"})
    source = [json.dumps({"cells": cells})]
    calculators.fill(app, "notebooks/x", source)
    shown = [cell["source"] for cell in json.loads(source[0])["cells"]]
    assert shown == [cells[0]["source"], "Text\n\n\nFORM\n"]
    assert str(FOLDER / "kv_cache.js") in noted


def test_scripts_are_loaded_only_where_they_serve(pages: dict[str, BeautifulSoup]) -> None:
    for page, document in pages.items():
        scripts = [tag["src"].split("?")[0] for tag in document.select("script[src]")]
        loaded = [Path(src).stem for src in scripts if "/calculators/" in src]
        there = [tag["name"] for tag in document.select("course-calculator")]
        assert loaded == ([*there, "_shared"] if there else []), page
        assert "<!-- calculator" not in str(document), page
    assert {tag["name"] for tag in pages[PAGE].select("course-calculator")} == set(NAMES)


# In the browser


def short(x: float) -> str:
    """Three significant digits, and all before the point, half up as in JavaScript."""
    if x >= 100 or x == 0:
        return f"{Decimal(x).quantize(Decimal(1), ROUND_HALF_UP):,}"
    rounded = Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)
    return str(rounded.quantize(Decimal(1).scaleb(rounded.adjusted() - 2)))


def shown(output: dict, value: float) -> str:
    """How a declared output shows a number."""
    unit = output.get("unit", "")
    if output["format"] == "whole":
        text = f"{value:,}"
    elif output["format"] == "short":
        text = short(value)
    else:
        power = next(p for p in range(6) if value < 999.5 * 1000**p or p == 5)
        text = short(value / 1000**power)
        unit = ("bytes", "kB", "MB", "GB", "TB", "PB")[power]
    return f"{text}\u00a0{unit}" if unit else text


READ = """name => Object.fromEntries([...document.querySelectorAll(
  `[name=${name}] [data-output]`)].map(e => [e.dataset.output, e.textContent]))"""
VALUES = """name => Object.fromEntries([...document.querySelectorAll(
  `[name=${name}] [name]`)].map(e => [e.name, e.value]))"""
DECLARED = "name => courseCalculators.find(d => d.name === name)"


@pytest.fixture(scope="module")
def visit(browser, address: str):
    """One window for the tests that leave it as they like."""
    visit = Visit(browser, address, permissions=["clipboard-read", "clipboard-write"])
    yield visit
    visit.context.close()


def declared(visit: Visit, name: str) -> dict:
    return json.loads(visit.tab.evaluate(f"name => JSON.stringify(({DECLARED})(name))", name))


def field(visit: Visit, name: str, key: str):
    return visit.tab.locator(f'course-calculator[name="{name}"] [name="{key}"]')


def slider(visit: Visit, name: str, key: str):
    return visit.tab.locator(f'course-calculator[name="{name}"] [data-slider="{key}"]')


def status(visit: Visit, name: str):
    return visit.tab.locator(f'course-calculator[name="{name}"] [role=status]')


def expected(d: dict, vector: dict) -> dict[str, str]:
    return {o["name"]: shown(o, vector["outputs"][o["name"]]) for o in d["outputs"]}


@each_calculator
def test_every_vector_by_its_inputs(visit: Visit, name: str) -> None:
    visit.open(PAGE)
    d = declared(visit, name)
    assert visit.tab.evaluate(READ, name) == expected(d, vectors(name)[0])  # where it starts
    for vector in vectors(name)[::-1]:
        for key, value in vector["inputs"].items():
            control = field(visit, name, key)
            if control.evaluate("e => e.localName") == "select":
                control.select_option(str(value))
            else:
                control.fill(str(value))
        assert visit.tab.evaluate(READ, name) == expected(d, vector)
        curve = visit.tab.locator(f'course-calculator[name="{name}"] svg[role=img]')
        at = expected(d, vector)[d["curve"]["y"]]
        assert curve.get_attribute("aria-label").endswith(f": {at}.")
    assert visit.problems == []


def address_of(rows: dict[str, dict]) -> str:
    """The page with a setting for each of several calculators."""
    query = {f"{name}.{k}": v for name, row in rows.items() for k, v in row["inputs"].items()}
    return f"{PAGE}?{urlencode(query)}"


def test_every_vector_by_the_address(visit: Visit) -> None:
    for rows in zip_longest(*map(vectors, NAMES)):
        given = {name: row for name, row in zip(NAMES, rows, strict=True) if row}
        visit.open(address_of(given))
        for name, row in given.items():
            assert visit.tab.evaluate(READ, name) == expected(declared(visit, name), row)
            assert status(visit, name).inner_text() == ""
    assert visit.problems == []


def test_the_link_brings_the_settings_back(visit: Visit) -> None:
    visit.open(address_of({name: vectors(name)[1] for name in NAMES}) + "&q=1")
    before = {name: visit.tab.evaluate(VALUES, name) for name in NAMES}
    for name in NAMES:
        visit.tab.locator(f"[name={name}] button").click()
        visit.tab.wait_for_function(
            "name => document.querySelector(`[name=${name}] [role=status]`).textContent", arg=name
        )
        assert status(visit, name).inner_text().startswith("The link is copied.")
        link = visit.tab.evaluate("navigator.clipboard.readText()")
        assert link == visit.tab.url
        assert urlsplit(link).fragment == f"calculator-{name}"
    keys = {f"{name}.{key}" for name, values in before.items() for key in values}
    assert parse_qs(urlsplit(link).query).keys() == keys | {"q"}
    visit.tab.goto("about:blank")
    visit.tab.goto(link)
    assert {name: visit.tab.evaluate(VALUES, name) for name in NAMES} == before
    assert visit.tab.evaluate("scrollY") > 0  # it leads to the last calculator
    assert visit.problems == []


def test_sliders_and_fields_move_together_by_keyboard(visit: Visit) -> None:
    visit.open(PAGE)
    context = slider(visit, "kv_cache", "context")
    context.focus()
    keys = {"ArrowRight": 11585, "ArrowLeft": 8192, "End": 1048576, "Home": 128}
    for key, value in keys.items():
        visit.tab.keyboard.press(key)
        assert field(visit, "kv_cache", "context").input_value() == str(value)
        assert context.get_attribute("aria-valuetext") == f"{value:,}\u00a0tokens"
    visit.tab.keyboard.press("Shift+Tab")
    visit.tab.keyboard.press("ControlOrMeta+a")
    visit.tab.keyboard.type("2048")
    assert float(context.input_value()) == 11
    layers = slider(visit, "kv_cache", "layers")
    layers.focus()
    visit.tab.keyboard.press("ArrowUp")
    assert visit.tab.evaluate(READ, "kv_cache")["per_token"] == "135,168\u00a0bytes"
    assert visit.problems == []


def test_a_preset_sets_several_inputs_and_knows_itself(visit: Visit) -> None:
    visit.open(PAGE)
    preset = visit.tab.locator("#kv_cache-preset")
    chosen = "e => e.selectedOptions[0].text"
    assert preset.evaluate(chosen) == "Llama-3-8B"
    preset.select_option("SmolLM2-135M")
    values = visit.tab.evaluate(VALUES, "kv_cache")
    assert [values[key] for key in ("layers", "kv_heads", "head_size")] == ["30", "3", "64"]
    assert visit.tab.evaluate(READ, "kv_cache")["per_token"] == "23,040\u00a0bytes"
    field(visit, "kv_cache", "layers").fill("31")
    assert preset.evaluate(chosen) == "own numbers"
    field(visit, "kv_cache", "layers").fill("30")
    assert preset.evaluate(chosen) == "SmolLM2-135M"


def test_devices_have_the_rates_of_the_roofline_page(visit: Visit) -> None:
    visit.open(PAGE)
    rates = {
        d["name"]: (d["bytes_per_second"] / 1e12, d["flops_per_second"] / 1e12)
        for d in yaml.safe_load((ROOT / "book" / "devices.yml").read_text())
    }
    options = declared(visit, "serving")["presets"]["options"]
    assert {o["label"]: tuple(o["values"].values()) for o in options} == rates


def test_a_result_is_announced_once_the_reader_pauses(visit: Visit) -> None:
    visit.open(PAGE)
    status(visit, "serving").evaluate(
        "e => { window.said = []; new MutationObserver(() => said.push(e.textContent)).observe("
        "e, {childList: true, subtree: true, characterData: true}) }"
    )
    slider(visit, "serving", "batch").focus()
    for _ in range(5):
        visit.tab.keyboard.press("ArrowRight")
    assert visit.tab.evaluate("said") == []
    visit.tab.wait_for_timeout(SETTLED)
    results = visit.tab.evaluate(READ, "serving")
    (said,) = visit.tab.evaluate("said")
    assert said.strip().startswith(f"All users together: {results['total']}; Each user: ")


def test_what_cannot_be_is_replaced_and_told(visit: Visit) -> None:
    query = urlencode(
        {
            "kv_cache.layers": 9000,
            "kv_cache.util": "<b>abc</b>",
            "kv_cache.kv_heads": 2.6,
            "kv_cache.bytes_per_number": 3,
            "kv_cache.heads": 1,
            "serving.batch": "",
            "other": 1,
        }
    )
    visit.open(f"{PAGE}?{query}")
    told = status(visit, "kv_cache").evaluate("e => e.firstChild.textContent")
    assert told == (
        "Layers: 128 in place of “9000” (1 to 128). "
        "Share in use: 0.9 in place of “<b>abc</b>” (0.05 to 1). "
        "KV heads: 3 in place of “2.6” (1 to 128). "
        "Stored as: 2 in place of “3” (1, 2, 4). "
        "There is no input “kv_cache.heads”."
    )
    assert status(visit, "quantization").inner_text() == ""
    assert "Sequences: 64 in place of “”" in status(visit, "serving").inner_text()
    assert visit.tab.evaluate(VALUES, "kv_cache")["layers"] == "128"

    layers = field(visit, "kv_cache", "layers")
    before = visit.tab.evaluate(READ, "kv_cache")
    for text in ("", "-5", "1000"):  # on the way to something else, perhaps
        layers.fill(text)
        assert layers.get_attribute("aria-invalid") == "true"
        assert visit.tab.evaluate(READ, "kv_cache") == before
    layers.press("Enter")
    visit.tab.keyboard.press("Tab")
    assert layers.input_value() == "128"
    assert layers.get_attribute("aria-invalid") is None
    assert "128 in place of “1000”" in status(visit, "kv_cache").inner_text()
    layers.fill("1")
    visit.tab.wait_for_timeout(SETTLED)
    assert "in place of" not in status(visit, "kv_cache").inner_text()

    field(visit, "kv_cache", "weights").fill("1000")  # nothing fits at any length
    assert visit.tab.evaluate(READ, "kv_cache")["sequences"] == "0"
    assert visit.problems == []


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_forms_in_use_are_accessible_and_fit_a_phone(browser, address: str, mode: str) -> None:
    visit = Visit(browser, address, color_scheme=mode, viewport={"width": 390, "height": 844})
    visit.open(f"{PAGE}?kv_cache.layers=x")
    field(visit, "serving", "batch").fill("100000")
    assert visit.axe() == []
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 390
    assert visit.tab.evaluate("document.documentElement.dataset.theme") == mode
    for name in NAMES:
        width = "e => e.scrollWidth - e.clientWidth"
        assert visit.tab.locator(f'[name="{name}"] .katex-display').evaluate(width) <= 0
    assert visit.problems == []
    visit.context.close()


def test_nothing_moves_when_numbers_change(visit: Visit) -> None:
    places = """() => [...document.querySelectorAll("course-calculator *")]
      .filter(e => !e.closest("svg, [role=status], dd") && e.localName !== "option")
      .map(e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })"""
    visit.open(PAGE)
    before = visit.tab.evaluate(places)
    field(visit, "kv_cache", "context").fill("1048576")
    field(visit, "kv_cache", "layers").fill("128")
    field(visit, "quantization", "parameters").fill("1024")
    field(visit, "serving", "batch").fill("1")
    field(visit, "serving", "weights").fill("1024")
    visit.tab.wait_for_timeout(SETTLED)
    visit.tab.evaluate("scrollTo(0, 0)")
    assert visit.tab.evaluate(places) == before


def test_an_example_stands_there_without_scripts(browser, address: str) -> None:
    visit = Visit(browser, address, java_script_enabled=False)
    visit.tab.goto(address + PAGE)
    for name in NAMES:
        form = visit.tab.locator(f'course-calculator[name="{name}"]')
        first = vectors(name)[0]
        for key, value in first["inputs"].items():
            control = form.locator(f'[name="{key}"]')
            assert control.is_visible() and control.is_disabled()
            assert control.input_value() == str(value)
        numbers = form.locator("dd").all_inner_texts()
        assert numbers == [
            shown(output, first["outputs"][output["name"]]) for output in declarations(name)
        ]
        assert form.locator(".katex-display").is_visible()
        assert form.locator("noscript").is_visible()
        assert form.locator("svg[role=img]").is_visible()
        assert not form.locator("input[type=range], button").first.is_visible()
    visit.context.close()


def declarations(name: str) -> list[dict]:
    """The declared outputs, read off the source of NAME.js, since nothing can be evaluated."""
    rows = (FOLDER / f"{name}.js").read_text().split("outputs: [")[1].split("],")[0]
    found = [dict(re.findall(r'(name|unit|format): "([^"]+)"', row)) for row in rows.splitlines()]
    return [row for row in found if row]


def test_a_page_from_disk_computes(browser, site: Path) -> None:
    tab = browser.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"{(site / PAGE).as_uri()}?kv_cache.layers=16")
    form = tab.locator('course-calculator[name="kv_cache"]')
    assert form.locator("dd").first.inner_text() == "65,536\u00a0bytes"
    form.locator("button").click()
    tab.wait_for_function("document.querySelector('[role=status]').textContent")
    assert form.locator("[role=status]").inner_text().startswith("The link is ")
    assert errors == []
    tab.close()
