"""Every automatic edit of the paged family must be noticed by the small cases below.

The cases are few, since 800 mutants run them; each has a reason.
"""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.attention_paged as original
from course import lab
from course.lab.launch import cdiv
from course.lab.meter import Meter, metered
from kernels.cases.attention_paged import Paged, paged_inputs
from tests.kernels.mutants import Detector, assert_every_mutant_is_noticed, launches
from tests.kernels.test_attention_paged import APPEND, ATTENTION, BAD, OFFSETS, int32, pages

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

Case = tuple[Paged, int, float]  # how many splits, and what q is multiplied by
DECODE: list[Case] = [
    # One program, which most mutants do not survive.
    (Paged((7,), None, 3, 1, 20, page_size=5, layout="fused"), 1, 1.0),
    # Padded rows and columns, an empty sequence, interleaved K and V, a tile of several pages.
    (Paged((2, 0, 19), None, 3, 2, 20, page_size=5, layout="fused"), 1, 1.0),
    # Splits, of which one is empty, and pages of several tiles.
    (Paged((33, 17), None, 2, 1, 16, HALF, page_size=24, layout="heads first"), 3, 1.0),
    # Large scores, of both signs: a wrong maximum overflows.
    (Paged((40,), None, 5, 1, 16, page_size=1), 2, 200.0),
]
PREFILL: list[Case] = [
    # One program, which most mutants do not survive.
    (Paged((18,), (2,), 3, 1, 20, page_size=5, layout="fused"), 1, 1.0),
    # Two tiles of five queries, a sequence without any, and a chunk after a prefix.
    (Paged((6, 5, 17), (6, 0, 3), 12, 2, 20, page_size=5, layout="fused"), 1, 1.0),
    # Splits, whole blocks that all see, and pages of several tiles.
    (Paged((50, 19), (2, 2), 2, 1, 16, HALF, page_size=24, layout="heads first"), 3, 1.0),
    # More sequences than one step counts; a tile that is exactly full leaves one idle.
    (Paged((4, 1, 6, 0, 3), (4, 1, 4, 0, 3), 16, 1, 3, BRAIN, page_size=1), 1, 1.0),
    # Large scores, of both signs: a wrong maximum overflows.
    (Paged((40,), (3,), 5, 1, 16, page_size=16), 2, 200.0),
]


@functools.cache
def prepared(case: Case):
    """Inputs, the specification's results, and what the original moves."""
    paged, n_splits, factor = case
    q, *rest = paged_inputs(paged, torch.Generator().manual_seed(0))
    inputs = (q * factor, *rest)
    ref = original.paged_decode_attention_ref
    if paged.queries is not None:
        ref = original.paged_prefill_attention_ref
    return inputs, ref(*inputs), attend(original, inputs, n_splits)[1]


def attend(module: ModuleType, inputs, n_splits: int | None) -> tuple[tuple, Meter]:
    launcher = module.paged_decode_attention
    if len(inputs) == 6:
        launcher = module.paged_prefill_attention
    with metered() as meter:
        return launcher(*inputs, n_splits, return_lse=True), meter


def numbers(cases: list[Case]) -> Detector:
    """Other results than the specification's, or other bytes and products than before."""

    def notices(module: ModuleType) -> bool:
        for case in cases:
            inputs, want, before = prepared(case)
            got, meter = attend(module, inputs, case[1])
            tolerance = {HALF: 2e-3, BRAIN: 2e-2, SINGLE: 1e-5}[case[0].dtype]
            for have, expected in zip(got, want, strict=True):
                if have.dtype != expected.dtype:
                    return True
                if not torch.allclose(have, expected, tolerance, tolerance):
                    return True
            if (meter.read, meter.written, meter.flops) != (
                *(before.read, before.written),
                before.flops,
            ):
                return True
        return False

    return notices


def appended(module: ModuleType) -> bool:
    """Padded heads and numbers, more heads than a program takes, a row of padding."""
    g = torch.Generator().manual_seed(0)
    for heads, head_dim, dtype, P in ((11, 3, SINGLE, 3), (3, 16, HALF, 1)):
        rows = torch.randn(3, 2, heads, head_dim, generator=g).to(dtype)
        cache = torch.randn(4, P, 2, heads, head_dim, generator=g).to(dtype)
        k, v = rows[:, 0], rows.flip(0)[:, 1]
        slots = torch.tensor([4 * P - 2, -1, 0])
        want, got = cache.clone(), cache.clone()
        original.append_to_cache_ref(k, v, want[:, :, 0], want[:, :, 1], slots)
        with metered() as meter:
            module.append_to_cache(k, v, got[:, :, 0], got[:, :, 1], slots)
        moved = 2 * 2 * heads * head_dim * dtype.itemsize
        read = moved + 8 * 3 * cdiv(heads, 8), moved
        if not torch.equal(got, want) or (meter.loads, meter.stores) != read:
            return True
    return False


