"""Verify the tokens that a draft model proposes for speculative decoding.

Problem: of each sequence b, a draft model proposed n = n_draft[b] tokens x_i,
and the target model was run once on all n + 1 positions. Keep the longest
prefix of the drafts that the target's own decoding could have produced, and
add one token after it.

    greedy:   accept while x_i = argmax(logits[b, i]); add the next argmax
    sampled:  accept while r_i < p_i(x_i) / q_i(x_i); then add a token drawn
              from norm(max(p_i - q_i, 0)) at the first rejected position i,
              or from p_n if all were accepted

With x_i drawn from q_i and r, u uniform, an added token is distributed as if
drawn from p alone: min(p, q) + (1 - sum(min(p, q))) * residual = p.

Through memory: sampled, one row of p and one of q, 8 * B * V bytes, although
[B, K + 1, V] probabilities lie there: only the row where the first rejection
falls is needed whole, of the others single numbers. Greedy, all n + 1 rows
once. One comparison or two additions a number read: the time is the time to
read.

How it fills a GPU: a row is cut into chunks, each summed up (or searched) by a
program of its own; one program a sequence then finds the chunk that holds the
drawn point of the cumulative sum, and reads only this chunk again. No sort,
and chunks that do not depend on the batch, so neither does the result. A known
bug that this avoids: taking the first token whose cumulative sum exceeds the
drawn point. Sums by tree are not monotone in float32, so that token may have
probability 0; here only tokens of positive weight can be drawn.
"""

import math

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_tensor,
    check_values,
    next_power_of_2,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROWS = 32  # one more than drafts
MAX_VOCAB = 2**20


