"""A kernel exercise as a chapter's check cell poses it, right and wrong answers included.

The check looks at no cell and no record: it returns what `course.show` would display.
"""

import math

import pytest
import torch

from course import lab
from kernels.attention_decode import _decode_attention_kernel, decode_attention_ref

ANSWER = "@triton.jit\n" + _decode_attention_kernel.src


def launch(kernel, q, k, v, seq_lens, n_splits):
    """What a check cell does with the learner's kernel."""
    B, H, D = q.shape
    kv_heads = k.shape[2]
    part_out = lab.poisoned((B, H, n_splits, D), torch.float32)
    part_lse = lab.poisoned((B, H, n_splits), torch.float32)
    args = (
        *(q, k, v, seq_lens, part_out, part_lse, 1 / math.sqrt(D)),
        *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
    )
    tiles = dict(HEAD_DIM=D, GROUP=H // kv_heads, BLOCK_D=32, BLOCK_G=16, BLOCK_T=16)
    cost = lab.check_jit(kernel, args=args, constexprs=tiles, needs=("load", "store", "dot"))
    if cost.int32_offsets:
        raise lab.KernelError(f"32-bit offsets: {cost.int32_offsets}")
    with lab.metered() as meter:
        kernel[(B, kv_heads, n_splits)](*args, **tiles)
    lse = part_lse.logsumexp(-1)
    weight = (part_lse - lse.clamp(min=-1e38)[..., None]).exp()
    return torch.einsum("bhs,bhsd->bhd", weight, part_out), lse, meter


def shown(kernel) -> dict[str, torch.Tensor | int]:
    g = torch.Generator().manual_seed(0)
    B, S, H, kv_heads, D = 3, 40, 6, 2, 20
    q = 2 * torch.randn(B, H, D, generator=g)
    k, v = (torch.randn(B, S, kv_heads, D, generator=g) for _ in range(2))
    seq_lens = torch.tensor([33, 0, 17], dtype=torch.int32)
    for b, n in enumerate(seq_lens.tolist()):
        k[b, n:] = v[b, n:] = math.nan
    out, lse, meter = launch(kernel, q, k, v, seq_lens, n_splits=2)
    want, want_lse = decode_attention_ref(q, k, v, seq_lens)
    return {
        "error": (out - want).abs().nan_to_num(9.0).max(),
        "lse": lse.nan_to_num(9.0, neginf=-9.0) - want_lse.nan_to_num(neginf=-9.0),
        "keys": meter.read["k"] // k.element_size() // kv_heads // D,
    }


def is_right(kernel) -> bool:
    try:
        values = shown(kernel)
    except lab.KernelError:
        return False
    return bool(
        values["error"] < 1e-5 and values["lse"].abs().max() < 1e-5 and values["keys"] == 50
    )


WRONG = {
    "no mask on K": (", mask=m_t[None, :] & m_d[:, None], other=0.0", ""),
    "no mask on V": ("mask=m_t[:, None] & m_d[None, :]", "mask=m_d[None, :]"),
    "no mask on the scores": ('tl.where(m_t[None, :], s, -float("inf"))', "s + 0.0"),
    "wrong map of query to KV heads": ("h_kv * GROUP + o_g", "h_kv + o_g * tl.num_programs(1)"),
    "accumulator not rescaled": ("acc = acc * rescale[:, None]", "acc = acc"),
    "total not rescaled": ("total = total * rescale", "total = total"),
    "lse is the maximum alone": ("(high + tl.log2(total))", "high"),
    "lse in base 2": (" * 0.6931471805599453", ""),
    "one key too many": ("m_t = o_t < end", "m_t = o_t <= end"),
    "one key too few": ("length = tl.load(seq_lens + b)", "length = tl.load(seq_lens + b) - 1"),
    "fixed scale": ("(scale * ", "(0.125 * "),
    "not normalised": ("acc / tl.maximum(total, 1.0)[:, None]", "acc"),
    "empty split divides by zero": ("tl.maximum(total, 1.0)", "total"),
    "every split reads from the start": ("range(start, end", "range(0, end"),
    "32-bit offsets": ("tl.arange(0, BLOCK_T).to(tl.int64)", "tl.arange(0, BLOCK_T)"),
    "torch in the body": ("tl.exp2(s - new_high[:, None])", "torch.exp2(s - new_high[:, None])"),
}


def test_the_reference_passes(module_of) -> None:
    assert is_right(module_of(ANSWER)._decode_attention_kernel)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(module_of, name: str) -> None:
    old, new = WRONG[name]
    assert ANSWER.count(old) == 1
    kernel = module_of(ANSWER.replace(old, new))._decode_attention_kernel
    assert not is_right(kernel)


SIGNATURE = ANSWER[: ANSWER.index('    """Attention')]
CHEATS = {
    "stub": "    pass\n",
    "zeros": """
    row = tl.program_id(0) * 6 * 2 + tl.program_id(1) * 3 * 2 + tl.program_id(2)
    o = tl.arange(0, 32)
    for g in range(3):
        tl.store(part_out + (row + 2 * g) * HEAD_DIM + o, o * 0.0, mask=o < HEAD_DIM)
        tl.store(part_lse + row + 2 * g, 0.0)
""",
    "calls the reference": """
    out, lse = decode_attention_ref(q, k, v, seq_lens)
""",
    "reads and ignores": """
    o = tl.arange(0, 16)
    b_k = tl.load(k + o[:, None] * s_kt + o[None, :])
    tl.store(part_out + o[:, None] * 16 + o[None, :], tl.dot(b_k, b_k) * 0.0)
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_fail(module_of, name: str) -> None:
    source = "from kernels.attention_decode import decode_attention_ref\n" + SIGNATURE
    assert not is_right(module_of(source + CHEATS[name])._decode_attention_kernel)


def test_a_second_right_answer_passes(module_of) -> None:
    """Natural base, transposed products, one block loop over the whole range."""
    body = """
    b = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1).to(tl.int64)
    n_splits = tl.num_programs(2)
    length = tl.load(seq_lens + b)
    blocks = tl.cdiv(length, BLOCK_T)
    each = tl.cdiv(blocks, n_splits)
    first = tl.program_id(2) * each
    g, d, t = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    q_at = q + b * s_qb + (kv * GROUP + g[None, :]) * s_qh + d[:, None]
    b_q = tl.load(q_at, mask=(g[None, :] < GROUP) & (d[:, None] < HEAD_DIM), other=0.0) * scale
    top = tl.full([BLOCK_G], -1e30, tl.float32)
    norm = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
    for block in range(first, min(first + each, blocks)):
        at = block * BLOCK_T + t
        ok = (at[:, None] < length) & (d[None, :] < HEAD_DIM)
        far = at.to(tl.int64)[:, None]
        b_k = tl.load(k + b * s_kb + kv * s_kh + far * s_kt + d[None, :], mask=ok, other=0.0)
        b_v = tl.load(v + b * s_vb + kv * s_vh + far * s_vt + d[None, :], mask=ok, other=0.0)
        s = tl.dot(b_k, b_q, input_precision="ieee")
        s = tl.where(at[:, None] < length, s, -1e30)
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp(s - new[None, :])
        shrink = tl.exp(top - new)
        norm = norm * shrink + tl.sum(p, 0)
        acc = acc * shrink[None, :] + tl.dot(tl.trans(b_v), p, input_precision="ieee")
        top = new
    row = (b * tl.num_programs(1) * GROUP + kv * GROUP + g) * n_splits + tl.program_id(2)
    empty = norm == 0.0
    out_at = part_out + row[None, :] * HEAD_DIM + d[:, None]
    mask = (g[None, :] < GROUP) & (d[:, None] < HEAD_DIM)
    tl.store(out_at, acc / tl.where(empty, 1.0, norm)[None, :], mask=mask)
    tl.store(part_lse + row, tl.where(empty, -float("inf"), top + tl.log(norm)), mask=g < GROUP)
"""
    assert is_right(module_of(SIGNATURE + body)._decode_attention_kernel)
