"""The catalog (`course/catalog.yml`) and where a chapter's files lie in the checkout."""

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from course.errors import CourseError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Chapter:
    """One row of the catalog.

    `minutes` is the learner's time, `seconds` the CI budget, `about` one sentence for search
    engines and part pages, which every ready chapter has.
    """

    slug: str
    part: str
    title: str
    sources: tuple[str, ...]
    prerequisites: tuple[str, ...]
    minutes: int
    seconds: int
    kernel: str
    status: str
    about: str = ""

    @property
    def md(self) -> Path:
        """The source of truth: prose, stubs and checks."""
        return ROOT / "notebooks" / self.part / f"{self.slug}.md"

    @property
    def ipynb(self) -> Path:
        """Its built pair: the stubs with the recorded outputs."""
        return self.md.with_suffix(".ipynb")

    @property
    def record(self) -> Path:
        """What the reference answers showed, for the checks to compare with."""
        return self.md.with_suffix(".record.json")

    @property
    def solution(self) -> Path:
        return ROOT / "solutions" / self.part / f"{self.slug}.py"

    @property
    def mutants(self) -> Path:
        return ROOT / "tests" / "mutants" / self.part / f"{self.slug}.py"

    @property
    def second_answers(self) -> Path:
        return ROOT / "tests" / "answers" / self.part / f"{self.slug}.py"

    @property
    def work(self) -> Path:
        """The learner's own copy."""
        return ROOT / "work" / f"{self.slug}.ipynb"


@cache
def _load() -> tuple[str, dict[str, str], dict[str, Chapter]]:
    raw = yaml.safe_load((Path(__file__).parent / "catalog.yml").read_text(encoding="utf-8"))
    rows = {}
    for row in raw["chapters"]:
        row["sources"], row["prerequisites"] = tuple(row["sources"]), tuple(row["prerequisites"])
        rows[row["slug"]] = Chapter(**row)
    return raw["repository"], raw["parts"], rows


def repository() -> str:
    """The address of the course's repository."""
    return _load()[0]


def parts() -> dict[str, str]:
    """Folder name -> title of each part, in reading order."""
    return _load()[1]


def chapters() -> list[Chapter]:
    """All chapters, planned ones included, in reading order."""
    return list(_load()[2].values())


def find(name: str) -> Chapter:
    """The chapter called `name`: `slug`, `part/slug`, or a path that ends in the slug.

    Raises CourseError for an unknown name, with the nearest known one.
    """
    slug = Path(name).name.split(".")[0]
    rows = _load()[2]
    if slug in rows:
        return rows[slug]
    near = difflib.get_close_matches(slug, rows, n=1, cutoff=0.4)
    hint = f"did you mean `{near[0]}`?" if near else "`course list` shows all chapters"
    raise CourseError(f"no chapter is called `{slug}`: {hint}")


def ready(name: str) -> Chapter:
    """Like `find`, for a chapter that can be opened and checked.

    Raises CourseError if it is only planned, or if this is not a checkout of the course.
    """
    chapter = find(name)
    if not (ROOT / "notebooks").is_dir():
        raise CourseError(
            f"{ROOT} is not a checkout of the course (no folder `notebooks`): "
            f"clone {repository()} and install it with `pip install -e .`"
        )
    if chapter.status != "ready":
        raise CourseError(f"`{chapter.slug}` is planned, not written yet: see `course list`")
    return chapter
