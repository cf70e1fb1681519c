"""Draw the next token: temperature, top-k, top-p, min-p, without a sort.

Problem: each row of logits becomes one token, by one given uniform, so that
the draw does not depend on which rows are batched together. With integers as
weights every sum is exact, in any order and on any split of the row:

    w[t] = 2 ** ((x[t] - max(x)) * log2(e) / temperature)     float32, 0 to 1
    q[t] = floor(w[t] * 2 ** 40)                               int64
    top-k: the k tokens of largest w
    top-p: of these the fewest, largest first, with sum(q) >= p * their sum
    min-p: of these those with w >= min_p
    ids = the first t, in the order of ids, with q[0] + ... + q[t] of what is
          left > uniform * their sum

Of equal weights the lowest id comes first. A token below 2 ** -40 of the most
likely one has q = 0 and is never drawn.

Through memory: the row three times, the first from memory and the others from
the cache (8 rows of 49,152 are 1.5 MB, a cache holds 50 MB): for its maximum,
for a histogram, and to pick the candidates, all that a filter can keep, which
the search then reads instead of the row. With top-k they are hardly more than
k; top-p on a flat row leaves many, and the search is slow. Without a filter
they are the row, but then nothing is searched.

How it fills a GPU: the three passes run on all blocks of all rows; only the
search runs on one program a row. It needs no order: the k-th largest weight is
the largest number that k weights reach, so its bits are found from the top, a
few a step, by counting; the weight where top-p ends likewise, by summing q.
A known bug that this avoids: a threshold alone keeps all tokens that tie with
the last one, so that top-k = 1 on equal logits samples from the whole row.
"""

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
MAX_VOCAB = 1 << 18
GREEDY = tl.constexpr(1e-5)  # temperatures below take the largest logit
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
NOBODY = tl.constexpr(2**31 - 1)  # an id above all others
LOWEST = tl.constexpr(87 << 23)  # 2 ** -40 as bits: they order as floats do
MOST = tl.constexpr(127 << 23)  # 1.0, the largest weight
BIN_BITS = tl.constexpr(21)  # a bin of the histogram: a quarter of a binade
BINS = tl.constexpr(256)  # 162 in use, the first for tokens never drawn


def sample_tokens_ref(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The same law in plain torch, with a stable sort: the specification.

    Arguments and result as `sample_tokens`. Needs V > 0. Another exp2 may
    round a weight otherwise, which moves the borders of the law by 1e-7.
    """

    def share(total: torch.Tensor, parts: torch.Tensor, add: int):
        """(total * parts + add) >> 24 for parts <= 2**24; 64 bits are few."""
        return (total >> 24) * parts + (
            ((total & 0xFFFFFF) * parts + add) >> 24
        )

    least = -LARGEST.value
    x = logits.float()
    x = torch.where(x > least, x, least).clamp(max=LARGEST.value)
    high = x.amax(-1, keepdim=True)
    first = (x == high).int().argmax(-1)
    greedy = ~(temperature >= GREEDY.value)  # NaN too
    scale = LOG2_E.value / torch.where(greedy, 1.0, temperature)
    w = torch.exp2((x - high) * scale[:, None])
    w = torch.where(w >= 2.0**-40, w, 0.0)

    w, order = w.sort(dim=-1, descending=True, stable=True)
    q = (w * 2.0**40).long()
    live = (q > 0).sum(-1, keepdim=True)
    k = top_k[:, None].where(top_k[:, None] > 0, live)
    q = torch.where(torch.arange(q.shape[1], device=q.device) < k, q, 0)
    parts = (top_p * 2.0**24).ceil().long().clamp(min=1)[:, None]
    target = share(q.sum(-1, keepdim=True), parts, 0xFFFFFF)
    q = torch.where(q.cumsum(-1) - q < target, q, 0)
    q = torch.where(w >= min_p[:, None], q, 0)

    q = torch.zeros_like(q).scatter(-1, order, q)  # in the order of ids
    parts = (uniform * 2.0**24).long().clamp(max=2**24 - 1)[:, None]
    draw = share(q.sum(-1, keepdim=True), parts, 0)
    drawn = (q.cumsum(-1) > draw).int().argmax(-1).where(q.sum(-1) > 0, -1)
    ids = torch.where(greedy, first, drawn)
    return torch.where(high[:, 0] > least, ids, -1)


@triton.jit
def _mass(bits):
    """q of weights given as bits, int64."""
    return (bits.to(tl.float32, bitcast=True) * 1099511627776.0).to(tl.int64)


@triton.jit
def _parts(x, UP: tl.constexpr):
    """x in units of 2**-24: rounded up, at least 1, or down, below 2**24."""
    x = x * 16777216.0
    down = tl.minimum(x.to(tl.int64), 16777215)
    return tl.maximum(tl.ceil(x).to(tl.int64), 1) if UP else down


@triton.jit
def _share(total, parts, UP: tl.constexpr):
    """total * parts / 2**24 for parts <= 2**24, rounded up or down."""
    rest = (total & 0xFFFFFF) * parts  # whole, it would exceed 64 bits
    if UP:
        rest += 0xFFFFFF
    return (total >> 24) * parts + (rest >> 24)


@triton.jit
def _block(
    logits,  # [B, V]
    V,
    s_logits,
    BLOCK: tl.constexpr,
):
    """Ids and logits of this program's block, [BLOCK], finite float32."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = logits + row * s_logits + ids
    x = tl.load(tile, mask=ids < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x > -LARGEST, x, -LARGEST)  # NaN too
    return ids, tl.minimum(x, LARGEST)


@triton.jit
def _block_weights(
    logits,  # [B, V]
    temperature,  # [B] float32
    part_max,  # [B, n_blocks] float32
    V,
    s_logits,
    n_blocks,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two, at least n_blocks
):
    """Ids and weights of this program's block as bits; below LOWEST: no q."""
    row = tl.program_id(0).to(tl.int64)
    ids, x = _block(logits, V, s_logits, BLOCK)
    # Lanes beyond the last block repeat it.
    o_n = tl.minimum(tl.arange(0, BLOCK_N), n_blocks - 1)
    high = tl.max(tl.load(part_max + row * n_blocks + o_n))
    t = tl.load(temperature + row)
    scale = tl.div_rn(LOG2_E, tl.where(t < GREEDY, 1.0, t))
    bits = tl.exp2((x - high) * scale).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, MOST)  # the bits of NaN have no bin
    return ids, tl.where(x > -LARGEST, bits, 0)


