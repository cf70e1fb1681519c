"""Wrong answers to the chapter "The KV cache" that its checks must reject.

MUTANTS edit the reference (name, old, new, message for the learner), SHORTCUTS are whole answers
that call what the exercise forbids, EQUIVALENT lists automatic mutations that change nothing.
"""

_POSITIONS = [
    (
        "feeds_the_last_token",
        "return prompt_len + new_tokens - 1",
        "return prompt_len + new_tokens",
        "This is what you get when the last sampled token is fed to the model too. Nothing is "
        "sampled after it, so it never enters: P + N - 1.",
    ),
    (
        "triangle_of_n_plus_1",
        "new_tokens * (new_tokens - 1) // 2",
        "new_tokens * (new_tokens + 1) // 2",
        "This is what you get when the first pass already counts one new token. The passes feed "
        "P, P + 1, ..., P + N - 1 tokens, so the extra part is 0 + 1 + ... + (N - 1).",
    ),
    (
        "prompt_only",
        " + new_tokens * (new_tokens - 1) // 2",
        "",
        "This is what you get when every pass feeds the prompt alone. The plain loop also feeds "
        "all tokens generated so far, one more in each pass.",
    ),
    (
        "float_division",
        "(new_tokens - 1) // 2",
        "(new_tokens - 1) / 2",
        "`/` makes a float, and a count of positions is an int: use `//`.",
    ),
    (
        "prefill_for_nothing",
        "    if new_tokens == 0:\n        return 0\n",
        "",
        "This is what you get for new_tokens=0 when the formula for N >= 1 is used: with no token "
        "to produce, the model is never called.",
    ),
    (
        "branches_swapped",
        "if cached:",
        "if not cached:",
        "The two branches are swapped: `cached=True` must give the small number.",
    ),
]

_BYTES = [
    (
        "keys_only",
        "return 2 * n_layers",
        "return n_layers",
        "This is half of the truth: the cache keeps a key and a value. The factor 2 is missing.",
    ),
    (
        "always_two_bytes",
        "head_dim * bytes_per_elem",
        "head_dim * 2",
        "This is what you get when every number takes 2 bytes. In fp32 it takes 4: multiply by "
        "bytes_per_elem.",
    ),
    (
        "one_layer",
        "return 2 * n_layers * n_kv_heads",
        "return 2 * n_kv_heads",
        "This is the cache of a single layer: multiply by n_layers.",
    ),
    (
        "zero_accepted",
        "if bytes_per_elem < 1:",
        "if bytes_per_elem < 0:",
        "A zero passes here: every argument below 1 must raise ValueError.",
    ),
]

_LAYER = [
    (
        "length_before_the_test",
        '            raise ValueError(f"k ends',
        '            self.length = end\n            raise ValueError(f"k ends',
        "The refused append has changed `length`. Test first, and only then move `length`.",
    ),
    (
        "copies",
        "return self.k[:, :end], self.v[:, :end]",
        "return self.k[:, :end].clone(), self.v[:, :end].clone()",
        "Each call returns a tensor at a new address: that is a copy of the whole cache per "
        "step. Return slices of the buffers.",
    ),
    (
        "whole_buffer",
        "return self.k[:, :end], self.v[:, :end]",
        "return self.k, self.v",
        "The returned tensors have max_len tokens, and those past `length` were never written. "
        "Return the first `length` only.",
    ),
    (
        "values_from_keys",
        "self.v[:, self.length : end] = v",
        "self.v[:, self.length : end] = k",
        "V holds the keys: the second buffer must store `v`.",
    ),
    (
        "always_at_the_front",
        "self.k[:, self.length : end] = k",
        "self.k[:, : k.shape[1]] = k",
        "Every append overwrites the first slots. New tokens go behind the old ones, at `length`.",
    ),
    (
        "last_slot_unused",
        "if end > max_len:",
        "if end >= max_len:",
        "The buffer refuses its last slot: exactly max_len tokens must fit, so compare with `>`.",
    ),
    (
        "grows_on_truncate",
        "if not 0 <= n <= self.length:",
        "if not 0 <= n:",
        "truncate(n) with n above `length` must raise ValueError: it would declare slots valid "
        "that hold nothing.",
    ),
    (
        "negative_truncate",
        "if not 0 <= n <= self.length:",
        "if n > self.length:",
        "truncate(-1) must raise ValueError: a negative length makes the next slice count from "
        "the end.",
    ),
    (
        "always_fp32",
        "        self.k = torch.empty(shape, dtype=dtype)\n",
        "        dtype = torch.float32\n        self.k = torch.empty(shape, dtype=dtype)\n",
        "The buffers ignore `dtype`: in fp32 the cache takes twice the memory of fp16.",
    ),
]

