"""Every automatic edit of the cascade family must be noticed by the small cases below.

The cases are few, since 350 mutants run them; each has a reason.
"""

import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.attention_cascade as original
from course import lab
from course.lab.meter import metered
from kernels.cases.attention_cascade import Cascade, cascade_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_cascade_attention_kernel": {
        "constant#8: 0.0 to 1.0": "q: padded rows are not stored, padded columns meet zeros of K",
        "constant#9: 1e+38 to 2e+38": "any floor below every score will do",
        "constant#11: 0.0 to 1.0": "K: masked keys get -inf later, padded columns meet zeros of q",
        "constant#15: 0.0 to 1.0": "V: masked keys weigh 0, padded columns are not stored",
        ".to#5: drop tl.int64": "counts rows of the parts, which fit in 32 bits",
    },
    "_merge_lse_kernel": {
        "constant#6: 1e+38 to 2e+38": "any floor below every log-sum-exp will do",
        "constant#8: 0.0 to 1.0": "empty parts weigh exp(-inf), padded columns are not stored",
    },
    "merge_lse": {},
    "cascade_prefix_attention": {},
    "cascade_decode_attention": {},
    "_check": {},
    "_attend": {},
    "_attend_level": {},
    "_merge": {
        "constant#5: 512 to 511": "powers of two up to 2**15 give the same, rounded down",
    },
    "_splits": {},
    "_configuration": {},
}


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


CASES = [
    # A single part of which one sequence has no keys; a head of fewer than 16 numbers.
    (Cascade((0, 2), 0, 1, 1, 3, slots=2), 1, 1.0),
    # A single part writes the result itself, rounded to the inputs' dtype; full tiles.
    (Cascade((0,), 17, 16, 2, 16, torch.float16, slots=0), 1, 1.0),
    # Several tiles, the last one padded; heads of several sequences in a tile; padded columns.
    (Cascade((0,) * 6, 17, 3, 1, 20, layout="fused", slots=0), 1, 1.0),
    # Parts of both levels, an empty suffix, two KV heads, interleaved K and V.
    (Cascade((3, 0), 17, 1, 2, 20, layout="fused", slots=5), 2, 1.0),
    # Large scores, of both signs: a wrong maximum overflows.
    (Cascade((0,), 40, 5, 1, 16, slots=0), 2, 200.0),
    # A suffix of several splits, the last one short.
    (Cascade((33,), 0, 1, 1, 16, slots=34), 3, 1.0),
]


@functools.cache
def inputs(number: int):
    case, _, scale = CASES[number]
    q, *rest = cascade_inputs(case, seeded(number))
    return q * scale, *rest


@functools.cache
def expected(number: int):
    return original.cascade_decode_attention_ref(*inputs(number))


@functools.cache
def parts():
    """Strided parts, three for two sequences of three heads; some empty, with NaN inside."""
    outs = torch.randn(2, 3, 3, 20, generator=seeded(1)).permute(2, 0, 1, 3)
    lses = torch.randn(2, 3, 3, generator=seeded(2)).transpose(0, 1) * 40
    lses[0, 0] = lses[:, 1, 1] = -math.inf
    outs[torch.isneginf(lses)] = math.nan
    return outs, lses, original.merge_lse_ref(outs, lses)


def differs(got, want, tolerance: float = 1e-5) -> bool:
    return any(
        have.dtype != right.dtype or not torch.allclose(have, right, tolerance, tolerance)
        for have, right in zip(got, want, strict=True)
    )


def notices_numbers(module: ModuleType) -> bool:
    outs, lses, want = parts()
    with metered():
        if differs(module.merge_lse(outs, lses), want):
            return True
        for number, (case, n_splits, _) in enumerate(CASES):
            tolerance = 2e-3 if case.dtype == torch.float16 else 1e-5
            got = module.cascade_decode_attention(*inputs(number), n_splits)
            if differs(got, expected(number), tolerance):
                return True
        got = module.cascade_prefix_attention(*inputs(1)[:3])
    return differs(got, expected(1), 2e-3) or notices_a_lost_block(module)


def notices_a_lost_block(module: ModuleType) -> bool:
    """Scores of minus infinity in a whole split, and in the first block of another."""
    q, k, v, *_ = cascade_inputs(Cascade((0,), 48, 2, 1, 16), seeded(9))
    q, k = q.abs(), k.clone()
    k[:16] = -math.inf
    want = original.cascade_prefix_attention_ref(q, k[16:], v[16:])
    with metered():
        return any(differs(module.cascade_prefix_attention(q, k, v, n), want) for n in (1, 3))


