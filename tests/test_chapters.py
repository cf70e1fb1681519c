"""Every ready chapter meets everything that `course verify` demands."""

import importlib
import os

import pytest

from course import catalog, solutions, verify

READY = [c.slug for c in catalog.chapters() if c.status == "ready"]


@pytest.mark.parametrize("slug", READY)
def test_the_chapter_is_fit(slug: str) -> None:
    execute = bool(os.environ.get("COURSE_TEST_ALL"))
    ticks = list(verify.verify(catalog.find(slug), execute))
    assert len(ticks) > 10
    assert [f"{t.name}: {t.detail}" for t in ticks if not t.ok] == []


@pytest.mark.parametrize("slug", READY)
def test_the_solutions_export_every_answer(slug: str) -> None:
    """What an engine or a reader gets from `from solutions... import *`."""
    chapter = catalog.find(slug)
    module = importlib.import_module(f"solutions.{chapter.part}.{slug}")
    assert sorted(module.__all__) == sorted(solutions.keys(chapter.solution))
