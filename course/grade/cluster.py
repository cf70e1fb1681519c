"""Run boxes here or on a Dask cluster.

A worker gets cells and a seed, starts the box beside itself and returns plain data; it never
learns what is expected. Learners' code runs in the box alone, never in the worker. Everything that
a worker or the network can do wrong ends as `infrastructure`, which the grader tries once more.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any

from course.errors import CourseError
from course.grade.box import INFRASTRUCTURE, Box, Boxed, Denial, Limits, reap
from course.grade.child import PATIENCE
from course.grade.grader import Cells, Executor
from course.grade.results import code_hash
from course.shell import Ran

MARGIN = 60.0  # seconds beyond the box's own limits until a worker counts as hanging
_CONFIG = {
    "distributed.scheduler.allowed-failures": 0,  # a task that lost its worker comes back to us
    "distributed.scheduler.worker-saturation": 1.0,  # nothing waits behind a running box
    "distributed.admin.tick.limit": "60s",  # a busy machine is no news
    "distributed.worker.daemon": True,
    # no pages about the cluster, which anybody on this machine could read
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}


class Here:
    """Runs boxes in this process, one at a time."""

    width = 1

    def __init__(self, box: Box) -> None:
        self._box = box

    def run(self, cells: Cells, seed: int) -> Boxed:
        return self._box.run(cells, seed)


@contextmanager
def executor(box: Box, workers: int, scheduler: str = "") -> Iterator[Executor]:
    """What runs the boxes: this process for one worker, else a local or the given Dask cluster.

    Args:
        box: its limits and safety hold for the workers' boxes too.
        workers: how many boxes run at once; ignored with a scheduler, which knows its workers.
        scheduler: the address of a running scheduler, `tls://...`.

    Raises CourseError if Dask is missing, the address is not safe or its workers cannot be used.
    """
    if workers == 1 and not scheduler:
        yield Here(box)
        return
    try:
        import dask
        from distributed import Client, LocalCluster
        from distributed.security import Security
    except ImportError:
        raise CourseError(
            "more than one worker needs Dask: `pip install -e '.[grade]'`, or say `--workers 1`"
        ) from None
    with dask.config.set(_CONFIG):
        if scheduler:
            with _connected(Client, scheduler) as client:
                yield Dask(client, box, prove=True)
            return
        # TLS even on loopback: other users of this machine must not be able to submit work
        with (
            _safe_path(),
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                memory_limit=None,  # the box has its own
                security=Security.temporary(),
                protocol="tls",
                silence_logs="CRITICAL",
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            yield Dask(client, box, prove=False)
        reap()  # of a worker that died


@contextmanager
def _safe_path() -> Iterator[None]:
    """Workers and multiprocessing's own helper import nothing from the folder that we stand in.

    They are `python -c`, and the folder may be that of the submissions.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _connected(client: Any, scheduler: str) -> Any:
    if not scheduler.startswith("tls://"):
        raise CourseError(
            f"`--scheduler {scheduler}` is not encrypted, and whoever reaches an open scheduler "
            f"runs code on its workers: start it with TLS and say tls://HOST:PORT"
        )
    try:
        return client(scheduler, set_as_default=False, timeout=20)
    except (OSError, TimeoutError, ValueError, TypeError) as problem:
        raise CourseError(
            f"no scheduler answers at {scheduler} ({str(problem)[:200]}): are the certificates in "
            f"Dask's configuration (distributed.comm.tls)?"
        ) from None


class Dask:
    """Runs boxes on the workers of a Dask cluster, one per thread.

    Args:
        prove: the workers are other machines, whose boxes have to be proven there.
    """

    def __init__(self, client: Any, box: Box, prove: bool) -> None:
        self._client = client
        self._plan = {
            "limits": asdict(box.limits),
            "unsafe": box.unsafe,
            "prove": prove and not box.unsafe,
            "course": code_hash(),
        }
        self._patience = PATIENCE * box.limits.seconds + MARGIN
        try:
            client.wait_for_workers(1, timeout=MARGIN)
        except TimeoutError:
            raise CourseError(
                "the scheduler has no workers: start some with `dask worker`"
            ) from None
        self.width = sum(client.nthreads().values())
        for address, fault in client.run(_fault, self._plan).items():
            if fault:
                raise CourseError(f"the worker at {address} cannot be used: {fault}")

    def run(self, cells: Cells, seed: int) -> Boxed:
        """See `Box.run`. CourseError if the scheduler is gone: then nothing more can be graded."""
        start, key, future = time.monotonic(), f"box-{uuid.uuid4().hex}", None
        try:
            future = self._client.submit(
                _work, self._plan, cells, seed, key=key, pure=False, retries=0
            )
            said = future.result(timeout=self._patience)
        except TimeoutError:
            self._restart(key)
            return Boxed(INFRASTRUCTURE, detail="its worker did not answer")
        except Exception as problem:  # a lost worker has many names
            if self._client.status != "running":
                raise CourseError(
                    "the scheduler is gone: start it again and say `--resume`"
                ) from None
            what = f"its worker failed ({type(problem).__name__}: {str(problem)[:200]})"
            return Boxed(INFRASTRUCTURE, detail=what, seconds=time.monotonic() - start)
        finally:
            if future is not None:
                future.release()
        checks = {name: Ran(**ran) for name, ran in said.pop("checks").items()}
        return Boxed(checks=checks, **said)

    def _restart(self, key: str) -> None:
        """Replace the worker that hangs over a task; its nanny kills it."""
        try:
            busy = [w for w, keys in self._client.processing().items() if key in map(str, keys)]
            self._client.restart_workers(busy, timeout=MARGIN, raise_for_error=False)
        except Exception as problem:
            raise CourseError(
                f"a worker hangs and cannot be replaced ({type(problem).__name__}): stop it, then "
                f"say `--resume`"
            ) from None


def _work(plan: dict, cells: Cells, seed: int) -> dict:
    """On a worker: run one box and return plain data."""
    fault = _fault(plan)
    if fault:
        return asdict(Boxed(INFRASTRUCTURE, detail=fault))
    return asdict(_box(_key(plan)).run([(kind, key, source) for kind, key, source in cells], seed))


def _fault(plan: dict) -> str:
    """On a worker: why it must not be used, or an empty string."""
    if plan["course"] != code_hash():
        return "it has another version of the course"
    return _proof(_key(plan)) if plan["prove"] else ""


def unproven(denials: list[Denial]) -> str:
    """What a box failed to deny, in one sentence, or an empty string."""
    open_ = [f"{d.name} ({d.detail})" if d.detail else d.name for d in denials if not d.ok]
    return f"its box does not deny {', '.join(open_)}" if open_ else ""


def _key(plan: dict) -> tuple:
    return (*plan["limits"].items(), ("unsafe", plan["unsafe"]))


@cache
def _box(key: tuple) -> Box:
    """This process's box: one, so that no user id is given out twice."""
    fields = dict(key)
    unsafe = fields.pop("unsafe")
    return Box(Limits(**fields), unsafe)


@cache
def _proof(key: tuple) -> str:
    try:
        return unproven(_box(key).prove())
    except CourseError as problem:
        return str(problem)
