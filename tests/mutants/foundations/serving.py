"""Wrong answers to the chapter "Serving" that its checks must reject.

MUTANTS edit the reference (name, old, new, message for the learner), SHORTCUTS are whole answers
that call what the exercise forbids, EQUIVALENT lists automatic mutations that change nothing.
"""

_STEP = [
    (
        "weights_per_sequence",
        "(W + B * T * kappa) / bw",
        "(B * W + B * T * kappa) / bw",
        "This is what you get when every sequence reads the weights for itself. One read serves "
        "the whole batch: W stands alone, only the caches are multiplied by B.",
    ),
    (
        "one_flop_per_parameter",
        "2 * P * B / flops",
        "P * B / flops",
        "A multiply and an add are two operations: 2 * P * B FLOPs a step.",
    ),
    (
        "compute_ignored",
        "max((W + B * T * kappa) / bw, 2 * P * B / flops)",
        "(W + B * T * kappa) / bw",
        "This is the time to read only. A large batch with short caches is bound by compute: the "
        "slower of the two sets the time.",
    ),
    (
        "one_cache_for_all",
        "B * T * kappa",
        "T * kappa",
        "The cache is read once here, but every sequence has its own: B * T * kappa bytes.",
    ),
    (
        "times_added",
        "max((W + B * T * kappa) / bw, 2 * P * B / flops)",
        "(W + B * T * kappa) / bw + 2 * P * B / flops",
        "Reading and computing overlap: take the larger of the two times, not their sum.",
    ),
    (
        "faster_of_the_two",
        "max((W",
        "min((W",
        "The step ends when the slower part ends: take the larger time.",
    ),
    (
        "empty_cache_refused",
        "if T < 0:",
        "if T <= 0:",
        "T=0 is allowed: a cache may be empty.",
    ),
    (
        "zero_rate_accepted",
        "if not value > 0:",
        "if not value >= 0:",
        "A constant of 0 must raise ValueError (your own, before anything is divided by it).",
    ),
    (
        "nan_accepted",
        "if not value > 0:",
        "if value <= 0:",
        "A constant that is NaN passes `value <= 0`, since every comparison with NaN is false, and "
        "the time is NaN: refuse what is not above 0.",
    ),
]

_SIMULATE = [
    (
        "slot_kept_through_the_next_admission",
        """        done = [request for request, n in left.items() if n <= 0]
        if mode == "static" and len(done) < len(left):
            continue  # the longest still runs, so all keep their slots
        for request in done:
            finish[request] = clock
            del left[request]
""",
        """        done = [request for request, n in left.items() if n <= 0]
        if mode == "static" and len(done) < len(left):
            continue
        for request in done:
            finish.setdefault(request, clock)
            if mode == "static" or left[request] < 0:
                del left[request]
""",
        "A request that is done keeps its slot through the next admission. Retire at the end of "
        "the step, so that the next step can admit somebody into the slot.",
    ),
    (
        "clock_starts_early",
        "finish[request] = clock",
        "finish[request] = clock - 1",
        "Your finish times are one step early: the first step is step 1, so a request of three "
        "tokens that starts at once leaves after step 3.",
    ),
    (
        "static_leaves_early",
        '        if mode == "static" and len(done) < len(left):\n'
        "            continue  # the longest still runs, so all keep their slots\n",
        "",
        "In a static batch your requests leave one by one. They keep their slots, and finish, "
        "when the longest of the batch is done.",
    ),
    (
        "continuous_waits",
        "free = slots - len(left)",
        "free = 0 if clock - 1 in finish.values() else slots - len(left)",
        "In continuous mode a free slot is filled at the very next step.",
    ),
    (
        "last_come_first_served",
        "waiting = list(range(len(lens)))",
        "waiting = list(range(len(lens)))[::-1]",
        "Requests are admitted in the order of the list, the first one first.",
    ),
    (
        "one_slot_too_many",
        "free = slots - len(left)",
        "free = slots - len(left) + 1",
        "One request more than there are slots is admitted.",
    ),
    (
        "one_admission_per_step",
        "free = slots - len(left)",
        "free = min(1, slots - len(left))",
        "Only one request is admitted a step: admit until the slots are full.",
    ),
    (
        "unknown_mode",
        'if mode not in ("static", "continuous"):',
        "if False:",
        "A mode that is neither 'static' nor 'continuous' must raise ValueError.",
    ),
    (
        "empty_day_unchecked",
        "    if slots < 1:\n",
        "    if not lens:\n        return 0, []\n    if slots < 1:\n",
        "With no requests the arguments are not looked at: refuse bad ones first.",
    ),
    (
        "empty_request",
        "if any(n < 1 for n in lens):",
        "if any(n < 0 for n in lens):",
        "A request of 0 tokens must raise ValueError: it would leave before it came.",
    ),
]