def notices_far_parts(module: ModuleType) -> bool:
    """Parts whose offset 32 bits cannot hold: gigabytes of which a page or two is touched."""
    outs, lses, _ = parts()
    storage = torch.UntypedStorage(4 * (2**31 + 20))
    far = torch.empty(0).set_(storage).as_strided((3, 1, 1, 20), (2**30, 20, 20, 1))
    far.copy_(outs[:, :1, 1:2])
    near = far.clone(), lses[:, :1, 1:2]
    with metered():
        return differs(module.merge_lse(far, near[1]), original.merge_lse_ref(*near))


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    q, k, v, _, _, lens = inputs(2)
    k, v = k[None], v[None]
    partial = torch.ones(2, 6, 3, 20)
    for seq_lens in (None, lens):
        attention = lab.check_jit(
            module._cascade_attention_kernel,
            args=(
                *(q, k, v, seq_lens, partial, partial, 6, 17, 6, 0.1),
                *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
            ),
            constexprs=dict(HEAD_DIM=20, GROUP=3, BLOCK_D=32, BLOCK_M=16, BLOCK_T=16),
            needs=("load", "store", "dot"),
        )
        if attention.int32_offsets:
            return True
    merge = lab.check_jit(
        module._merge_lse_kernel,
        args=(partial, partial, q, partial, 3, 20, 60, 20, 18, 3),
        constexprs=dict(HEAD_DIM=20, BLOCK_D=32, BLOCK_N=4),
    )
    return bool(merge.int32_offsets)


ATTENTION, MERGE = "_cascade_attention_kernel", "_merge_lse_kernel"


