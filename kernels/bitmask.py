"""Constrained decoding: a packed bit per token forbids logits, or the argmax.

Problem: a grammar says before each step which of V tokens may come next. The
answer travels as bits: token t of row r is allowed if

    (bitmask[r, t // 32] >> (t % 32)) & 1 == 1

    logits[r, t] = -inf where the bit is 0                  (in place)
    ids[r] = the t with the largest allowed logits[r, t]    (writes no logits)

Through memory: the words, V / 8 bytes a row, 16 times less than 16-bit logits.
A vector is the 16 bytes of logits that a thread moves at once. Masking stores
the vectors that lose a token and reads only those that also keep one; argmax
reads the vectors that have an allowed token. So a state with two legal tokens
costs one pass of stores, or for the argmax two vectors. A store of single
elements would move fewer bytes on paper, but memory moves sectors of 32
bytes, and threads that each store 2 of 16 bytes need 8 times the requests.

How it fills a GPU: a program takes 2048 tokens of one row, without a loop, so
that all bytes of even a single row are in flight at once; an argmax merges its
blocks in a second launch, in any order with the same result. Two known bugs
that this avoids: a padded lane or a forbidden NaN winning the argmax, and an
illegal token winning where every legal logit is -inf.
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

# Tokens in 16 bytes of logits.
VECTORS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
MAX_VOCAB = 1 << 21
NOBODY = tl.constexpr(2**31 - 1)  # an id above all others


def allowed_tokens(bitmask: torch.Tensor, vocab: int) -> torch.Tensor:
    """The bits as bools: [B, ceil(vocab / 32)] int32 -> [B, vocab]."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[..., None] >> bits) & 1).flatten(1)[:, :vocab] == 1


