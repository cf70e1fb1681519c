"""Every automatic edit of the decode family must be noticed by the small cases below.

The cases are few, since 300 mutants run them; each has a reason.
"""

import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.attention_decode as original
from course import lab
from course.lab.meter import metered
from kernels.cases.attention_decode import Decode, decode_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_decode_attention_kernel": {
        "constant#7: 0.0 to 1.0": "q: padded rows are not stored, padded columns meet zeros of K",
        "constant#8: 1e+38 to 2e+38": "any floor below every score will do",
        "constant#10: 0.0 to 1.0": "K: masked keys get -inf later, padded columns meet zeros of q",
        "constant#14: 0.0 to 1.0": "V: masked keys weigh 0, padded columns are not stored",
    },
    "_decode_merge_kernel": {
        "constant#5: 1e+38 to 2e+38": "any floor below every score will do",
        "constant#7: 0.0 to 1.0": "padded splits weigh exp(-inf), padded columns are not stored",
    },
    "decode_attention": {
        "lse.new_empty#1: swap the first two arguments": "a dense buffer of the same size",
        "out.new_empty#1: swap the first two arguments": "a dense buffer of the same size",
    },
    "merge_splits": {},
    "_configuration": {},
}


CASES = [
    # Few programs, so that most mutants cost little: two splits of two heads, the last one short.
    (Decode((21,), 2, 2, 20, layout="fused", slots=24), 2, 1.0),
    # Padded rows and columns, an empty sequence and an empty split, interleaved K and V.
    (Decode((33, 0, 17), 3, 2, 20, layout="fused", slots=40), 3, 1.0),
    # A single split writes the result itself, rounded to the inputs' dtype; a full tile.
    (Decode((16, 3), 16, 1, 16, torch.float16, layout="fused", slots=16), 1, 1.0),
    # Large scores, of both signs: a wrong maximum overflows.
    (Decode((40,), 5, 1, 16, slots=40), 2, 200.0),
    # Wider than 16 rows and a head of fewer than 16 numbers.
    (Decode((5,), 17, 1, 3, slots=5), 1, 1.0),
]


@functools.cache
def inputs(number: int):
    case, _, scale = CASES[number]
    q, k, v, seq_lens = decode_inputs(case, torch.Generator().manual_seed(number))
    return q * scale, k, v, seq_lens


@functools.cache
def expected(number: int):
    out, lse = original.decode_attention_ref(*inputs(number))
    return out, lse


def notices_numbers(module: ModuleType) -> bool:
    for number, (case, n_splits, _) in enumerate(CASES):
        with metered():
            got = module.decode_attention(*inputs(number), n_splits, return_lse=True)
        tolerance = 2e-3 if case.dtype == torch.float16 else 1e-5
        for have, want in zip(got, expected(number), strict=True):
            if have.dtype != want.dtype or not torch.allclose(have, want, tolerance, tolerance):
                return True
    return notices_a_lost_block(module)


def notices_a_lost_block(module: ModuleType) -> bool:
    """Scores of minus infinity in a whole split, and in the first block of another."""
    q, k, v, seq_lens = decode_inputs(
        Decode((48,), 2, 1, 16, slots=48), torch.Generator().manual_seed(9)
    )
    q, k = q.abs(), k.clone()
    k[:, :16] = -math.inf
    want = original.decode_attention_ref(q, k[:, 16:], v[:, 16:], seq_lens - 16)[0]
    with metered():
        return any(
            not torch.allclose(module.decode_attention(q, k, v, seq_lens, n), want, 1e-5, 1e-5)
            for n in (1, 3)
        )


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    q, k, v, seq_lens = inputs(1)
    strides = [*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]]
    partial = torch.ones(3, 6, 3)
    tiles = dict(HEAD_DIM=20, BLOCK_D=32)
    decode = lab.check_jit(
        module._decode_attention_kernel,
        args=(q, k, v, seq_lens, partial, partial, 0.1, *strides),
        constexprs=tiles | dict(GROUP=3, BLOCK_G=16, BLOCK_T=16),
        needs=("load", "store", "dot"),
    )
    merge = lab.check_jit(
        module._decode_merge_kernel,
        args=(partial, partial, q, partial, 3),
        constexprs=tiles | dict(BLOCK_N=4),
    )
    return bool(decode.int32_offsets or merge.int32_offsets)


def launches_of(module: ModuleType, B: int, S: int, n_splits: int | None, processors: int):
    """Grids and options that the launcher asks for, on tensors without memory."""
    meta = torch.device("meta")
    q = torch.empty(B, 4, 8, dtype=torch.bfloat16, device=meta)
    k = torch.empty(B, S, 2, 8, dtype=torch.bfloat16, device=meta)
    seq_lens = torch.empty(B, dtype=torch.int32, device=meta)
    module.processors = lambda device: processors
    return launches(lambda: module.decode_attention(q, k, k, seq_lens, n_splits))