_WASTE = [
    (
        "block_too_early",
        "-(-used // block) * block",
        "(used // block + 1) * block",
        "This is what you get when a new block is taken as soon as the last one is full. 48 "
        "tokens fit into three blocks of 16: round up, and only up.",
    ),
    (
        "block_too_late",
        "-(-used // block) * block",
        "used // block * block",
        "The tokens of the last, partly filled block have no slot: round up.",
    ),
    (
        "strictly_above",
        "(used - 1).bit_length()",
        "used.bit_length()",
        "This is the power of two strictly above. 4 tokens fit into 4 slots.",
    ),
    (
        "pow2_over_the_limit",
        "min(max_len, 1 << (used - 1).bit_length())",
        "1 << (used - 1).bit_length()",
        "A power of two may exceed max_len, and then max_len is enough.",
    ),
    (
        "always_16",
        "-(-used // block) * block",
        "-(-used // 16) * 16",
        "The block size is fixed to 16: use `block`.",
    ),
    (
        "prompt_only",
        "    used = prompt + out\n",
        "    used = prompt\n",
        "The tokens of the output need slots as well: used = prompt + out.",
    ),
    (
        "internal_of_the_limit",
        '"internal": allocated - used,',
        '"internal": max_len - used,',
        "Internal waste is what is allocated and not used: allocated - used.",
    ),
    (
        "full_refused",
        "if used > max_len:",
        "if used >= max_len:",
        "A request of exactly max_len tokens fits.",
    ),
    (
        "too_long_accepted",
        "if used > max_len:",
        "if False:",
        "prompt + out above max_len must raise ValueError.",
    ),
    (
        "unknown_policy",
        """        raise ValueError(
            f"policy={policy!r}: must be 'max', 'pow2', 'oracle' or 'paged'"
        )""",
        "        allocated = used",
        "A policy that is none of the four must raise ValueError.",
    ),
]

_MANAGER = [
    (
        "copies_full_blocks",
        """        if slot == 0:
            table.append(self.take())
        elif self.refs[table[-1]] > 1:
            copied_from = table[-1]
            table[-1] = self.take()
            self.drop(copied_from)""",
        """        if table and self.refs[table[-1]] > 1:
            copied_from = table[-1]
            table[-1] = self.take()
            self.drop(copied_from)
        elif slot == 0:
            table.append(self.take())""",
        "A full shared block is copied. It is never written again, so it stays shared: if the new "
        "token starts a block, take one and copy nothing.",
    ),
    (
        "no_copy_on_write",
        "elif self.refs[table[-1]] > 1:",
        "elif False:",
        "A token is appended into a block that another sequence holds: both would read it. Give "
        "the writer a block of its own and name the old one in copied_from.",
    ),
    (
        "old_block_not_dropped",
        "            self.drop(copied_from)\n",
        "",
        "After copy-on-write the old block is still counted for the sequence that left it, so it "
        "never becomes free: drop it.",
    ),
    (
        "table_shared_by_fork",
        "self.tables[dst] = list(self.tables[src])",
        "self.tables[dst] = self.tables[src]",
        "After fork both sequences have one and the same list as their table, so that what one "
        "appends appears in the other: copy the list.",
    ),
    (
        "fork_counts_nothing",
        """        for block in self.tables[src]:
            self.share(block)
""",
        "",
        "fork does not count the second holder of the blocks: share each of them.",
    ),
    (
        "fork_shares_full_blocks_only",
        "        for block in self.tables[src]:\n",
        "        for block in self.tables[src][: self.lengths[src] // self.block_size]:\n",
        "The partly filled block is shared as well: it is copied only when one of them writes.",
    ),
    (
        "leaks_on_free",
        "        if self.refs[block] == 0:\n            heapq.heappush(self._free, block)",
        "        if self.refs[block] == 0 and block % 2:\n            heapq.heappush("
        "self._free, block)",
        "Some blocks never come back after their last holder is gone.",
    ),
    (
        "frees_shared",
        "        if self.refs[block] == 0:\n",
        "        if True:\n",
        "A block becomes free while others still hold it: only the last holder frees it.",
    ),
    (
        "last_in_first_out",
        """            heapq.heappush(self._free, block)""",
        """            self._free.insert(0, block)""",
        "`take` gives the block that came back last. It must give the lowest free id, whatever "
        "the order in which blocks came back.",
    ),
    (
        "allocates_before_the_test",
        '            raise MemoryError(f"{new} blocks wanted',
        '            self.take()\n            raise MemoryError(f"{new} blocks wanted',
        "A refused alloc has taken blocks: count first, and change something only when all are "
        "there.",
    ),
    (
        "length_before_the_test",
        "        table, slot = self.tables[seq], self.lengths[seq] % self.block_size\n",
        "        table, slot = self.tables[seq], self.lengths[seq] % self.block_size\n"
        "        self.lengths[seq] += 1\n        self.lengths[seq] -= bool(self._free)\n",
        "A refused append has changed the length of the sequence: take the block first.",
    ),
    (
        "one_block_more",
        "new = -(-n_tokens // self.block_size) - len(shared)",
        "new = n_tokens // self.block_size + 1 - len(shared)",
        "A block is taken for the token that comes next. Take it when `append` needs it: 8 "
        "tokens fit into two blocks of 4.",
    ),
    (
        "shared_behind",
        "[*shared, *(self.take() for _ in range(new))]",
        "[*(self.take() for _ in range(new)), *shared]",
        "The shared blocks hold the first tokens: they come first in the table.",
    ),
    (
        "shared_not_counted",
        """        for block in shared:
            self.share(block)
        self.tables[seq] =""",
        """        self.tables[seq] =""",
        "`alloc` puts shared blocks into a table without counting it as a holder: share them.",
    ),
    (
        "shared_taken_twice",
        " - len(shared)\n",
        "\n",
        "`alloc` takes new blocks for all tokens, also for those in the shared blocks.",
    ),
    (
        "returns_its_own_list",
        "        return list(self.tables[seq])",
        "        return self.tables[seq]",
        "`alloc` returns the table itself, and a caller that changes the list changes your "
        "books: return a copy.",
    ),
    (
        "append_returns_the_index",
        "return table[-1], slot, copied_from",
        "return len(table) - 1, slot, copied_from",
        "`append` returns the block's place in the table. Return its id, which says where it "
        "lies in memory.",
    ),
    (
        "alloc_does_not_take",
        "[*shared, *(self.take() for _ in range(new))]",
        "[*shared, *(BlockManager.take(self) for _ in range(new))]",
        "`alloc` gets its blocks without self.take(), so a subclass that replaces `take` is "
        "passed over.",
    ),
    (
        "fork_does_not_share",
        "        for block in self.tables[src]:\n            self.share(block)\n",
        "        for block in self.tables[src]:\n            self.refs[block] += 1\n",
        "`fork` counts without self.share(), so a subclass that replaces `share` is passed over.",
    ),
    (
        "takes_before_it_shares",
        """        for block in shared:
            self.share(block)
        self.tables[seq] = [*shared, *(self.take() for _ in range(new))]
""",
        """        self.tables[seq] = [*shared, *(self.take() for _ in range(new))]
        for block in shared:
            self.share(block)
""",
        "`alloc` takes new blocks before it shares. In the subclass to come `take` may evict a "
        "shared block that nobody holds yet: share first.",
    ),
    (
        "first_block_first",
        "reversed(self.tables.pop(seq))",
        "self.tables.pop(seq)",
        "`free` drops the first block first. The last one goes first, since the blocks behind a "
        "block are worth less than the block itself.",
    ),
    (
        "takes_what_nobody_holds",
        "        block = heapq.heappop(self._free)\n",
        "        block = self.refs.index(0)\n        self._free.remove(block)\n",
        "`take` gives any block that no table holds. A subclass may keep such a block: give the "
        "lowest *free* one.",
    ),
    (
        "length_stays",
        "        del self.lengths[seq]",
        "",
        "`free` leaves the length of the sequence behind.",
    ),
    (
        "overwrites_a_live_sequence",
        """        if seq in self.tables:
            raise ValueError(f"seq={seq!r}: is live already")
        if len(shared)""",
        "        if len(shared)",
        "`alloc` of a sequence that is live must raise ValueError: its blocks would leak.",
    ),
]