_HEADS = """\
    groups = q.float().reshape(B, t, Hkv, H // Hkv, D)
    scores = torch.einsum("btkgd,bskd->bkgts", groups, K.float())
    # Row i of the mask is position T - t + i: the diagonal starts there.
    visible = torch.ones(t, T, dtype=torch.bool, device=q.device).tril(T - t)
    scores = (scores / math.sqrt(D)).masked_fill(~visible, -math.inf)
    weights = scores.softmax(dim=-1)  # [B, Hkv, G, t, T]
    out = torch.einsum("bkgts,bskd->btkgd", weights, V.float())
"""
_ATTEND = [
    (
        "mask_at_top_left",
        ".tril(T - t)",
        ".tril()",
        "This is what you get when the mask is aligned at the top left: query i sees keys 0..i. "
        "The queries are the last t of T, so the diagonal starts at T - t.",
    ),
    (
        "no_mask",
        ".masked_fill(~visible, -math.inf)",
        "",
        "This is attention without the causal mask: each query sees keys of later tokens, which "
        "do not exist yet during decode.",
    ),
    (
        "blind_to_itself",
        ".tril(T - t)",
        ".tril(T - t - 1)",
        "The mask hides a token from itself (and the first one from everything, which gives "
        "NaN). Query i sees keys up to and including T - t + i.",
    ),
    (
        "sees_one_ahead",
        ".tril(T - t)",
        ".tril(T - t + 1)",
        "The mask is off by one: each query sees one token of the future.",
    ),
    (
        "heads_interleaved",
        _HEADS,
        _HEADS.replace("Hkv, H // Hkv, D)", "H // Hkv, Hkv, D)")
        .replace('"btkgd,', '"btgkd,')
        .replace("->btkgd", "->btgkd"),
        "This is what you get when query head h reads KV head h % Hkv (as `repeat` would lay "
        "them out). Neighbouring query heads share: h // (H // Hkv), as `repeat_interleave` does.",
    ),
    (
        "no_scale",
        "(scores / math.sqrt(D))",
        "scores",
        "The scores are not divided by sqrt(D).",
    ),
    (
        "scale_of_64",
        "math.sqrt(D)",
        "8.0",
        "The scale is fixed to 1/8, which is right for heads of 64 numbers only: divide by "
        "sqrt(D).",
    ),
    (
        "scale_without_root",
        "math.sqrt(D)",
        "D",
        "The scores are divided by D instead of its square root.",
    ),
    (
        "softmax_over_queries",
        "softmax(dim=-1)",
        "softmax(dim=-2)",
        "The weights of a query do not sum to 1: the softmax runs over the queries, not the keys.",
    ),
    (
        "no_maximum",
        "weights = scores.softmax(dim=-1)",
        "weights = scores.exp() / scores.exp().sum(-1, keepdim=True)",
        "exp overflows for large scores and the result is NaN. Take the maximum of each row out "
        "first, as `softmax` does.",
    ),
    (
        "softmax_in_fp16",
        "weights = scores.softmax(dim=-1)",
        "weights = scores.to(q.dtype).softmax(dim=-1).float()",
        "With fp16 inputs the scores are rounded to fp16 before the softmax: at a score of 100 "
        "the grid is 1/16 wide. Keep scores and softmax in fp32.",
    ),
    (
        "returns_fp32",
        ".to(q.dtype)",
        "",
        "The output is fp32 although q is fp16: convert back to q's dtype at the end.",
    ),
    (
        "more_queries_than_keys",
        "if t > T:",
        "if False:",
        "5 queries cannot be the last of 4 positions: raise ValueError if t > T.",
    ),
    (
        "any_number_of_heads",
        "if H % Hkv:",
        "if H < Hkv:",
        "3 query heads cannot share 2 KV heads evenly: raise ValueError (your own, with a "
        "message) if H is no multiple of Hkv.",
    ),
]

