"""Cut what one cell prints, in the kernel, before megabytes of it travel to a client."""

import sys
from typing import Any


def install(limit: int) -> None:
    """From now on each cell may print `limit` characters to stdout and stderr together."""
    from IPython import get_ipython

    shell, used = get_ipython(), {"n": 0, "told": False}

    def reset(*_: Any) -> None:
        used["n"], used["told"] = 0, False

    shell.events.register("pre_run_cell", reset)
    for stream in (sys.stdout, sys.stderr):
        stream.write = _capped(stream, stream.write, used, limit)


def _capped(stream: Any, write: Any, used: dict, limit: int) -> Any:
    def capped(text: str) -> int:
        room = limit - used["n"]
        used["n"] += len(text)
        if room > 0:
            write(text[:room])
        if used["n"] > limit and not used["told"]:
            used["told"] = True
            write(f"\n[output cut after {limit:,} characters]\n")
        return len(text)

    return capped