def verify_greedy_ref(
    logits: torch.Tensor, draft: torch.Tensor, n_draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verify_greedy` in plain torch: the specification."""
    tokens = n_draft.new_full(logits.shape[:2], -1)
    accepted = torch.zeros_like(n_draft)
    best = logits.float().nan_to_num(-math.inf, math.inf, -math.inf).argmax(-1)
    for b, n in enumerate(n_draft.tolist()):
        i = 0
        while i < n and draft[b, i] == best[b, i]:
            i += 1
        accepted[b] = i
        tokens[b, : i + 1] = best[b, : i + 1]
    return tokens, accepted


def verify_sampled_ref(
    p: torch.Tensor,
    q: torch.Tensor,
    draft: torch.Tensor,
    r: torch.Tensor,
    u: torch.Tensor,
    n_draft: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verify_sampled` in plain torch, in float64: the specification."""
    tokens = n_draft.new_full(p.shape[:2], -1)
    accepted = torch.zeros_like(n_draft)
    p, q = p.double().clamp(min=0).nan_to_num(0), q.double()
    for b, n in enumerate(n_draft.tolist()):
        i = 0
        while i < n and (x := int(draft[b, i])) >= 0:
            if not r[b, i].double() * q[b, i, x] < p[b, i, x]:
                break
            i += 1
        weights = p[b, i]
        if i < n:
            residual = (weights - q[b, i]).clamp(min=0).nan_to_num(0)
            weights = residual if residual.any() else weights
        accepted[b] = i
        tokens[b, :i] = draft[b, :i]
        possible = weights.nonzero()[:, 0]
        if len(possible):
            edges = weights[possible].cumsum(0)
            place = int((~(edges > u[b] * edges[-1])).sum())
            tokens[b, i] = possible[min(place, len(possible) - 1)]
    return tokens, accepted


@triton.jit
def _argmax_chunk_kernel(
    logits,  # [B, K + 1, V]
    n_draft,  # [B] int32
    part_max,  # [B, K + 1, n_chunks] float32, dense
    part_id,  # [B, K + 1, n_chunks] int32, dense
    V,
    s_lb,
    s_li,
    BLOCK_V: tl.constexpr,  # tokens per chunk
):
    """Largest logit of one chunk of a row and the lowest id that has it.

    Grid (B, K + 1, n_chunks). Rows after the last draft's are not read.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    if i <= tl.load(n_draft + b):
        o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        row = logits + b * s_lb + i * s_li
        x = tl.load(row + o_v, mask=o_v < V, other=-float("inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, -float("inf"))  # NaN is never the largest
        high = tl.max(x, 0)
        part = (b * tl.num_programs(1) + i) * tl.num_programs(2)
        part += tl.program_id(2)
        tl.store(part_max + part, high)
        tl.store(part_id + part, tl.min(tl.where(x == high, o_v, V), 0))


@triton.jit
def _verify_greedy_kernel(
    draft,  # [B, K] int32
    n_draft,  # [B] int32
    part_max,  # [B, K + 1, n_chunks] float32, dense
    part_id,  # [B, K + 1, n_chunks] int32, dense
    tokens,  # [B, K + 1] int32, dense
    accepted,  # [B] int32, dense
    rows,  # K + 1
    n_chunks,
    s_db,
    BLOCK_K: tl.constexpr,  # power of two, at least K + 1
    BLOCK_N: tl.constexpr,  # power of two, at least n_chunks
):
    """Compare the drafts of one sequence with the argmax. Grid (B,)."""
    b = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    o_n = tl.arange(0, BLOCK_N)
    n = tl.load(n_draft + b)

    part = (b * rows + o_k) * n_chunks  # [K]
    m_kn = (o_k <= n)[:, None] & (o_n < n_chunks)[None, :]
    max_tile = part_max + part[:, None] + o_n[None, :]
    b_max = tl.load(max_tile, mask=m_kn, other=-float("inf"))  # [K, N]
    chunk = tl.argmax(b_max, 1)  # [K], the lowest of equally large ones
    token = tl.load(part_id + part + chunk, mask=o_k <= n, other=0)

    b_draft = tl.load(draft + b * s_db + o_k, mask=o_k < n, other=-1)
    # The first place without a match; after the last draft there is none.
    end = tl.min(tl.where(token == b_draft, BLOCK_K, o_k), 0)
    out = tl.where(o_k <= end, token, -1)
    tl.store(tokens + b * rows + o_k, out, mask=o_k < rows)
    tl.store(accepted + b, end)


@triton.jit
def _residual_chunk_kernel(
    p,  # [B, K + 1, V] float32
    q,  # [B, K, V] float32
    draft,  # [B, K] int32
    r,  # [B, K] float32
    n_draft,  # [B] int32
    accepted,  # [B] int32, dense
    residual_sums,  # [B, n_chunks] float32, dense
    p_sums,  # [B, n_chunks] float32, dense
    V,
    s_pb,
    s_pi,
    s_qb,
    s_qi,
    s_db,
    s_rb,
    BLOCK_K: tl.constexpr,  # power of two, at least K + 1
    BLOCK_V: tl.constexpr,  # tokens per chunk
):
    """Judge the drafts of one sequence; sum up max(p - q, 0), and p, over one
    chunk of the row to draw from.

    Grid (B, n_chunks). After the last draft q counts as 0, and is not read.
    """
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    n = tl.load(n_draft + b)
    p += b * s_pb
    q += b * s_qb

    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    x = tl.load(draft + b * s_db + o_k, mask=o_k < n, other=-1)
    m_x = x >= 0
    x_p = tl.load(p + o_k * s_pi + x, mask=m_x, other=0.0)
    x_q = tl.load(q + o_k * s_qi + x, mask=m_x, other=0.0)
    x_r = tl.load(r + b * s_rb + o_k, mask=m_x, other=0.0)
    # Not r < p / q: q may be 0. Strict: p = 0 fails even for r = 0, and so
    # does the place after the last draft, 0 * 0 < 0.
    end = tl.min(tl.where(x_r * x_q < x_p, BLOCK_K, o_k), 0)

    o_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    b_p = tl.load(p + end * s_pi + o_v, mask=o_v < V, other=0.0)
    m_q = o_v < tl.where(end < n, V, 0)
    b_q = tl.load(q + end * s_qi + o_v, mask=m_q, other=0.0)
    # Comparisons, not maximum: where it meets NaN, processors disagree.
    b_residual = tl.where(b_p > b_q, b_p - b_q, 0.0)
    b_p = tl.where(b_p == b_p, b_p, 0.0)
    part = b * tl.num_programs(1) + chunk
    tl.store(residual_sums + part, tl.sum(b_residual, 0))
    tl.store(p_sums + part, tl.sum(b_p, 0))
    tl.store(accepted + b, end, mask=chunk == 0)


@triton.jit
def _draw(weights, ids, point):
    """The first id at which the running sum exceeds the point.

    Only ids of positive weight, the last of them if rounding leaves none; -1
    if there is none at all.
    """
    after = (tl.cumsum(weights, 0) > point) & (weights > 0.0)
    first = tl.min(tl.where(after, ids, 2147483647), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0.0, ids, -1), 0))


@triton.jit
def _verify_sampled_kernel(
    p,  # [B, K + 1, V] float32
    q,  # [B, K, V] float32
    draft,  # [B, K] int32
    u,  # [B] float32
    n_draft,  # [B] int32
    accepted,  # [B] int32, dense
    residual_sums,  # [B, n_chunks] float32, dense
    p_sums,  # [B, n_chunks] float32, dense
    tokens,  # [B, K + 1] int32, dense
    rows,  # K + 1
    V,
    n_chunks,
    s_pb,
    s_pi,
    s_qb,
    s_qi,
    s_db,
    BLOCK_K: tl.constexpr,  # power of two, at least K + 1
    BLOCK_N: tl.constexpr,  # power of two, at least n_chunks
    BLOCK_V: tl.constexpr,  # tokens per chunk
):
    """Write one sequence's accepted drafts and draw the token after them.

    Grid (B,). Reads one chunk of the row again, that in which u lies.
    """
    b = tl.program_id(0).to(tl.int64)
    end = tl.load(accepted + b).to(tl.int64)

    o_n = tl.arange(0, BLOCK_N)
    part, m_n = b * n_chunks + o_n, o_n < n_chunks
    b_sum = tl.load(residual_sums + part, mask=m_n, other=0.0)
    # Rounding can leave p <= q everywhere although a draft failed: from p.
    has_residual = tl.sum(b_sum, 0) > 0.0
    b_all = tl.load(p_sums + part, mask=m_n, other=0.0)
    b_sum = tl.where(has_residual, b_sum, b_all)
    point = tl.load(u + b) * tl.sum(b_sum, 0)
    chunk = _draw(b_sum, o_n, point)
    point -= tl.sum(tl.where(o_n < chunk, b_sum, 0.0), 0)

    # With no chunk to draw from (-1) all weights of the first one are 0.
    o_v = tl.maximum(chunk, 0) * BLOCK_V + tl.arange(0, BLOCK_V)
    p_row, q_row = p + b * s_pb + end * s_pi, q + b * s_qb + end * s_qi
    b_p = tl.load(p_row + o_v, mask=o_v < V, other=0.0)
    minus_q = (end < tl.load(n_draft + b)) & has_residual
    m_q = o_v < tl.where(minus_q, V, 0)
    b_q = tl.load(q_row + o_v, mask=m_q, other=0.0)
    token = _draw(tl.where(b_p > b_q, b_p - b_q, 0.0), o_v, point)

    o_k = tl.arange(0, BLOCK_K)
    out = tl.load(draft + b * s_db + o_k, mask=o_k < end, other=-1)
    out = tl.where(o_k == end, token, out)
    tl.store(tokens + b * rows + o_k, out, mask=o_k < rows)


def verify_greedy(
    logits: torch.Tensor, draft: torch.Tensor, n_draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts as long as they are what greedy decoding would choose.

    Args:
        logits: [B, K + 1, V], float16, bfloat16 or float32, K <= 31,
            V <= 2**20: the target's, row i for the token after i drafts. NaN
            counts as -inf. Rows after n_draft[b] are never read.
        draft: [B, K] int32, ids below V; -1 is never accepted.
        n_draft: [B] int32, dense: how many drafts there are, 0 to K.

        Outer strides are free, the last one is 1. Values of draft and n_draft
        are checked on a GPU in debug mode only.

    Returns:
        tokens [B, K + 1] int32: the accepted drafts, the target's own next
        token, then -1. The lowest of equally large ids wins; it is 0 where all
        are -inf. n_accepted [B] int32, 0 to n_draft[b]. Both dense.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Stern et al., https://arxiv.org/abs/1811.03115.
    """
    check_tensor("logits", logits, ("B", "K + 1", "V"), DTYPES, logits.device)
    B, rows, V = logits.shape
    _check("logits", logits, draft, n_draft)
    tokens = torch.empty(B, rows, dtype=torch.int32, device=logits.device)
    accepted = torch.empty(B, dtype=torch.int32, device=logits.device)
    if B == 0:
        return tokens, accepted

    # Half the numbers of a sampled chunk, and half as wide: twice the chunk.
    block_v = 2 * _configuration(arch(logits.device))[0]
    n_chunks = cdiv(V, block_v)
    part_max = logits.new_empty((B, rows, n_chunks), dtype=torch.float32)
    part_id = tokens.new_empty((B, rows, n_chunks))
    _argmax_chunk_kernel[(B, rows, n_chunks)](
        logits,
        n_draft,
        part_max,
        part_id,
        V,
        *logits.stride()[:2],
        BLOCK_V=block_v,
        num_warps=4,
    )
    _verify_greedy_kernel[(B,)](
        draft,
        n_draft,
        part_max,
        part_id,
        tokens,
        accepted,
        rows,
        n_chunks,
        draft.stride(0),
        BLOCK_K=next_power_of_2(rows),
        BLOCK_N=next_power_of_2(n_chunks),
        num_warps=4,
    )
    return tokens, accepted


def verify_sampled(
    p: torch.Tensor,
    q: torch.Tensor,
    draft: torch.Tensor,
    r: torch.Tensor,
    u: torch.Tensor,
    n_draft: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts and draw one more token so that all follow the target.

    Args:
        p: [B, K + 1, V] float32, K <= 31, V <= 2**20: the target's
            probabilities, row i for the token after i drafts, with
            temperature, top-k and top-p already applied.
        q: [B, K, V] float32: the draft model's, of which draft was drawn.
        draft: [B, K] int32, ids below V; -1 is never accepted.
        r: [B, K] float32, uniform in [0, 1): draft i passes if
            r * q(draft) < p(draft), in float32.
        u: [B] float32, dense, uniform in [0, 1): where in the running sum the
            added token lies: the first whose sum exceeds u * total, or else
            the last of positive weight.
        n_draft: [B] int32, dense: how many drafts there are, 0 to K.

        Outer strides are free, the last one is 1. Values of draft and n_draft
        are checked on a GPU in debug mode only. What lies after n_draft[b] is
        never read. A NaN in p or q counts as a weight of 0 for its id; a NaN
        in p, q or r fails the draft; a NaN in u is beyond every sum.

    Returns:
        tokens [B, K + 1] int32: the accepted drafts, the added token, then -1.
        n_accepted [B] int32, 0 to n_draft[b]. Both dense.

        Sums are float32 in a fixed order that B has no part in. The rows need
        not sum to 1 exactly. If rounding makes p <= q everywhere at a rejected
        position, the token is drawn from p; if p is 0 everywhere, it is -1.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Leviathan et al., https://arxiv.org/abs/2211.17192, and Chen et
    al., https://arxiv.org/abs/2302.01318.
    """
    single = (torch.float32,)
    check_tensor("p", p, ("B", "K + 1", "V"), single, p.device)
    B, rows, V = p.shape
    _check("p", p, draft, n_draft)
    check_tensor("q", q, (B, rows - 1, V), single, p.device)
    check_tensor("r", r, (B, rows - 1), single, p.device)
    check_tensor("u", u, (B,), single, p.device)
    tokens = torch.empty(B, rows, dtype=torch.int32, device=p.device)
    accepted = torch.empty(B, dtype=torch.int32, device=p.device)
    if B == 0:
        return tokens, accepted

    block_v, warps = _configuration(arch(p.device))
    block_k = next_power_of_2(rows)
    n_chunks = cdiv(V, block_v)
    residual_sums = p.new_empty((B, n_chunks))
    p_sums = p.new_empty((B, n_chunks))
    strides = (*p.stride()[:2], *q.stride()[:2], draft.stride(0))
    _residual_chunk_kernel[(B, n_chunks)](
        p,
        q,
        draft,
        r,
        n_draft,
        accepted,
        residual_sums,
        p_sums,
        V,
        *strides,
        r.stride(0),
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=warps,
    )
    _verify_sampled_kernel[(B,)](
        p,
        q,
        draft,
        u,
        n_draft,
        accepted,
        residual_sums,
        p_sums,
        tokens,
        rows,
        V,
        n_chunks,
        *strides,
        BLOCK_K=block_k,
        BLOCK_N=next_power_of_2(n_chunks),
        BLOCK_V=block_v,
        num_warps=4,
    )
    return tokens, accepted


def _check(
    name: str, target: torch.Tensor, draft: torch.Tensor, n_draft: torch.Tensor
) -> None:
    """Raise ValueError unless the drafts fit the target's [B, K + 1, V]."""
    B, rows, V = target.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{name}: {rows} rows must be 1 to {MAX_ROWS}")
    if not 1 <= V <= MAX_VOCAB:
        raise ValueError(f"{name}: vocabulary {V} must be 1 to {MAX_VOCAB}")
    ids = (torch.int32,)
    check_tensor("draft", draft, (B, rows - 1), ids, target.device)
    check_tensor("n_draft", n_draft, (B,), ids, target.device)
    check_values("draft", draft, -1, V - 1)
    check_values("n_draft", n_draft, 0, rows - 1)


def _configuration(target: str) -> tuple[int, int]:
    """Tokens per chunk, and warps for the sums over one chunk of p and of q.

    32 numbers of each a thread, so that the few that it looks up for the
    drafts weigh nothing; 63 programs a sequence of a vocabulary of 128,000.
    """
    if target == "cpu":  # the interpreter: small chunks, so tests have many
        return 16, 4
    return 2048, 1 if target.startswith("gfx") else 2  # warps of 64 there