@triton.jit
def _sample_max_kernel(
    logits,  # [B, V]
    part_max,  # [B, n_blocks] float32, dense
    part_id,  # [B, n_blocks] int32, dense
    V,
    s_logits,
    BLOCK: tl.constexpr,
):
    """The largest logit of each block and its lowest id. Grid (B, n_blocks).

    NOBODY where none can be drawn.
    """
    ids, x = _block(logits, V, s_logits, BLOCK)
    largest = tl.max(x)
    winner = (x == largest) & (x > -LARGEST)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    part += tl.program_id(1)
    tl.store(part_max + part, largest)
    tl.store(part_id + part, tl.min(tl.where(winner, ids, NOBODY)))


@triton.jit
def _sample_bins_kernel(
    logits,  # [B, V]
    temperature,  # [B] float32
    part_max,  # [B, n_blocks] float32, dense
    part_bins,  # [B, n_blocks, BINS] int32, dense
    part_mass,  # [B, n_blocks] int64, dense
    V,
    s_logits,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """How many weights of each block are in each bin, and the sum of all q.

    Grid (B, n_blocks). Bin 0 holds the tokens that are never
    drawn, the others follow by weight.
    """
    n_blocks = tl.num_programs(1)
    _, bits = _block_weights(
        logits, temperature, part_max, V, s_logits, n_blocks, BLOCK, BLOCK_N
    )
    bins = tl.maximum((bits - LOWEST) >> BIN_BITS, -1) + 1
    part = tl.program_id(0).to(tl.int64) * n_blocks + tl.program_id(1)
    o_bin = tl.arange(0, BINS)
    tl.store(part_bins + part * BINS + o_bin, tl.histogram(bins, BINS))
    tl.store(part_mass + part, tl.sum(_mass(bits)))


@triton.jit
def _sample_cut_kernel(
    part_max,  # [B, n_blocks] float32, dense
    part_id,  # [B, n_blocks] int32, dense
    part_bins,  # [B, n_blocks, BINS] int32, dense
    part_mass,  # [B, n_blocks] int64, dense
    top_k,  # [B] int32
    top_p,  # [B] float32
    ids,  # [B] int64
    cut,  # [B] int32
    offsets,  # [B, n_blocks] int32, dense
    chosen,  # [B] int32
    keep,  # [B] int32
    mass,  # [B] int64
    n_blocks,
    BLOCK_N: tl.constexpr,
):
    """Choose the bins whose tokens are candidates, and their places.

    Grid (B,). Writes the largest logit's id, or -1, to ids; the least bits of
    a candidate to cut; how many candidates come before each block to offsets,
    and how many there are to chosen; top_k, or 0 where it removes nothing, to
    keep; the sum of all q to mass.
    """
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    o_bin = tl.arange(0, BINS)
    m_n = o_n < n_blocks
    part = row * n_blocks + o_n
    counts = tl.load(
        part_bins + part[:, None] * BINS + o_bin[None, :],
        mask=m_n[:, None] & (o_bin > 0)[None, :],
        other=0,
    )  # [N, BINS]
    count = tl.sum(counts, 0)
    k = tl.load(top_k + row)
    k = tl.where(k < tl.sum(count), k, 0)
    reached = tl.cumsum(count, reverse=True) >= k
    bin_k = tl.sum(tl.where(reached, 1, 0)) - 1

    # Top-p ends at a bin or above if it and those above hold p of the sum:
    # with their weights taken low, the others high, a little for rounding.
    low = count * _mass(((o_bin - 1) << BIN_BITS) + LOWEST)
    high = count * _mass((o_bin << BIN_BITS) + LOWEST)
    here = tl.cumsum(low, reverse=True)
    below = tl.cumsum(high) - high
    parts = _parts(tl.load(top_p + row), True)
    reached = here * (16777216.0 - parts) >= below * (1.001 * parts)
    bin_p = tl.sum(tl.where(reached, 1, 0)) - 1

    first = tl.where(k > 0, bin_k, bin_p)
    taken = tl.sum(tl.where(o_bin[None, :] >= first, counts, 0), 1)
    tl.store(offsets + part, tl.cumsum(taken) - taken, mask=m_n)
    tl.store(chosen + row, tl.sum(taken))
    tl.store(cut + row, ((first - 1) << BIN_BITS) + LOWEST)
    tl.store(keep + row, k)
    tl.store(mass + row, tl.sum(tl.load(part_mass + part, mask=m_n, other=0)))

    maxima = tl.load(part_max + part, mask=m_n, other=-LARGEST)
    best = tl.load(part_id + part, mask=m_n, other=NOBODY)
    best = tl.min(tl.where(maxima == tl.max(maxima), best, NOBODY))
    tl.store(ids + row, tl.where(best == NOBODY, -1, best))


@triton.jit
def _sample_gather_kernel(
    logits,  # [B, V]
    temperature,  # [B] float32
    part_max,  # [B, n_blocks] float32, dense
    cut,  # [B] int32
    offsets,  # [B, n_blocks] int32, dense
    weights,  # [B, V] int32, dense
    tokens,  # [B, V] int32, dense
    V,
    s_logits,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy the candidates side by side, by id: bits and ids. Grid as above."""
    row = tl.program_id(0).to(tl.int64)
    n_blocks = tl.num_programs(1)
    ids, bits = _block_weights(
        logits, temperature, part_max, V, s_logits, n_blocks, BLOCK, BLOCK_N
    )
    chosen = bits >= tl.load(cut + row)
    start = tl.load(offsets + row * n_blocks + tl.program_id(1))
    place = row * V + start + tl.cumsum(tl.where(chosen, 1, 0)) - 1
    tl.store(weights + place, bits, mask=chosen)
    tl.store(tokens + place, ids, mask=chosen)


@triton.jit
def _reach(
    weights,  # [n] int32, the candidates of a row as bits
    n,
    target,
    wanted,
    MASS: tl.constexpr,  # sum q, or else count
    STEPS: tl.constexpr,  # 30 / DIGIT
    DIGIT: tl.constexpr,  # bits found in a step
    TILE: tl.constexpr,
):
    """The largest bits such that the weights at or above reach the target.

    0 without a search if it is not wanted.
    """
    found = 0
    for step in range(0, tl.where(wanted, STEPS, 0)):
        shift = 30 - DIGIT * (step + 1)
        pivots = found + (tl.arange(0, 1 << DIGIT) << shift)
        reached = tl.zeros([1 << DIGIT], tl.int64)
        for start in range(0, n, TILE):
            o_c = start + tl.arange(0, TILE)
            bits = tl.load(weights + o_c, mask=o_c < n, other=0)
            hits = bits[:, None] >= pivots[None, :]
            if MASS:
                reached += tl.sum(tl.where(hits, _mass(bits)[:, None], 0), 0)
            else:
                reached += tl.sum(tl.where(hits, 1, 0), 0)
        enough = tl.sum(tl.where(reached >= target, 1, 0))
        found += (enough - 1) << shift
    return found


@triton.jit
def _split(
    weights,  # [n] int32
    n,
    border,  # bits
    TILE: tl.constexpr,
):
    """How many weights lie above the border, the sum of their q, its ties."""
    above = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    ties = tl.zeros([TILE], tl.int32)
    for start in range(0, n, TILE):
        o_c = start + tl.arange(0, TILE)
        bits = tl.load(weights + o_c, mask=o_c < n, other=0)
        above += tl.where(bits > border, 1, 0)
        mass += tl.where(bits > border, _mass(bits), 0)
        ties += tl.where(bits == border, 1, 0)
    return tl.sum(above), tl.sum(mass), tl.sum(ties)


@triton.jit
def _sample_draw_kernel(
    uniform,  # [B] float32
    temperature,  # [B] float32
    keep,  # [B] int32
    top_p,  # [B] float32
    min_p,  # [B] float32
    chosen,  # [B] int32
    mass,  # [B] int64
    weights,  # [B, V] int32, dense
    tokens,  # [B, V] int32, dense
    ids,  # [B] int64, changed
    V,
    STEPS: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Filter the candidates of a row and draw one. Grid (B,).

    What the filters leave: the weights above `border`, and of those equal to
    it the first `ties`. Rows without temperature or candidates stay.
    """
    row = tl.program_id(0).to(tl.int64)
    weights += row * V
    tokens += row * V
    n = tl.load(chosen + row)

    k = tl.load(keep + row)
    total = tl.load(mass + row)
    border = _reach(weights, n, k, k > 0, False, STEPS, DIGIT, TILE)
    above, mass_above, _ = _split(weights, n, border, TILE)
    mass_k = mass_above + (k - above) * _mass(border)
    total = tl.where(k > 0, mass_k, total)

    p = tl.load(top_p + row)
    target = _share(total, _parts(p, True), True)
    reach = _reach(weights, n, target, p < 1.0, True, STEPS, DIGIT, TILE)
    border = tl.maximum(border, reach)
    _, mass_above, _ = _split(weights, n, border, TILE)
    each = _mass(tl.maximum(border, LOWEST))  # not 0 where all is kept
    ties = (target - mass_above + each - 1) // each

    least = tl.load(min_p + row).to(tl.int32, bitcast=True)
    ties = tl.where(least > border, n, ties)
    border = tl.maximum(border, least)
    _, mass_above, equal = _split(weights, n, border, TILE)
    total = mass_above + tl.minimum(ties, equal) * _mass(border)
    draw = _share(total, _parts(tl.load(uniform + row), False), False)

    drawn = tl.full([], NOBODY, tl.int32)
    before = tl.zeros([], tl.int64)
    seen = tl.zeros([], tl.int32)
    for start in range(0, n, TILE):
        o_c = start + tl.arange(0, TILE)
        # Lanes from n on, the last ones, have no token and may hold anything.
        bits = tl.load(weights + o_c, mask=o_c < n)
        token = tl.load(tokens + o_c, mask=o_c < n, other=NOBODY)
        tie = tl.where(bits == border, 1, 0)
        early = seen + tl.cumsum(tie) <= ties
        left = (bits > border) | ((bits == border) & early)
        q = tl.where(left, _mass(bits), 0)
        beyond = before + tl.cumsum(q) > draw
        drawn = tl.minimum(drawn, tl.min(tl.where(beyond, token, NOBODY)))
        before += tl.sum(q)
        seen += tl.sum(tie)
    drawn = tl.where(drawn == NOBODY, -1, drawn)
    is_drawn = tl.load(temperature + row) >= GREEDY
    is_drawn = is_drawn & (tl.load(ids + row) >= 0)
    tl.store(ids + row, drawn, mask=is_drawn)


def sample_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: [B, V], float16, bfloat16 or float32, V <= 2**18; rows may lie
            anywhere. +inf counts as the largest float32, NaN and -inf as the
            least, which is never drawn.
        uniform: [B] float32, 0 to 1, in units of 2**-24, rounded down; 1
            counts as the unit before it.
        temperature: [B] float32, 0 to 1e5; below 1e-5 the largest logit wins.
        top_k: [B] int32; 0 keeps all.
        top_p: [B] float32, 0 to 1, in units of 2**-24, rounded up; 1 keeps
            all, 0 keeps one. The token that reaches the sum is kept.
        min_p: [B] float32, 0 to 1; 0 keeps all.

    The filters act in this order, each on what the one before left; the module
    says what is kept, and that the lowest id wins ties. All vectors are dense;
    on a GPU their values are checked in debug mode only: else a row that
    breaks a rule gets some id or -1, and harms no other row.

    Returns:
        ids, int64 [B]; -1 for a row without a token that can be drawn.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: top-p is nucleus sampling, https://arxiv.org/abs/1904.09751; min-p,
    https://arxiv.org/abs/2407.01082.
    """
    device = logits.device
    check_tensor("logits", logits, ("B", "V"), DTYPES, device)
    B, V = logits.shape
    if V > MAX_VOCAB:
        raise ValueError(f"logits: {V} tokens must be at most {MAX_VOCAB}")
    for name, tensor, dtype, most in (
        ("uniform", uniform, torch.float32, 1),
        ("temperature", temperature, torch.float32, 100_000),
        ("top_k", top_k, torch.int32, NOBODY.value),
        ("top_p", top_p, torch.float32, 1),
        ("min_p", min_p, torch.float32, 1),
    ):
        check_tensor(name, tensor, (B,), (dtype,), device)
        check_values(name, tensor, 0, most)

    ids = torch.full((B,), -1, dtype=torch.int64, device=device)
    if B * V == 0:
        return ids
    block, options, search = _configuration(arch(device), logits.dtype)
    n_blocks = cdiv(V, block)
    part_max = logits.new_empty((B, n_blocks), dtype=torch.float32)
    part_id = top_k.new_empty((B, n_blocks))
    part_bins = top_k.new_empty((B, n_blocks, BINS.value))
    part_mass = ids.new_empty((B, n_blocks))
    cut, chosen, keep = (torch.empty_like(top_k) for _ in range(3))
    offsets = torch.empty_like(part_id)
    mass = torch.empty_like(ids)
    weights = top_k.new_empty((B, V))
    tokens = torch.empty_like(weights)
    row = V, logits.stride(0)
    blocks = {"BLOCK": block, "BLOCK_N": next_power_of_2(n_blocks)}
    _sample_max_kernel[(B, n_blocks)](
        logits,
        part_max,
        part_id,
        *row,
        BLOCK=block,
        **options,
    )
    _sample_bins_kernel[(B, n_blocks)](
        logits,
        temperature,
        part_max,
        part_bins,
        part_mass,
        *row,
        **blocks,
        **options,
    )
    _sample_cut_kernel[(B,)](
        part_max,
        part_id,
        part_bins,
        part_mass,
        top_k,
        top_p,
        ids,
        cut,
        offsets,
        chosen,
        keep,
        mass,
        n_blocks,
        BLOCK_N=next_power_of_2(n_blocks),
        num_warps=8,
    )
    _sample_gather_kernel[(B, n_blocks)](
        logits,
        temperature,
        part_max,
        cut,
        offsets,
        weights,
        tokens,
        *row,
        **blocks,
        num_warps=8,
    )
    _sample_draw_kernel[(B,)](
        uniform,
        temperature,
        keep,
        top_p,
        min_p,
        chosen,
        mass,
        weights,
        tokens,
        ids,
        V,
        **search,
    )
    return ids


def _configuration(
    target: str, dtype: torch.dtype
) -> tuple[int, dict[str, int], dict[str, int]]:
    """Tokens a block, launch options, and how the candidates are searched.

    A thread loads 128 bytes of logits at once. Few bits a step: a tile is
    compared with 2 ** bits pivots, which costs more than to read it again.
    """
    if target == "cpu":  # the interpreter: small blocks, few steps
        return 32, {}, {"STEPS": 3, "DIGIT": 10, "TILE": 16}
    warps = 4 if dtype == torch.float32 else 2
    if target.startswith("gfx"):  # of 64 threads
        warps //= 2
    search = {"STEPS": 15, "DIGIT": 2, "TILE": 512, "num_warps": 4}
    return 4096, {"num_warps": warps}, search
