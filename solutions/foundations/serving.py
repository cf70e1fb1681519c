"""Reference answers of the chapter "Serving".

`BlockManager`, `PrefixCache`, `schedule` and `Scheduler` are the parts of an
engine; book/notes/serving.md is their contract on one page.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention_paged import _paged_decode_kernel as paged_decode_kernel

__all__ = [
    "BlockManager",
    "PrefixCache",
    "Scheduler",
    "kv_waste",
    "paged_attention",
    "paged_decode_kernel",
    "schedule",
    "simulate",
    "step_time",
]


def step_time(
    B: int,
    T: float,
    W: float,
    P: float,
    kappa: float,
    bw: float,
    flops: float,
) -> float:
    """Return the seconds that one decode step of a batch takes at least.

    B sequences of T cached tokens each decode one token. A step reads W bytes
    of weights once and kappa bytes of cache per cached token, at bw bytes per
    second; it computes 2 FLOPs per parameter (P of them) and sequence, at
    flops per second. The slower of the two sets the time.

    Raises ValueError if B < 1, T < 0 or any of the others is not above 0, as
    NaN is not.
    """
    # stub: find the bytes that one step reads, and divide them by bw
    if B < 1:
        raise ValueError(f"B={B}: must be at least 1")
    if T < 0:
        raise ValueError(f"T={T}: must not be negative")
    for name, value in (
        ("W", W),
        ("P", P),
        ("kappa", kappa),
        ("bw", bw),
        ("flops", flops),
    ):
        if not value > 0:  # catches NaN too
            raise ValueError(f"{name}={value}: must be above 0")
    return max((W + B * T * kappa) / bw, 2 * P * B / flops)


def simulate(lens: list[int], slots: int, mode: str) -> tuple[int, list[int]]:
    """Serve requests that all arrive at step 0, first come first served.

    Request i needs lens[i] steps in one of the slots. A step admits, then
    every request in a slot makes one token, then requests leave. In mode
    "continuous" a request leaves when it is done and the next step admits
    another; in mode "static" a batch is admitted when all slots are empty and
    leaves when its longest request is done.

    Returns the number of steps and, per request, the step after which it left
    (the first step is step 1).
    Raises ValueError if slots < 1, a length is below 1 or mode is unknown.
    """
    # stub: keep a queue of waiting requests and a dict of running ones
    if slots < 1:
        raise ValueError(f"slots={slots}: must be at least 1")
    if any(n < 1 for n in lens):
        raise ValueError(f"lens={lens}: every length must be at least 1")
    if mode not in ("static", "continuous"):
        raise ValueError(f"mode={mode!r}: must be 'static' or 'continuous'")
    finish: dict[int, int] = {}
    waiting = list(range(len(lens)))
    left: dict[int, int] = {}  # running request -> tokens to make
    for clock in range(1, sum(lens) + 1):  # each step makes one at least
        free = slots - len(left)
        left |= {request: lens[request] for request in waiting[:free]}
        waiting = waiting[free:]
        left = {request: n - 1 for request, n in left.items()}
        done = [request for request, n in left.items() if n <= 0]
        if mode == "static" and len(done) < len(left):
            continue  # the longest still runs, so all keep their slots
        for request in done:
            finish[request] = clock
            del left[request]
    return max(finish.values(), default=0), [
        finish[request] for request in range(len(lens))
    ]


def kv_waste(
    prompt: int, out: int, max_len: int, policy: str, block: int = 16
) -> dict[str, int]:
    """Count the cache slots that one request of prompt + out tokens holds.

    policy "max" reserves max_len slots; "pow2" the smallest power of two that
    holds the request, at most max_len; "oracle" exactly what is used; "paged"
    whole blocks of `block` slots.

    Returns {"allocated": slots held, "used": prompt + out, "internal": held
    and not used}, integers.
    Raises ValueError if prompt < 1, out < 0, block < 1, prompt + out >
    max_len or the policy is unknown.
    """
    # stub: check the arguments, then compute `allocated` for each policy
    used = prompt + out
    if prompt < 1:
        raise ValueError(f"prompt={prompt}: must be at least 1")
    if out < 0:
        raise ValueError(f"out={out}: must not be negative")
    if block < 1:
        raise ValueError(f"block={block}: must be at least 1")
    if used > max_len:
        raise ValueError(f"max_len={max_len}: must hold {used} tokens")
    if policy == "max":
        allocated = max_len
    elif policy == "pow2":
        allocated = min(max_len, 1 << (used - 1).bit_length())
    elif policy == "oracle":
        allocated = used
    elif policy == "paged":
        allocated = -(-used // block) * block
    else:
        raise ValueError(
            f"policy={policy!r}: must be 'max', 'pow2', 'oracle' or 'paged'"
        )
    return {
        "allocated": allocated,
        "used": used,
        "internal": allocated - used,
    }


class BlockManager:
    """Who holds which block of the cache: bookkeeping, no tensors.

    A sequence is live from alloc or fork to free. Token t of a sequence lies
    in block tables[seq][t // block_size] at slot t % block_size.

    num_blocks, block_size: as given
    tables: dict, sequence -> list of its block ids, in order
    lengths: dict, sequence -> number of its tokens
    refs: list, block id -> how many tables hold it
    n_free: blocks that `take` can still give
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free. ValueError if an argument is below 1."""
        # stub: set the attributes, and remember which blocks are free
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 1")
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap

    @property
    def n_free(self) -> int:
        """The number of blocks that `take` can still give."""
        # stub: count the free blocks
        return len(self._free)

    def take(self) -> int:
        """Return the lowest free block; refs becomes 1.

        Raises MemoryError if no block is free.
        """
        # stub: find the lowest free block
        if not self._free:
            raise MemoryError(f"all {self.num_blocks} blocks are in use")
        block = heapq.heappop(self._free)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds the block. ValueError if it is free."""
        # stub: count one more holder
        if self.refs[block] < 1:
            raise ValueError(f"block={block}: is free, nothing to share")
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """One table less holds the block; the last one frees it.

        Raises ValueError if it is free already.
        """
        # stub: count one holder less, and free the block at none
        if self.refs[block] < 1:
            raise ValueError(f"block={block}: is free already")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            heapq.heappush(self._free, block)

    def alloc(
        self, seq: str, n_tokens: int, shared: Sequence[int] = ()
    ) -> list[int]:
        """Give a new sequence the blocks of its first n_tokens tokens.

        shared: full blocks that hold its first tokens already; they come
        first in the table, and only the rest is taken.
        Returns a copy of the table.
        Raises ValueError if seq is live, n_tokens < 0 or shared holds more
        than n_tokens; MemoryError, changing nothing, if blocks are missing.
        """
        # stub: count the blocks to take and refuse if they are not there
        if seq in self.tables:
            raise ValueError(f"seq={seq!r}: is live already")
        if len(shared) * self.block_size > n_tokens:
            raise ValueError(
                f"n_tokens={n_tokens}: must be at least 0 and hold {shared=}"
            )
        new = -(-n_tokens // self.block_size) - len(shared)
        # A shared block that nobody holds is one of the n_free, until now.
        if new + sum(self.refs[block] == 0 for block in shared) > self.n_free:
            raise MemoryError(f"{new} blocks wanted, {self.n_free} free")
        for block in shared:
            self.share(block)
        self.tables[seq] = [*shared, *(self.take() for _ in range(new))]
        self.lengths[seq] = n_tokens
        return list(self.tables[seq])

    def append(self, seq: str) -> tuple[int, int, int | None]:
        """Make room for one more token of seq: (block, slot, copied_from).

        A partly filled block that others hold too is replaced by a fresh one
        first; copied_from then names the old block, whose tokens the caller
        must copy before writing, and is None otherwise.
        Raises ValueError if seq is unknown; MemoryError, changing nothing, if
        a block is missing.
        """
        # stub: find the slot of the new token, and whether it starts a block
        if seq not in self.tables:
            raise ValueError(f"seq={seq!r}: is not live")
        table, slot = self.tables[seq], self.lengths[seq] % self.block_size
        copied_from = None
        if slot == 0:
            table.append(self.take())
        elif self.refs[table[-1]] > 1:
            copied_from = table[-1]
            table[-1] = self.take()
            self.drop(copied_from)
        self.lengths[seq] += 1
        return table[-1], slot, copied_from

    def fork(self, src: str, dst: str) -> None:
        """Let a new sequence dst share all tokens of src.

        Raises ValueError if src is unknown or dst is live.
        """
        # stub: share every block of src, the partly filled one too
        if src not in self.tables:
            raise ValueError(f"src={src!r}: is not live")
        if dst in self.tables:
            raise ValueError(f"dst={dst!r}: is live already")
        for block in self.tables[src]:
            self.share(block)
        self.tables[dst] = list(self.tables[src])
        self.lengths[dst] = self.lengths[src]

    def free(self, seq: str) -> None:
        """Forget seq and drop its blocks, the last one first.

        Raises ValueError if seq is unknown.
        """
        # stub: drop the blocks from the last to the first
        if seq not in self.tables:
            raise ValueError(f"seq={seq!r}: is not live")
        for block in reversed(self.tables.pop(seq)):
            self.drop(block)
        del self.lengths[seq]


def paged_attention(
    q: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    """Attention of one query per sequence over a cache in blocks.

    q: [B, H, d]; kc, vc: [N, bs, Hkv, d]; table: int [B, M]; lens: int [B].
    Token t of sequence b lies in block table[b, t // bs] at slot t % bs, for
    t < lens[b]; other slots may hold anything, NaN too, and table entries
    past the length are -1. Query head h reads KV head h // (H // Hkv). Scores
    are scaled by 1 / sqrt(d); scores, softmax and sum are computed in fp32.

    Returns [B, H, d] in q's dtype; a sequence of length 0 gives zeros.
    Raises ValueError if H is not a multiple of Hkv or a length exceeds
    M * bs.
    """
    # stub: find block and slot of every token of every sequence
    B, H, d = q.shape
    bs, Hkv = kc.shape[1:3]
    T = table.shape[1] * bs
    if H % Hkv:
        raise ValueError(f"q has {H} heads: must be a multiple of {Hkv}")
    if B and int(lens.max()) > T:
        raise ValueError(f"lens={lens.tolist()}: must not exceed {T}")
    token = torch.arange(T, device=q.device)
    valid = token < lens[:, None]  # [B, T]
    block = table.long()[:, token // bs].clamp(min=0)  # [B, T]
    K = kc[block, token % bs].float()  # [B, T, Hkv, d]
    V = vc[block, token % bs].float()
    V = V.masked_fill(~valid[:, :, None, None], 0)  # 0 times NaN is NaN
    groups = q.float().reshape(B, Hkv, H // Hkv, d)
    scores = torch.einsum("bkgd,btkd->bkgt", groups, K) / math.sqrt(d)
    hidden = ~valid[:, None, None, :]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    # A sequence of length 0 has no softmax: NaN, until it is masked as well.
    weights = weights.masked_fill(hidden, 0)
    out = torch.einsum("bkgt,btkd->bkgd", weights, V)
    return out.reshape(B, H, d).to(q.dtype)


def schedule(
    running: Sequence[str],
    waiting: Sequence[tuple[str, int]],
    token_budget: int,
    chunk: int,
) -> list[tuple[str, int]]:
    """Deal the token budget of one step: (id, tokens), in order.

    running: ids that decode, one token each, served first and in order while
    the budget lasts. waiting: (id, prompt tokens still to prefill), in order
    of arrival; each gets what is left of the budget, at most `chunk` and at
    most what it needs. Nobody is listed with 0 tokens.

    Raises ValueError if token_budget or chunk is below 1.
    """
    # stub: give one token each to as many running ids as the budget allows
    if token_budget < 1:
        raise ValueError(f"token_budget={token_budget}: must be at least 1")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    plan = [(name, 1) for name in running[:token_budget]]
    left = token_budget - len(plan)
    for name, remaining in waiting:
        tokens = min(left, chunk, remaining)
        if tokens > 0:
            plan.append((name, tokens))
            left -= tokens
    return plan


class PrefixCache(BlockManager):
    """A BlockManager whose full blocks are found again by their tokens.

    A cached block is known by its own tokens and all tokens before it. One
    that no table holds stays cached until `take` needs it: blocks that never
    were cached go first, then the block that was dropped longest ago.
    n_free counts free blocks and cached blocks that no table holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """An empty cache. ValueError if an argument is below 1."""
        # stub: call super().__init__, then make your index
        super().__init__(num_blocks, block_size)
        # (block before or -1, tokens of the block) -> block, and back. The
        # tokens themselves are the key, so a hash alone never decides.
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Cached blocks that no table holds, the longest dropped first.
        self._unused: dict[int, None] = {}

    @property
    def n_free(self) -> int:
        """Free blocks and cached blocks that no table holds."""
        # stub: add to super().n_free
        return super().n_free + len(self._unused)

    def take(self) -> int:
        """Return a block with refs 1: the lowest free one, or an evicted one.

        Raises MemoryError if every block is held by a table.
        """
        # stub: evict only if super().n_free is 0
        if super().n_free or not self._unused:
            return super().take()
        block = next(iter(self._unused))
        del self._unused[block]
        del self._index[self._key.pop(block)]
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds the block, which may be cached and unused.

        Raises ValueError if it is neither held nor cached.
        """
        # stub: a cached block that nobody holds comes back into use
        if block in self._unused:
            del self._unused[block]
            self.refs[block] = 1
        else:
            super().share(block)

    def drop(self, block: int) -> None:
        """One table less holds the block; a cached one stays cached.

        Raises ValueError if no table holds it.
        """
        # stub: decide whether this was the last holder of a cached block
        if self.refs[block] == 1 and block in self._key:
            self.refs[block] = 0
            self._unused[block] = None
        else:
            super().drop(block)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest known prefix of tokens.

        Whole blocks only, and never the last token: its logits are wanted, so
        it has to be computed. Changes nothing.
        """
        # stub: look up one block after the other until one is not cached
        blocks: list[int] = []
        before = -1
        for end in range(self.block_size, len(tokens), self.block_size):
            own = tuple(tokens[end - self.block_size : end])
            found = self._index.get((before, own))
            if found is None:
                break
            blocks.append(found)
            before = found
        return blocks

    def register(self, seq: str, tokens: Sequence[int]) -> None:
        """Cache the full blocks of seq's first tokens, which are computed.

        Where an equal block is cached already, seq's table takes that one and
        drops its own, so that the same prefix is never held twice. If a fork
        holds the own block too, it could not follow: registering ends there.
        Raises ValueError if seq is unknown or has fewer tokens than given.
        """
        # stub: walk over the full blocks and skip those already cached
        if seq not in self.lengths or self.lengths[seq] < len(tokens):
            raise ValueError(f"seq={seq!r}: is not live or is too short")
        table, before = self.tables[seq], -1
        for i in range(len(tokens) // self.block_size):
            block = table[i]
            if block not in self._key:
                start = i * self.block_size
                own = tuple(tokens[start : start + self.block_size])
                cached = self._index.setdefault((before, own), block)
                if cached == block:
                    self._key[block] = (before, own)
                elif self.refs[block] > 1:
                    break
                else:
                    self.share(cached)
                    table[i] = cached
                    self.drop(block)
            before = table[i]


class _Live:
    """A request on its way: all its tokens, and how many are computed."""

    def __init__(self, request: Any) -> None:
        self.prompt_len = len(request.prompt)
        self.tokens = list(request.prompt)
        self.max_tokens = request.max_tokens
        self.stop = frozenset(request.stop)
        self.done = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        output = self.output
        return len(output) >= self.max_tokens or output[-1] in self.stop


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed.

    Pure bookkeeping: no tensors and no clock. running + waiting (lists of
    ids) is always the order of arrival: admission moves the boundary to the
    right, preemption to the left. A request of n tokens holds blocks only
    while it runs.
    """

    def __init__(
        self, cache: PrefixCache, token_budget: int, chunk: int
    ) -> None:
        """At most token_budget tokens a step, `chunk` of them per prompt.

        Raises ValueError if token_budget or chunk is below 1.
        """
        # stub: keep the arguments, and make two empty lists of ids
        schedule([], [], token_budget, chunk)  # refuses a bad one
        self.cache, self.token_budget, self.chunk = cache, token_budget, chunk
        self.running: list[str] = []
        self.waiting: list[str] = []
        self._live: dict[str, _Live] = {}
        self._plan: list[tuple[str, int, list[int], bool]] = []

    def add(self, request: Any) -> str:
        """Queue a request; return "waiting", or "rejected" if it never fits.

        request has id, prompt (token ids), max_tokens (to sample at most) and
        stop (token ids that end it). It needs a slot for each of its tokens
        but the last, which is never fed to the model.
        Raises ValueError if the id is live, the prompt is empty or
        max_tokens < 1.
        """
        # stub: refuse bad arguments, then compare with the whole cache
        if request.id in self._live:
            raise ValueError(f"id={request.id!r}: is live already")
        if not request.prompt:
            raise ValueError("prompt=[]: must hold at least one token")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens={request.max_tokens}: must be >= 1")
        most = len(request.prompt) + request.max_tokens - 1
        if most > self.cache.num_blocks * self.cache.block_size:
            return "rejected"
        self._live[request.id] = _Live(request)
        self.waiting.append(request.id)
        return "waiting"

    def abort(self, id: str) -> list[int]:
        """End a live request at once; return the tokens sampled so far.

        Its blocks are dropped and an open plan no longer holds it.
        Raises ValueError if the id is not live.
        """
        # stub: find out whether it runs, since only then it holds blocks
        if id not in self._live:
            raise ValueError(f"id={id!r}: is not live")
        self._plan = [work for work in self._plan if work[0] != id]
        return self._remove(id)

    def step(self) -> list[tuple[str, int, list[int], bool]]:
        """Plan one pass of the model: a list of (id, first, tokens, samples).

        tokens are to be fed at positions first, first + 1, ...; their slots
        follow from cache.tables[id]. If samples is true, they reach the end of
        the request, and the next token is to be sampled after the last.

        In order: (1) each decoding request, oldest first, gets a slot for its
        newest token; while a block is missing, the latest arrival that runs
        is preempted: it drops its blocks and waits again, in front. (2)
        Waiting requests are admitted in order while the running ones leave a
        part of token_budget unused and, beside the blocks the newcomer needs,
        one block per running request is free. A newcomer starts behind the
        prefix that the cache holds. (3) `schedule` deals the budget to those
        with a slot and those that prefill.

        The list is the caller's own; it is empty only if no request is live.
        Raises ValueError if the last plan is not empty and not committed yet.
        """
        # stub: refuse an open plan, then take the three parts one by one
        if self._plan:
            raise ValueError("step: the last plan is not committed yet")
        decoding = self._give_slots()
        self._admit(decoding)
        prefilling = self._prefilling(decoding)
        for id, n in schedule(
            decoding, prefilling, self.token_budget, self.chunk
        ):
            live = self._live[id]
            tokens = live.tokens[live.done : live.done + n]
            last = live.done + n == len(live.tokens)
            self._plan.append((id, live.done, tokens, last))
        return list(self._plan)

    def commit(self, sampled: dict[str, int]) -> dict[str, list[int]]:
        """Feed back what the model sampled, id -> token; end the plan.

        The planned tokens now count as computed, and full blocks are
        registered. A request that has sampled max_tokens tokens, or one of
        its stop tokens, is finished: it drops its blocks and leaves.

        Returns the finished requests, id -> sampled tokens (a stop token is
        among them).
        Raises ValueError, changing nothing, if the token of an entry that
        samples is missing; what else is in sampled is ignored. Without an
        open plan nothing happens.
        """
        # stub: check that every id whose plan entry samples has a token
        for id, _, _, samples in self._plan:
            if samples and id not in sampled:
                raise ValueError(f"sampled: lacks the token of {id!r}")
        finished: dict[str, list[int]] = {}
        for id, first, tokens, samples in self._plan:
            live = self._live[id]
            live.done = first + len(tokens)
            block_size = self.cache.block_size
            if live.done // block_size > first // block_size:
                self.cache.register(id, live.tokens[: live.done])
            if samples:
                live.tokens.append(sampled[id])
                if live.finished:
                    finished[id] = self._remove(id)
        self._plan = []
        return finished

    def _give_slots(self) -> list[str]:
        """Make room for the newest tokens; return whose have a slot now."""
        lengths = self.cache.lengths
        decoding = [
            id
            for id in self.running
            if lengths[id] < len(self._live[id].tokens)
        ]
        served: list[str] = []
        for id in decoding:
            while id in self.running:  # it may itself be the latest arrival
                try:
                    self.cache.append(id)
                except MemoryError:
                    self._preempt()
                else:
                    served.append(id)
                    break
        return served

    def _preempt(self) -> None:
        """Send the latest arrival that runs back to the head of the queue."""
        id = self.running.pop()
        self.cache.free(id)
        self.waiting.insert(0, id)

    def _admit(self, decoding: list[str]) -> None:
        """Give waiting requests their blocks while budget and blocks last."""
        used = sum(min(n, self.chunk) for _, n in self._prefilling(decoding))
        left = self.token_budget - len(decoding) - used
        while self.waiting and left > 0:
            live = self._live[self.waiting[0]]
            shared = self.cache.match(live.tokens)
            held = sum(self.cache.refs[block] > 0 for block in shared)
            new = -(-len(live.tokens) // self.cache.block_size) - held
            if new + len(self.running) > self.cache.n_free:
                break
            id = self.waiting.pop(0)
            self.running.append(id)
            self.cache.alloc(id, len(live.tokens), shared)
            live.done = len(shared) * self.cache.block_size
            left -= min(len(live.tokens) - live.done, self.chunk)

    def _prefilling(self, decoding: list[str]) -> list[tuple[str, int]]:
        """Running requests whose slots wait to be filled, and how many."""
        return [
            (id, len(self._live[id].tokens) - self._live[id].done)
            for id in self.running
            if id not in decoding
        ]

    def _remove(self, id: str) -> list[int]:
        """Forget a request; return its output."""
        if id in self.running:
            self.running.remove(id)
            self.cache.free(id)
        else:
            self.waiting.remove(id)
        return self._live.pop(id).output
