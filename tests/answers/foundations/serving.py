"""Second correct answers to the chapter "Serving": other algorithms, the same contracts."""

import math

import torch
import triton
import triton.language as tl


def step_time(B, T, W, P, kappa, bw, flops):
    """Time per token of the batch, then times the batch."""
    if B < 1 or T < 0 or not all(x > 0 for x in (W, P, kappa, bw, flops)):
        raise ValueError("an argument is out of range")
    reading = W / B + T * kappa
    computing = 2.0 * P
    return B * max(reading / bw, computing / flops)


def simulate(lens, slots, mode):
    """No clock: each slot knows when it is free next."""
    if slots < 1 or mode not in {"static", "continuous"} or any(n <= 0 for n in lens):
        raise ValueError("an argument is out of range")
    finish = []
    if mode == "static":
        start = 0
        for i in range(0, len(lens), slots):
            batch = lens[i : i + slots]
            start += max(batch)
            finish += [start] * len(batch)
    else:
        free_at = [0] * slots
        for n in lens:
            earliest = min(free_at)
            free_at.remove(earliest)
            free_at.append(earliest + n)
            finish.append(earliest + n)
    return max([0, *finish]), finish


def kv_waste(prompt, out, max_len, policy, block=16):
    """Grows each reservation until it holds the request."""
    total = prompt + out
    if prompt <= 0 or out < 0 or block <= 0 or total > max_len:
        raise ValueError("an argument is out of range")
    if policy not in ("max", "pow2", "oracle", "paged"):
        raise ValueError(policy)
    held = {"max": max_len, "pow2": 1, "oracle": total, "paged": 0}[policy]
    while held < total:
        held = 2 * held if policy == "pow2" else held + block
    if policy == "pow2":
        held = min(held, max_len)
    return dict(internal=held - total, used=total, allocated=held)