def notices_launches(module: ModuleType) -> bool:
    """Two programs a processor, at most a split a block of 64 keys, at most 128."""
    for B, S, n_splits, processors, splits in [
        (3, 1000, None, 13, 5),  # 26 programs over 6 pieces, rounded up
        (3, 1000, None, 1000, 16),
        (1, 64 * 200, None, 1000, 128),
        (40, 1000, None, 2, 1),
        (2, 129, 128, 1, 3),
        (2, 1000, 2, 1000, 2),
    ]:
        asked = launches_of(module, B, S, n_splits, processors)
        grids = {name: grid for name, grid, _ in asked}
        options = [(o["num_warps"], o.get("num_stages")) for _, _, o in asked]
        if asked[0][2] | dict(HEAD_DIM=8, GROUP=2, BLOCK_D=16, BLOCK_G=16) != asked[0][2]:
            return True  # tl.dot takes no fewer than 16
        want = {"_decode_attention_kernel": (B, 2, splits)}
        if splits > 1:
            want["_decode_merge_kernel"] = (B * 4,)
        if grids != want or options != [(4, 3), (4, None)][: len(want)]:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    q, k, v, seq_lens = inputs(1)
    wide = torch.ones(1, 1, 1, 129)
    one = torch.ones(1, dtype=torch.int32)
    bad = [
        ("q: shape", q[0], k, v, seq_lens, 1),
        ("k: shape", q, k[0], v, seq_lens, 1),
        ("v: shape", q, k, v[:, 1:], seq_lens, 1),
        ("seq_lens: dtype", q, k, v, seq_lens.long(), 1),
        ("seq_lens: -1", q, k, v, seq_lens - 1, 1),
        ("seq_lens: 41", q, k, v, seq_lens + 8, 1),
        ("q: head_dim", wide[0], wide, wide, one, 1),
        ("q: head_dim", wide[0, ..., :0], wide[..., :0], wide[..., :0], one, 1),
        ("k: 2 KV", q[:, :5], k, v, seq_lens, 1),
        ("k: 1 KV", torch.ones(1, 65, 1), wide[..., :1], wide[..., :1], one, 1),
        ("k: 0 KV", torch.ones(1, 1, 1), wide[..., :0, :1], wide[..., :0, :1], one, 1),
        ("n_splits: 0", q, k, v, seq_lens, 0),
        ("n_splits: 129", q, k, v, seq_lens, 129),
    ]
    for start, *arguments in bad:
        try:
            module.decode_attention(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    edge = decode_inputs(Decode((1,), 64, 1, 128, slots=1), torch.Generator().manual_seed(1))
    empty = decode_inputs(Decode((0,), slots=0), torch.Generator().manual_seed(1))
    with metered():
        module.decode_attention(wide[0, ..., :1], wide[..., :1], wide[..., :1], one)
    with metered() as meter:
        module.decode_attention(*edge, n_splits=128)
        module.decode_attention(*edge)
        out = module.decode_attention(*empty, n_splits=1)
        if not isinstance(out, torch.Tensor) or out.any() or meter.launches != 3:
            return True
        nothing = module.decode_attention(q[:0], k[:0], v[:0], seq_lens[:0])
        both = module.decode_attention(q[:0], k[:0], v[:0], seq_lens[:0], return_lse=True)
    return meter.launches != 3 or not isinstance(nothing, torch.Tensor) or len(both) != 2


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    half, single = torch.float16, torch.float32
    want = {
        ("sm_80", 128, half): (64, 4, 3),
        ("sm_90", 64, torch.bfloat16): (64, 4, 3),
        ("gfx942", 128, half): (32, 4, 2),
        ("sm_90", 128, single): (16, 8, 3),
        ("sm_90", 65, single): (16, 8, 3),
        ("gfx942", 64, single): (32, 8, 2),
    }
    for arguments, (block_t, warps, stages) in want.items():
        options = {"num_warps": warps, "num_stages": stages}
        if module._configuration(*arguments) != (block_t, options):
            return True
    return module._configuration("cpu", 128, half) != (16, {})


LAUNCHER = [notices_configuration, notices_launches]  # cheap, so first
KERNELS = [notices_numbers, notices_in_the_ir]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    order = [KERNELS, LAUNCHER] if name.endswith("_kernel") else [LAUNCHER, KERNELS]
    detectors = [*order[0], *order[1], notices_arguments]
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors, tmp_path)