def ir(name: str) -> Detector:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    x, n = torch.ones(2, 3, 5), int32(1)
    tiles = dict(HEAD_DIM=20, PAGE_SIZE=5, BLOCK_D=32)
    attention = tiles | dict(GROUP=3, BLOCK_T=16, BLOCK_P=4)
    args, sizes, strides = {
        "_paged_decode_kernel": ((x, x, x, n, n, x, x, 0.1), attention | dict(BLOCK_G=16), 9),
        "_paged_prefill_kernel": (
            *((x, x, x, n, n, n, x, x, 7, 0.1), attention | dict(BLOCK_M=32, BLOCK_B=2)),
            9,
        ),
        "_append_kernel": ((x, x, x, x, n.long(), 5), tiles | dict(BLOCK_H=8), 10),
    }[name]
    needs = ("load", "store", "dot") if "BLOCK_T" in sizes else ("load", "store")

    def notices(module: ModuleType) -> bool:
        cost = lab.check_jit(
            getattr(module, name),
            args=(*args, *range(20, 20 + strides)),
            constexprs=sizes,
            needs=needs,
        )
        return bool(cost.int32_offsets)

    return notices


def meta(*shape: int, dtype: torch.dtype = BRAIN) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches_attention(prefill: bool) -> Detector:
    """Grids, tiles and options, on tensors without memory: two programs a processor, at most
    a split a block of keys, at most 128."""

    def notices(module: ModuleType) -> bool:
        kernel = "_paged_prefill_kernel" if prefill else "_paged_decode_kernel"
        # Sequences, rows of q, query and KV heads, D, pages a sequence, P, splits asked and
        # processors -> pieces without splits, splits.
        for B, T, H, heads, D, width, P, n_splits, processors, pieces, splits in [
            (3, 3, 4, 2, 80, 100, 10, None, 13, (3, 3), 5),
            (3, 3, 4, 2, 80, 100, 10, None, 1000, (3, 3), 16),
            (1, 1, 4, 2, 80, 200, 62, None, 1000, (1, 1), 128),
            (2, 2, 4, 2, 80, 0, 10, None, 1000, (2, 2), 1),
            (40, 40, 4, 2, 65, 100, 10, None, 2, (40, 40), 1),
            (2, 2, 4, 2, 80, 3, 43, 128, 1, (2, 2), 3),
            (2, 2, 128, 2, 80, 100, 10, 2, 1000, (2, 3), 2),
            (2, 300, 17, 1, 128, 100, 1, 1, 1, (300, 44), 1),
            (1, 129, 1, 1, 1, 9, 16, 1, 1, (129, 2), 1),
        ]:
            B = B if prefill else T
            module.processors = lambda device, count=processors: count
            q, k = meta(T, H, D), meta(7, P, heads, D)
            tables, lengths = meta(B, width, dtype=torch.int32), meta(B, dtype=torch.int32)
            inputs = (q, k, k, tables, lengths)
            if prefill:
                inputs += (meta(B + 1, dtype=torch.int32),)
                start = functools.partial(module.paged_prefill_attention, *inputs, n_splits)
            else:
                start = functools.partial(module.paged_decode_attention, *inputs, n_splits)
            (name, grid, options), *merges = launches(start)
            group = H // heads
            # Whole pages, except where a page is longer than the 64 keys of a step.
            tiles = dict(HEAD_DIM=D, GROUP=group, PAGE_SIZE=P, BLOCK_T=64, num_warps=4)
            tiles |= dict(BLOCK_D={80: 128, 65: 128, 128: 128, 1: 16}[D], num_stages=5)
            tiles |= dict(BLOCK_P={10: 8, 62: 4, 43: 4, 1: 64, 16: 8}[P])
            if D <= 64 and not prefill:
                tiles |= dict(BLOCK_T=128, BLOCK_P=16)
            if prefill:
                tiles |= dict(BLOCK_M=128, BLOCK_B=128, num_warps=8)
            else:
                tiles["BLOCK_G"] = {2: 16, 64: 64, 17: 32, 1: 16}[group]
                tiles["num_warps"] = 4 if group <= 16 else 8
            if (name, grid, options) != (kernel, (pieces[prefill], heads, splits), tiles):
                return True
            if [merge[1] for merge in merges] != [(T * H,)] * (splits > 1):
                return True
        return False

    return notices