def notices_launches(module: ModuleType) -> bool:
    """Two programs a processor, at most a split a block of 64 keys, at most 128."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    for B, P, S, n_splits, processors, grids in [
        # 26 programs: over 2 pieces of the prefix, and 6 of the suffixes, both rounded up
        (3, 1000, 1000, None, 13, [(1, 2, 13), (3, 2, 5), (3, 4)]),
        (3, 1000, 100, None, 1000, [(1, 2, 16), (3, 2, 2), (3, 4)]),
        (70, 640, 0, None, 10, [(2, 2, 5), (70, 4)]),
        (1, 64 * 200, 0, None, 1000, [(1, 2, 128), (1, 4)]),
        (40, 0, 1000, None, 2, [(40, 2, 1)]),
        (2, 129, 1, 128, 1, [(1, 2, 3), (2, 2, 1), (2, 4)]),
        (2, 1000, 1000, 2, 1000, [(1, 2, 2), (2, 2, 2), (2, 4)]),
        (2, 0, 0, None, 1, [(2, 4)]),
        (12, 0, 1000, None, 100, [(12, 2, 9), (12, 4)]),
    ]:
        module.processors = lambda device, count=processors: count
        q, prefix, suffix = empty(B, 4, 8), empty(P, 2, 8), empty(B, S, 2, 8)
        lens = torch.empty(B, dtype=torch.int32, device="meta")
        cascade = functools.partial(
            module.cascade_decode_attention, q, prefix, prefix, suffix, suffix, lens, n_splits
        )
        asked = launches(cascade)
        if [grid for _, grid, _ in asked] != grids:
            return True
        for name, grid, options in asked:
            tile = dict(HEAD_DIM=8, GROUP=2, BLOCK_D=16, BLOCK_T=64, num_stages=3)
            tile["BLOCK_M"] = {1: 16, 2: 128}[grid[0]] if grid[0] != B else 16
            tile["num_warps"] = 8 if tile["BLOCK_M"] == 128 else 4
            if (name == MERGE) != (grid == (B, 4)) or (name == ATTENTION and options != tile):
                return True
    warps = []
    for n, D in [(1, 3), (2, 128), (7, 128), (9, 128), (256, 128)]:
        merged = empty(n, 1, 1, D), torch.empty(n, 1, 1, device="meta")
        asked = launches(functools.partial(module.merge_lse, *merged))
        warps += [options["num_warps"] for _, _, options in asked]
    return warps != [1, 1, 2, 4, 8]


def thin(H: int, heads: int, D: int = 1) -> list[torch.Tensor]:
    """Ones for a sequence that has one key in the prefix and one of its own."""
    keys, own = torch.ones(1, heads, D), torch.ones(1, 1, heads, D)
    return [torch.ones(1, H, D), keys, keys, own, own, torch.ones(1, dtype=torch.int32)]


def notices_arguments(module: ModuleType) -> bool:
    q, k, v, own_k, own_v, lens = inputs(3)
    wide = torch.ones(1, 1, 129)
    decode, prefix, merge = (
        module.cascade_decode_attention,
        module.cascade_prefix_attention,
        module.merge_lse,
    )
    bad = [
        ("q: shape", decode, q[0], k, v, own_k, own_v, lens),
        ("prefix_k: shape", decode, q, k[0], v, own_k, own_v, lens),
        ("prefix_v: shape", decode, q, k, v[1:], own_k, own_v, lens),
        ("suffix_k: shape", decode, q, k, v, own_k[:1], own_v, lens),
        ("suffix_v: shape", decode, q, k, v, own_k, own_v[:, 1:], lens),
        ("suffix_lens: dtype", decode, q, k, v, own_k, own_v, lens.long()),
        ("suffix_lens: -1", decode, q, k, v, own_k, own_v, lens - 1),
        ("suffix_lens: 6", decode, q, k, v, own_k, own_v, lens + 3),
        ("q: head_dim 129", decode, *thin(1, 1, 129)),
        ("q: head_dim 0", decode, *thin(1, 1, 0)),
        ("prefix_k: 2 KV", decode, *thin(3, 2)),
        ("prefix_k: 1 KV", decode, *thin(65, 1)),
        ("prefix_k: 0 KV", decode, *thin(1, 0)),
        ("n_splits: 0", decode, *thin(1, 1), 0),
        ("n_splits: 129", decode, *thin(1, 1), 129),
        ("k: shape", prefix, q, k[0], v),
        ("v: shape", prefix, q, k, v[1:]),
        ("n_splits: 0", prefix, q, k, v, 0),
        ("outs: shape", merge, wide, wide[0]),
        ("outs: head_dim 129", merge, wide[None], wide[..., 0][None]),
        ("outs: head_dim 0", merge, wide[None, ..., :0], wide[..., 0][None]),
        ("outs: 257 parts", merge, wide[None, ..., :1].expand(257, 1, 1, 1), torch.ones(257, 1, 1)),
        ("lses: shape", merge, wide[None, ..., :1], wide),
    ]
    for start, launcher, *arguments in bad:
        try:
            launcher(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    return False


def notices_edges(module: ModuleType) -> bool:
    """What the claim just includes, and what needs no launch."""
    decode, prefix, merge = (
        module.cascade_decode_attention,
        module.cascade_prefix_attention,
        module.merge_lse,
    )
    q, k, v, own_k, own_v, lens = inputs(3)
    edge = cascade_inputs(Cascade((1,), 1, 64, 1, 128, slots=1), seeded(1))
    with metered() as meter:
        decode(*thin(1, 1))
        decode(*edge, n_splits=128)
        merge(torch.ones(256, 1, 1, 1), torch.ones(256, 1, 1))
        if meter.launches != 7:
            return True
        got = [
            *decode(q[:0], k, v, own_k[:0], own_v[:0], lens[:0]),
            *prefix(q[:0], k, v),
            *merge(q[None, :0], torch.ones(1, 0, 2)),
        ]
        return meter.launches != 7 or any(x.numel() for x in got)


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    half, single = torch.float16, torch.float32
    want = {
        ("sm_90", 1, 128, half): (16, 64, 4, 3),
        ("sm_90", 64, 128, half): (64, 64, 4, 3),
        ("sm_90", 65, 64, half): (128, 64, 8, 3),
        ("sm_100", 1000, 64, half): (128, 64, 8, 3),
        ("sm_80", 1000, 64, half): (64, 64, 4, 2),
        ("sm_80", 17, 64, half): (32, 64, 4, 2),
        ("gfx942", 1000, 128, half): (64, 32, 4, 2),
        ("sm_90", 1000, 65, single): (64, 16, 8, 2),
        ("sm_90", 1, 128, single): (16, 16, 8, 2),
        ("gfx942", 100, 64, single): (64, 32, 8, 2),
    }
    for arguments, (block_m, block_t, warps, stages) in want.items():
        options = {"num_warps": warps, "num_stages": stages}
        if module._configuration(*arguments) != (block_m, block_t, options):
            return True
    return module._configuration("cpu", 1000, 128, half) != (16, 16, {})


DETECTORS = [  # the cheap ones first
    notices_configuration,
    notices_launches,
    notices_arguments,
    notices_numbers,
    notices_in_the_ir,
    notices_far_parts,
    notices_edges,
]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS, tmp_path)