_LOOP = """\
    for _ in range(n_new):
        positions = torch.arange(fed, fed + len(feed))
        logits = model(
            torch.tensor([feed]), positions[None], attention, logits_to_keep=1
        )
        fed += len(feed)
        feed = [int(logits.argmax())]
        new_ids += feed
"""
_GENERATE = [
    (
        "recomputes_everything",
        _LOOP,
        """\
    for _ in range(n_new):
        positions = torch.arange(len(ids) + len(new_ids))[None]
        logits = model(torch.tensor([ids + new_ids]), positions)
        fed = len(ids) + len(new_ids)
        new_ids.append(int(logits[0, -1].argmax()))
""",
        "The ids are right, but the model was fed far more positions than you report: the whole "
        "sequence goes through it again for each token. Feed only what is not in the cache yet.",
    ),
    (
        "always_position_0",
        "torch.arange(fed, fed + len(feed))",
        "torch.arange(len(feed))",
        "This is what you get when each pass starts at position 0, so every decoded token is "
        "rotated to the first place. The next position is the number of tokens fed so far.",
    ),
    (
        "positions_one_late",
        "torch.arange(fed, fed + len(feed))",
        "torch.arange(fed, fed + len(feed)) + min(fed, 1)",
        "The decoded tokens stand one position too far: after a prompt of P tokens, the first of "
        "them has position P, since positions start at 0.",
    ),
    (
        "positions_one_early",
        "torch.arange(fed, fed + len(feed))",
        "torch.arange(fed, fed + len(feed)) - min(fed, 1)",
        "The decoded tokens stand one position too early: the first of them shares its position "
        "with the last token of the prompt.",
    ),
    (
        "one_cache_for_all_layers",
        "caches[layer]",
        "caches[0]",
        "All layers append to one cache. Each layer has its own keys and values: keep one "
        "LayerKV per layer.",
    ),
    (
        "sees_itself_only",
        "attend(q, *caches[layer].append(k, v))",
        "attend(q, k, v)",
        "A decoded token attends to itself only: attend to what `append` returns, not to the new "
        "k and v.",
    ),
    (
        "feeds_all_again",
        "feed = [int(logits.argmax())]\n        new_ids += feed",
        "new_ids += [int(logits.argmax())]\n        feed = ids + new_ids",
        "The whole sequence is fed again and appended again. With a cache, only the token just "
        "chosen is new.",
    ),
    (
        "counts_the_last_token",
        "return new_ids, fed",
        "return new_ids, fed + 1",
        "You report one position more than the model was fed: the last token is never fed back.",
    ),
    (
        "returns_the_prompt",
        "return new_ids, fed",
        "return ids + new_ids, fed",
        "The list holds the prompt too: return the new ids only.",
    ),
    (
        "takes_the_least_likely",
        ".argmax()",
        ".argmin()",
        "This picks the least likely token of each step: use argmax.",
    ),
    (
        "empty_prompt",
        "if not ids:",
        "if ids is None:",
        "An empty prompt must raise ValueError (your own, with a message): there is no last "
        "token to continue.",
    ),
    (
        "negative_length",
        "if n_new < 0:",
        "if False:",
        "A negative n_new must raise ValueError instead of returning nothing.",
    ),
]

_CONCURRENCY = [
    (
        "util_after_the_weights",
        "free = util * hbm_bytes - weight_bytes",
        "free = util * (hbm_bytes - weight_bytes)",
        "This is what you get when `util` is applied after the weights are taken off. It limits "
        "the whole memory: util * HBM - weights.",
    ),
    (
        "no_util",
        "free = util * hbm_bytes - weight_bytes",
        "free = hbm_bytes - weight_bytes",
        "`util` is ignored: the server may use only that share of the memory.",
    ),
    (
        "negative_users",
        "max(0, int(free // (bytes_per_token * ctx)))",
        "int(free // (bytes_per_token * ctx))",
        "A negative number of users: if the weights do not fit, return 0.",
    ),
    (
        "tokens_not_sequences",
        "(bytes_per_token * ctx)",
        "bytes_per_token",
        "This is the number of token slots. One sequence takes ctx of them.",
    ),
    (
        "rounded",
        "int(free // (bytes_per_token * ctx))",
        "round(free / (bytes_per_token * ctx))",
        "This rounds to the nearest: a sequence that fits by half does not fit. Round down.",
    ),
    (
        "float_floor",
        "int(free // (bytes_per_token * ctx))",
        "free // (bytes_per_token * ctx)",
        "`//` between floats gives a float: convert the floor to int.",
    ),
    (
        "full_memory_refused",
        "if not 0 < util <= 1:",
        "if not 0 < util < 1:",
        "util=1 is allowed: the interval is open at 0 and closed at 1.",
    ),
    (
        "percent_accepted",
        "if not 0 < util <= 1:",
        "if util <= 0:",
        "util above 1 must raise ValueError: a server cannot use more than its memory.",
    ),
]