_FP16 = (
    "With fp16 inputs the scores are rounded to fp16: at a score of 100 the grid is 1/16 wide. "
    "Keep scores, softmax and sum in fp32."
)
_PAGED = [
    (
        "masked_by_block",
        "    token = torch.arange(T, device=q.device)\n    valid = token < lens[:, None]",
        "    token = torch.arange(T, device=q.device)\n"
        "    valid = token // bs * bs < lens[:, None]",
        "This masks by block: the free slots of the last block count as keys, and their NaN "
        "spreads. Mask by token: t < lens[b].",
    ),
    (
        "heads_interleaved",
        "groups = q.float().reshape(B, Hkv, H // Hkv, d)",
        "groups = q.float().reshape(B, H // Hkv, Hkv, d).transpose(1, 2)",
        "This is what you get when query head h reads KV head h % Hkv. Neighbouring query heads "
        "share: h // (H // Hkv).",
    ),
    (
        "values_not_masked",
        "    V = V.masked_fill(~valid[:, :, None, None], 0)  # 0 times NaN is NaN\n",
        "",
        "A weight of 0 times the NaN in a free slot is NaN: zero the values of free slots too.",
    ),
    (
        "blocks_in_order",
        "block = table.long()[:, token // bs].clamp(min=0)",
        "block = (table.long()[:, :1] + token // bs).clamp(0, len(kc) - 1)",
        "This takes the blocks that follow the first one. They lie anywhere: look each of them "
        "up in the table.",
    ),
    (
        "slots_from_the_end",
        "V = vc[block, token % bs]",
        "V = vc[block, bs - 1 - token % bs]",
        "The values come from the wrong slot: token t lies at slot t % bs, counted from 0.",
    ),
    (
        "no_scale",
        " / math.sqrt(d)",
        "",
        "The scores are not divided by sqrt(d).",
    ),
    (
        "one_key_too_many",
        "valid = token < lens[:, None]",
        "valid = token <= lens[:, None]",
        "Each sequence reads one slot too many: tokens 0 to lens[b] - 1.",
    ),
    (
        "one_key_too_few",
        "valid = token < lens[:, None]",
        "valid = token < lens[:, None] - 1",
        "Each sequence leaves out its last token, which attends to itself as well.",
    ),
    (
        "empty_is_nan",
        "    weights = weights.masked_fill(hidden, 0)\n",
        "",
        "A sequence without tokens gives NaN: its row must be 0.",
    ),
    (
        "mean_of_one_row",
        "weights = scores.masked_fill(hidden, -math.inf).softmax(-1)",
        "weights = scores.softmax(-1)",
        "Free slots take part in the softmax with a score of 0. Set their scores to minus "
        "infinity first.",
    ),
    (
        "scores_in_fp16",
        'torch.einsum("bkgd,btkd->bkgt", groups, K) / math.sqrt(d)',
        'torch.einsum("bkgd,btkd->bkgt", groups, K).to(q.dtype).float() / math.sqrt(d)',
        _FP16,
    ),
    (
        "softmax_in_fp16",
        "    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)\n",
        "    weights = scores.masked_fill(hidden, -math.inf).to(q.dtype).softmax(-1).float()\n",
        _FP16,
    ),
    (
        "changes_the_table",
        "    token = torch.arange(T, device=q.device)\n",
        "    table.clamp_(min=0)\n    token = torch.arange(T, device=q.device)\n",
        "Your function changes the caller's table: work on a copy.",
    ),
    (
        "returns_fp32",
        ".reshape(B, H, d).to(q.dtype)",
        ".reshape(B, H, d)",
        "The output is fp32 although q is fp16: convert back to q's dtype at the end.",
    ),
    (
        "too_long_accepted",
        "if B and int(lens.max()) > T:",
        "if False:",
        "A sequence longer than its row of the table must raise ValueError.",
    ),
    (
        "lengths_in_sum",
        "if B and int(lens.max()) > T:",
        "if int(lens.sum()) > B * T:",
        "One sequence is too long for its row, although the sum of all lengths would fit: look "
        "at the longest.",
    ),
    (
        "full_table_refused",
        "int(lens.max()) > T",
        "int(lens.max()) >= T",
        "8 tokens fit into two blocks of 4.",
    ),
    (
        "any_number_of_heads",
        "if H % Hkv:",
        "if H < Hkv:",
        "3 query heads cannot share 2 KV heads evenly: raise ValueError (your own, with a "
        "message).",
    ),
]

