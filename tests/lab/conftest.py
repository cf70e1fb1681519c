"""Kernels under test are written to files, because `@triton.jit` reads its source."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)
HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
numbers = itertools.count()


@pytest.fixture
def module_of(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Import a source text as a module, with torch, triton and tl already there."""

    def load(source: str) -> ModuleType:
        path = tmp_path / f"written_{next(numbers)}.py"
        path.write_text(HEADER + source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