_KERNEL = [
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
        "acc is not rescaled when the maximum grows, so the values of earlier blocks weigh too "
        "much.",
    ),
    (
        "total_not_rescaled",
        "total = total * rescale + tl.sum(p, 1)",
        "total = total + tl.sum(p, 1)",
        "total is not rescaled when the maximum grows: the sum of weights mixes two scales.",
    ),
    (
        "maximum_of_the_block",
        "new_high = tl.maximum(high, tl.max(s, 1))",
        "new_high = tl.max(s, 1)",
        "The running maximum falls in a block of small scores, and the rescale factor overflows "
        "to infinity: take the larger of the old maximum and the block's.",
    ),
    (
        "lse_without_total",
        "(high + tl.log2(total))",
        "high",
        "part_lse holds the largest score instead of the log-sum-exp, so the merge weighs the "
        "splits wrongly: add the logarithm of total.",
    ),
    (
        "lse_in_base_2",
        " * 0.6931471805599453",
        "",
        "part_lse is in base 2; the contract is the natural logarithm: multiply by ln 2.",
    ),
    (
        "exp2_of_natural_scores",
        "(scale * 1.4426950408889634)",
        "scale",
        "exp2 is applied to scores that were not multiplied by log2(e): this is a softmax in "
        "base 2.",
    ),
    (
        "one_key_too_many",
        "m_t = o_t < end",
        "m_t = o_t <= end",
        "Each split takes one key too many: the first slot of the next split, or a free one. "
        "Keys end before `end`.",
    ),
    (
        "one_key_too_few",
        "m_t = o_t < end",
        "m_t = o_t < end - 1",
        "Each split leaves out its last key.",
    ),
    (
        "past_the_length",
        "end = tl.minimum(start + per_split, length)",
        "end = start + per_split",
        "The last split runs past seq_lens[b]: its end is the smaller of start + per_split and "
        "the length.",
    ),
    (
        "tail_dropped",
        "per_split = tl.cdiv(length, n_splits * BLOCK_T) * BLOCK_T",
        "per_split = length // (n_splits * BLOCK_T) * BLOCK_T",
        "The keys that do not fill a block per split are lost: round per_split up, not down.",
    ),
    (
        "splits_overlap",
        "start = split * per_split",
        "start = split * 0",
        "Every split starts at key 0, so early keys are counted several times after the merge.",
    ),
    (
        "scale_of_64",
        "s = s * (scale * 1.4426950408889634)",
        "s = s * (0.125 * 1.4426950408889634)",
        "The scale is fixed to 1/8, which is right for heads of 64 numbers only: use `scale`.",
    ),
    (
        "not_normalised",
        "average = acc / tl.maximum(total, 1.0)[:, None]",
        "average = acc",
        "part_out holds the weighted sum, not the average: divide by total.",
    ),
    (
        "empty_split_is_nan",
        "average = acc / tl.maximum(total, 1.0)[:, None]",
        "average = acc / total[:, None]",
        "A split without keys computes 0 / 0. It must write 0: divide by 1 where total is 0.",
    ),
]