_SCHEDULE = [
    (
        "prefill_first",
        """    plan = [(name, 1) for name in running[:token_budget]]
    left = token_budget - len(plan)
    for name, remaining in waiting:
        tokens = min(left, chunk, remaining)
        if tokens > 0:
            plan.append((name, tokens))
            left -= tokens
    return plan""",
        """    plan, left = [], token_budget
    for name, remaining in waiting:
        tokens = min(left, chunk, remaining)
        if tokens > 0:
            plan.append((name, tokens))
            left -= tokens
    return plan + [(name, 1) for name in running[:left]]""",
        "This is what you get when prompts are served first: a long one leaves the decoding "
        "requests without a token. Decodes come first.",
    ),
    (
        "decodes_are_free",
        "left = token_budget - len(plan)",
        "left = token_budget",
        "The tokens of the decoding requests count too: take them off the budget.",
    ),
    (
        "no_chunk",
        "min(left, chunk, remaining)",
        "min(left, remaining)",
        "A prompt gets more than `chunk` tokens in one step.",
    ),
    (
        "chunk_for_all",
        "min(left, chunk, remaining)",
        "min(left, chunk - token_budget + left + len(plan), remaining)",
        "`chunk` bounds the tokens of each prompt, not of all prompts together.",
    ),
    (
        "more_than_needed",
        "min(left, chunk, remaining)",
        "min(left, chunk)",
        "A prompt gets more tokens than it still needs.",
    ),
    (
        "over_budget",
        "min(left, chunk, remaining)",
        "min(token_budget, chunk, remaining)",
        "The plan exceeds the token budget: bound each prompt by what is left.",
    ),
    (
        "all_decode",
        "running[:token_budget]",
        "running",
        "More requests decode than the budget has tokens: the first token_budget of them do.",
    ),
    (
        "one_prompt_per_step",
        "            left -= tokens\n",
        "            left = 0\n",
        "Only one prompt is served a step: the next one gets what is left.",
    ),
    (
        "zero_tokens_listed",
        "if tokens > 0:",
        "if tokens >= 0:",
        "The plan lists requests with 0 tokens: leave them out.",
    ),
    (
        "zero_budget",
        "if token_budget < 1:",
        "if token_budget < 0:",
        "token_budget=0 must raise ValueError: such a server never does anything.",
    ),
]

