"""AdamW whose two moments are stored in 8 bits, in blocks of 256.

Problem: a parameter p [n] with gradient g takes step t >= 1. Each block of
256 elements has one scale, its largest magnitude; a moment is stored as the
index of the nearest of 256 values in [-1, 1] (for v: in [0, 1]).

    m = beta1 * m_code[m_index] * m_scale[block] + (1 - beta1) * g
    v = beta2 * v_code[v_index] * v_scale[block] + (1 - beta2) * g^2
    p = p * (1 - lr * weight_decay)
        - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    scale = max |m| of the block;  index = nearest(m / scale)

and the same for v. The step uses m and v before they are rounded; bias
correction is for the step only, the stored moments have none.

Through memory: every element once, with float32 p and g 4 + 4 + 2 bytes read
and 4 + 2 written, and 16 bytes of scales a block: 16.06 bytes, where float32
moments take 28. An element takes some two hundred instructions, most of them
to find the nearest value, so they may cost as much time as the bytes.

How it fills a GPU: blocks share nothing, so a program takes sixteen of them
at once, 16 bytes a thread and load, and does all in registers. The tables are
read once a program and searched in shared memory: eight steps down a tree of
the middles between neighbours find the nearest value. In sorted order the
lanes' middles would lie in one bank, 31 reads a warp and search, not 10.

A known bug that this avoids: a block without gradients has scale 0, and 0 / 0
is NaN for ever. Here it stores zeros with scale 0, and scale 0 with whatever
indices means zeros, so that a fresh state needs no particular indices.
"""

import math

import torch
import triton
import triton.language as tl

from course.lab.launch import (
    arch,
    cdiv,
    check_int,
    check_tensor,
    processors,
)

BLOCK = 256  # elements that share a scale
LEVELS = 256  # values of a code
MAX_STEP = 2**31 - 1
SMALLEST = tl.constexpr(1e-37)  # of a divisor
DTYPES = (torch.float32, torch.bfloat16)