# Found by somebody who solved the chapter from its notebook alone, and then tried to fool it.
_POSITIONS += [
    (
        "empty_prompt_for_nothing",
        "    if prompt_len < 1:",
        "    if prompt_len < 1 and new_tokens:",
        "An empty prompt is refused even when no token is wanted: look at the arguments first, "
        "and only then take the short way out for new_tokens=0.",
    ),
]
_POSITIONS += [
    (
        "accepts_everything",
        "    if prompt_len < 1:\n"
        '        raise ValueError(f"prompt_len={prompt_len}: must be at least 1")\n'
        "    if new_tokens < 0:\n"
        '        raise ValueError(f"new_tokens={new_tokens}: must not be negative")\n',
        "",
        "An empty prompt or a negative count must raise ValueError; yours computes a number.",
    ),
    (
        "accepts_an_empty_prompt",
        "    if prompt_len < 1:\n"
        '        raise ValueError(f"prompt_len={prompt_len}: must be at least 1")\n',
        "",
        "A prompt of no tokens, or of fewer, must raise ValueError; yours computes a number.",
    ),
    (
        "accepts_negative_counts",
        "    if new_tokens < 0:\n"
        '        raise ValueError(f"new_tokens={new_tokens}: must not be negative")\n',
        "",
        "A negative number of new tokens must raise ValueError; yours computes a number.",
    ),
]
_BYTES += [
    (
        "negatives_pass",
        "    if n_layers < 1:",
        "    if n_layers == 0:",
        "A negative argument passes here: everything below 1 must raise ValueError.",
    ),
]
_ATTEND += [
    (
        "mask_of_minus_100",
        "masked_fill(~visible, -math.inf)",
        "masked_fill(~visible, -100.0)",
        "Hidden keys get a score of about -100, and real scores can be lower than that: then the "
        "future wins. Use minus infinity.",
    ),
]
_GENERATE += [
    (
        "counts_from_one",
        "torch.arange(fed, fed + len(feed))",
        "torch.arange(fed + 1, fed + 1 + len(feed))",
        "Positions start at 0, the first token's. Rotary embedding sees only differences, so the "
        "ids hide a shift of all positions; a model with learned positions would not.",
    ),
]
_GENERATE += [
    (
        "prompt_grows",
        "        new_ids += feed\n",
        "        new_ids += feed\n        ids += feed\n",
        "The caller's list has grown: copy the prompt before you append to it.",
    ),
]
_CONCURRENCY += [
    (
        "negatives_pass",
        "    if bytes_per_token < 1:",
        "    if bytes_per_token == 0:",
        "Negative bytes per token pass here: everything below 1 must raise ValueError.",
    ),
]
_KERNEL += [
    (
        "group_missing_in_the_output_row",
        "row = (b * tl.num_programs(1) * GROUP + h)",
        "row = (b * tl.num_programs(1) + h)",
        "Sequences write over each other: a sequence has KV heads times GROUP rows in part_out and "
        "part_lse, so the row of sequence b starts at b * num_programs(1) * GROUP.",
    ),
    (
        "strides_of_k_for_v",
        "o_t[:, None] * s_vt",
        "o_t[:, None] * s_kt",
        "V is read with a stride of K. The two may be laid out differently: use s_vb, s_vt, s_vh.",
    ),
    (
        "maximum_starts_at_zero",
        "tl.full([BLOCK_G], -1e38, tl.float32)",
        "tl.zeros([BLOCK_G], tl.float32)",
        "The running maximum starts at 0. When all scores are far below that, every weight "
        "underflows to 0: start far below any score.",
    ),
    (
        "tf32",
        's = tl.dot(b_q, b_k, input_precision="ieee")',
        "s = tl.dot(b_q, b_k)",
        'Without input_precision="ieee" a GPU multiplies fp32 tiles in TF32.',
    ),
]

MUTANTS = {
    "forward_positions": _POSITIONS,
    "kv_bytes_per_token": _BYTES,
    "LayerKV": _LAYER,
    "attend": _ATTEND,
    "generate_cached": _GENERATE,
    "max_concurrency": _CONCURRENCY,
    "decode_attention_kernel": _KERNEL,
}

_GROWING = """\
class LayerKV:
    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32):
        self.max_len, self.length = max_len, 0
        self.k = self.v = torch.empty(batch, 0, n_kv_heads, head_dim, dtype=dtype)

    def append(self, k, v):
        if self.length + k.shape[1] > self.max_len:
            raise ValueError("full")
        self.k = JOIN(self.k[:, : self.length], k)
        self.v = JOIN(self.v[:, : self.length], v)
        self.length += k.shape[1]
        return self.k, self.v

    def truncate(self, n):
        if not 0 <= n <= self.length:
            raise ValueError("outside")
        self.length = n
"""
_JOIN = "`torch.cat` and its relatives copy the whole cache in each step: write into a buffer."