_PREFIX = [
    (
        "content_only",
        "            found = self._index.get((before, own))\n",
        "            same = [b for b, k in self._key.items() if k[1] == own]\n"
        "            found = same[0] if same else None\n",
        "A block is found by its own tokens, whatever stands before it. Behind another beginning "
        "the same tokens have other keys and values: the block before belongs to its identity.",
    ),
    (
        "trusts_a_hash",
        "own = tuple(tokens[start : start + self.block_size])",
        "own = hash(tuple(tokens[start : start + self.block_size]))",
        "Keys and lookups do not fit together: compare the tokens themselves in both places.",
    ),
    (
        "hash_of_the_tokens",
        """            own = tuple(tokens[end - self.block_size : end])
            found = self._index.get((before, own))
""",
        """            own = tuple(tokens[end - self.block_size : end])
            same = [b for k, b in self._index.items() if hash(k) == hash((before, own))]
            found = same[0] if same else None
""",
        "Two different prefixes with one hash are taken for the same: here 2**61 - 1 and 0, "
        "elsewhere somebody else's conversation. Compare the tokens.",
    ),
    (
        "matches_the_last_token",
        "range(self.block_size, len(tokens), self.block_size)",
        "range(self.block_size, len(tokens) + 1, self.block_size)",
        "A prompt that is cached as a whole is matched as a whole, and nothing is left to "
        "compute: its last token must stay out, for its logits.",
    ),
    (
        "goes_on_after_a_gap",
        """            if found is None:
                break
            blocks""",
        """            if found is None:
                continue
            blocks""",
        "The lookup goes on after a block that is not cached. A prefix ends at the first gap.",
    ),
    (
        "evicts_the_newest",
        "block = next(iter(self._unused))",
        "block = list(self._unused)[-1]",
        "Eviction takes the block that was dropped last: take the one dropped longest ago.",
    ),
    (
        "evicts_the_lowest",
        "block = next(iter(self._unused))",
        "block = min(self._unused)",
        "Eviction takes the lowest id: take the block that was dropped longest ago.",
    ),
    (
        "evicts_before_using_free_blocks",
        "if super().n_free or not self._unused:",
        "if not self._unused:",
        "A cached block is evicted although a free one is left: free blocks go first.",
    ),
    (
        "never_evicts",
        "if super().n_free or not self._unused:",
        "if True:",
        "A cached block that no table holds is never given up, so a full cache serves nobody: "
        "`take` must evict it.",
    ),
    (
        "evicted_stays_in_the_index",
        "del self._index[self._key.pop(block)]",
        "del self._key[block]",
        "An evicted block is still found by its old tokens, but holds others soon: forget its key.",
    ),
    (
        "forgets_when_dropped",
        "if self.refs[block] == 1 and block in self._key:",
        "if False:",
        "A cached block becomes free when its last holder drops it, so nothing is found after a "
        "request has ended: keep it, unused, until it is evicted.",
    ),
    (
        "unused_while_held",
        "if self.refs[block] == 1 and block in self._key:",
        "if block in self._key:",
        "A block counts as unused although other tables hold it, and would be evicted under them.",
    ),
    (
        "share_leaves_it_unused",
        "            del self._unused[block]\n            self.refs[block] = 1\n        else:",
        "            self.refs[block] = 1\n        else:",
        "A cached block that is shared again is still listed as unused, and may be evicted while "
        "in use.",
    ),
    (
        "n_free_without_unused",
        "return super().n_free + len(self._unused)",
        "return super().n_free",
        "n_free must count cached blocks that no table holds: `take` can give them.",
    ),
    (
        "two_copies",
        """                    self.share(cached)
                    table[i] = cached
                    self.drop(block)
""",
        "                    pass\n",
        "Two sequences with the same prefix keep two copies of it: the table should switch to "
        "the cached block and drop its own.",
    ),
    (
        "own_block_leaks",
        """                    table[i] = cached
                    self.drop(block)
""",
        """                    table[i] = cached
""",
        "The table has switched to the cached block, but its own was not dropped and is lost.",
    ),
    (
        "switches_beside_a_fork",
        "                elif self.refs[block] > 1:\n                    break\n",
        "",
        "The table switches to the cached block although a fork holds the own one too. What is "
        "cached behind it is then held by the fork without the block before, which may be evicted "
        "and given to other tokens: stop there.",
    ),
    (
        "registers_the_partial_block",
        "for i in range(len(tokens) // self.block_size):",
        "for i in range(-(-len(tokens) // self.block_size)):",
        "A partly filled block is registered. It will be written again: full blocks only.",
    ),
    (
        "too_long_accepted",
        "if seq not in self.lengths or self.lengths[seq] < len(tokens):",
        "if seq not in self.lengths:",
        "More tokens are registered than the sequence has: raise ValueError.",
    ),
]

