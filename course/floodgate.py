"""Cut what one cell sends, in the kernel, before megabytes of it travel to a client."""

import os
import sys
from typing import Any

from course.runtime import MIME


class Gate:
    """Stands for stdout or stderr and passes on at most `limit` characters a cell.

    A new object rather than a patched stream: IPython swaps a stream's `write` while a cell runs
    and puts back what it found before.
    """

    def __init__(self, stream: Any, limit: int):
        self._stream, self._limit, self._used = stream, limit, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        room = self._limit - self._used
        self._used += len(text)
        if room >= 0:
            self._stream.write(text[:room])
            if self._used > self._limit:
                self._stream.write(f"\n[output cut after {self._limit:,} characters]\n")
        return len(text)

    def reset(self, *_: Any) -> None:
        self._used = 0


def install(limit: int) -> None:
    """From now on each cell may print `limit` characters to stdout, and as many to stderr.

    Displays that are not lines of `show`, and what C code and child processes write past Python,
    go nowhere: nobody looks at them here, and they would pile up in the client.
    """
    from IPython import get_ipython

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name in ("stdout", "stderr"):
        gate = Gate(getattr(sys, name), limit)
        setattr(sys, name, gate)
        get_ipython().events.register("pre_run_cell", gate.reset)
    get_ipython().display_pub.register_hook(_only_lines)


def _only_lines(message: dict) -> dict | None:
    return message if MIME in message["content"].get("data", {}) else None
