"""The serving parts under random load: what holds for every workload, and what breaks it.

The model is a fake: a slot of the cache holds a hash of the token that was written there and of
the slot before it, read back through the block table, and the next token is a hash of all slots
of the sequence. One wrong, stale or overwritten slot changes every token after it.
"""

import zlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from solutions.foundations.serving import PrefixCache, Scheduler

VOCAB = 3
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=list(HealthCheck),
)


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def history(tokens: list[int]) -> list[int]:
    """What the slots of a sequence must hold."""
    slots: list[int] = []
    for position, token in enumerate(tokens):
        slots.append(digest(slots[-1] if slots else 0, token, position))
    return slots


def alone(request: SimpleNamespace) -> list[int]:
    """The output of a request that has the machine to itself and no cache."""
    tokens = list(request.prompt)
    while True:
        tokens.append(digest(history(tokens)) % VOCAB)
        output = tokens[len(request.prompt) :]
        if len(output) == request.max_tokens or output[-1] in request.stop:
            return output


class FakeModel:
    """Writes and reads slots through the tables of a cache, and watches who holds them."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.slots: dict[tuple[int, int], int] = {}

    def place(self, seq: str, position: int) -> tuple[int, int]:
        block_size = self.cache.block_size
        return self.cache.tables[seq][position // block_size], position % block_size

    def read(self, seq: str, n: int) -> list[int]:
        return [self.slots[self.place(seq, t)] for t in range(n)]

    def write(self, seq: str, position: int, token: int) -> None:
        block, slot = self.place(seq, position)
        assert self.cache.refs[block] == 1, f"block {block} is written while others hold it"
        before = self.slots[self.place(seq, position - 1)] if position else 0
        self.slots[block, slot] = digest(before, token, position)

    def copy(self, source: int, target: int) -> None:
        for slot in range(self.cache.block_size):
            if (source, slot) in self.slots:
                self.slots[target, slot] = self.slots[source, slot]


def audit(cache: PrefixCache) -> None:
    """Every block is held by as many tables as `refs` says; no block is lost or invented."""
    held = [block for table in cache.tables.values() for block in table]
    assert [held.count(block) for block in range(cache.num_blocks)] == cache.refs
    assert cache.n_free == cache.num_blocks - len(set(held))
    assert len(set(held)) <= cache.num_blocks
    assert cache.tables.keys() == cache.lengths.keys()
    for seq, table in cache.tables.items():
        assert len(table) == -(-cache.lengths[seq] // cache.block_size)
        assert len(set(table)) == len(table)


@st.composite
def workloads(draw: st.DrawFn) -> SimpleNamespace:
    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    stems = [draw(st.lists(st.integers(0, VOCAB - 1), max_size=9)) for _ in range(2)]
    requests = []
    for i in range(number(1, 7)):
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
        requests.append(
            SimpleNamespace(
                id=f"r{i}",
                prompt=stems[number(0, 1)] + tail,
                max_tokens=number(1, 8),
                stop=draw(st.sampled_from([(), (), (0,)])),
                arrives=number(0, 6),
                aborts=draw(st.sampled_from([None, None, None, 1, 3, 6])),
                after_step=draw(st.booleans()),
            )
        )
    return SimpleNamespace(
        blocks=number(1, 12),
        block_size=number(1, 4),
        budget=number(1, 9),
        chunk=number(1, 6),
        requests=requests,
    )


def serve(load: SimpleNamespace, cache_class: type, scheduler_class: type) -> None:
    """Run a workload to its end and hold every property against it, at every step."""
    cache = cache_class(load.blocks, load.block_size)
    scheduler = scheduler_class(cache, load.budget, load.chunk)
    model = FakeModel(cache)
    arrived: list[str] = []
    outputs: dict[str, list[int]] = {}
    rejected: list[str] = []

    def abort(now: int, after_step: bool) -> None:
        for request in load.requests:
            live = request.id in scheduler.running + scheduler.waiting
            due = request.aborts is not None and now >= request.arrives + request.aborts
            if live and due and request.after_step == after_step:
                output = scheduler.abort(request.id)
                assert output == alone(request)[: len(output)]
                outputs[request.id] = output
                arrived.remove(request.id)

    for now in range(2000):
        for request in load.requests:
            if request.arrives == now:
                if scheduler.add(request) == "rejected":
                    rejected.append(request.id)
                else:
                    arrived.append(request.id)
        abort(now, after_step=False)
        plan = scheduler.step()
        audit(cache)
        assert scheduler.running + scheduler.waiting == arrived
        assert cache.tables.keys() == set(scheduler.running)
        assert sum(len(tokens) for _, _, tokens, _ in plan) <= load.budget
        assert len(scheduler.running) <= load.budget
        assert len({id for id, *_ in plan}) == len(plan)
        assert plan or not arrived, "live requests, but nothing to do"
        abort(now, after_step=True)
        sampled = {}
        for id, first, tokens, samples in plan:
            if id not in cache.tables:
                continue  # aborted meanwhile
            assert 1 <= len(tokens) <= max(load.chunk, 1)
            for position, token in enumerate(tokens, first):
                model.write(id, position, token)
            if samples:
                sampled[id] = digest(model.read(id, first + len(tokens))) % VOCAB
        for id, output in scheduler.commit(sampled).items():
            outputs[id] = output
            arrived.remove(id)
        audit(cache)
        if not arrived and now > max(r.arrives for r in load.requests):
            break
    else:
        raise AssertionError(f"requests that never end: {arrived}")

    assert cache.n_free == cache.num_blocks, "blocks leaked"
    for request in load.requests:
        slots = len(request.prompt) + request.max_tokens - 1
        if slots > load.blocks * load.block_size:
            assert request.id in rejected
        elif request.aborts is None:
            assert outputs[request.id] == alone(request)


@st.composite
def traces(draw: st.DrawFn) -> SimpleNamespace:
    """Calls on a small PrefixCache: (what, which sequence, a number)."""
    call = st.tuples(
        st.sampled_from(["alloc", "alloc", "append", "append", "fork", "free", "register"]),
        st.integers(0, 3),
        st.integers(0, 9),
    )
    return SimpleNamespace(
        blocks=draw(st.integers(2, 7)),
        block_size=draw(st.integers(1, 3)),
        calls=draw(st.lists(call, min_size=8, max_size=50)),
    )


def exercise(trace: SimpleNamespace, cache_class: type) -> None:
    """Play the calls; every sequence must read back its own history after each."""
    cache = cache_class(trace.blocks, trace.block_size)
    model = FakeModel(cache)
    told: dict[str, list[int]] = {}
    ever: list[list[int]] = []
    for what, which, number in trace.calls:
        seq = f"s{which}"
        before = (cache.n_free, list(cache.refs), {s: list(t) for s, t in cache.tables.items()})
        try:
            if what == "alloc" and seq not in told:
                tokens = [number % 2] * 2 + [number // 2 % 2] * (number // 2)
                shared = cache.match(tokens)
                known = len(shared) * trace.block_size
                assert known < len(tokens)
                cache.alloc(seq, len(tokens), shared)
                told[seq] = tokens
                for position in range(known, len(tokens)):
                    model.write(seq, position, tokens[position])
                if which:
                    cache.register(seq, tokens)
            elif what == "append" and seq in told:
                block, slot, copied_from = cache.append(seq)
                if copied_from is not None:
                    model.copy(copied_from, block)
                assert model.place(seq, len(told[seq])) == (block, slot)
                model.write(seq, len(told[seq]), number % 2)
                told[seq] = [*told[seq], number % 2]
            elif what == "fork" and seq in told and f"s{number % 4}" not in told:
                cache.fork(seq, f"s{number % 4}")
                told[f"s{number % 4}"] = told[seq]
            elif what == "free" and seq in told:
                cache.free(seq)
                del told[seq]
            elif what == "register" and seq in told:
                cache.register(seq, told[seq])
        except MemoryError:
            after = (cache.n_free, list(cache.refs), {s: list(t) for s, t in cache.tables.items()})
            assert after == before, "MemoryError changed something"
        audit(cache)
        for name, tokens in told.items():
            assert model.read(name, len(tokens)) == history(tokens)
            if tokens not in ever:
                ever.append(tokens)
        for tokens in ever[-5:]:
            found = [
                model.slots[block, slot]
                for block in cache.match([*tokens, 0, 0, 0])
                for slot in range(cache.block_size)
            ]
            known = history([*tokens, 0, 0, 0])
            assert found == known[: len(found)], "matched what is not there"
    for seq in list(told):
        cache.free(seq)
    assert sorted(cache.take() for _ in range(cache.n_free)) == list(range(cache.num_blocks))


@FIXED
@given(workloads())
def test_every_workload_ends_as_if_each_request_ran_alone(load: SimpleNamespace) -> None:
    serve(load, PrefixCache, Scheduler)


# a and p compute one prefix, a is forked, and only then finds p's copy in the cache: found by
# somebody who read the contracts, in an earlier register that switched a's table all the same.
BESIDE_A_FORK = SimpleNamespace(
    blocks=5,
    block_size=2,
    calls=[
        ("alloc", 0, 4),
        ("alloc", 1, 0),
        ("fork", 0, 3),
        ("register", 0, 0),
        ("free", 0, 0),
        ("free", 1, 0),
        ("alloc", 0, 9),
        ("register", 0, 0),
    ],
)


@settings(FIXED, max_examples=200)
@given(traces())
@example(BESIDE_A_FORK)
def test_every_sequence_reads_back_its_own_history(trace: SimpleNamespace) -> None:
    exercise(trace, PrefixCache)


class LeakOnAbort(Scheduler):
    """abort forgets the request and keeps its blocks."""

    def abort(self, id: str) -> list[int]:
        self._plan = [work for work in self._plan if work[0] != id]
        (self.running if id in self.running else self.waiting).remove(id)
        return self._live.pop(id).output


class PlanKeepsAborted(Scheduler):
    """abort leaves the request in the open plan."""

    def abort(self, id: str) -> list[int]:
        return self._remove(id)


class PreemptsTheOldest(Scheduler):
    """The first to come is the first to go."""

    def _preempt(self) -> None:
        self.running.append(self.running.pop(0))
        super()._preempt()


class KeepsDoneOnPreemption(Scheduler):
    """A preempted request believes that its tokens are still computed."""

    def _admit(self, decoding: list[str]) -> None:
        kept = {id: self._live[id].done for id in self.waiting}
        super()._admit(decoding)
        for id, done in kept.items():
            self._live[id].done = max(self._live[id].done, done)


class WritesIntoShared(PrefixCache):
    """Copy-on-write is missing."""

    def append(self, seq: str) -> tuple[int, int, int | None]:
        slot = self.lengths[seq] % self.block_size
        if slot:
            self.lengths[seq] += 1
            return self.tables[seq][-1], slot, None
        return super().append(seq)


class EvictsUsed(PrefixCache):
    """A cached block may be evicted while a table holds it."""

    def take(self) -> int:
        if not self._free and not self._unused and self._key:
            block = next(iter(self._key))
            del self._index[self._key.pop(block)]
            return block
        return super().take()

    @property
    def n_free(self) -> int:
        return super().n_free + sum(self.refs[block] > 0 for block in self._key)


class SwitchesBesideAFork(PrefixCache):
    """A table switches to the cached block although a fork holds its own one too."""

    def register(self, seq: str, tokens: list[int]) -> None:
        before = -1
        for i in range(len(tokens) // self.block_size):
            own = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            block = self.tables[seq][i]
            cached = self._index.setdefault((before, own), block)
            self._key.setdefault(cached, (before, own))
            if cached != block:
                self.share(cached)
                self.tables[seq][i] = cached
                self.drop(block)
            before = cached


class MatchesContentOnly(PrefixCache):
    """A block is known by its own tokens, whatever stands before it."""

    def match(self, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(self.block_size, len(tokens), self.block_size):
            own = tuple(tokens[end - self.block_size : end])
            found = [b for b, key in self._key.items() if key[1] == own and b not in blocks]
            if not found:
                break
            blocks.append(found[0])
        return blocks


class RegistersTooEarly(Scheduler):
    """Blocks are cached when they are allocated, before they are computed."""

    def _admit(self, decoding: list[str]) -> None:
        super()._admit(decoding)
        for id in self.running:
            if id not in decoding and self._live[id].done == 0:
                self.cache.register(id, self._live[id].tokens[: self.cache.lengths[id]])


class ForgetsTheEvicted(PrefixCache):
    """An evicted block stays in the index and is found again with other contents."""

    def take(self) -> int:
        if self._free or not self._unused:
            return super().take()
        block = next(iter(self._unused))
        del self._unused[block]
        self.refs[block] = 1
        return block


@pytest.mark.parametrize(
    ("scheduler", "cache"),
    [
        (LeakOnAbort, PrefixCache),
        (PlanKeepsAborted, PrefixCache),
        (PreemptsTheOldest, PrefixCache),
        (KeepsDoneOnPreemption, PrefixCache),
        (RegistersTooEarly, PrefixCache),
        (Scheduler, EvictsUsed),
        (Scheduler, MatchesContentOnly),
        (Scheduler, ForgetsTheEvicted),
        (None, WritesIntoShared),
        (None, EvictsUsed),
    ],
)
def test_a_planted_bug_is_found(scheduler: type | None, cache: type) -> None:
    """The properties bite: each bug meets a workload that shows it."""
    without_shrinking = settings(FIXED, max_examples=200, phases=[Phase.generate])

    def broken(case: SimpleNamespace) -> None:
        if scheduler is None:
            exercise(case, cache)
        else:
            serve(case, cache, scheduler)

    run: Callable[[], None] = without_shrinking(
        given(traces() if scheduler is None else workloads())(broken)
    )
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run()


def test_a_switch_beside_a_fork_is_found() -> None:
    exercise(BESIDE_A_FORK, PrefixCache)
    with pytest.raises(AssertionError, match="matched what is not there"):
        exercise(BESIDE_A_FORK, SwitchesBesideAFork)