_SCHEDULER = [
    (
        "leaks_on_abort",
        "        return self._remove(id)\n\n    def step",
        "        (self.running if id in self.running else self.waiting).remove(id)\n"
        "        return self._live.pop(id).output\n\n    def step",
        "An aborted request keeps its blocks: n_free stays too low.",
    ),
    (
        "aborted_stays_in_the_plan",
        "        self._plan = [work for work in self._plan if work[0] != id]\n",
        "",
        "A request aborted between step and commit is still in the open plan, and commit looks "
        "for it: take it out.",
    ),
    (
        "preempts_the_oldest",
        "        id = self.running.pop()\n",
        "        id = self.running.pop(0)\n",
        "The oldest request is preempted: the latest arrival that runs has to go, or nobody ever "
        "finishes.",
    ),
    (
        "preempted_to_the_back",
        "self.waiting.insert(0, id)",
        "self.waiting.append(id)",
        "A preempted request goes to the end of the queue, behind later arrivals: put it first.",
    ),
    (
        "preempted_keeps_done",
        "            live.done = len(shared) * self.cache.block_size\n",
        "            live.done = max(live.done, len(shared) * self.cache.block_size)\n",
        "A preempted request still counts its tokens as computed, but its blocks are gone: "
        "admission starts behind the matched prefix, whatever was done before.",
    ),
    (
        "preempted_forgets_its_output",
        "        self.waiting.insert(0, id)",
        "        live = self._live[id]\n"
        "        del live.tokens[live.prompt_len :]\n        self.waiting.insert(0, id)",
        "A preempted request loses the tokens it had sampled: they stay, and are computed again "
        "like a prompt.",
    ),
    (
        "no_margin",
        "if new + len(self.running) > self.cache.n_free:",
        "if new > self.cache.n_free:",
        "A request is admitted into the last free blocks, and thrown out as soon as another one "
        "decodes: leave one block per running request.",
    ),
    (
        "prefix_counted_as_new",
        " - held\n",
        "\n",
        "Blocks of the matched prefix that a table holds already need no free block: admission "
        "asks for too many.",
    ),
    (
        "unused_prefix_counted_as_there",
        "held = sum(self.cache.refs[block] > 0 for block in shared)",
        "held = len(shared)",
        "Matched blocks that no table holds are among the free ones and are used up by this "
        "request: count them as needed.",
    ),
    (
        "skips_the_first_in_the_queue",
        "            if new + len(self.running) > self.cache.n_free:\n                break\n",
        "            if new + len(self.running) > self.cache.n_free:\n"
        "                self.waiting.append(self.waiting.pop(0))\n"
        "                left -= 1\n                continue\n",
        "Somebody is admitted past the first in the queue, who might then wait forever.",
    ),
    (
        "prefix_not_used",
        "            shared = self.cache.match(live.tokens)\n",
        "            shared: list[int] = []\n",
        "A cached prefix is computed again: match it at admission, and start behind it.",
    ),
    (
        "registers_what_is_planned",
        "            self._plan.append((id, live.done, tokens, last))\n",
        "            self._plan.append((id, live.done, tokens, last))\n"
        "            self.cache.register(id, live.tokens[: live.done + n])\n",
        "Blocks are registered when they are planned. If the request is aborted before commit, "
        "somebody else finds a prefix that was never computed: register in commit.",
    ),
    (
        "first_stop_only",
        "self.stop = frozenset(request.stop)",
        "self.stop = frozenset(request.stop[:1])",
        "Only the first stop token ends a request: each of them does.",
    ),
    (
        "takes_every_token_offered",
        "            if samples:\n",
        "            if id in sampled:\n",
        "A token is appended to a request in the middle of its prompt: only an entry that samples "
        "takes one.",
    ),
    (
        "prefix_charged_to_the_budget",
        "left -= min(len(live.tokens) - live.done, self.chunk)",
        "left -= min(len(live.tokens), self.chunk)",
        "A newcomer is charged for its whole prompt: only the tokens behind the matched prefix "
        "are computed.",
    ),
    (
        "prefix_computed_again",
        "            live.done = len(shared) * self.cache.block_size\n",
        "",
        "The blocks of the prefix are shared, but the plan still starts at position 0 and would "
        "write into them: start behind the prefix.",
    ),
    (
        "admits_regardless_of_the_budget",
        "while self.waiting and left > 0:",
        "while self.waiting:",
        "Requests are admitted although the running ones use up the budget: they would hold "
        "blocks and do nothing.",
    ),
    (
        "one_admission_per_step",
        "        while self.waiting and left > 0:",
        "        for _ in range(bool(self.waiting and left > 0)):",
        "Only one request is admitted a step: go on while the budget lasts.",
    ),
    (
        "last_token_needs_a_slot",
        "most = len(request.prompt) + request.max_tokens - 1",
        "most = len(request.prompt) + request.max_tokens",
        "The last sampled token is never fed, so it needs no slot: a request that just fits is "
        "rejected.",
    ),
    (
        "never_rejects",
        'return "rejected"',
        "pass",
        "A request that exceeds the whole cache is accepted, and waits forever or stops everybody: "
        "reject it.",
    ),
    (
        "samples_after_every_chunk",
        "last = live.done + n == len(live.tokens)",
        "last = True",
        "A token is sampled after each chunk of a prompt: only the last chunk reaches the end of "
        "the request.",
    ),
    (
        "stop_ignored",
        "return len(output) >= self.max_tokens or output[-1] in self.stop",
        "return len(output) >= self.max_tokens",
        "A request goes on after one of its stop tokens.",
    ),
    (
        "stop_looked_for_in_the_prompt",
        "output[-1] in self.stop",
        "not self.stop.isdisjoint(self.tokens)",
        "A stop token in the prompt ends the request: only sampled tokens count.",
    ),
    (
        "one_token_too_many",
        "len(output) >= self.max_tokens",
        "len(output) > self.max_tokens",
        "A request samples max_tokens + 1 tokens.",
    ),
    (
        "nothing_registered",
        "                self.cache.register(id, live.tokens[: live.done])\n",
        "                pass\n",
        "No prefix is ever found: commit has to register the blocks that are computed now.",
    ),
    (
        "registers_the_uncomputed",
        "self.cache.register(id, live.tokens[: live.done])",
        "self.cache.register(id, live.tokens[: self.cache.lengths[id]])",
        "Blocks are registered before all of their tokens are computed, and the next request "
        "would read what is not there: only the first `done` tokens count.",
    ),
    (
        "finished_stay",
        "finished[id] = self._remove(id)",
        "finished[id] = live.output",
        "A finished request stays: it must drop its blocks and leave.",
    ),
    (
        "returns_the_whole_text",
        "return self.tokens[self.prompt_len :]",
        "return self.tokens",
        "The output holds the prompt too: return the sampled tokens only.",
    ),
    (
        "open_plan_ignored",
        """        if self._plan:
            raise ValueError("step: the last plan is not committed yet")
""",
        "",
        "A second step before commit must raise ValueError: it would give out slots twice.",
    ),
    (
        "half_committed",
        """        for id, _, _, samples in self._plan:
            if samples and id not in sampled:
                raise ValueError(f"sampled: lacks the token of {id!r}")
""",
        "",
        "commit without the token of a planned request must raise ValueError before it changes "
        "anything: look through the plan first.",
    ),
    (
        "same_id_twice",
        "if request.id in self._live:",
        "if False:",
        "A second request with a live id must raise ValueError.",
    ),
    (
        "empty_prompt",
        "if not request.prompt:",
        "if False:",
        "A request without a prompt must raise ValueError: nothing could be sampled from it.",
    ),
]

