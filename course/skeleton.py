"""The first draft of a chapter, from its row in the catalog."""

from course.catalog import ROOT, Chapter, repository
from course.errors import CourseError
from course.recordfile import write_text

NOTEBOOK = '''---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# {title}

What you build, in one sentence, and the number to beat.

```{{code-cell}} ipython3
:tags: [setup]

# setup
import contextlib
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("course") is None:  # a bare Colab
    home = pathlib.Path("inference-from-scratch").absolute()
    url = "{url}"
    if not home.exists():
        clone = ["git", "clone", "--quiet", "--depth", "1", url, str(home)]
        subprocess.run(clone, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-e", str(home)]
    subprocess.run(pip, check=True)
    sys.path.insert(0, str(home))  # this kernel started before the install

import torch

with contextlib.suppress(ImportError):  # Triton exists for Linux only;
    import triton  # elsewhere all exercises but the last work without it
    import triton.language as tl

from course import begin, demo, forbid, require, rng, show

begin("{slug}")
```

## Why the naive way hurts

## The mechanism

### Exercise 1: the first step

*Difficulty 1 of 3 · 5 minutes*

Say what to build: shapes, dtypes, errors.

<details><summary>Hint</summary>

One hint that is not the answer.

</details>

<!-- solution: first_step -->

```{{code-cell}} ipython3
:tags: [answer-first_step]

# answer: first_step
def first_step(x: torch.Tensor) -> torch.Tensor:
    """Double `x` of any shape."""
    raise NotImplementedError("say what to do first")
```

```{{code-cell}} ipython3
:tags: [check-first_step]

# check: first_step
show("first_step", first_step(torch.randn(3, 5, generator=rng("first_step"))))
```

## The kernel

## What it buys

## Claims ledger

| claim | source | how | cell |
|---|---|---|---|

## Limits, and what to read next
'''

SOLUTION = '''"""Reference answers of the chapter `{slug}`."""

import torch


def first_step(x: torch.Tensor) -> torch.Tensor:
    """Double `x` of any shape."""
    # stub: say what to do first
    return 2 * x
'''

MUTANTS = '''"""Wrong answers that the checks of `{slug}` must reject."""

MUTANTS = {{
    "first_step": [
        ("not doubled", "2 * x", "x", "this is `x` itself: nothing was doubled"),
        ("tripled", "2 * x", "3 * x", "this is three times `x`: one too many"),
    ],
}}

SHORTCUTS: dict = {{}}

EQUIVALENT: dict = {{}}
'''

ANSWERS = '''"""Second correct answers of the chapter `{slug}`."""

import torch


def first_step(x: torch.Tensor) -> torch.Tensor:
    """Double `x` by adding it to itself."""
    return x + x
'''


def new(chapter: Chapter) -> list[str]:
    """Write the skeleton of a planned chapter. Returns the files written.

    Raises CourseError, before anything is written, if one of them exists.
    """
    names = {"slug": chapter.slug, "title": chapter.title, "url": repository()}
    files = {
        chapter.md: NOTEBOOK.format(**names),
        chapter.solution: SOLUTION.format(**names),
        chapter.mutants: MUTANTS.format(**names),
        chapter.second_answers: ANSWERS.format(**names),
        ROOT / "book" / "glossary" / f"{chapter.slug}.md": "",
        ROOT / "book" / "references" / f"{chapter.slug}.bib": "",
    }
    for path in files:
        if path.exists():
            raise CourseError(f"{path} exists already: `course new` never overwrites")
    for path, text in files.items():
        write_text(path, text)
    return [str(path.relative_to(ROOT)) for path in files]
