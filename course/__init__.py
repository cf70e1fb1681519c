"""The machinery of the course. What a chapter's cells use is imported here; the rest stays lazy."""

from course.runtime import begin, demo, forbid, require, rng, show

__all__ = ["begin", "demo", "forbid", "require", "rng", "show"]