def launches_append(module: ModuleType) -> bool:
    for T, heads, D, grid, block_h, block_d in [
        (5, 1, 1, (5, 1), 1, 1),
        (5, 3, 80, (5, 1), 4, 128),
        (4, 9, 128, (4, 2), 8, 128),
    ]:
        k, k_pages = meta(T, heads, D), meta(7, 5, heads, D)
        slots = meta(T, dtype=torch.int64)
        asked = launches(functools.partial(module.append_to_cache, k, k, k_pages, k_pages, slots))
        options = dict(HEAD_DIM=D, PAGE_SIZE=5, BLOCK_D=block_d, BLOCK_H=block_h, num_warps=1)
        if asked != [("_append_kernel", grid, options)]:
            return True
    return False


def arguments(module: ModuleType) -> bool:
    """What is wrong is refused by name; what is at the edge is not."""
    for launcher, good, start, changes in BAD:
        try:
            getattr(module, launcher.__name__)(**(good | changes))
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    q, edge = ATTENTION["q"], ATTENTION | dict(seq_lens=int32(8, 4), n_splits=128)
    few = edge | dict(q=torch.ones(8, 4, 16))
    widest = edge | dict(q=torch.ones(2, 64, 128), **pages(3, 4, 1, 128))
    narrow = edge | dict(
        q=q[:1], block_tables=int32([0, 1]), seq_lens=int32(8), **pages(2, 4, 2, 16)
    )
    single = edge | dict(block_tables=int32([0], [-1]), seq_lens=int32(4, 0), **pages(1, 4, 2, 16))
    unused = edge | dict(block_tables=int32([0, 1], [2, -1]), seq_lens=int32(5, 4))
    one = dict(k=torch.ones(2, 2, 1), v=torch.ones(2, 2, 1), **pages(3, 4, 2, 1))
    wide = dict(k=torch.ones(2, 2, 128), v=torch.ones(2, 2, 128), **pages(3, 4, 2, 128))
    slots = [dict(slot_mapping=torch.tensor(values)) for values in ([0, 11], [-1, -1])]
    asked = launches(
        lambda: [
            *(module.paged_decode_attention(**given) for given in (edge, widest, unused, single)),
            *(module.paged_prefill_attention(**given, **OFFSETS) for given in (edge, widest)),
            module.paged_prefill_attention(**narrow, cu_seqlens_q=int32(0, 1)),
            module.paged_prefill_attention(**few, cu_seqlens_q=int32(0, 8, 8)),
            *(module.append_to_cache(**(APPEND | given)) for given in (one, wide, *slots)),
        ]
    )
    return len([name for name, *_ in asked if "merge" not in name]) != 12


def nothing_to_do(module: ModuleType) -> bool:
    """No launch without queries, heads or rows, and lse only where asked for."""
    q, empty = ATTENTION["q"], torch.empty(0, dtype=torch.int32)
    none = ATTENTION | dict(q=q[:0], block_tables=int32([0])[:0], seq_lens=empty)
    for name, offsets in (
        ("paged_decode_attention", [{}, {}]),
        ("paged_prefill_attention", [dict(cu_seqlens_q=int32(0)), OFFSETS]),
    ):
        launcher, answers = getattr(module, name), []
        given = (none | offsets[0], ATTENTION | offsets[1])
        calls = [
            functools.partial(launcher, **call, return_lse=lse)
            for call in given
            for lse in (False, True)
        ]
        calls += [functools.partial(launcher, **call) for call in given]
        asked = [launches(lambda c=c, a=answers: a.append(c())) for c in calls]
        if [len(each) for each in asked] != [0, 0, 1, 1, 0, 1]:
            return True
        if [len(answer) if isinstance(answer, tuple) else 1 for answer in answers] != [
            *(1, 2, 1, 2, 1, 1)
        ]:
            return True
    none = pages(0, 4, 2, 16) | dict(slot_mapping=torch.tensor([-1, -1]))
    return bool(
        launches(lambda: module.append_to_cache(**(APPEND | none)))
        or launches(
            lambda: module.append_to_cache(
                *(torch.ones(0, 2, 16),) * 2, **pages(), slot_mapping=empty.long()
            )
        )
    )


def configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    decode = {
        ("sm_80", 128, 1, HALF): (64, 4, 5),
        ("sm_90", 65, 16, BRAIN): (64, 4, 5),
        ("sm_90", 65, 17, BRAIN): (64, 8, 5),
        ("sm_90", 64, 8, HALF): (128, 4, 5),
        ("gfx942", 128, 17, HALF): (32, 4, 2),
        ("gfx942", 64, 8, HALF): (64, 4, 2),
        ("sm_90", 64, 8, SINGLE): (32, 8, 5),
        ("sm_90", 65, 8, SINGLE): (32, 16, 5),
        ("gfx942", 128, 8, SINGLE): (32, 4, 2),
    }
    prefill = {
        ("sm_80", 65, HALF): (128, 32, 128, 8, 5),
        ("sm_80", 64, HALF): (128, 64, 128, 8, 5),
        ("sm_90", 64, HALF): (128, 64, 128, 8, 5),
        ("sm_100", 128, BRAIN): (128, 64, 128, 8, 5),
        ("gfx942", 128, HALF): (64, 64, 128, 4, 2),
        ("sm_90", 64, SINGLE): (64, 32, 128, 8, 2),
        ("sm_90", 65, SINGLE): (64, 64, 128, 16, 2),
        ("gfx942", 128, SINGLE): (64, 32, 128, 4, 2),
    }
    for choose, wanted in (
        (module._decode_configuration, decode),
        (module._prefill_configuration, prefill),
    ):
        for given, (*blocks, warps, stages) in wanted.items():
            if choose(*given) != (*blocks, dict(num_warps=warps, num_stages=stages)):
                return True
    return module._decode_configuration("cpu", 128, 8, HALF) != (
        16,
        {},
    ) or module._prefill_configuration("cpu", 128, HALF) != (64, 16, 4, {})


PADDED_Q = "q: padded rows are not stored, padded columns meet zeros of K"
PADDED_V = "V: masked keys weigh 0, padded columns are not stored"
FEWER = "fewer blocks do without the mask, which hides nothing in them"

PYTHON = [configuration, launches_attention(False), launches_attention(True), launches_append]
PYTHON += [arguments, nothing_to_do]
# Per function: the mutants that change nothing, and why; and what to try, the cheap first.
FUNCTIONS: dict[str, tuple[dict[str, str], list[Detector]]] = {
    "_paged_decode_kernel": (
        {
            "constant#7: 0.0 to 1.0": PADDED_Q,
            "constant#8: 1e+38 to 2e+38": "any floor below every score will do",
            "constant#12: 0.0 to 1.0": "K: masked keys get -inf later, padded columns meet zeros",
            "constant#16: 0.0 to 1.0": PADDED_V,
        },
        [numbers(DECODE[:1]), ir("_paged_decode_kernel"), numbers(DECODE[1:])],
    ),
    "_paged_prefill_kernel": (
        {
            "constant#16: 0.0 to 1.0": PADDED_Q,
            "operator#41: + to -": FEWER,
            "operator#42: + to -": FEWER,
            "constant#17: 1 to 0": FEWER,
            "tl.maximum#1: keep argument 2 only": FEWER,
            "constant#19: 1e+38 to 2e+38": "any floor below every score will do",
            "constant#24: 0.0 to 1.0": "K: keys from end on are hidden from rows that are stored",
            "constant#27: 0.0 to 1.0": PADDED_V,
        },
        [numbers(PREFILL[:1]), ir("_paged_prefill_kernel"), numbers(PREFILL[1:])],
    ),
    "_append_kernel": ({}, [appended, ir("_append_kernel")]),
    "paged_decode_attention": ({}, [*PYTHON, numbers(DECODE[:3])]),
    "paged_prefill_attention": ({}, [*PYTHON, numbers(PREFILL[:3])]),
    "append_to_cache": ({}, [*PYTHON, appended]),
    "_check_cache": ({}, PYTHON),
    "_check_sequences": ({}, PYTHON),
    "_splits": ({}, PYTHON),
    "_partials": ({}, [numbers(DECODE[:3])]),
    "_decode_configuration": ({}, PYTHON),
    "_prefill_configuration": ({}, PYTHON),
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    equivalent, detectors = FUNCTIONS[name]
    assert_every_mutant_is_noticed(SOURCE, name, equivalent, detectors, tmp_path)