_SDPA = """\
def attend(q, K, V):
    if q.shape[2] % K.shape[2] or q.shape[1] > K.shape[1]:
        raise ValueError("shape")
    t, T = q.shape[1], K.shape[1]
    visible = torch.ones(t, T, dtype=torch.bool).tril(T - t)
    q, K, V = (x.transpose(1, 2) for x in (q, K, V))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, K, V, attn_mask=visible, enable_gqa=True
    )
    return out.transpose(1, 2)
"""
_LIBRARY = "Build attention from plain tensor operations: the library call is the exercise."

_TORCH_BODY = """\
@triton.jit
def decode_attention_kernel(
    q, k, v, seq_lens, part_out, part_lse, scale,
    s_qb, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    tl.store(part_out, out)
"""

SHORTCUTS = {
    "LayerKV": [
        ("cat", _GROWING.replace("JOIN(", "(lambda *x: torch.cat(x, 1))("), _JOIN),
        ("concat", _GROWING.replace("JOIN(", "(lambda *x: torch.concat(x, 1))("), _JOIN),
        (
            "concatenate",
            _GROWING.replace("JOIN(", "(lambda *x: torch.concatenate(x, 1))("),
            _JOIN,
        ),
        (
            "stack",
            _GROWING.replace(
                "JOIN(",
                "(lambda a, b: torch.stack([*a.unbind(1), *b.unbind(1)], 1))(",
            ),
            _JOIN,
        ),
        (
            "course_lm",
            "from course.lm import KVCache\n\n\n" + _GROWING.replace("JOIN(", "max("),
            "The course's own cache is this exercise's answer: build yours from tensors.",
        ),
    ],
    "attend": [
        ("scaled_dot_product_attention", _SDPA, _LIBRARY),
        (
            "flex_attention",
            "from torch.nn.attention.flex_attention import flex_attention\n\n\n"
            "def attend(q, K, V):\n"
            "    q, K, V = (x.transpose(1, 2) for x in (q, K, V))\n"
            "    return flex_attention(q, K, V, enable_gqa=True).transpose(1, 2)\n",
            _LIBRARY,
        ),
        (
            "course_lm",
            "from course.lm import causal_attention\n\n\n"
            "def attend(q, K, V):\n    return causal_attention(0, q, K, V)\n",
            _LIBRARY,
        ),
        (
            "transformers",
            "from transformers.integrations.sdpa_attention import repeat_kv\n\n\n"
            "def attend(q, K, V):\n    return repeat_kv(q, 1)\n",
            _LIBRARY,
        ),
    ],
    "generate_cached": [
        (
            "course_lm",
            "from course import lm\n\n\n"
            "def generate_cached(model, ids, n_new):\n"
            "    new_ids = lm.generate(model, ids, n_new)\n"
            "    return new_ids, len(ids) + n_new - 1\n",
            "The course's own loop is this exercise's answer: write yours.",
        ),
        (
            "transformers",
            "import transformers\n\n\n"
            "def generate_cached(model, ids, n_new):\n"
            "    cache = transformers.DynamicCache()\n"
            "    return [], len(cache)\n",
            "The library's cache is this exercise's answer: use your LayerKV.",
        ),
        (
            "generate",
            "def generate_cached(model, ids, n_new):\n"
            "    new_ids = model.model.generate(ids, n_new)\n"
            "    return new_ids, len(ids) + n_new - 1\n",
            "A ready-made generate is this exercise's answer: write the loop.",
        ),
    ],
    "decode_attention_kernel": [
        ("torch", _TORCH_BODY, "A kernel's body may name only tl, its parameters and variables."),
    ],
}

_NOT_STORED = "fills padded rows and columns of the query tile: the rows are never stored, and the "
EQUIVALENT: dict[str, dict[str, str]] = {
    "decode_attention_kernel": {
        "constant#7: 0.0 to 1.0": _NOT_STORED + "columns meet zeros of K",
        "constant#8: 1e+38 to 2e+38": "any finite floor below every score gives the same maximum",
        "constant#10: 0.0 to 1.0": "fills keys that tl.where replaces and columns where q is 0",
        "constant#14: 0.0 to 1.0": "fills values of weight 0 and columns that are never stored",
    },
}
