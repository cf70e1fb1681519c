"""Every attack works on a grader that trusts too much; on ours it earns nothing and hurts nobody.

The whole class is graded once with all attacks in it and once without any, each box after another,
while the trusting graders have their turn beside it.
"""

import hashlib
import importlib
import json
import os
import socket
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import toy as toys
from tests.attacks.toy import NAIVE, NBVAL, OURS, UNSAFE, Attack, Desk, Graded, Toy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
PATIENCE = 120.0  # seconds of a naive grader; attacks that never end say how few suffice
ATTACKS = [
    Attack(path.stem, importlib.import_module(f"tests.attacks.{path.stem}"))
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in ("__init__", "toy", "test_attacks")
]
AGAINST = {who: [a for a in ATTACKS if a.against == who] for who in (NBVAL, NAIVE, UNSAFE)}
CLASSMATES = {"honest": "passed", "wrong": "failed"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all graders said."""
    base = tmp_path_factory.mktemp("attacks")
    toy = Toy(base / "course-of-toys")
    toy.write()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        toy.port = server.getsockname()[1]
        real = pool.submit(_real, toy, base / "real")
        naive = pool.submit(_trusting, toy, base / "trusting")
        return {"real": real.result(), **naive.result()}


def _class(toy: Toy, base: Path, attacks: list[Attack]) -> Path:
    """Write a class: two classmates and these attacks."""
    folder = base / "class"
    (base / "marks").mkdir(parents=True)
    for name in CLASSMATES:
        _desk(toy, base, name).put(toy.notebook(OURS))
    _desk(toy, base, "wrong").answer("def scale(x):\n    return 3 * x")
    for attack in attacks:
        attack.module.attack(_desk(toy, base, attack.name))
    return folder


def _desk(toy: Toy, base: Path, name: str) -> Desk:
    folder = base / "class" / name
    folder.mkdir(parents=True, exist_ok=True)
    return Desk(toy, folder, base / "marks" / name)


def _real(toy: Toy, base: Path) -> dict[str, Any]:
    folder = _class(toy, base, ATTACKS)
    before = _state(folder) | _state(toy.folder)
    whole = toys.grade(toy, folder, base / "results")
    changed = {str(p) for p, _ in before.items() ^ (_state(folder) | _state(toy.folder)).items()}
    few = _class(toy, base / "few", [])
    alone = toys.grade(toy, few, base / "few-results")
    return {
        **_told(whole, base),
        "changed": sorted(changed),
        "files": {name: whole.files()[name].decode() for name in CLASSMATES},
        "files alone": {name: data.decode() for name, data in alone.files().items()},
        "reports": {
            str(path.relative_to(whole.out)): path.read_text()
            for path in whole.out.rglob("*.*")
            if path.suffix in (".json", ".csv", ".xml", ".html")
        },
    }


def _state(folder: Path) -> dict[Path, str]:
    """Every file and what is in it; compiled code is nobody's."""
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _told(graded: Graded, base: Path) -> dict[str, Any]:
    return {
        "code": graded.code,
        "said": graded.said,
        "left": graded.left,
        "home": [str(p) for p in graded.home.rglob("*") if p.is_file()],
        "marks": [p.name for p in (base / "marks").iterdir()],
        "status": {id: graded.statuses(id) for id in graded.verdicts()},
    }


def _trusting(toy: Toy, base: Path) -> dict[str, Any]:
    folder = _class(toy, base, [*AGAINST[NBVAL], *AGAINST[NAIVE]])
    _desk(toy, base, "stub").put(toy.pristine)
    plain = [a.name for a in AGAINST[NBVAL] if not hasattr(a.module, "OWN")]
    passed = toys.nbval(toy, [folder / name for name in ("honest", "stub", *plain)])
    for attack in AGAINST[NBVAL]:
        if attack.name not in plain:
            own = folder / attack.name
            passed |= toys.nbval(toy, [own], own)
    naive = {}
    for name in ("honest", "stub", *(a.name for a in AGAINST[NAIVE])):
        path = folder / name if (folder / name).exists() else folder / f"{name}.zip"
        naive[name] = vars(toys.naive(toy, path, *_wanted(name)))
    place = base / "unsafe"
    graded = toys.grade(toy, _class(toy, place, AGAINST[UNSAFE]), place / "results", "--unsafe")
    return {NBVAL: passed, NAIVE: naive, UNSAFE: _told(graded, place)}


def _wanted(name: str) -> tuple[str, float]:
    """The exercise that a submission wants to pass, and how long a naive grader waits for it."""
    for attack in ATTACKS:
        if attack.name == name:
            return attack.target, getattr(attack.module, "SECONDS", PATIENCE)
    return toys.TARGET, PATIENCE


def _ids(attacks: list[Attack]) -> list[str]:
    return [attack.name for attack in attacks]


@pytest.mark.parametrize("attack", AGAINST[NBVAL], ids=_ids(AGAINST[NBVAL]))
def test_it_passes_plain_nbval(attack, found):
    if hasattr(attack.module, "PTRACE") and os.geteuid() != 0:
        pytest.skip("only root may surely read its parent's memory")
    assert found[NBVAL][attack.name]


@pytest.mark.parametrize("attack", AGAINST[NAIVE], ids=_ids(AGAINST[NAIVE]))
def test_it_defeats_a_naive_grader(attack, found):
    ended = found[NAIVE][attack.name]
    traces = getattr(attack.module, "TRACES", ())
    if traces:
        assert all(trace in ended["said"] for trace in traces), ended
    else:
        endless = hasattr(attack.module, "SECONDS")
        assert ended["how"] in (("hangs",) if endless else ("passed", "crashes")), ended


@pytest.mark.parametrize("attack", AGAINST[UNSAFE], ids=_ids(AGAINST[UNSAFE]))
def test_it_works_without_the_box(attack, found):
    unsafe = found[UNSAFE]
    passed = unsafe["status"][attack.name][attack.target] == "passed"
    assert passed or attack.name in unsafe["marks"], unsafe["status"][attack.name]


@pytest.mark.parametrize("attack", ATTACKS, ids=_ids(ATTACKS))
def test_it_earns_nothing_here(attack, found):
    real = found["real"]
    assert real["status"][attack.name][attack.target] in ("failed", "not attempted")
    assert attack.name not in real["marks"]


def test_the_trusting_graders_do_grade(found):
    assert found[NBVAL]["honest"] and not found[NBVAL]["stub"]
    assert found[NAIVE]["honest"]["how"] == "passed" and found[NAIVE]["stub"]["how"] == "failed"
    for name, status in CLASSMATES.items():
        assert found[UNSAFE]["status"][name][toys.TARGET] == status


def test_classmates_get_what_they_get_without_attacks(found):
    real = found["real"]
    assert real["code"] == 0, real["said"]
    assert real["files"] == real["files alone"]
    for name, status in CLASSMATES.items():
        assert real["status"][name][toys.TARGET] == status
    assert set(real["status"]["honest"].values()) == {"passed"}


def test_nothing_is_left_behind(found):
    real = found["real"]
    assert real["left"] == [] and real["changed"] == [] and real["home"] == []
    assert real["marks"] == []


def test_reports_repeat_no_commands(found):
    reports = found["real"]["reports"]
    assert {"grades.csv", "junit.xml", "report/index.html"} <= set(reports)
    ET.fromstring(reports["junit.xml"])
    for name, text in {**reports, "said": found["real"]["said"]}.items():
        if name.startswith("verdicts/"):  # JSON escapes what it holds
            text = json.dumps(json.loads(text), ensure_ascii=False)
        assert "\x1b" not in text and "\n::" not in text and "\x00" not in text, name
        assert not {"\x9b", "\u202e", "\u2028"} & set(text), name
        assert "<script>alert" not in text or name.endswith(".json"), name
        assert toys.SECRET not in text
