"""Cross entropy of a linear layer's logits, which never exist in memory.

Problem: hidden states [T, D] meet an output matrix [V, D], and token t is
scored by the negative log-likelihood of its target.

    z[t, v] = hidden[t] @ weight[v]
    lse[t]  = log(sum_v exp(z[t, v]))
    nll[t]  = lse[t] - z[t, targets[t]],  0 where targets[t] == ignore_index
    dz[t, v] = grad_nll[t] * (exp(z[t, v] - lse[t]) - [v == targets[t]])
    grad_hidden = dz @ weight,  grad_weight = dz.T @ hidden

Through memory, with b bytes an element: forward (T + V) * D * b, and 4 bytes
per token and split. Logits in float32 would add 8 * T * V, written and read:
8.4 GB for 8,192 tokens and 128,256 words. Backward computes z again, for a
chunk of C words at a time, and writes dz [T, C] instead of z; torch.matmul
takes both products from it. That is a buffer of T * C * b <= 256 MiB (more
only beyond 65,536 tokens), and 3 * T * V * b bytes; a chunk completes its rows
of grad_weight and adds T * D floats to grad_hidden. FLOPs: 2 * T * V * D
forward, three times that backward, on tensor cores.

How it fills a GPU: tiles of 128 tokens by 128 words, two programs a processor,
so that one multiplies while the other takes exponentials. The words are split
over programs, and a second kernel merges the splits in a fixed order; fewer
tokens get a tile of fewer rows, so that the time is the time to read the
matrix once. Sixteen tiles of tokens walk the same words side by side and find
them in the L2 cache.

A known bug that this avoids: lse - z and p - 1 cancel when the model is sure,
so a loss of 1e-9 and its gradient come out as 0 or as noise of 1e-6. Here the
target's own term is kept out of the sum: with the rest's log-sum-exp r,
nll = log(1 + exp(r - z)), and p - 1 = exp(-nll) - 1.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_int,
    check_splits,
    check_tensor,
    check_values,
    next_power_of_2,
    processors,
    reads_values,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_SPLITS = 16  # so that a wave's programs share their tiles in L2
MAX_SPLITS = 1024
GROUP = 16  # tiles of tokens that walk the same words together
CHUNK_ELEMENTS = 2**27  # of dz, 256 MiB at 16 bits
MIN_CHUNK = 2048  # words; fewer would starve the products


def linear_token_nll_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in plain torch, in float32: the specification.

    Shapes as `linear_token_nll`. Returns nll [T] and lse [T] float32.
    """
    logits = hidden.float() @ weight.float().T  # [T, V]
    lse = logits.logsumexp(-1)
    scored = targets != ignore_index
    column = targets.where(scored, 0)[:, None]
    is_target = torch.zeros_like(logits, dtype=torch.bool)
    is_target = is_target.scatter(1, column, True)
    rest = logits.masked_fill(is_target, -torch.inf).logsumexp(-1)
    chosen = logits.gather(1, column)[:, 0]
    nll = torch.logaddexp(rest - chosen, torch.zeros_like(rest))
    return nll.where(scored, 0.0), lse


