"""Every ready chapter meets everything that `course verify` demands."""

import os

import pytest

from course import catalog, verify

READY = [c.slug for c in catalog.chapters() if c.status == "ready"]


@pytest.mark.parametrize("slug", READY)
def test_the_chapter_is_fit(slug: str) -> None:
    execute = bool(os.environ.get("COURSE_TEST_ALL"))
    ticks = list(verify.verify(catalog.find(slug), execute))
    assert len(ticks) > 10
    assert [f"{t.name}: {t.detail}" for t in ticks if not t.ok] == []
