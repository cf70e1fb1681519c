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


class Family:
    """A family's source as one module, in which one function is exchanged again and again.

    Loading the whole source for every mutant would take longer than most mutants run.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source, self.folder = source, folder
        path = folder / "unchanged.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("unchanged", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.unchanged = dict(vars(self.module))

    def restore(self) -> None:
        vars(self.module).clear()
        vars(self.module).update(self.unchanged)

    def exchange(self, name: str, mutant: str, file: str) -> None:
        """Put `mutant` in place of function `name`, decorators kept, lines numbered as ever."""
        original = definition(self.source, name)
        start = self.source.index(original)
        head = self.source[:start].splitlines(keepends=True)
        decorators = len(head)
        while decorators and head[decorators - 1].startswith("@"):
            decorators -= 1
        path = self.folder / file
        path.write_text(self.source.replace(original, mutant))  # Triton reads a kernel's file
        text = "\n" * decorators + "".join(head[decorators:]) + mutant
        self.restore()
        self.module.__file__ = str(path)
        exec(compile(text, path, "exec"), vars(self.module))


def assert_every_mutant_is_noticed(
    source: str,
    name: str,
    equivalent: Mapping[str, str],
    detectors: Iterable[Detector],
    folder: Path,
) -> None:
    """Edit function `name` of a family's `source` in every way and run the detectors on each.

    Args:
        equivalent: id of a mutant that changes nothing -> why, in one line. At most 5%.
        detectors: tried in order, so put the cheap ones first; each says whether a module is
            wrong. An exception counts as noticed.
    """
    detectors, family = list(detectors), Family(source, folder)
    assert [detector.__name__ for detector in detectors if detector(family.module)] == []

    def survives(number: int, mutant: Mutation) -> bool:
        try:
            family.exchange(name, mutant.source, f"m{number}.py")
            return not any(detector(family.module) for detector in detectors)
        except Exception:
            return False

    mutants = mutations(definition(source, name))
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
