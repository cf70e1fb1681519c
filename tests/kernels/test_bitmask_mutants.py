"""Every automatic edit of the bitmask family must be noticed by the small cases below."""

import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.bitmask as original
from course import lab
from course.lab.meter import metered
from kernels.cases.bitmask import Masked, bitmask_inputs, pack
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "allowed_tokens": {},
    "_allowed_block": {
        "constant#4: 32 to 33": "33 // 4 and 33 // 8 are 32 // 4 and 32 // 8",
    },
    "_apply_token_bitmask_kernel": {},
    "_masked_argmax_kernel": {},
    "_argmax_merge_kernel": {},
    "apply_token_bitmask": {},
    "masked_argmax": {},
    "_check": {},
    "_configuration": {},
}


@functools.cache
def inputs(number: int):
    """Three blocks of 64, the last one short, far apart and in another order; and one word."""
    generator = torch.Generator().manual_seed(number)
    if number:
        return bitmask_inputs(Masked(32, torch.float32, "most", B=2), generator)
    case = Masked(150, torch.bfloat16, "half", "padded", (2, 0))
    logits, words, rows = bitmask_inputs(case, generator)
    words[0, :3] = torch.tensor([0x0101FF00, 0x01FF0100, 0])  # of vectors all kinds
    logits.view(torch.int16)[0, 16] = 0x7FD5  # an allowed NaN, and not the usual one
    return logits, words, rows


@functools.cache
def expected(number: int):
    logits, words, rows = inputs(number)
    ids = original.masked_argmax_ref(logits, words, rows)
    return ids, original.apply_token_bitmask_ref(logits.clone(), words, rows)


@functools.cache
def choices():
    """Rows whose winner is disputed, and the winner; only the named tokens are allowed."""
    rows = [
        ({}, -1),
        ({70: -math.inf, 90: -math.inf}, 70),
        ({3: math.nan, 70: -1.0, 71: -1.0}, 70),
        ({3: math.nan, 70: -math.inf}, 3),
        ({40: 2.0, 70: 2.0, 90: 1.0}, 40),
    ]
    logits = torch.full((len(rows), 91), math.inf)
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (values, _) in enumerate(rows):
        for token, value in values.items():
            logits[row, token], allowed[row, token] = value, True
    return logits, pack(allowed), torch.tensor([winner for _, winner in rows])


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype == torch.bfloat16:  # to the bit, NaN too
        one, two = one.view(torch.int16), two.view(torch.int16)
    return one.dtype == two.dtype and torch.equal(one, two)


def notices_argmax(module: ModuleType) -> bool:
    for number in (1, 0):
        with metered() as meter:
            ids = module.masked_argmax(*inputs(number))
        if not same(ids, expected(number)[0]) or meter.read["logits"] != traffic(number)[0]:
            return True
    logits, words, winners = choices()
    with metered():
        return not same(module.masked_argmax(logits, words), winners)


def notices_masking(module: ModuleType) -> bool:
    for number in (1, 0):
        logits, words, rows = inputs(number)
        changed = logits.clone()  # dense, unlike the input
        with metered() as meter:
            if module.apply_token_bitmask(changed, words, rows) is not changed:
                return True
        if not same(changed, expected(number)[1]):
            return True
        if (meter.read["logits"], meter.written["logits"]) != traffic(number)[1:]:
            return True
    return False


@functools.cache
def traffic(number: int) -> tuple[int, int, int]:
    """Bytes of logits that an argmax reads, and that masking reads and writes."""
    logits, words, rows = inputs(number)
    vector, vocab = 16 // logits.itemsize, logits.shape[1]
    words = words if rows is None else words[rows.long()]
    bits = original.allowed_tokens(words, 32 * words.shape[1]).view(len(words), -1, vector)
    sizes = (torch.arange(bits[0].numel()) < vocab).view(-1, vector).sum(-1) * logits.itemsize
    some, every = bits.any(-1), bits.all(-1)
    return tuple(int((sizes * used).sum()) for used in (some, some & ~every, ~every))


