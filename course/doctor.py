"""Is this machine ready for the course, and if not, what to do."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass

from course.catalog import ROOT


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `ok` is None where the thing is optional and absent."""

    name: str
    ok: bool | None
    detail: str


def examine() -> list[Finding]:
    """Look at Python, packages, kernel, model, GPU and the optional system programs."""
    return [_python(), *_packages(), _kernel(), _model(), _triton(), *_programs()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Finding("Python", ok, version if ok else f"{version}: use 3.11, 3.12 or 3.13")


def _packages() -> list[Finding]:
    pins = ROOT / "constraints.txt"
    if not pins.exists():
        return [Finding("packages", False, f"no checkout at {ROOT}: clone the course")]
    wanted = dict(re.findall(r"^([\w.-]+)==(\S+)$", pins.read_text(encoding="utf-8"), re.M))
    found = []
    for name in ("torch", "triton", "nbval", "jupytext", "ipykernel", "jupyterlab"):
        try:
            version = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            optional = name == "triton" and sys.platform != "linux"
            advice = "needs Linux" if optional else "missing: run `make setup`"
            found.append(Finding(name, None if optional else False, advice))
            continue
        tested = wanted.get(name, version)
        note = "" if version == tested else f" (the course is tested with {tested})"
        found.append(Finding(name, True, version + note))
    return found


def _kernel() -> Finding:
    from jupyter_client.kernelspec import KernelSpecManager

    names = KernelSpecManager().find_kernel_specs()
    if "python3" in names:
        return Finding("Jupyter kernel", True, "python3")
    return Finding("Jupyter kernel", False, "none: run `python -m ipykernel install --sys-prefix`")


def _model() -> Finding:
    from course.lm import weights

    if weights.model_dir().is_dir():
        return Finding("model", True, f"SmolLM2-135M-Instruct in {weights.model_dir()}")
    return Finding("model", False, "not prepared: run `make model` (88 MB download)")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("GPU", None, "no Triton here: kernel exercises are not checkable")
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", True, torch.cuda.get_device_name())
    return Finding("GPU", None, "none: kernels run in the interpreter and are compiled only")


def _programs() -> list[Finding]:
    uses = {"chromium": "browser tests of the website", "bwrap": "the box for grading a class"}
    root = "" if os.geteuid() == 0 else " (as root)"
    return [
        Finding(
            name,
            bool(shutil.which(name)) or None,
            shutil.which(name) or f"absent; only needed for {use}: install it{root}",
        )
        for name, use in uses.items()
    ]
