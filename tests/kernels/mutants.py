"""Break a family on purpose: every automatic edit must be noticed or be proven harmless."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

from triton.runtime.jit import KernelInterface

from course.lab.launch import pretending
from course.lab.mutate import Mutation, mutations

Detector = Callable[[ModuleType], bool]


def definition(source: str, name: str) -> str:
    """The text of a top-level function without its decorator."""
    start = source.index(f"def {name}(")
    ends = [source.find(mark, start) for mark in ("\n@triton.jit", "\ndef ", "\n@dataclass")]
    return source[start : min((end for end in ends if end > 0), default=len(source))]


def load(source: str, path: Path) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_every_mutant_is_noticed(
    source: str,
    name: str,
    equivalent: Mapping[str, str],
    detectors: Iterable[Detector],
    folder: Path,
) -> None:
    """Edit function `name` of a family's `source` in every way and load each as a module.

    Args:
        equivalent: id of a mutant that changes nothing -> why, in one line. At most 5%.
        detectors: tried in order, so put the cheap ones first; each says whether a module is
            wrong. An exception counts as noticed.
    """
    original, detectors = definition(source, name), list(detectors)
    unchanged = load(source, folder / "unchanged.py")
    assert [detector.__name__ for detector in detectors if detector(unchanged)] == []

    def survives(number: int, mutant: Mutation) -> bool:
        try:
            module = load(source.replace(original, mutant.source), folder / f"m{number}.py")
            return not any(detector(module) for detector in detectors)
        except Exception:
            return False

    mutants = mutations(original)
    survivors = {mutant.id for i, mutant in enumerate(mutants) if survives(i, mutant)}
    assert survivors == set(equivalent), sorted(survivors ^ set(equivalent))
    assert len(equivalent) <= 0.05 * len(mutants)


def launches(start: Callable[[], object], target: str = "sm_90") -> list[tuple[str, tuple, dict]]:
    """(kernel name, grid, keyword arguments) of what `start()` launches, without running it."""
    asked = []
    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: (
        lambda *args, **options: asked.append((kernel.__name__, grid, options))
    )
    try:
        with pretending(target):
            start()
    finally:
        KernelInterface.__getitem__ = before
    return asked