def dynamic_code(
    signed: bool, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The 256 values of the dynamic 8-bit code, in ascending order.

    Seven decades from 1e-7 to 1, each with twice as many values as the one
    below: relative precision near 1, and range down to 1e-7. A value is the
    middle of one of the equal parts of its decade; 0 and 1 come on top.

    Args:
        signed: for the first moment; the negative values then take half.

    Returns:
        [256] float32.

    Source: 8-bit Optimizers via Block-wise Quantization, section 1.3,
    https://arxiv.org/abs/2110.02861.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        parts = 2**decade if signed else 2 * 2**decade
        part = torch.arange(parts, dtype=torch.float64)
        middles = (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.float().to(device)


def adam8bit_blockwise_step_ref(
    p: torch.Tensor,
    g: torch.Tensor,
    m_index: torch.Tensor,
    v_index: torch.Tensor,
    m_scale: torch.Tensor,
    v_scale: torch.Tensor,
    m_code: torch.Tensor,
    v_code: torch.Tensor,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """The same step in plain torch, in float32: the specification.

    Arguments as `adam8bit_blockwise_step`.
    """
    n, blocks = p.numel(), m_scale.numel()

    def load(index, scale, code):
        spread = scale.repeat_interleave(BLOCK)[:n]
        return code[index.long()] * spread

    def store(x, index, scale, code):
        padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - n))
        tiles = padded.view(blocks, BLOCK)
        scale.copy_(tiles.abs().amax(1))
        ratio = tiles / scale.clamp(min=SMALLEST.value)[:, None]
        middles = (code[:-1] + code[1:]) / 2
        nearest = torch.bucketize(ratio, middles).view(-1)
        index.copy_(nearest[:n])

    grad = g.float()
    m = beta1 * load(m_index, m_scale, m_code) + (1 - beta1) * grad
    v = beta2 * load(v_index, v_scale, v_code) + (1 - beta2) * grad**2
    rate = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    decayed = p.float() * (1 - lr * weight_decay)
    p.copy_(decayed - rate * m / (v.sqrt() / root + eps))
    if n:
        store(m, m_index, m_scale, m_code)
        store(v, v_index, v_scale, v_code)


@triton.jit
def _spread(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One number a block, [ROWS], repeated for its elements."""
    return tl.broadcast_to(x[:, None], [ROWS, BLOCK]).reshape(ROWS * BLOCK)


@triton.jit
def _tree(code):
    """Middles between neighbours of code [256] as a heap: node n has 2n, 2n + 1.

    Lanes of a warp that stand at one depth read neighbouring words, which lie
    in different banks of shared memory.
    """
    n = tl.arange(0, 256)
    depth = tl.zeros_like(n)
    for d in tl.static_range(1, 8):
        depth += tl.where(n >= (1 << d), 1, 0)
    # In sorted order; node 0 is not used, but reads a place that there is.
    place = (((2 * n + 1) << (7 - depth)) - 1) & 255
    return (tl.gather(code, place, 0) + tl.gather(code, place + 1, 0)) * 0.5


@triton.jit
def _nearest(tree, x):
    """Place of the value nearest to each x; ties and NaN go lower."""
    node = tl.full(x.shape, 1, tl.int32)
    for _ in tl.static_range(8):
        node = 2 * node + tl.where(x > tl.gather(tree, node, 0), 1, 0)
    return node  # 256 + index, of which uint8 keeps the index


@triton.jit
def _adam8bit_kernel(
    p,  # [n]
    g,  # [n]
    m_index,  # [n] uint8
    v_index,  # [n] uint8
    m_scale,  # [blocks] float32
    v_scale,  # [blocks] float32
    m_code,  # [256] float32
    v_code,  # [256] float32
    n,
    beta1,
    rest1,  # 1 - beta1, which float32 could not tell from beta1
    beta2,
    rest2,
    decay,  # 1 - lr * weight_decay
    rate,  # lr / (1 - beta1**step)
    root,  # 1 / sqrt(1 - beta2**step)
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # blocks of a program
):
    """Blocks in tiles of ROWS, in place. Grid (programs,).

    The tiles go round the programs, so that a program reads the codes once.
    """
    o_c = tl.arange(0, 256)
    b_m_code = tl.load(m_code + o_c)
    b_v_code = tl.load(v_code + o_c)
    m_tree = _tree(b_m_code)
    v_tree = _tree(b_v_code)
    tiles = tl.cdiv(tl.cast(n, tl.int64), ROWS * BLOCK).to(tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS
        o_row = row + tl.arange(0, ROWS)
        o = row * BLOCK + tl.arange(0, ROWS * BLOCK)
        m_o = o < n
        m_row = o_row * BLOCK < n

        # The rates are float32, so what they multiply becomes float32.
        b_g = tl.load(g + o, mask=m_o, other=0.0)
        b_p = tl.load(p + o, mask=m_o)
        b_m = tl.load(m_index + o, mask=m_o).to(tl.int32)
        b_v = tl.load(v_index + o, mask=m_o).to(tl.int32)
        b_m_scale = tl.load(m_scale + o_row, mask=m_row)
        b_v_scale = tl.load(v_scale + o_row, mask=m_row)
        m = tl.gather(b_m_code, b_m, 0) * _spread(b_m_scale, ROWS, BLOCK)
        v = tl.gather(b_v_code, b_v, 0) * _spread(b_v_scale, ROWS, BLOCK)
        # What lies past the end must not raise the scale of the last block.
        m = tl.where(m_o, beta1 * m + rest1 * b_g, 0.0)
        v = tl.where(m_o, beta2 * v + rest2 * b_g * b_g, 0.0)

        update = rate * m / (tl.sqrt(v) * root + eps)
        tl.store(p + o, b_p * decay - update, mask=m_o)

        m_high = tl.max(tl.abs(m).reshape(ROWS, BLOCK), 1)
        v_high = tl.max(v.reshape(ROWS, BLOCK), 1)
        tl.store(m_scale + o_row, m_high, mask=m_row)
        tl.store(v_scale + o_row, v_high, mask=m_row)
        m_ratio = m / _spread(tl.maximum(m_high, SMALLEST), ROWS, BLOCK)
        v_ratio = v / _spread(tl.maximum(v_high, SMALLEST), ROWS, BLOCK)
        tl.store(m_index + o, _nearest(m_tree, m_ratio), mask=m_o)
        tl.store(v_index + o, _nearest(v_tree, v_ratio), mask=m_o)


def adam8bit_blockwise_step(
    p: torch.Tensor,
    g: torch.Tensor,
    m_index: torch.Tensor,
    v_index: torch.Tensor,
    m_scale: torch.Tensor,
    v_scale: torch.Tensor,
    m_code: torch.Tensor,
    v_code: torch.Tensor,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """One AdamW step on a parameter with 8-bit moments, in place.

    Args:
        p: [n], float32 or bfloat16, updated.
        g: [n], float32 or bfloat16. A NaN makes its own parameter NaN and
            spoils the moments of its block.
        m_index, v_index: [n] uint8, updated; the moments' places in the codes.
        m_scale, v_scale: [ceil(n / 256)] float32, updated; 0 is a block of
            zeros whatever its indices, such as that of a fresh state.
        m_code, v_code: [256] float32, ascending, with 0 among them: see
            `dynamic_code`. v's must not be negative.
        step: t, 1 to 2**31 - 1; for bias correction.
        lr: learning rate, at least 0. beta1, beta2: 0 to below 1. eps: at
            least 1e-38. weight_decay: decoupled, at least 0.

    All dense, of one device. Arithmetic is float32; a tie between two values
    of a code goes to the lower one.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Sources: https://arxiv.org/abs/2110.02861 (8-bit optimizers),
    https://arxiv.org/abs/1711.05101 (decoupled weight decay).
    """
    device = p.device
    check_tensor("p", p, ("n",), DTYPES, device)
    n = p.shape[0]
    check_tensor("g", g, (n,), DTYPES, device)
    blocks = cdiv(n, BLOCK)
    for name, index in dict(m_index=m_index, v_index=v_index).items():
        check_tensor(name, index, (n,), (torch.uint8,), device)
    for name, scale in dict(m_scale=m_scale, v_scale=v_scale).items():
        check_tensor(name, scale, (blocks,), (torch.float32,), device)
    for name, code in dict(m_code=m_code, v_code=v_code).items():
        check_tensor(name, code, (LEVELS,), (torch.float32,), device)
    check_int("step", step, 1, MAX_STEP)
    for name, beta in dict(beta1=beta1, beta2=beta2).items():
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: {beta} must be 0 to below 1")
    for name, rate in dict(lr=lr, weight_decay=weight_decay).items():
        if not 0 <= rate < math.inf:
            raise ValueError(f"{name}: {rate} must be 0 to below infinity")
    if not eps >= 1e-38:  # less may be 0 as float32
        raise ValueError(f"eps: {eps} must be at least 1e-38")
    if n == 0:
        return

    rows, options = _configuration(arch(device))
    programs = min(cdiv(blocks, rows), 4 * processors(device))
    _adam8bit_kernel[(programs,)](
        p,
        g,
        m_index,
        v_index,
        m_scale,
        v_scale,
        m_code,
        v_code,
        n,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        eps,
        BLOCK=BLOCK,
        ROWS=rows,
        **options,
    )


def _configuration(target: str) -> tuple[int, dict[str, int]]:
    """Blocks of a program and launch options.

    Sixteen elements a thread, so that the indices too are loaded 16 bytes at
    a time; no target spills.
    """
    if target == "cpu":  # the interpreter: small programs, so tests have many
        return 2, {}
    return 16, {"num_warps": 4 if target.startswith("gfx") else 8}