_KERNEL = [
    (
        "page_as_if_contiguous",
        "page = tl.gather(b_p, o_t // PAGE_SIZE - t // PAGE_SIZE, 0)",
        "page = o_t // PAGE_SIZE + b * 0",
        "The table is not used: token o is looked for on page o // PAGE_SIZE itself. The table "
        "says which page that is.",
    ),
    (
        "slot_is_the_token",
        "slot = (o_t % PAGE_SIZE).to(tl.int64)",
        "slot = o_t.to(tl.int64)",
        "Within its page a token lies at slot o % PAGE_SIZE, not at o.",
    ),
    (
        "first_page_of_the_step",
        "page = tl.gather(b_p, o_t // PAGE_SIZE - t // PAGE_SIZE, 0)",
        "page = tl.gather(b_p, o_t * 0, 0)",
        "All keys of a step are looked for on one page. A step may touch several: each token "
        "needs the page of its own.",
    ),
    (
        "wrong_row_of_the_table",
        "block_tables + b * s_tb + o_p",
        "block_tables + o_p",
        "Every sequence reads the first row of the table: add b * s_tb.",
    ),
    (
        "strides_of_k_for_v",
        "v_row = v_pages + page * s_vn + slot * s_vp + h_kv * s_vh",
        "v_row = v_pages + page * s_kn + slot * s_kp + h_kv * s_kh",
        "V is read with the strides of K, and they need not be the same.",
    ),
    (
        "scores_unmasked",
        '        s = tl.where(m_t[None, :], s, -float("inf"))\n',
        "",
        "Slots past the end of the split count as keys with score 0. Set their scores to minus "
        "infinity before the maximum and the weights.",
    ),
    (
        "v_unmasked",
        "b_v = tl.load(v_tile, mask=m_t[:, None] & m_d[None, :], other=0.0)",
        "b_v = tl.load(v_tile, mask=m_d[None, :], other=0.0)",
        "The load of V is not masked by the length. A weight of 0 times the NaN in a free slot "
        "is NaN, so mask the load too.",
    ),
    (
        "wrong_kv_head",
        "h = h_kv * GROUP + o_g",
        "h = h_kv + o_g * tl.num_programs(1)",
        "This maps query head h to KV head h % Hkv. Neighbours share: the group of h_kv is the "
        "GROUP heads from h_kv * GROUP on.",
    ),
    (
        "acc_not_rescaled",
        "acc = acc * rescale[:, None]",
        "acc = acc * 1.0",
        "acc is not rescaled when the maximum grows, so the values of earlier steps weigh too "
        "much.",
    ),
    (
        "maximum_of_the_block",
        "new_high = tl.maximum(high, tl.max(s, 1))",
        "new_high = tl.max(s, 1)",
        "The running maximum falls in a step of small scores, and the rescale factor overflows: "
        "take the larger of the old maximum and the step's.",
    ),
    (
        "lse_in_base_2",
        " * 0.6931471805599453",
        "",
        "part_lse is in base 2; the contract is the natural logarithm: multiply by ln 2.",
    ),
    (
        "past_the_length",
        "end = tl.minimum(start + per_split, length)",
        "end = start + per_split",
        "The last split runs past seq_lens[b]: its end is the smaller of start + per_split and "
        "the length.",
    ),
    (
        "floor_of_the_split",
        "per_split = tl.cdiv(length, n_splits * BLOCK_T) * BLOCK_T",
        "per_split = tl.cdiv(length // n_splits, BLOCK_T) * BLOCK_T",
        "The last key is lost where the length is no multiple of the number of splits: round up "
        "once, from the exact quotient.",
    ),
    (
        "splits_overlap",
        "start = split * per_split",
        "start = split * 0",
        "Every split starts at key 0, so early keys are counted several times after the merge.",
    ),
    (
        "empty_split_is_nan",
        "average = acc / tl.maximum(total, 1.0)[:, None]",
        "average = acc / total[:, None]",
        "A split without keys computes 0 / 0. It must write 0: divide by 1 where total is 0.",
    ),
]