def linear_token_nll_backward_ref(
    grad_nll: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients in plain torch, in float32: the specification.

    Shapes as `linear_token_nll_backward`.
    """
    logits = hidden.float() @ weight.float().T  # [T, V]
    scored = targets != ignore_index
    column = targets.where(scored, 0)[:, None]
    p = (logits - lse[:, None]).exp()
    p = p.scatter(1, column, torch.expm1(-nll)[:, None])
    dz = (p * grad_nll[:, None]).where(scored[:, None], 0.0)
    grad_hidden = (dz @ weight.float()).to(hidden.dtype)
    return grad_hidden, (dz.T @ hidden.float()).to(weight.dtype)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, exact to a few 1e-7 of itself however small."""
    u = 1 + x
    return tl.log(u) + (x - (u - 1))  # and what 1 + x rounded away


@triton.jit
def _logits_tile(
    hidden,  # [T, D]
    weight,  # [V, D]
    o_t,  # [BLOCK_T] int64
    o_v,  # [BLOCK_V] int64
    T,
    V,
    D,
    s_ht,
    s_wv,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,  # elements of a row per step
):
    """hidden[o_t] @ weight[o_v].T, [BLOCK_T, BLOCK_V] float32; 0 outside."""
    o_d = tl.arange(0, BLOCK_D)
    h_tile = hidden + o_t[:, None] * s_ht + o_d[None, :]
    w_tile = weight + o_v[None, :] * s_wv + o_d[:, None]
    m_t = o_t < T
    m_v = o_v < V
    outside = 0.0  # in both tiles: the end of a row must not add to z
    z = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for d in range(0, D, BLOCK_D):
        m_d = d + o_d < D
        m_h = m_t[:, None] & m_d[None, :]
        m_w = m_d[:, None] & m_v[None, :]
        b_h = tl.load(h_tile + d, mask=m_h, other=outside)  # [T, D]
        b_w = tl.load(w_tile + d, mask=m_w, other=outside)  # [D, V]
        z = tl.dot(b_h, b_w, z, input_precision="ieee")
    return z


@triton.jit
def _token_nll_kernel(
    hidden,  # [T, D]
    weight,  # [V, D]
    targets,  # [T] int64
    part_rest,  # [T, n_splits] float32, dense
    chosen,  # [T] float32
    T,
    V,
    D,
    ignore_index,
    s_ht,
    s_wv,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Log-sum-exp of a tile of tokens over one split of the words.

    Grid (tiles of a group, n_splits, groups). The words are dealt to the
    splits in equal runs of whole blocks. Leaves each token's target out of the
    sum in part_rest (natural log, -inf if nothing is left) and writes its
    logit to chosen, if the split holds it. An ignored token has no target.
    """
    group = tl.program_id(2).to(tl.int64)
    first_t = (group * tl.num_programs(0) + tl.program_id(0)) * BLOCK_T
    if first_t >= T:  # the last group may have fewer tiles
        return
    o_t = first_t + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    target = tl.load(targets + o_t, mask=m_t, other=ignore_index)
    target = tl.where(target == ignore_index, -1, target)

    split = tl.program_id(1)
    per_split = tl.cdiv(V, tl.num_programs(1) * BLOCK_V) * BLOCK_V
    start = split * per_split
    end = tl.minimum(start + per_split, V)

    # A finite floor for the running maximum: -inf - -inf would be NaN.
    high = tl.full([BLOCK_T], -1e38, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    logit = tl.zeros([BLOCK_T], tl.float32)
    for v in range(start, end, BLOCK_V):
        o_v = v + tl.arange(0, BLOCK_V).to(tl.int64)
        z = _logits_tile(
            hidden,
            weight,
            o_t,
            o_v,
            T,
            V,
            D,
            s_ht,
            s_wv,
            BLOCK_T,
            BLOCK_V,
            BLOCK_D,
        )
        is_target = o_v[None, :] == target[:, None]
        logit += tl.sum(tl.where(is_target, z, 0.0), 1)
        z = tl.where(is_target | (o_v[None, :] >= V), -float("inf"), z)

        new_high = tl.maximum(high, tl.max(z, 1))
        p = tl.exp(z - new_high[:, None])
        total = total * tl.exp(high - new_high) + tl.sum(p, 1)
        high = new_high

    is_here = (target >= start) & (target < end)
    tl.store(chosen + o_t, logit, mask=m_t & is_here)
    part = o_t * tl.num_programs(1) + split
    tl.store(part_rest + part, high + tl.log(total), mask=m_t)


@triton.jit
def _token_nll_merge_kernel(
    part_rest,  # [T, n_splits] float32, dense
    chosen,  # [T] float32
    targets,  # [T] int64
    nll,  # [T] float32
    lse,  # [T] float32
    T,
    n_splits,
    ignore_index,
    BLOCK_N: tl.constexpr,  # power of two, at least n_splits
    BLOCK_T: tl.constexpr,
):
    """Add up the splits of a block of tokens, then their targets. Grid 1-D."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = tl.arange(0, BLOCK_N)
    m_t = o_t < T
    m_part = m_t[:, None] & (o_n < n_splits)[None, :]

    part_tile = part_rest + o_t[:, None] * n_splits + o_n[None, :]
    b_rest = tl.load(part_tile, mask=m_part, other=-float("inf"))  # [T, N]
    high = tl.maximum(tl.max(b_rest, 1), -1e38)
    rest = high + tl.log(tl.sum(tl.exp(b_rest - high[:, None]), 1))

    target = tl.load(targets + o_t, mask=m_t, other=ignore_index)
    is_scored = target != ignore_index
    logit = tl.load(chosen + o_t, mask=is_scored, other=-float("inf"))
    top = tl.maximum(rest, logit)
    more = _log1p(tl.exp(-tl.abs(rest - logit)))  # NaN stays NaN
    tl.store(lse + o_t, top + more, mask=m_t)
    b_nll = tl.where(is_scored, top - logit + more, 0.0)
    tl.store(nll + o_t, b_nll, mask=m_t)


@triton.jit
def _token_nll_gradient_kernel(
    grad_nll,  # [T] float32
    hidden,  # [T, D]
    weight,  # [C, D], the words of a chunk
    targets,  # [T] int64
    nll,  # [T] float32
    lse,  # [T] float32
    dz,  # [T, C]
    T,
    C,
    D,
    first,  # the chunk's first word
    ignore_index,
    s_ht,
    s_wv,
    s_dt,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of a tile of a chunk's logits, in the inputs' dtype.

    Grid (tiles of a group, blocks of words, groups).
    """
    group = tl.program_id(2).to(tl.int64)
    first_t = (group * tl.num_programs(0) + tl.program_id(0)) * BLOCK_T
    if first_t >= T:  # the last group may have fewer tiles
        return
    o_t = first_t + tl.arange(0, BLOCK_T)
    o_v = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_t = o_t < T
    z = _logits_tile(
        hidden,
        weight,
        o_t,
        o_v,
        T,
        C,
        D,
        s_ht,
        s_wv,
        BLOCK_T,
        BLOCK_V,
        BLOCK_D,
    )

    target = tl.load(targets + o_t, mask=m_t, other=ignore_index)
    is_scored = target != ignore_index
    b_grad = tl.load(grad_nll + o_t, mask=is_scored)
    b_nll = tl.load(nll + o_t, mask=is_scored)
    b_lse = tl.load(lse + o_t, mask=is_scored)

    # exp(-nll) - 1, which would cancel where nll is small.
    series = b_nll * (b_nll * (0.5 - b_nll * (1 / 6)) - 1)
    at_target = tl.where(b_nll < 0.02, series, tl.exp(-b_nll) - 1)
    is_target = o_v[None, :] == (target - first)[:, None]
    p = tl.exp(z - b_lse[:, None])
    b_dz = tl.where(is_target, at_target[:, None], p) * b_grad[:, None]
    # An ignored token has no gradient, whatever its logits are.
    b_dz = tl.where(is_scored[:, None], b_dz, 0.0)
    dz_tile = dz + o_t[:, None] * s_dt + o_v[None, :]
    tl.store(dz_tile, b_dz, mask=m_t[:, None] & (o_v < C)[None, :])


def linear_token_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    n_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood of each token under a linear output layer.

    Args:
        hidden: [T, D], float16, bfloat16 or float32, D >= 1.
        weight: [V, D], hidden's dtype, V >= 1. Outer strides are free, the
            last one is 1.
        targets: [T] int64, dense; each a word, 0 <= targets[t] < V, or
            ignore_index. On a GPU this is checked in debug mode only.
        ignore_index: the target of tokens that are not scored.
        n_splits: pieces of the vocabulary, at most 1024; by default enough to
            give every processor eight programs. Never more than V has blocks.

    Returns:
        nll [T] and lse [T], float32, natural log. An ignored token has nll 0
        and its lse. Logits and sums are float32.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Sources: Liger Kernel's fused linear cross entropy,
    https://arxiv.org/abs/2410.10989; Cut Your Losses in Large-Vocabulary
    Language Models, https://arxiv.org/abs/2411.09009.
    """
    _check(hidden, weight, targets, ignore_index)
    check_splits(n_splits, MAX_SPLITS)
    (T, D), V = hidden.shape, weight.shape[0]
    nll = torch.empty(T, dtype=torch.float32, device=hidden.device)
    lse = torch.empty_like(nll)
    if T == 0:
        return nll, lse

    configuration = _configuration(arch(hidden.device), T, hidden.dtype)
    side, groups = _grouped(T, configuration["BLOCK_T"])
    if n_splits is None:
        wanted = cdiv(8 * processors(hidden.device), side * groups)
        n_splits = max(MIN_SPLITS, wanted)
    blocks = cdiv(V, configuration["BLOCK_V"])
    # Runs of equal length, as many as have a block.
    n_splits = cdiv(blocks, cdiv(blocks, min(n_splits, MAX_SPLITS)))
    part_rest = nll.new_empty(T, n_splits)
    chosen = torch.empty_like(nll)
    _token_nll_kernel[(side, n_splits, groups)](
        hidden,
        weight,
        targets,
        part_rest,
        chosen,
        T,
        V,
        D,
        ignore_index,
        hidden.stride(0),
        weight.stride(0),
        **configuration,
    )
    _token_nll_merge_kernel[(cdiv(T, 16),)](
        part_rest,
        chosen,
        targets,
        nll,
        lse,
        T,
        n_splits,
        ignore_index,
        BLOCK_N=next_power_of_2(n_splits),
        BLOCK_T=16,
        num_warps=4,
    )
    return nll, lse


def linear_token_nll_backward(
    grad_nll: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `linear_token_nll`, from what it returned.

    Args:
        grad_nll: [T] float32, dense; d loss / d nll.
        hidden, weight, targets, ignore_index: those of the forward call.
        nll, lse: [T] float32, dense; its results.
        chunk: words per buffer of dz, at least 1; by default so many that the
            buffer has 2**27 elements, but at least 2,048 words.

    Returns:
        grad_hidden [T, D] and grad_weight [V, D], dense, in the inputs' dtype.
        The gradient of a logit is rounded to that dtype, like the logits'
        gradient in torch; a chunk's products sum in float32. An ignored token
        has a gradient of 0 and gives none. No atomics: twice the same bits.

    Raises:
        ValueError: an argument breaks one of the rules above.

    float32 products follow torch.backends.cuda.matmul.allow_tf32.
    """
    device = hidden.device
    _check(hidden, weight, targets, ignore_index)
    (T, D), V = hidden.shape, weight.shape[0]
    for name, row in dict(grad_nll=grad_nll, nll=nll, lse=lse).items():
        check_tensor(name, row, (T,), (torch.float32,), device)
    if chunk is not None:
        check_int("chunk", chunk, 1)
    grad_weight = torch.zeros(V, D, dtype=weight.dtype, device=device)
    total = torch.zeros(T, D, dtype=torch.float32, device=device)
    if T == 0:
        return total.to(hidden.dtype), grad_weight

    configuration = _configuration(arch(device), T, hidden.dtype)
    side, groups = _grouped(T, configuration["BLOCK_T"])
    if chunk is None:
        chunk = max(MIN_CHUNK, CHUNK_ELEMENTS // T // 256 * 256)
    chunk = min(chunk, V)
    buffer = hidden.new_empty(T, chunk)
    for first in range(0, V, chunk):
        rows = slice(first, first + chunk)
        words = weight[rows]
        C = words.shape[0]
        dz = buffer[:, :C]
        blocks = cdiv(C, configuration["BLOCK_V"])
        _token_nll_gradient_kernel[(side, blocks, groups)](
            grad_nll,
            hidden,
            words,
            targets,
            nll,
            lse,
            dz,
            T,
            C,
            D,
            first,
            ignore_index,
            hidden.stride(0),
            weight.stride(0),
            dz.stride(0),
            **configuration,
        )
        total += dz @ words
        torch.matmul(dz.T, hidden, out=grad_weight[rows])
    return total.to(hidden.dtype), grad_weight


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
) -> None:
    """Raise ValueError unless forward and backward can take these."""
    check_tensor("hidden", hidden, ("T", "D"), DTYPES, hidden.device)
    T, D = hidden.shape
    check_tensor("weight", weight, ("V", D), (hidden.dtype,), hidden.device)
    V = weight.shape[0]
    if V == 0 or D == 0:
        raise ValueError(f"weight: shape [{V}, {D}] must have no 0")
    check_tensor("targets", targets, (T,), (torch.int64,), hidden.device)
    if not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index: {ignore_index!r} must be an int")
    if reads_values(targets.device):
        scored = targets.masked_fill(targets == ignore_index, 0)
        check_values("targets", scored, 0, V - 1)


def _grouped(T: int, block_t: int) -> tuple[int, int]:
    """Tiles of tokens as (tiles in a group, groups), nearly equal groups."""
    tiles = cdiv(T, block_t)
    groups = cdiv(tiles, GROUP)
    return cdiv(tiles, groups), groups


def _configuration(target: str, T: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile shape and launch options.

    Chosen so that no target spills, two programs fit a processor's shared
    memory, and a thread loads 16 bytes at a time.
    """
    if target == "cpu":  # the interpreter: small blocks, so tests have many
        return {"BLOCK_T": 16, "BLOCK_V": 32, "BLOCK_D": 16}
    block_d, warps, stages = 64, 4, 4
    if dtype == torch.float32:  # no tensor core on NVIDIA: register-hungry
        block_t, block_v, block_d, warps, stages = 64, 64, 32, 8, 2
    elif T <= 64:
        block_t, block_v = (16 if T <= 16 else 64), 128
    else:
        block_t, block_v, stages = 128, 128, 3
        warps = 8 if target == "sm_80" else 4  # whose sums are in registers
    if target.startswith("gfx"):  # 64 KiB of shared memory
        block_d, stages = (128 if block_t == 16 else block_d), 2
    return {
        "BLOCK_T": block_t,
        "BLOCK_V": block_v,
        "BLOCK_D": block_d,
        "num_warps": warps,
        "num_stages": stages,
    }
