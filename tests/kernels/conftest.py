"""Kernel tests run on poisoned memory: on the GPU if there is one, else metered on the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from course.lab.memory import poisoning

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "aot: compiles ahead of time, with the pinned Triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def running(device: torch.device) -> Callable[[], AbstractContextManager]:
    """`with running():` launches on the GPU, or interprets with bounds and races checked."""
    if device.type == "cuda":
        return contextlib.nullcontext
    from course.lab.meter import metered

    return metered


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    with poisoning():
        yield
