"""The box stands with every kind of Python and user, and covers what they would bring along."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from course.grade import mounts
from course.grade.box import Box, Limits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box needs Linux")
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SYSTEM = Path("/usr/bin", VERSION)
ORDINARY = 54321  # a user id that nobody has: an ordinary user need not have an account
GRADER = """
import json, sys
from dataclasses import asdict
from course.grade.box import Box
box = Box()
setup = "import torch\\nfrom course import show"
job = [("setup", "", setup), ("check", "f", "show('f', torch.ones(2).sum())")]
boxed = box.run(job, 0)
print(json.dumps({
    "prefixes": [sys.prefix, sys.base_prefix],
    "denials": [asdict(d) for d in box.prove()],
    "boxed": asdict(boxed),
    "weaker": box.guarantees(),
}))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that other users may read, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="course-place-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def conda(place: Path) -> Path:
    """An environment laid out as conda's: a whole Python whose prefix is its base."""
    home = place / "conda" / "envs" / "course"
    if not home.exists():
        base = Path(os.path.realpath(sys.base_prefix))
        (home / "bin").mkdir(parents=True)
        binary = home / "bin" / VERSION
        shutil.copy2(mounts.interpreter(), binary)
        ours = os.fsencode(base / "lib")  # conda's binaries look for libraries beside themselves
        beside = b"$ORIGIN/../lib".ljust(len(ours), b"\0")
        binary.write_bytes(binary.read_bytes().replace(ours + b"\0", beside + b"\0"))
        (home / "bin" / "python").symlink_to(VERSION)
        (home / "conda-meta").mkdir()
        left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__")
        library = home / "lib" / VERSION
        shutil.copytree(
            base / "lib" / VERSION, library, ignore=left_out, copy_function=link, symlinks=True
        )
        for shared in (base / "lib").glob("libpython3*"):
            link(str(shared), str(home / "lib" / shared.name))
        (library / "site-packages").symlink_to(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


def system(place: Path) -> Path:
    """A venv of the system's Python whose packages lie elsewhere."""
    home = place / "venv"
    if not home.exists():
        subprocess.run([SYSTEM, "-m", "venv", "--without-pip", home], check=True)
        packages = home / "lib" / VERSION / "site-packages"
        packages.rmdir()
        packages.symlink_to(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


LAYOUTS = [conda, system] if SYSTEM.exists() else [conda]


@pytest.mark.parametrize("ordinary", [False, True] if os.geteuid() == 0 else [False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_python_and_user_makes_the_box(layout, ordinary, place):
    python = layout(place)
    # the probe asks for a model that can be read; the true one may lie in root's home
    model = place / "cache" / "smollm2"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    env = {"PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(mounts.ROOT)}
    env |= {"COURSE_CACHE": str(model.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    user = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if ordinary else {}
    can_read = [python, "-c", "import course.grade.box, IPython"]
    tried = subprocess.run(can_read, env=env, cwd="/", capture_output=True, text=True, **user)
    if tried.returncode:
        pytest.skip(f"this user and Python cannot import the course: {tried.stderr[-200:]}")
    ran = subprocess.run(
        [python, "-c", GRADER], env=env, cwd="/", capture_output=True, text=True, **user
    )
    if "may not make namespaces" in ran.stderr:
        pytest.skip(f"the kernel lets ordinary users make no namespaces: {ran.stderr[-200:]}")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [d for d in found["denials"] if not d["ok"]] == []
    assert found["boxed"]["status"] == "ok"
    assert found["boxed"]["checks"]["f"]["shown"][0]["values"] == [2.0]
    assert found["prefixes"][0].startswith(str(place))
    assert any("ran as one user" in weaker for weaker in found["weaker"]) == (
        ordinary or os.geteuid() != 0
    )


def shown(cell: str) -> list:
    """What one check shows in a box made now."""
    job = [("setup", "", "from course import show"), ("check", "f", cell)]
    boxed = Box(Limits(seconds=30)).run(job, 0)
    assert boxed.status == "ok" and not boxed.checks["f"].error, boxed
    return boxed.checks["f"].shown[0]["values"]


def test_an_installed_course_does_not_bring_the_answers_along(place, monkeypatch):
    """`pip install` without `-e` puts solutions and kernels beside the other packages."""
    folder = place / "installed"
    for name in ("solutions", "kernels", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("answer = 1\n")
    packages = [str(folder), *mounts.packages()]
    monkeypatch.setattr(mounts, "packages", lambda: packages)
    cell = """
import importlib
found = []
for name in ("solutions", "kernels", "other"):
    found.append(str(getattr(importlib.import_module(name), "answer", "nothing")))
show("f", found)
"""
    assert shown(cell) == ["nothing", "nothing", "1"]
    denials = {d.name: d for d in Box().prove()}
    assert denials["no answers to import"].ok
    monkeypatch.setattr(mounts, "ANSWERS", ())
    assert shown(cell) == ["1", "1", "1"]


def test_a_checkout_below_usr_is_covered(monkeypatch):
    """Containers like to work in /usr/src/app; some of /usr is shown."""
    folder = Path("/usr/share", sorted(os.listdir("/usr/share"))[0])
    cell = f"import os; show('f', len(os.listdir({str(folder)!r})))"
    assert folder.is_dir() and shown(cell) == [len(os.listdir(folder))]
    monkeypatch.setattr(mounts, "ROOT", folder)
    assert shown(cell) == [0]
    with pytest.raises(AssertionError, match="Read-only"):
        shown(f"open({str(folder / 'x')!r}, 'w')")


def test_the_model_is_where_the_child_looks_for_it():
    cell = """
from pathlib import Path
from course.lm import weights
show("f", [(weights.model_dir() / "config.json").stat().st_size, str(weights.model_dir().parent)])
"""
    from course.lm import weights

    assert shown(cell) == [(weights.model_dir() / "config.json").stat().st_size, "/box/cache"]
