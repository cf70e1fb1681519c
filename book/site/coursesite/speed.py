"""What takes long in a build of the whole course, and need not.

`python -m course.bench.site` measures it.
"""

import functools
import gc
import os

from pybtex import plugin
from sphinx.search.en import SearchEnglish

CORES = 4  # resolving references and the search index stay with one, so more would wait
ALLOCATIONS = 50_000  # between two searches for garbage; Python's 700 suit smaller heaps


def remember(owner, name: str) -> None:
    """Let a function of a module or class keep its results for as long as this process builds."""
    function = getattr(owner, name)
    if not hasattr(function, "cache_info"):
        setattr(owner, name, functools.cache(function))


def write_in_parallel(app, env):
    """`env-updated`: pages are written on several cores, after having been read on one."""
    app.parallel = min(os.cpu_count() or 1, CORES)


def setup(app):
    gc.set_threshold(ALLOCATIONS, 20, 100)
    remember(plugin, "_load_entry_point")  # for each citation: what is installed, from the disk
    remember(SearchEnglish, "stem")  # for each page: the stem of the same words
    app.connect("env-updated", write_in_parallel)
