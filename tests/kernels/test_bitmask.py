"""Token bitmasks against NumPy, on vocabularies, masks and layouts that break kernels."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import cdiv, pretending
from kernels.bitmask import (
    _apply_token_bitmask_kernel,
    _argmax_merge_kernel,
    _masked_argmax_kernel,
    allowed_tokens,
    apply_token_bitmask,
    apply_token_bitmask_ref,
    masked_argmax,
    masked_argmax_ref,
)
from kernels.cases.bitmask import CASES, STREAMING, Masked, bitmask_inputs, draw_mask, pack

ON_CPU = not torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def bits_of(words: torch.Tensor, vocab: int) -> np.ndarray:
    """Bools [rows, vocab]; a little-endian word is its bytes in order, low bit first."""
    raw = np.ascontiguousarray(words.cpu().numpy().astype("<i4")).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little")[:, :vocab].astype(bool)


def numbers(logits: torch.Tensor) -> np.ndarray:
    return logits.cpu().double().numpy()


def expected_argmax(logits, words, row_idx=None) -> list[int]:
    """One token at a time."""
    x, bits = numbers(logits), bits_of(words, logits.shape[1])
    rows = range(len(x)) if row_idx is None else row_idx.tolist()
    found = []
    for row in rows:
        best, winner = -math.inf, -1
        for token in np.flatnonzero(bits[row]).tolist():
            value = x[row, token]
            if winner == -1:  # the first legal token wins unless another is larger
                winner = token
            if value > best:
                best, winner = value, token
        found.append(winner)
    return found


def assert_masked(before, after, words, row_idx=None) -> None:
    """Same bits where allowed or in other rows, -inf elsewhere."""
    rows = range(len(before)) if row_idx is None else row_idx.tolist()
    forbidden = np.zeros(before.shape, bool)
    forbidden[list(rows)] = ~bits_of(words, before.shape[1])[list(rows)]
    forbidden = torch.from_numpy(forbidden)
    as_int = torch.int32 if before.dtype == torch.float32 else torch.int16
    kept = ~forbidden
    assert torch.equal(before.cpu().view(as_int)[kept], after.cpu().view(as_int)[kept])
    assert torch.isneginf(after.cpu()[forbidden]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_numpy(case: Masked, device, running) -> None:
    logits, words, rows = bitmask_inputs(case, seeded(), device)
    before = logits.clone(), words.clone()
    with running():
        ids = masked_argmax(logits, words, rows)
    assert ids.dtype == torch.int64 and ids.tolist() == expected_argmax(*before, rows)
    torch.testing.assert_close(logits, before[0], rtol=0, atol=0, equal_nan=True)
    with running():
        assert apply_token_bitmask(logits, words, rows) is logits
    assert_masked(before[0], logits, before[1], rows)
    assert torch.equal(words, before[1])
    if case.layout == "padded":  # the slots beyond the vocabulary
        wide = logits.as_strided((case.B, logits.stride(0)), (logits.stride(0), 1))
        assert wide[:, case.vocab :].isnan().all()


def test_twice_gives_the_same(device, running) -> None:
    """Masking what is masked changes nothing; nor does it change the argmax."""
    inputs = bitmask_inputs(Masked(200, torch.bfloat16), seeded(), device)
    before = inputs[0].clone()
    with running():
        first, second = masked_argmax(*inputs), masked_argmax(*inputs)
        once = apply_token_bitmask(*inputs).clone()
        apply_token_bitmask(*inputs)
        third = masked_argmax(*inputs)
    assert first.tolist() == second.tolist() == third.tolist()
    assert torch.equal(inputs[0], once)
    assert_masked(before, once, inputs[1])


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_the_references_match_numpy(case: Masked, device) -> None:
    logits, words, rows = bitmask_inputs(case, seeded(), device)
    assert allowed_tokens(words, case.vocab).cpu().numpy().tolist() == (
        bits_of(words, case.vocab).tolist()
    )
    assert masked_argmax_ref(logits, words, rows).tolist() == expected_argmax(logits, words, rows)
    before = logits.clone()
    apply_token_bitmask_ref(logits, words, rows)
    assert_masked(before, logits, words, rows)


def test_words_hold_bits_from_the_low_end() -> None:
    allowed = torch.zeros(1, 40, dtype=torch.bool)
    allowed[0, [0, 31, 32]] = True
    assert pack(allowed)[0].tolist() == [-2147483647, 1 - 2**8]  # spare bits are ones
    assert torch.equal(allowed_tokens(pack(allowed), 40), allowed)


@pytest.mark.parametrize("vocab", [1, 8, 63, 64, 128, 199])
@pytest.mark.parametrize("rows", [None, ()])
def test_odd_vocabularies(vocab: int, rows, device, running) -> None:
    for dtype, kind in zip(DTYPES, ("half", "few", "most"), strict=True):
        case = Masked(vocab, dtype, kind, rows=rows, B=1)
        logits, words, row_idx = bitmask_inputs(case, seeded(vocab), device)
        before = logits.clone()
        with running():
            ids = masked_argmax(logits, words, row_idx)
            apply_token_bitmask(logits, words, row_idx)
        assert ids.tolist() == expected_argmax(before, words, row_idx)
        assert_masked(before, logits, words, row_idx)


# Each: logits of the allowed tokens {token: value} of 200, all others forbidden; who wins.
NAN, INF = math.nan, math.inf
CHOICES = [
    ({}, -1),
    ({150: -INF}, 150),
    ({150: -INF, 70: -INF, 199: -INF}, 70),
    ({150: NAN}, 150),
    ({150: NAN, 90: -INF}, 90),
    ({90: NAN, 150: -65504.0}, 150),
    ({90: -INF, 150: -65504.0}, 150),
    ({90: -INF, 91: NAN, 150: INF, 151: INF}, 150),
    ({5: -0.0, 64: 0.0}, 5),
    ({5: 0.0, 64: -0.0}, 5),
    ({64: 7.0, 127: 7.0, 128: 7.0}, 64),
    ({0: 1.0, 199: 2.0}, 199),
    ({33: 6e-8, 34: 1.2e-7}, 34),  # subnormal halves
]


@pytest.mark.parametrize("others, dtype", [*zip([NAN, INF, 65504.0], DTYPES, strict=True)])
def test_only_the_allowed_compete(others: float, dtype, device, running) -> None:
    logits = torch.full((len(CHOICES), 200), others)
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (values, _) in enumerate(CHOICES):
        for token, value in values.items():
            logits[row, token], allowed[row, token] = value, True
    logits, words = logits.to(device, dtype), pack(allowed).to(device)
    with running():
        ids = masked_argmax(logits, words)
    assert ids.tolist() == [winner for _, winner in CHOICES]
    assert masked_argmax_ref(logits, words).tolist() == ids.tolist()


def test_allowed_nan_keeps_its_bits(device, running) -> None:
    """Payloads too: a masked vector is read and written back."""
    for dtype, as_int, pattern in [
        (torch.float32, torch.int32, 0x7FC12345),
        (torch.float16, torch.int16, 0x7E55),
        (torch.bfloat16, torch.int16, 0x7FD5),
    ]:
        raw = torch.full((1, 64), pattern, dtype=as_int, device=device)
        words = torch.tensor([[0x55555555, -1]], dtype=torch.int32, device=device)
        logits = raw.clone().view(dtype)
        with running():
            apply_token_bitmask(logits, words)
        assert_masked(raw.view(dtype), logits, words)


def test_logits_of_one_row_under_many_masks(device, running) -> None:
    """An argmax reads the same row for all; masking it for all would be a race."""
    logits, words, _ = bitmask_inputs(Masked(100), seeded(), device)
    shared = logits[:1].expand(3, -1)
    with running():
        ids = masked_argmax(shared, words)
    assert ids.tolist() == expected_argmax(shared, words)


def test_nothing_to_do_launches_nothing(device, running) -> None:
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    none = empty(0, dtype=torch.int32)
    with running() as meter:
        for B, V, rows in [(0, 33, None), (3, 0, None), (3, 33, none), (0, 0, none)]:
            logits, words = empty(B, V), empty(B, cdiv(V, 32), dtype=torch.int32)
            assert apply_token_bitmask(logits, words, rows) is logits
            ids = masked_argmax(logits, words, rows)
            assert ids.tolist() == [-1] * (B if rows is None else 0)
    assert meter is None or meter.launches == 0


@pytest.mark.parametrize("what", ["logits", "bitmask"])
def test_offsets_beyond_32_bits(what: str, device, running) -> None:
    logits, words, _ = bitmask_inputs(Masked(40, torch.float16, B=3), seeded(), device)
    near = logits if what == "logits" else words
    stride = 2**30
    assert (near.shape[0] - 1) * stride == 2**31
    # Gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(near.itemsize * (2**31 + 64), device=device)
    far = torch.empty(0, dtype=near.dtype, device=device).set_(storage)
    spread = far.as_strided(near.shape, (stride, 1))
    spread.copy_(near)
    before = logits.clone()
    if what == "logits":
        logits = spread
    else:
        words = spread
    with running():
        ids = masked_argmax(logits, words)
        apply_token_bitmask(logits, words)
    assert ids.tolist() == expected_argmax(before, words)
    assert_masked(before, logits.contiguous(), words)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("vocab, B, kind", [(49_152, 8, "few"), (50_257, 1, "most")])
def test_masking_touches_what_it_must(vocab: int, B: int, kind: str) -> None:
    """At the tile of a real GPU, in vectors of 16 bytes, 8 tokens, each at most once.

    Vectors with a forbidden token are stored, and read if they have an allowed one too: at most
    32 bytes for a memory sector of 32. Where little is allowed, as in most states of a grammar,
    that is the compulsory traffic. Where little is forbidden, single elements would be fewer
    bytes, but not fewer sectors; hence no limit for "most".
    """
    from course.lab.meter import metered

    logits, words, sizes, legal = metered_inputs(vocab, B, kind)
    before = logits.clone()
    with metered() as meter, pretending("sm_90"):
        apply_token_bitmask(logits, words)
    assert_masked(before, logits, words)
    assert meter.read["bitmask"] == words.nbytes
    assert meter.read["logits"] == sizes[(legal > 0) & (legal < sizes)].sum()
    assert meter.stores == meter.written["logits"] == sizes[legal < sizes].sum()
    compulsory = int((sizes - legal).sum()) + words.nbytes
    if kind == "few":
        assert meter.loads + meter.stores <= 1.01 * compulsory


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("vocab, B, kind", [(49_152, 8, "most"), (50_257, 1, "few")])
def test_argmax_reads_what_it_must(vocab: int, B: int, kind: str) -> None:
    """At the tile of a real GPU: the mask, and the vectors that have an allowed token."""
    from course.lab.meter import metered

    logits, words, sizes, legal = metered_inputs(vocab, B, kind)
    with metered() as meter, pretending("sm_90"):
        ids = masked_argmax(logits, words)
    assert ids.tolist() == expected_argmax(logits, words)
    assert meter.read["bitmask"] == words.nbytes
    assert meter.read["logits"] == sizes[legal > 0].sum()
    assert meter.stores == 8 * B * cdiv(vocab, 2048) + 8 * B
    if kind == "most":
        assert meter.loads + meter.stores <= 1.01 * (logits.nbytes + words.nbytes)


def metered_inputs(vocab: int, B: int, kind: str):
    """logits, words; per vector of 8 tokens its bytes and the bytes of its allowed tokens."""
    allowed = draw_mask(kind, B, vocab, seeded())
    allowed[:, -1] = True  # as the spare bits beyond it
    logits = torch.randn(B, vocab, generator=seeded(1)).to(torch.bfloat16)
    padding = (0, -vocab % 8)
    sizes = torch.nn.functional.pad(torch.full((B, vocab), 2), padding).view(B, -1, 8)
    legal = torch.nn.functional.pad(2 * allowed, padding).view(B, -1, 8)
    return logits, pack(allowed), sizes.sum(-1), legal.sum(-1)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    case = Masked(70, torch.float16, layout="padded", rows=(2, 0))
    inputs = bitmask_inputs(case, seeded())
    logits, words, rows = map(lab.guarded, inputs)
    part_max = lab.guarded(lab.poisoned((2, 2), torch.float32))
    part_id = lab.guarded(lab.poisoned((2, 2), torch.int32))
    ids = lab.guarded(lab.poisoned((2,), torch.int64))
    sizes = 70, logits.stride(0), words.stride(0)
    with lab.interpreted():
        _masked_argmax_kernel[(2, 2)](
            logits, words, rows, part_max, part_id, *sizes, VECTOR=8, BLOCK_W=2
        )
        _argmax_merge_kernel[(2,)](part_max, part_id, ids, 2, BLOCK_N=2)
        _apply_token_bitmask_kernel[(2, 2)](logits, words, rows, *sizes, VECTOR=8, BLOCK_W=2)
    named = dict(part_max=part_max, part_id=part_id, ids=ids, logits=logits, words=words)
    for name, tensor in named.items():
        lab.check_guard(name, tensor)
    assert ids.tolist() == expected_argmax(*inputs)
    assert_masked(inputs[0], logits, words, rows)


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    return dict(logits=torch.zeros(2, 40), bitmask=ones(2, 2), row_idx=None) | changes


def ones(*shape, dtype=torch.int32):
    return torch.ones(shape, dtype=dtype)


BAD = {
    "logits: shape": dict(logits=torch.zeros(40)),
    "logits: dtype": dict(logits=torch.zeros(2, 40, dtype=torch.float64)),
    "logits: last stride 2": dict(logits=torch.zeros(2, 80)[:, ::2]),
    "logits: 2097153 tokens": dict(
        logits=torch.zeros(1, 1).expand(2, 2**21 + 1).clone(), bitmask=ones(2, 2**16 + 1)
    ),
    "bitmask: shape": dict(bitmask=ones(2, 3)),
    "bitmask: shape .3, 2.": dict(bitmask=ones(3, 2)),
    "bitmask: dtype": dict(bitmask=ones(2, 2, dtype=torch.int64)),
    "bitmask: last stride 2": dict(bitmask=ones(2, 4)[:, ::2]),
    "row_idx: shape": dict(row_idx=ones(1, 1)),
    "row_idx: dtype": dict(row_idx=ones(1, dtype=torch.int64)),
    "row_idx: last stride 2": dict(row_idx=ones(4)[::2]),
    "row_idx: 2 at .1. must be 0 to 1": dict(row_idx=torch.tensor([1, 2], dtype=torch.int32)),
    "row_idx: -1 at .0.": dict(row_idx=-ones(1)),
}


@pytest.mark.parametrize("launcher", [apply_token_bitmask, masked_argmax])
@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str, launcher) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        launcher(**changed(**BAD[start]))


def test_rows_to_be_changed_may_not_overlap() -> None:
    for stride in (0, 39):
        rows = torch.zeros(80).as_strided((2, 40), (stride, 1))
        with pytest.raises(ValueError, match=f"^logits: row stride {stride} must be at least 40"):
            apply_token_bitmask(**changed(logits=rows))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    arguments = torch.zeros(1, 1), ones(1, 1)
    row = torch.zeros(1, dtype=torch.int32)
    for launcher in (apply_token_bitmask, masked_argmax):
        compile_launches(lambda: (launcher(*arguments), launcher(*arguments, row)), target)  # noqa: B023


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_vocabulary_fits(target: str) -> None:
    """The edge of the claim, 2**21 tokens: a merge of 1024 blocks."""
    logits = torch.empty(2, 2**21, dtype=torch.float16, device="meta")
    words = torch.empty(2, 2**16, dtype=torch.int32, device="meta")
    rows = table.build(
        {"": lambda: (apply_token_bitmask(logits, words), masked_argmax(logits, words))}, [target]
    )
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in CASES]
    axes = ("vocab", "dtype", "mask", "layout", "rows")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