class BlockManager:
    """A flag per block instead of a heap; tables are filled place by place."""

    def __init__(self, num_blocks, block_size):
        if min(num_blocks, block_size) < 1:
            raise ValueError("needs at least one block of one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0 for _ in range(num_blocks)]
        self.is_free = [True] * num_blocks
        self.tables = {}
        self.lengths = {}

    @property
    def n_free(self):
        return sum(self.is_free)

    def take(self):
        for block, free in enumerate(self.is_free):
            if free:
                self.is_free[block] = False
                self.refs[block] += 1
                return block
        raise MemoryError("no block is free")

    def share(self, block):
        if self.is_free[block]:
            raise ValueError(f"block {block} is free")
        self.refs[block] += 1

    def drop(self, block):
        if self.is_free[block]:
            raise ValueError(f"block {block} is free")
        self.refs[block] -= 1
        self.is_free[block] = not self.refs[block]

    def alloc(self, seq, n_tokens, shared=()):
        if seq in self.tables or n_tokens < self.block_size * len(shared):
            raise ValueError(f"{seq} is live, or has {n_tokens} tokens")
        total = math.ceil(n_tokens / self.block_size)
        revived = [block for block in shared if self.refs[block] == 0]
        if total - len(shared) + len(revived) > self.n_free:
            raise MemoryError("not enough blocks")
        table = []
        for i in range(total):
            if i < len(shared):
                self.share(shared[i])
                table.append(shared[i])
            else:
                table.append(self.take())
        self.tables[seq], self.lengths[seq] = table, n_tokens
        return table[:]

    def append(self, seq):
        if seq not in self.tables:
            raise ValueError(seq)
        place, slot = divmod(self.lengths[seq], self.block_size)
        table = self.tables[seq]
        old = None
        if place == len(table):
            table.append(self.take())
        elif self.refs[table[place]] > 1:
            new, old = self.take(), table[place]
            table[place] = new
            self.drop(old)
        self.lengths[seq] += 1
        return table[place], slot, old

    def fork(self, src, dst):
        if src not in self.tables or dst in self.tables:
            raise ValueError(f"cannot fork {src} to {dst}")
        self.tables[dst] = self.tables[src][:]
        self.lengths[dst] = self.lengths[src]
        for block in self.tables[dst]:
            self.share(block)

    def free(self, seq):
        if seq not in self.tables:
            raise ValueError(seq)
        table = self.tables.pop(seq)
        while table:
            self.drop(table.pop())
        self.lengths.pop(seq)


def paged_attention(q, kc, vc, table, lens):
    """One sequence at a time, block by block with a running softmax, in float64."""
    B, H, d = q.shape
    bs, Hkv = kc.shape[1], kc.shape[2]
    if H % Hkv or any(n > table.shape[1] * bs for n in lens.tolist()):
        raise ValueError("heads do not divide, or a sequence is too long")
    out = torch.zeros(B, H, d, dtype=torch.float64)
    of_head = torch.arange(H) // (H // Hkv)
    for b, n in enumerate(lens.tolist()):
        high = torch.full((H,), -math.inf, dtype=torch.float64)
        total = torch.zeros(H, dtype=torch.float64)
        for i in range(-(-n // bs)):
            used = min(bs, n - i * bs)
            block = int(table[b, i])
            keys = kc[block, :used].double()[:, of_head]  # [used, H, d]
            values = vc[block, :used].double()[:, of_head]
            scores = (keys * q[b].double()).sum(-1) / d**0.5  # [used, H]
            higher = torch.maximum(high, scores.amax(0))
            weights, keep = (scores - higher).exp(), (high - higher).exp()
            total = total * keep + weights.sum(0)
            out[b] = out[b] * keep[:, None] + (weights[..., None] * values).sum(0)
            high = higher
        if n:
            out[b] /= total[:, None]
    return out.to(q.dtype)


def schedule(running, waiting, token_budget, chunk):
    """Deals token by token and counts."""
    if token_budget <= 0 or chunk <= 0:
        raise ValueError("nothing can be dealt")
    wishes = [(name, 1) for name in running]
    wishes += [(name, min(chunk, remaining)) for name, remaining in waiting]
    queue = [i for i, (_, n) in enumerate(wishes) for _ in range(n)]
    dealt: dict = {}
    for i in queue[:token_budget]:
        dealt[i] = dealt.get(i, 0) + 1
    return [(wishes[i][0], dealt[i]) for i in sorted(dealt)]


class PrefixCache(BlockManager):
    """A tree of nodes with a clock; eviction looks for the unused leaf with the oldest date."""

    class Node:
        def __init__(self, parent, tokens, block):
            self.parent, self.tokens, self.block = parent, tokens, block
            self.children, self.dropped_at = [], 0

        def child(self, tokens):
            for node in self.children:
                if node.tokens == tokens:
                    return node
            return None

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.root = self.Node(None, [], None)
        self.nodes = {}  # block -> its node
        self.clock = 0

    def idle(self):
        return [node for block, node in self.nodes.items() if self.refs[block] == 0]

    @property
    def n_free(self):
        return super().n_free + len(self.idle())

    def take(self):
        if super().n_free == 0:
            leaves = [node for node in self.idle() if not node.children]
            if leaves:
                oldest = min(leaves, key=lambda node: node.dropped_at)
                oldest.parent.children.remove(oldest)
                del self.nodes[oldest.block]
                self.refs[oldest.block] = 1
                return oldest.block
        return super().take()

    def share(self, block):
        if block in self.nodes:
            self.refs[block] += 1
        else:
            super().share(block)

    def drop(self, block):
        if block in self.nodes and self.refs[block]:
            self.clock += 1
            self.nodes[block].dropped_at = self.clock
            self.refs[block] -= 1
        elif block in self.nodes:
            raise ValueError(f"no table holds block {block}")
        else:
            super().drop(block)

    def match(self, tokens):
        node, blocks = self.root, []
        while (len(blocks) + 1) * self.block_size < len(tokens):
            start = len(blocks) * self.block_size
            node = node.child(list(tokens[start : start + self.block_size]))
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def register(self, seq, tokens):
        if seq not in self.tables or len(tokens) > self.lengths[seq]:
            raise ValueError(f"{seq} is unknown or too short")
        node, table = self.root, self.tables[seq]
        for i in range(len(tokens) // self.block_size):
            own = list(tokens[i * self.block_size : (i + 1) * self.block_size])
            known = node.child(own)
            if known is None:
                known = self.Node(node, own, table[i])
                node.children.append(known)
                self.nodes[table[i]] = known
            elif known.block != table[i] and self.refs[table[i]] > 1:
                return
            elif known.block != table[i]:
                self.share(known.block)
                old, table[i] = table[i], known.block
                self.drop(old)
            node = known


class Scheduler:
    """One list of requests in order of arrival; who runs is a mark on the request."""

    def __init__(self, cache, token_budget, chunk):
        if token_budget < 1 or chunk < 1:
            raise ValueError("a server needs a budget and a chunk")
        self.cache = cache
        self.token_budget = token_budget
        self.chunk = chunk
        self.queue = []  # dicts, in order of arrival
        self.open = {}  # id -> plan entry

    @property
    def running(self):
        return [job["id"] for job in self.queue if job["runs"]]

    @property
    def waiting(self):
        return [job["id"] for job in self.queue if not job["runs"]]

    def find(self, id):
        for job in self.queue:
            if job["id"] == id:
                return job
        raise ValueError(f"{id} is not live")

    def add(self, request):
        if request.id in self.running + self.waiting:
            raise ValueError(f"{request.id} is live")
        if len(request.prompt) == 0 or request.max_tokens <= 0:
            raise ValueError(f"{request.id} asks for nothing")
        slots = len(request.prompt) + request.max_tokens - 1
        if -(-slots // self.cache.block_size) > self.cache.num_blocks:
            return "rejected"
        job = {"id": request.id, "prompt": list(request.prompt), "sampled": [], "runs": False}
        job |= {"most": request.max_tokens, "stop": list(request.stop), "done": 0}
        self.queue.append(job)
        return "waiting"

    def leave(self, job):
        if job["runs"]:
            self.cache.free(job["id"])
        self.queue.remove(job)
        return job["sampled"]

    def abort(self, id):
        job = self.find(id)
        self.open.pop(id, None)
        return self.leave(job)

    def evict_one(self):
        last = [job for job in self.queue if job["runs"]][-1]
        self.cache.free(last["id"])
        last["runs"] = False

    def step(self):
        if self.open:
            raise ValueError("commit first")
        decoding = []
        for job in self.queue:
            wants = len(job["prompt"]) + len(job["sampled"])
            if not job["runs"] or self.cache.lengths[job["id"]] == wants:
                continue
            while job["runs"]:
                try:
                    self.cache.append(job["id"])
                    decoding.append(job["id"])
                    break
                except MemoryError:
                    self.evict_one()
        budget = self.token_budget
        for job in self.queue:
            need = len(job["prompt"]) + len(job["sampled"])
            if job["runs"]:
                budget -= min(need - job["done"], self.chunk)
                continue
            if budget <= 0:
                break
            known = self.cache.match(job["prompt"] + job["sampled"])
            blocks = math.ceil(need / self.cache.block_size)
            blocks -= len([block for block in known if self.cache.refs[block]])
            if self.cache.n_free < blocks + len(self.running):
                break
            self.cache.alloc(job["id"], need, known)
            job["runs"], job["done"] = True, len(known) * self.cache.block_size
            budget -= min(need - job["done"], self.chunk)
        prompts = [
            (job["id"], len(job["prompt"]) + len(job["sampled"]) - job["done"])
            for job in self.queue
            if job["runs"] and job["id"] not in decoding
        ]
        for id, n in schedule(decoding, prompts, self.token_budget, self.chunk):
            job = self.find(id)
            tokens = job["prompt"] + job["sampled"]
            end = job["done"] + n
            self.open[id] = (id, job["done"], tokens[job["done"] : end], end == len(tokens))
        return list(self.open.values())

    def commit(self, sampled):
        missing = [id for id, entry in self.open.items() if entry[3] and id not in sampled]
        if missing:
            raise ValueError(f"tokens of {missing} are missing")
        ended = {}
        for id, first, tokens, samples in self.open.values():
            job = self.find(id)
            job["done"] = first + len(tokens)
            self.cache.register(id, (job["prompt"] + job["sampled"])[: job["done"]])
            if samples:
                job["sampled"].append(sampled[id])
                if sampled[id] in job["stop"] or len(job["sampled"]) == job["most"]:
                    ended[id] = self.leave(job)
        self.open = {}
        return ended


@triton.jit
def paged_decode_kernel(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    part_out,
    part_lse,
    scale,
    s_qb,
    s_qh,
    s_kn,
    s_kp,
    s_kh,
    s_vn,
    s_vp,
    s_vh,
    s_tb,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One load of page numbers per step, natural exponentials, keys as rows, sums in fp32."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    d = tl.arange(0, BLOCK_D)[None, :]
    g = tl.arange(0, BLOCK_G)[:, None]
    head = kv_head * GROUP + g
    inside = (g < GROUP) & (d < HEAD_DIM)
    queries = tl.load(q + b * s_qb + head * s_qh + d, mask=inside, other=0.0)
    queries = queries.to(tl.float32) * scale

    length = tl.load(seq_lens + b)
    steps = tl.cdiv(length, BLOCK_T)
    first = split * tl.cdiv(steps, splits) * BLOCK_T
    last = tl.minimum(first + tl.cdiv(steps, splits) * BLOCK_T, length)

    high = tl.full([BLOCK_G, 1], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G, 1], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for t in range(first, last, BLOCK_T):
        token = t + tl.arange(0, BLOCK_T)[:, None]
        valid = token < last
        entry = block_tables + b * s_tb + token // PAGE_SIZE
        page = tl.load(entry, mask=valid, other=0).to(tl.int64)
        slot = (token % PAGE_SIZE).to(tl.int64)
        here = valid & (d < HEAD_DIM)
        k_at = k_pages + page * s_kn + slot * s_kp + kv_head * s_kh + d
        v_at = v_pages + page * s_vn + slot * s_vp + kv_head * s_vh + d
        keys = tl.load(k_at, mask=here, other=0.0).to(tl.float32)
        values = tl.load(v_at, mask=here, other=0.0).to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.where(tl.trans(valid), scores, -float("inf"))
        higher = tl.maximum(high, tl.max(scores, 1)[:, None])
        weights = tl.where(tl.trans(valid), tl.exp(scores - higher), 0.0)
        keep = tl.exp(high - higher)
        total = total * keep + tl.sum(weights, 1)[:, None]
        acc = acc * keep + tl.dot(weights, values, input_precision="ieee")
        high = higher

    row = (b * tl.num_programs(1) * GROUP + head) * splits + split
    empty = total == 0.0
    average = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(part_out + row * HEAD_DIM + d, average, mask=inside)
    tl.store(part_lse + row, high + tl.log(total), mask=g < GROUP)