MUTANTS = {
    "step_time": _STEP,
    "simulate": _SIMULATE,
    "kv_waste": _WASTE,
    "BlockManager": _MANAGER,
    "paged_attention": _PAGED,
    "schedule": _SCHEDULE,
    "PrefixCache": _PREFIX,
    "Scheduler": _SCHEDULER,
    "paged_decode_kernel": _KERNEL,
}

_SDPA = """\
def paged_attention(q, kc, vc, table, lens):
    out = torch.zeros_like(q)
    for b, n in enumerate(lens.tolist()):
        pages = table[b, : -(-n // kc.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[:n].transpose(0, 1) for x in (kc, vc))
        query = q[b][:, None]
        out[b] = ATTEND(query, k, v, enable_gqa=True)[:, 0]
    return out
"""

_TORCH_BODY = """\
@triton.jit
def paged_decode_kernel(
    q, k_pages, v_pages, block_tables, seq_lens, part_out, part_lse, scale,
    s_qb, s_qh, s_kn, s_kp, s_kh, s_vn, s_vp, s_vh, s_tb,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    out = torch.nn.functional.scaled_dot_product_attention(q, k_pages, v_pages)
    tl.store(part_out, out)
"""

_ATTENTION = (
    "A ready-made attention is this exercise's answer: compute scores and softmax yourself."
)
SHORTCUTS = {
    "paged_attention": [
        (
            "sdpa",
            _SDPA.replace("ATTEND", "torch.nn.functional.scaled_dot_product_attention"),
            _ATTENTION,
        ),
        (
            "sdpa_by_name",
            _SDPA.replace("ATTEND", 'getattr(torch.nn.functional, "scaled_dot_product_attention")'),
            _ATTENTION,
        ),
        (
            "course_lm",
            "def paged_attention(q, kc, vc, table, lens):\n"
            "    from course.lm import causal_attention\n"
            "    return causal_attention(0, q, kc, vc)\n",
            _ATTENTION,
        ),
    ],
    "paged_decode_kernel": [
        ("torch", _TORCH_BODY, "A kernel's body may name only tl, its parameters and variables."),
    ],
}

_DROPPED = "meets a factor that is 0 anyway: weights and values are both masked"
_EARLIER = "registering again changes nothing: commit calls register only to save time"
_NOT_STORED = "fills padded rows and columns of the query tile: the rows are never stored, and the "
EQUIVALENT: dict[str, dict[str, str]] = {
    "simulate": {"constant#4: 1 to 2": "one step more, in which nobody is left"},
    "paged_attention": {
        "constant#5: 0 to 1": _DROPPED,
        "constant#7: 0 to 1": _DROPPED,
    },
    "paged_decode_kernel": {
        "constant#7: 0.0 to 1.0": _NOT_STORED + "columns meet zeros of K",
        "constant#8: 1e+38 to 2e+38": "any finite floor below every score gives the same maximum",
        "constant#12: 0.0 to 1.0": "fills keys that tl.where replaces and columns where q is 0",
        "constant#16: 0.0 to 1.0": "fills values of weight 0 and columns that are never stored",
    },
    "Scheduler": {
        "constant#1: 0 to 1": "admission sets `done` before it is read",
        "raise#4: drop": "list.remove raises ValueError as well, without naming the argument",
        "operator#11: // to *": _EARLIER,
        "compare#10: > to >=": _EARLIER,
    },
}
