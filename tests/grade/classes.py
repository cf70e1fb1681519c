"""Synthetic classes to grade: who hands in what is decided by a name and a number alone.

Every kind of submission comes with what must become of it, so that a whole class can be judged.
"""

import io
import json
import os
import random
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from course import catalog, mutants, recordfile, solutions
from course.catalog import Chapter
from course.recordfile import Record


@dataclass(frozen=True)
class Handed:
    """One submission of a class: its kind and the exercises that pass (None: it is unreadable).

    Those in `may` use a wrong answer, which need not show there: a softmax in fp16 does no harm to
    a model in fp32.
    """

    id: str
    kind: str
    passes: frozenset[str] | None
    path: Path
    may: frozenset[str] = frozenset()


@dataclass
class School:
    """The material of one chapter: pristine cells, right, second and wrong answers."""

    chapter: Chapter
    record: Record = field(init=False)
    ours: dict[str, str] = field(init=False)
    second: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.record = recordfile.load(self.chapter)
        self.ours = mutants.references(self.chapter, self.record)
        path = self.chapter.second_answers
        self.second = {key: solutions.from_file(path, key) for key in self.record.keys}
        self.wrong = [
            m for m in mutants.written(self.chapter) if not m.shortcut and not _may_hang(m.source)
        ]

    def notebook(self, answers: dict[str, str]) -> dict:
        """The chapter's notebook with some answers, as plain JSON."""
        cells = []
        for kind, key, source in self.record.cells:
            if kind == "answer" and key in answers:
                source = solutions.answer_cell(key, answers[key])
            tags = [f"{kind}-{key}" if key else kind]
            cells.append(code(source, tags))
        return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def school(slug: str = "kv_cache") -> School:
    return School(catalog.find(slug))


def code(source: str, tags: list[str] | None = None) -> dict:
    about = {"tags": tags} if tags else {}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": about,
        "outputs": [],
        "source": source,
    }


def _may_hang(source: str) -> bool:
    return "while" in source


# what goes below the right answer to the first exercise, inside its function or at top level
HOSTILE = {
    "exit": "    raise SystemExit(0)",
    "os_exit": "    import os\n    os._exit(0)",
    "kill_parent": "    import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
    "reads_answers": "    from solutions.foundations.kv_cache import {key} as f\n"
    "    return f(*a, **k)",
    "patches_show": "    import course.runtime as r\n    r.STATE.shown.clear()\n    return 0",
    "patches_require": "    import course\n    course.require = lambda *a: None\n    return 1.5",
    "always_equal": "    class E(int):\n        __eq__ = lambda s, o: True\n"
    "        __hash__ = int.__hash__\n    return E(1)",
    "recursion": "    return {key}(*a, **k)",
    "long_text": "    raise ValueError('=HYPERLINK(1)' + '\\x00\\x1b[2J\\ud800<script>' * 10_000)",
}


def hostile(first: str, name: str) -> str:
    body = HOSTILE[name].replace("{key}", first)
    return f"def {first}(*a, **k):\n{body}\n"


def members(*named: tuple[str, bytes]) -> bytes:
    """A zip with these members, in order, even where names repeat."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in named:
            archive.writestr(name, content)
    return data.getvalue()


KINDS = (
    *("correct", "second", "wrong", "correct_zip", "half", "malicious", "wrong", "empty"),
    *("stripped", "corrupt", "malicious", "second", "wrong", "colab", "link", "not_a_zip"),
)


def build(folder: Path, count: int, taught: School, only: tuple[str, ...] = ()) -> list[Handed]:
    """Write a class of `count` submissions; the same `count` gives the same bytes.

    Args:
        only: exercises that anybody attempts; default all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return list(_build(folder, count, taught, only or tuple(taught.record.keys)))


def _build(folder: Path, count: int, taught: School, keys: tuple[str, ...]) -> Iterator[Handed]:
    everything, slug = frozenset(keys), taught.chapter.slug
    ours = {key: taught.ours[key] for key in keys}
    wrong = [m for m in taught.wrong if m.key in keys]
    attacks = list(HOSTILE)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        draw = random.Random(f"{count}/{number}")
        id = f"s{number:04d}_{kind}"
        place = folder / id / "notebooks" / taught.chapter.part / f"{slug}.ipynb"
        answers, passes, may = dict(ours), everything, frozenset()
        if kind == "second":
            answers = {key: taught.second[key] for key in keys}
        elif kind == "wrong":
            mutant = draw.choice(wrong)
            answers[mutant.key] = mutant.source
            may = frozenset(dependents(taught, mutant.key))
            passes = everything - {mutant.key} - may
        elif kind == "half":
            answers = {key: ours[key] for key in keys[: len(keys) // 2]}
            passes = frozenset(answers)
        elif kind == "malicious":
            answers[keys[0]] = hostile(keys[0], attacks[number // 5 % len(attacks)])
            passes = everything - {keys[0]} - dependents(taught, keys[0])
        elif kind == "empty":
            answers, passes = {}, frozenset()
        raw = taught.notebook(answers)
        if kind == "stripped":
            for cell in raw["cells"]:
                cell["metadata"] = {}
        if kind == "colab":
            for cell in raw["cells"]:
                cell["source"] = cell["source"].replace("\n", "\r\n").splitlines(keepends=True)
                cell["metadata"] = {"id": "aBc", "colab": {"base_uri": "https://localhost/"}}
        data = json.dumps(raw).encode()
        if kind == "correct_zip":
            place = folder / f"{id}.zip"
            data = members(("repo-main/README.md", b"x"), (f"repo-main/work/{slug}.ipynb", data))
        elif kind == "corrupt":
            data, passes = data[: len(data) // 2], None
        elif kind == "not_a_zip":
            place, passes = folder / f"{id}.zip", None
        elif kind == "link":
            passes = None
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            os.symlink(taught.chapter.ipynb, place)
        else:
            place.write_bytes(data)
        yield Handed(id, kind, passes, place, may)


def dependents(taught: School, key: str) -> frozenset[str]:
    return frozenset(e.key for e in taught.record.exercises if key in e.needs)


def statuses(verdict: dict, slug: str = "kv_cache") -> dict[str, str]:
    """Exercise -> status of one verdict file."""
    return {row["key"]: row["status"] for row in verdict["chapters"][slug]["exercises"]}