def notices_bools(module: ModuleType) -> bool:
    words = torch.tensor([[1 - 2**31, 5], [-2, 0]], dtype=torch.int32)
    bits = torch.zeros(2, 40, dtype=torch.bool)
    bits[0, [0, 31, 32, 34]] = True
    bits[1, 1:32] = True
    return not same(module.allowed_tokens(words, 40), bits)


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    logits, words, rows = inputs(0)
    floats, ids = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int32)
    sizes, tiles = (150, logits.stride(0), words.stride(0)), dict(VECTOR=8, BLOCK_W=4)
    changed = module._allowed_block.src != original._allowed_block.src
    for name, args, constexprs in [
        ("_apply_token_bitmask_kernel", (logits, words, rows, *sizes), tiles),
        ("_masked_argmax_kernel", (logits, words, rows, floats, ids, *sizes), tiles),
        ("_argmax_merge_kernel", (floats, ids, ids.long(), 3), dict(BLOCK_N=4)),
    ]:
        kernel = getattr(module, name)
        if changed or kernel.src != getattr(original, name).src:  # compiling is slow
            if lab.check_jit(kernel, args=args, constexprs=constexprs).int32_offsets:
                return True
            changed = False
    return False


def notices_launches(module: ModuleType) -> bool:
    """Grids and options, on tensors without memory."""
    meta = torch.device("meta")
    for rows, count in ((None, 5), (torch.ones(3, dtype=torch.int32, device=meta), 3)):
        for dtype, vector in ((torch.bfloat16, 8), (torch.float32, 4)):
            logits = torch.empty(5, 33 * 2048, dtype=dtype, device=meta)
            words = torch.empty(5, 33 * 64, dtype=torch.int32, device=meta)
            block = dict(VECTOR=vector, BLOCK_W=64, num_warps=2)
            apply = launches(lambda: module.apply_token_bitmask(logits, words, rows))  # noqa: B023
            argmax = launches(lambda: module.masked_argmax(logits, words, rows))  # noqa: B023
            if apply != [("_apply_token_bitmask_kernel", (count, 33), block)] or argmax != [
                ("_masked_argmax_kernel", (count, 33), block),
                ("_argmax_merge_kernel", (count,), dict(BLOCK_N=64, num_warps=1)),
            ]:
                return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    logits, words, rows = inputs(0)
    wide = torch.empty(1, 2**21 + 1, dtype=torch.float16, device="meta")
    bad = [
        ("logits: shape", logits[0], words, rows),
        ("logits: 2097153", wide, words, None),
        ("bitmask: shape", logits, words[:, 1:], rows),
        ("bitmask: dtype", logits, words.long(), rows),
        ("row_idx: dtype", logits, words, rows.long()),
        ("row_idx: 3", logits, words, rows + 1),
        ("row_idx: -1", logits, words, rows - 1),
    ]
    overlap = logits.as_strided((2, 150), (149, 1))
    calls = [(module.apply_token_bitmask, "logits: row stride 149", overlap, words[:2], None)]
    for launcher in (module.apply_token_bitmask, module.masked_argmax):
        calls += [(launcher, *row) for row in bad]
    for launcher, start, *arguments in calls:
        try:
            launcher(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    edge = wide[:, :-1], torch.ones(1, 2**16, dtype=torch.int32, device="meta")
    if len(launches(lambda: module.apply_token_bitmask(*edge))) != 1:
        return True
    # Rows that touch, and a single row, whose stride means nothing.
    dense = torch.zeros(2, 33), torch.zeros(2, 2, dtype=torch.int32)
    single = torch.zeros(33).as_strided((1, 33), (0, 1)), dense[1][:1]
    with metered() as meter:
        for allowed in (dense, single):
            if not torch.isneginf(module.apply_token_bitmask(*allowed)).all():
                return True
    before = meter.launches
    with metered() as meter:
        for B, V in ((0, 33), (2, 0)):
            nothing = torch.zeros(B, V), torch.zeros(B, -(-V // 32), dtype=torch.int32)
            if module.apply_token_bitmask(*nothing) is not nothing[0]:
                return True
            if not same(module.masked_argmax(*nothing), torch.full((B,), -1)):
                return True
    return (before, meter.launches) != (2, 0)


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    return [module._configuration(target) for target in ("sm_80", "sm_90", "gfx942", "cpu")] != [
        *[(64, {"num_warps": 2})] * 2,
        (64, {"num_warps": 1}),
        (2, {}),
    ]


CALLS = [notices_configuration, notices_bools, notices_launches, notices_arguments]
RUNS = [notices_masking, notices_argmax, notices_in_the_ir]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    is_kernel = name.endswith(("_kernel", "_block"))
    detectors = RUNS + CALLS if is_kernel else CALLS + RUNS  # those that are likely to notice
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors, tmp_path)