def apply_token_bitmask_ref(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    row_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, also in place: the specification."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    if row_idx is not None:
        rows = row_idx.long()
    allowed = allowed_tokens(bitmask[rows], logits.shape[1])
    logits[rows] = logits[rows].masked_fill(~allowed, -math.inf)
    return logits


def masked_argmax_ref(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    row_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same result in plain torch: the specification. Needs V > 0."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    if row_idx is not None:
        rows = row_idx.long()
    allowed = allowed_tokens(bitmask[rows], logits.shape[1])
    x = logits[rows].float()
    x = x.masked_fill(x.isnan() | ~allowed, -math.inf)
    winners = allowed & (x == x.amax(-1, keepdim=True))
    first = winners.int().argmax(-1)  # the first of several
    return torch.where(winners.any(-1), first, -1)


@triton.jit
def _allowed_block(
    bitmask,  # [B, ceil(V / 32)] int32
    row,  # int64
    s_bitmask,
    V,
    VECTOR: tl.constexpr,  # tokens in 16 bytes of logits
    BLOCK_W: tl.constexpr,  # words per program
):
    """Token ids of this program's block and whether each is allowed.

    Returns the ids, whether they are below V, whether their bit is set, each
    [BLOCK_W, 32 / VECTOR, VECTOR], and the bits of a vector as one integer,
    [BLOCK_W, 32 / VECTOR, 1]: a condition on that is the same for a whole
    vector, and so the compiler keeps 16-byte loads and stores. Lanes from V on
    hold no particular bits.
    """
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    o_p = tl.arange(0, 32 // VECTOR) * VECTOR
    o_e = tl.arange(0, VECTOR)
    ids = (o_w * 32)[:, None, None] + o_p[None, :, None] + o_e[None, None, :]
    m_w = o_w * 32 < V
    words = tl.load(bitmask + row * s_bitmask + o_w, mask=m_w)
    vectors = words[:, None, None] >> o_p[None, :, None]
    vectors = vectors & ((1 << VECTOR) - 1)
    allowed = ((vectors >> o_e[None, None, :]) & 1) == 1
    return ids, ids < V, allowed, vectors


@triton.jit
def _apply_token_bitmask_kernel(
    logits,  # [B, V], changed
    bitmask,  # [B, ceil(V / 32)] int32
    row_idx,  # [rows] int32, or None for all rows
    V,
    s_logits,
    s_bitmask,
    VECTOR: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write -inf over the forbidden tokens of one block of one row.

    Grid (rows, blocks of 32 * BLOCK_W tokens).
    """
    row = tl.program_id(0)
    if row_idx is not None:
        row = tl.load(row_idx + row)
    row = row.to(tl.int64)
    ids, m_v, allowed, vectors = _allowed_block(
        bitmask, row, s_bitmask, V, VECTOR, BLOCK_W
    )
    tile = logits + row * s_logits + ids
    changes = vectors != (1 << VECTOR) - 1
    mixed = changes & (vectors != 0)
    x = tl.load(tile, mask=mixed & m_v)
    nothing = tl.full([1, 1, 1], -float("inf"), tl.float32).to(x.dtype)
    x = tl.where(allowed, x, nothing)
    tl.store(tile, x, mask=changes & m_v)


@triton.jit
def _masked_argmax_kernel(
    logits,  # [B, V]
    bitmask,  # [B, ceil(V / 32)] int32
    row_idx,  # [rows] int32, or None for all rows
    part_max,  # [rows, n_blocks] float32, dense
    part_id,  # [rows, n_blocks] int32, dense
    V,
    s_logits,
    s_bitmask,
    VECTOR: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The largest allowed logit of one block of one row, and its lowest id.

    Grid (rows, n_blocks). A block without an allowed token leaves NOBODY.
    """
    i = tl.program_id(0)
    row = i
    if row_idx is not None:
        row = tl.load(row_idx + i)
    row = row.to(tl.int64)
    ids, m_v, allowed, vectors = _allowed_block(
        bitmask, row, s_bitmask, V, VECTOR, BLOCK_W
    )
    tile = logits + row * s_logits + ids
    x = tl.load(tile, mask=(vectors != 0) & m_v).to(tl.float32)
    allowed = allowed & m_v
    x = tl.where(allowed & (x == x), x, -float("inf"))  # NaN is not itself
    ids = tl.where(allowed, ids, NOBODY)
    # The best of each vector first: few values are alive at a time.
    best = tl.max(x, 2)
    ids = tl.min(tl.where(x == best[:, :, None], ids, NOBODY), 2)
    largest = tl.max(best)
    first = tl.min(tl.where(best == largest, ids, NOBODY))
    part = i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_max + part, largest)
    tl.store(part_id + part, first)


@triton.jit
def _argmax_merge_kernel(
    part_max,  # [rows, n_blocks] float32, dense
    part_id,  # [rows, n_blocks] int32, dense
    ids,  # [rows] int64, dense
    n_blocks,
    BLOCK_N: tl.constexpr,  # power of two, at least n_blocks
):
    """The lowest id among the blocks with the largest maximum. Grid (rows,).

    The id decides between equal maxima, not the place: a block without an
    allowed token has -inf too, and NOBODY.
    """
    row = tl.program_id(0).to(tl.int64)
    # Lanes beyond the last block repeat it, which changes no maximum.
    o_n = tl.minimum(tl.arange(0, BLOCK_N), n_blocks - 1)
    maxima = tl.load(part_max + row * n_blocks + o_n)
    first = tl.load(part_id + row * n_blocks + o_n)
    winner = tl.min(tl.where(maxima == tl.max(maxima), first, NOBODY))
    tl.store(ids + row, tl.where(winner == NOBODY, -1, winner))


def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    row_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [B, V], float16, bfloat16 or float32, V <= 2**21. Rows may lie
            further apart than V, not closer. Allowed logits keep their bits.
        bitmask: [B, ceil(V / 32)] int32; token t is bit t % 32 of word
            t // 32, and 1 allows it. Bits from V on are ignored.
        row_idx: [rows] int32, dense, distinct: the rows to mask, each by the
            row of `bitmask` of the same number; by default all of them. On a
            GPU the values are checked in debug mode only.

    Returns:
        logits. A row of zero bits becomes -inf throughout.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: XGrammar, https://arxiv.org/abs/2411.15100.
    """
    rows = _check(logits, bitmask, row_idx)
    B, V = logits.shape
    if B > 1 and logits.stride(0) < V:
        raise ValueError(
            f"logits: row stride {logits.stride(0)} must be at least {V}, "
            "since rows are changed"
        )
    if rows * V == 0:
        return logits
    block_w, options = _configuration(arch(logits.device))
    _apply_token_bitmask_kernel[(rows, cdiv(V, 32 * block_w))](
        logits,
        bitmask,
        row_idx,
        V,
        logits.stride(0),
        bitmask.stride(0),
        VECTOR=VECTORS[logits.dtype],
        BLOCK_W=block_w,
        **options,
    )
    return logits


def masked_argmax(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    row_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """The allowed token with the largest logit, without writing the logits.

    Args:
        logits, bitmask, row_idx: as for `apply_token_bitmask`, but nothing is
            changed, so that rows of logits may overlap or be the same.

    Returns:
        ids, int64 [rows], or [B] without row_idx. The lowest id wins a tie,
        also where every allowed logit is -inf; NaN counts as -inf; -1 if
        nothing is allowed.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: XGrammar, https://arxiv.org/abs/2411.15100.
    """
    rows = _check(logits, bitmask, row_idx)
    V = logits.shape[1]
    ids = torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
    if rows * V == 0:
        return ids
    block_w, options = _configuration(arch(logits.device))
    n_blocks = cdiv(V, 32 * block_w)
    part_max = logits.new_empty((rows, n_blocks), dtype=torch.float32)
    part_id = torch.empty_like(part_max, dtype=torch.int32)
    _masked_argmax_kernel[(rows, n_blocks)](
        logits,
        bitmask,
        row_idx,
        part_max,
        part_id,
        V,
        logits.stride(0),
        bitmask.stride(0),
        VECTOR=VECTORS[logits.dtype],
        BLOCK_W=block_w,
        **options,
    )
    _argmax_merge_kernel[(rows,)](
        part_max,
        part_id,
        ids,
        n_blocks,
        BLOCK_N=next_power_of_2(n_blocks),
        num_warps=1,
    )
    return ids


def _check(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    row_idx: torch.Tensor | None,
) -> int:
    """Hold the arguments to the rules; the number of rows to work on."""
    check_tensor("logits", logits, ("B", "V"), [*VECTORS], logits.device)
    B, V = logits.shape
    if V > MAX_VOCAB:
        raise ValueError(f"logits: {V} tokens must be at most {MAX_VOCAB}")
    words = cdiv(V, 32)
    check_tensor("bitmask", bitmask, (B, words), (torch.int32,), logits.device)
    if row_idx is None:
        return B
    check_tensor("row_idx", row_idx, ("rows",), (torch.int32,), logits.device)
    check_values("row_idx", row_idx, 0, B - 1)
    return row_idx.shape[0]


def _configuration(target: str) -> tuple[int, dict[str, int]]:
    """Words a program and launch options.

    32 tokens a thread: enough 16-byte loads at once, and few against them the
    4 bytes of its word. The interpreter takes 64 tokens, so tests have blocks.
    """
    if target == "cpu":
        return 2, {}
    # A warp has 64 threads on AMD and 32 on NVIDIA.
    return 64, {"num_warps": 1 if target.startswith("gfx") else 2}
