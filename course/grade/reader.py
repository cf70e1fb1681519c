"""Read submissions in a child process with limits on memory and time.

The child only parses, it never runs a learner's code, so one serves many submissions; a file that
exhausts it costs that file, and the next one gets a new child.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from course.catalog import ROOT
from course.grade import submissions

MEMORY = 3 << 30  # bytes of address space
SECONDS = 20.0  # for one submission
MAX_REPLY = 64 << 20
_GAVE_UP = "it cannot be read: it takes too much time or memory"


class Reader:
    """A warm child. Use as a context manager; requests from several threads wait for each other."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._limits = seconds, memory
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        self._closed = False

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._stop()

    def read(self, path: Path, slugs: list[str]) -> dict:
        """See `submissions.read`. A submission that exhausts the child has that as its problem."""
        nothing = {"digest": "", "problem": _GAVE_UP, "chapters": {}}
        return self._ask({"do": "read", "path": os.path.abspath(path), "slugs": slugs}, nothing)

    def present(self, path: Path, slugs: list[str]) -> list[str]:
        """See `submissions.present`."""
        reply = self._ask(
            {"do": "present", "path": os.path.abspath(path), "slugs": slugs}, {"slugs": []}
        )
        return reply["slugs"]

    def _ask(self, request: dict, otherwise: dict) -> dict:
        with self._lock:
            for _ in range(2):  # the first child may have been ended from outside
                line = self._exchange(json.dumps(request).encode() + b"\n")
                if line:
                    return json.loads(line)
                self._stop()
        return otherwise

    def _exchange(self, request: bytes) -> bytes:
        if self._closed:  # a thread of an abandoned batch must not start a child again
            raise RuntimeError("this reader is closed")
        child = self._child = self._child or self._start()
        assert child.stdin and child.stdout  # PIPE was asked for
        try:
            child.stdin.write(request)
            return self._line(child.stdout.fileno())
        except OSError:
            return b""

    def _start(self) -> subprocess.Popen:
        seconds, memory = self._limits
        return subprocess.Popen(
            [sys.executable, "-m", "course.grade.reader", str(int(seconds)), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=ROOT,  # never a folder in which a learner's `course` could lie
            env={**os.environ, "PYTHONSAFEPATH": ""},  # `-m` looks there
        )

    def _line(self, replies: int) -> bytes:
        """One line, or nothing if the child ends, takes too long or says too much."""
        deadline, parts, size = time.monotonic() + self._limits[0], [], 0
        while size <= MAX_REPLY:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([replies], [], [], left)[0]:
                break
            part = os.read(replies, 1 << 20)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if part.endswith(b"\n"):
                return b"".join(parts)
        return b""

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe:
                    pipe.close()


def _serve(seconds: int, memory: int) -> None:
    """The child: one JSON request per line in, one JSON reply per line out; ends with its input."""
    import resource

    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a parser prints goes nowhere
    with suppress(ValueError, OSError):  # some systems know no limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # the parent may be gone before it can stop an endless parse
        cap = int(time.process_time()) + 2 * seconds
        resource.setrlimit(resource.RLIMIT_CPU, (cap, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        path, slugs = Path(request["path"]), request["slugs"]
        if request["do"] == "present":
            reply: dict = {"slugs": submissions.present(path, slugs)}
        else:
            reply = submissions.read(path, slugs)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
