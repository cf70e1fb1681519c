"""What the tests of `course.lm` share: one thread, a tiny model, and SmolLM2 loaded once."""

from collections.abc import Iterator

import pytest
import torch

from course.lm import Config, Llama, load, random_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny() -> Llama:
    config = Config(
        n_layers=3, n_heads=6, n_kv_heads=2, head_dim=10, hidden=28, intermediate=52, vocab=101
    )
    return random_model(config, torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def smollm2() -> Llama:
    return load()
