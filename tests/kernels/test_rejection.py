"""Speculative verification against plain loops, and the law of the tokens it emits, exactly."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases.rejection import (
    BENCHMARKS,
    STREAMING,
    VERIFY_CASES,
    Verify,
    greedy_inputs,
    sampled_inputs,
)
from kernels.rejection import (
    _argmax_chunk_kernel,
    _residual_chunk_kernel,
    _verify_greedy_kernel,
    _verify_sampled_kernel,
    verify_greedy,
    verify_greedy_ref,
    verify_sampled,
    verify_sampled_ref,
)

ON_CPU = not torch.cuda.is_available()


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# Written apart from the references: Python and NumPy, one sequence at a time.


def passes(p: float, q: float, r: float) -> bool:
    return r * q < p


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.maximum(p - q, 0)


def inverse(weights: np.ndarray, u: float) -> int:
    """Of the running sum, as a share of the total."""
    edges = np.cumsum(weights) / weights.sum()
    return int(np.searchsorted(edges, u, side="right"))


def sampled(p, q, draft, r, u, passes=passes, residual=residual, inverse=inverse, bonus=0):
    """One sequence; `bonus` -1 draws the token after the last draft from the row before."""
    for i, x in enumerate(draft):
        if not passes(p[i][x], q[i][x], r[i]):
            return [*draft[:i], inverse(residual(p[i], q[i]), u)]
    return [*draft, inverse(p[len(draft) + bonus], u)]


def greedy(logits, draft):
    for i, x in enumerate(draft):
        best = max(range(len(logits[i])), key=lambda v: (logits[i][v], -v))
        if x != best:
            return [*draft[:i], best]
    i = len(draft)
    return [*draft, max(range(len(logits[i])), key=lambda v: (logits[i][v], -v))]


def assert_emits(got, want: list[list[int]], rows: int) -> None:
    """tokens, -1 after the last, and the number of drafts among them; all int32 and dense."""
    tokens, accepted = got
    assert tokens.dtype == accepted.dtype == torch.int32
    assert tokens.is_contiguous() and tokens.shape == (len(want), rows)
    assert tokens.tolist() == [[*row, *[-1] * (rows - len(row))] for row in want]
    assert accepted.tolist() == [len(row) - 1 for row in want]


def expected_samples(p, q, draft, r, u, n_draft) -> list[list[int]]:
    p, q, r, u = (x.cpu().double().numpy() for x in (p, q, r, u))
    return [
        sampled(p[b], q[b], draft[b, :n].tolist(), r[b], u[b])
        for b, n in enumerate(n_draft.tolist())
    ]


def expected_greedy(logits, draft, n_draft) -> list[list[int]]:
    return [
        greedy(logits[b].tolist(), draft[b, :n].tolist()) for b, n in enumerate(n_draft.tolist())
    ]


@pytest.mark.parametrize("case", VERIFY_CASES, ids=str)
def test_sampled_matches_float64(case: Verify, device, running) -> None:
    inputs = sampled_inputs(case, seeded(), device)
    with running():
        got = verify_sampled(*inputs)
    want = expected_samples(*inputs)
    assert_emits(got, want, case.drafts + 1)
    assert_emits(verify_sampled_ref(*inputs), want, case.drafts + 1)


@pytest.mark.parametrize("case", VERIFY_CASES, ids=str)
def test_greedy_matches_plain_loops(case: Verify, device, running) -> None:
    inputs = greedy_inputs(case, seeded(), device)
    with running():
        got = verify_greedy(*inputs)
    want = expected_greedy(*inputs)
    assert_emits(got, want, case.drafts + 1)
    assert_emits(verify_greedy_ref(*inputs), want, case.drafts + 1)


def test_the_cases_end_everywhere(device) -> None:
    """At the first draft, in the middle and after the last one."""
    for kind, inputs in ((expected_samples, sampled_inputs), (expected_greedy, greedy_inputs)):
        ends = set()
        for case in VERIFY_CASES:
            emitted = kind(*inputs(case, seeded()))
            ends |= {(len(row) - 1, n) for row, n in zip(emitted, case.n_draft, strict=True)}
        assert {(0, 4), (1, 5), (5, 5), (0, 0), (2, 2)} <= ends


# The law of the emitted tokens

# In eighths, of five tokens; drafts pass with probability 1, 1/2 and 0, and the residual, (1, 2,
# 1, 0, 0) / 4, and p have edges at eighths, so these midpoints count every probability exactly.
P, Q = [4, 2, 1, 1, 0], [3, 0, 0, 2, 3]
R_GRID, U_GRID = [0.25, 0.75], [(2 * i + 1) / 16 for i in range(8)]


def eighths(weights: list[int], prefix: tuple[int, ...]) -> list[int]:
    """The conditional distribution after a prefix: another one after each."""
    turns = sum(token + 1 for token in prefix) % 5
    return weights[-turns:] + weights[:-turns]


def runs(drafts: int):
    """Every draft sequence with every combination of uniforms: inputs, and their weights."""
    rows, weights = [], []
    for x in itertools.product(range(5), repeat=drafts):
        prefixes = [x[:i] for i in range(drafts + 1)]
        p = [eighths(P, prefix) for prefix in prefixes]
        q = [eighths(Q, prefix) for prefix in prefixes[:-1]]
        weight = math.prod(row[token] for row, token in zip(q, x, strict=True))
        for r in itertools.product(R_GRID, repeat=drafts) if weight else ():
            for u in U_GRID:
                rows.append((p, q, x, r, u))
                weights.append(weight)
    p, q, x, r, u = zip(*rows, strict=True)
    n_draft = torch.full((len(rows),), drafts, dtype=torch.int32)
    draft = torch.tensor(x, dtype=torch.int32)
    return (
        (torch.tensor(p) / 8, torch.tensor(q) / 8, draft, torch.tensor(r), torch.tensor(u)),
        n_draft,
        weights,
    )


def follows_the_target(drafts: int, verify) -> bool:
    """Whether each emitted token has the target's law, given the tokens before it: exactly."""
    inputs, n_draft, weights = runs(drafts)
    emitted = verify(*inputs, n_draft)
    counts: dict[tuple[int, ...], int] = {}
    for row, weight in zip(emitted, weights, strict=True):
        for end in range(len(row) + 1):
            counts[row[:end]] = counts.get(row[:end], 0) + weight
    going_on = {
        prefix: sum(counts.get((*prefix, token), 0) for token in range(5)) for prefix in counts
    }
    return all(
        Fraction(counts.get((*prefix, token), 0), total) == Fraction(eighths(P, prefix)[token], 8)
        for prefix, total in going_on.items()
        if total
        for token in range(5)
    )


def rows_of(tokens: torch.Tensor, accepted: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[: n + 1]) for row, n in zip(tokens.tolist(), accepted.tolist(), strict=True)]


def one_by_one(p, q, draft, r, u, n_draft, **changes) -> list[tuple[int, ...]]:
    p, q, r, u = (x.double().numpy() for x in (p, q, r, u))
    return [
        tuple(sampled(p[b], q[b], draft[b].tolist(), r[b], u[b], **changes))
        for b in range(len(draft))
    ]


def test_the_emitted_tokens_have_exactly_the_law_of_the_target(device, running) -> None:
    def verify(*inputs):
        with running():
            return rows_of(*verify_sampled(*(x.to(device) for x in inputs)))

    assert follows_the_target(2, verify)


@pytest.mark.parametrize("drafts", [1, 2])
def test_so_have_those_of_the_references(drafts: int) -> None:
    assert follows_the_target(drafts, lambda *inputs: rows_of(*verify_sampled_ref(*inputs)))
    assert follows_the_target(drafts, one_by_one)


WRONG = {
    "accepts with q / p": dict(passes=lambda p, q, r: r * p < q),
    "accepts whatever p allows": dict(passes=lambda p, q, r: p > 0),
    "accepts with p alone": dict(passes=lambda p, q, r: r < p),
    "draws from p after a rejection": dict(residual=lambda p, q: p),
    "draws from |p - q|": dict(residual=lambda p, q: abs(p - q)),
    "draws from q - p": dict(residual=lambda p, q: np.maximum(q - p, 0)),
    "residual not normalised": dict(
        inverse=lambda w, u: int(np.searchsorted(np.cumsum(w), u, side="right").clip(max=4))
    ),
    "the most probable token instead of a draw": dict(inverse=lambda w, u: int(w.argmax())),
    "one token too far": dict(inverse=lambda w, u: min(inverse(w, u) + 1, 4)),
    "the bonus token from the row before": dict(bonus=-1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_samplers_do_not(name: str) -> None:
    for drafts in (1, 2):
        assert not follows_the_target(drafts, functools.partial(one_by_one, **WRONG[name]))


def test_the_law_over_several_chunks(device, running) -> None:
    """One sequence a 64th of the uniform, no drafts: each token as often as p says."""
    p = torch.zeros(35)
    ids, weights = [3, 15, 16, 20, 31, 32, 34], [5, 10, 1, 20, 8, 17, 3]
    p[ids] = torch.tensor(weights) / 64
    u = (torch.arange(64) * 2 + 1) / 128
    inputs = (
        p.expand(64, 1, -1),
        torch.zeros(64, 0, 35),
        torch.zeros(64, 0, dtype=torch.int32),
        torch.zeros(64, 0),
        u,
        torch.zeros(64, dtype=torch.int32),
    )
    with running():
        tokens, _ = verify_sampled(*(x.to(device) for x in inputs))
    assert torch.bincount(tokens[:, 0].cpu(), minlength=35).tolist() == (p * 64).tolist()


# Edges of the sampled kind


def one_draft(p, q, draft, r=0.5, u=0.5) -> list[torch.Tensor]:
    """A sequence with one draft; p is used for the row after it too."""
    p, q = torch.tensor([[p, p]], dtype=torch.float32), torch.tensor([[q]], dtype=torch.float32)
    one = torch.ones(1, dtype=torch.int32)
    return [p, q, one[:, None] * draft, torch.tensor([[r]]), torch.tensor([u]), one]


NAN, LAST = math.nan, 1 - 2**-24  # the largest uniform below 1
EDGES = {
    "p = 0 fails even for r = 0": (one_draft([0, 1], [1, 0], 0, r=0.0), [1]),
    "q = 0 passes": (one_draft([1, 0], [0, 1], 0, r=LAST), [0, 0]),
    "p = q = 0 fails": (one_draft([0, 1], [0, 1], 0, r=0.0, u=0.0), [1]),
    "p = q passes for every r": (one_draft([0.3, 0.7], [0.3, 0.7], 1, r=LAST, u=0.0), [1, 0]),
    "no residual by rounding: from p": (
        one_draft([0.5, 0.25, 0.25], [0.5, 0.25, 0.25 + 2**-24], 2, r=LAST, u=0.6),
        [1],
    ),
    "certain p, as at temperature 0": (one_draft([0, 0, 1], [1, 0, 0], 0), [2]),
    "first token of positive weight": (one_draft([0, 0.5, 0.5], [1, 0, 0], 0, u=0.0), [1]),
    "an edge belongs to the next token": (one_draft([0.5, 0.5], [0, 1], 0, u=0.5), [0, 1]),
    "last token of positive weight": (one_draft([0.5, 0.5, 0], [0, 0, 1], 2, u=LAST), [1]),
    "rows that do not sum to 1": (one_draft([2, 0, 6], [0, 3, 0], 1, u=0.3), [2]),
    "draft -1": (one_draft([0.5, 0.5], [0.5, 0.25], -1, u=0.0), [1]),
    "NaN in p is never drawn": (one_draft([NAN, 0.5, 0.5], [0, 0, 1], 2, r=0.9, u=0.0), [1]),
    "NaN in p fails": (one_draft([NAN, 1], [1, 0], 0, r=0.0), [1]),
    "NaN in q fails": (one_draft([0.5, 0.5], [NAN, 0], 0, r=0.0, u=0.0), [1]),
    "NaN in r fails": (one_draft([0.9, 0.1], [0.1, 0.9], 0, r=NAN), [0]),
    "NaN in u is beyond every edge": (one_draft([0.5, 0.5, 0], [0, 0, 1], 2, u=NAN), [1]),
    "a draft where all is NaN": (one_draft([NAN, NAN], [0.5, 0.5], 0), [-1]),
    "p = 0 everywhere": (one_draft([0, 0], [0.5, 0.5], 0), [-1]),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, device, running) -> None:
    inputs, want = EDGES[name]
    with running():
        got = verify_sampled(*(x.to(device) for x in inputs))
    assert_emits(got, [want], 2)
    assert_emits(verify_sampled_ref(*inputs), [want], 2)


@pytest.mark.parametrize("u", [0.0, 0.3, 0.9, LAST])
def test_draws_no_token_of_probability_zero(u: float, device, running) -> None:
    """Whatever the order of additions makes of the running sum."""
    p = torch.rand(1, 1, 2000, generator=seeded()) ** 8
    p[:, :, ::2] = p[:, :, 1990:] = 0
    nothing = torch.zeros(1, 0)
    inputs = [p, torch.zeros(1, 0, 2000), nothing.int(), nothing, torch.tensor([u])]
    inputs = [x.to(device) for x in [*inputs, torch.zeros(1, dtype=torch.int32)]]
    with running(), pretending("sm_90"):
        tokens, _ = verify_sampled(*inputs)
    assert p[0, 0, tokens[0, 0]] > 0
    if u in (0.0, LAST):
        assert tokens.item() == (1 if u == 0 else 1989)


# Edges of the greedy kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_logits(dtype, device, running) -> None:
    """Ties over a chunk's border, NaN, infinities, the largest halves."""
    logits = torch.full((6, 2, 70), -1.0)
    logits[0, 0, [40, 33, 69]] = 5.0  # the lowest id wins
    logits[1] = -math.inf
    logits[2, 0], logits[2, 1] = math.nan, 3.0
    logits[3, 0, :65] = math.nan
    logits[3, 0, 65:] = -math.inf
    logits[3, 0, 67] = -65504
    logits[4, 0, 50], logits[4, 0, 51] = 65504, math.inf
    logits[5, 0, 0], logits[5, 0, 66] = -0.0, 0.0
    draft = torch.tensor([[33], [0], [0], [67], [51], [0]], dtype=torch.int32)
    logits, ones = logits.to(device, dtype), torch.ones(6, dtype=torch.int32, device=device)
    want = [[33, 0], [0, 0], [0, 0], [67, 0], [51, 0], [0, 0]]
    inputs = logits, draft.to(device), ones
    with running():
        assert_emits(verify_greedy(*inputs), want, 2)
        assert_emits(
            verify_greedy(logits, draft.to(device) * 0 - 1, ones), [[x[0]] for x in want], 2
        )
    assert_emits(verify_greedy_ref(*inputs), want, 2)


def test_certain_probabilities_are_greedy(device, running) -> None:
    """One-hot p and q: what is sampled is what greedy decoding takes, whatever r and u."""
    logits, draft, n_draft = greedy_inputs(Verify((3, 3, 1, 0)), seeded(), device)
    best = logits.nan_to_num(0).argmax(-1, keepdim=True)
    p = torch.zeros_like(logits).scatter(-1, best, 1)
    q = torch.zeros_like(p[:, :3]).scatter(-1, draft.clamp(min=0).long()[..., None], 1)
    r, u = (torch.rand(size, generator=seeded(1)).to(device) for size in ((4, 3), (4,)))
    with running():
        drawn, chosen = (
            verify_sampled(p, q, draft, r, u, n_draft),
            verify_greedy(logits, draft, n_draft),
        )
    assert torch.equal(drawn[0], chosen[0]) and torch.equal(drawn[1], chosen[1])


# Both kinds

KINDS = pytest.mark.parametrize(
    "verify, inputs", [(verify_sampled, sampled_inputs), (verify_greedy, greedy_inputs)]
)


@KINDS
def test_the_batch_has_no_part_in_the_result(verify, inputs, device, running) -> None:
    args = inputs(Verify((3, 0, 2, 3), vocab=70), seeded(3), device)
    with running():
        tokens, accepted = verify(*args)
        for b in range(4):
            alone = verify(*(x[b : b + 1] for x in args))
            assert torch.equal(alone[0], tokens[b : b + 1]) and alone[1] == accepted[b]


@KINDS
def test_twice_gives_the_same_and_leaves_the_inputs(verify, inputs, device, running) -> None:
    args = inputs(Verify((3, 1), vocab=70), seeded(), device)
    before = [x.clone() for x in args]
    with running():
        first, second = verify(*args), verify(*args)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    for x, copy in zip(args, before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@KINDS
def test_an_empty_batch_launches_nothing(verify, inputs, device, running) -> None:
    args = inputs(Verify(()), seeded(), device)
    with running() as meter:
        tokens, accepted = verify(*args)
    assert tokens.shape == (0, 4) and accepted.shape == (0,)
    if ON_CPU:
        assert meter.launches == 0


def spread(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy whose second or third place along one axis lies 2**31 elements on."""
    stride = 2**31 // (tensor.shape[axis] - 1)
    strides = list(tensor.stride())
    strides[axis] = stride
    # Gigabytes, of which a few pages are ever touched.
    count = 2**31 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    storage = torch.UntypedStorage(tensor.itemsize * (count + 1), device=tensor.device)
    far = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    return far.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("place, axis", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)])
def test_offsets_beyond_32_bits(place: int, axis: int, device, running) -> None:
    """Of p, q, draft and r: from one sequence to another, and from one row to the next."""
    args = list(sampled_inputs(Verify((2, 2), 2, 20), seeded(8), device))
    want = verify_sampled_ref(*args)
    args[place] = spread(args[place], axis)
    with running():
        got = verify_sampled(*args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert want[1].max() == 2


@pytest.mark.parametrize("place, axis", [(0, 0), (0, 1), (1, 0)])
def test_logits_beyond_32_bits(place: int, axis: int, device, running) -> None:
    args = list(greedy_inputs(Verify((2, 2), 2, 40, dtype=torch.float16), seeded(2), device))
    want = verify_greedy_ref(*args)
    args[place] = spread(args[place], axis)
    with running():
        got = verify_greedy(*args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert want[1].max() == 2


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("r, models", [(0.9, 2), (0.0, 1)])
def test_reads_one_row_of_each_model(r: float, models: int) -> None:
    """Of the 9 there are: at most 1.25 times p and q where a draft fails, p alone if all pass."""
    from course.lab.meter import metered

    B, K, V = 8, 4, 49152
    p, q = torch.full((B, K + 1, V), 1 / V), torch.zeros(B, K, V)
    q[..., : V // 2] = 2 / V  # so that the residual is uniform over the other half
    draft, n_draft = torch.zeros(B, K, dtype=torch.int32), torch.full((B,), K, dtype=torch.int32)
    u = (torch.arange(B) + 0.5) / B + 0.5 / V
    with metered() as meter, pretending("sm_90"):
        tokens, accepted = verify_sampled(p, q, draft, torch.full((B, K), r), u, n_draft)
    assert accepted.tolist() == [0 if r else K] * B
    first = V // 2 if r else 0
    drawn = tokens.gather(1, accepted.long()[:, None])[:, 0]
    assert drawn.tolist() == (first + u.double() * (V - first)).int().tolist()
    row = 4 * B * V
    assert models * row <= meter.loads <= 1.25 * models * row
    assert row <= meter.read["p"] <= 1.05 * row
    assert (models - 1) * row <= meter.read["q"] <= 1.05 * (models - 1) * row + 0.01 * row


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_logits_once() -> None:
    """8 rows; and of a sequence with one draft only two of its four."""
    from course.lab.meter import metered

    V = 49152
    logits = torch.zeros(2, 4, V, dtype=torch.bfloat16)
    draft = torch.zeros(2, 3, dtype=torch.int32)
    for n_draft, rows in (([3, 3], 8), ([1, 3], 6)):
        with metered() as meter, pretending("sm_90"):
            verify_greedy(logits, draft, torch.tensor(n_draft, dtype=torch.int32))
        assert meter.read["logits"] == rows * V * 2
        assert meter.loads <= 1.01 * rows * V * 2


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    case = Verify((3, 1, 0), vocab=40)
    guarded = functools.partial(map, lab.guarded)
    p, q, draft, r, u, n_draft = guarded(sampled_inputs(case, seeded()))
    logits, choice, _ = guarded(greedy_inputs(case, seeded()))
    out = dict(
        residual_sums=lab.poisoned((3, 3), torch.float32),
        p_sums=lab.poisoned((3, 3), torch.float32),
        tokens=lab.poisoned((3, 4), torch.int32),
        accepted=lab.poisoned((3,), torch.int32),
        part_max=lab.poisoned((3, 4, 2), torch.float32),
        part_id=lab.poisoned((3, 4, 2), torch.int32),
        best=lab.poisoned((3, 4), torch.int32),
        matched=lab.poisoned((3,), torch.int32),
    )
    out = {name: lab.guarded(tensor) for name, tensor in out.items()}
    strides = (*p.stride()[:2], *q.stride()[:2], draft.stride(0))
    between = out["accepted"], out["residual_sums"], out["p_sums"]
    with lab.interpreted():
        _residual_chunk_kernel[(3, 3)](
            *(p, q, draft, r, n_draft, *between, 40),
            *(*strides, r.stride(0)),
            **dict(BLOCK_K=4, BLOCK_V=16),
        )
        _verify_sampled_kernel[(3,)](
            *(p, q, draft, u, n_draft, *between, out["tokens"], 4, 40, 3),
            *strides,
            **dict(BLOCK_K=4, BLOCK_N=4, BLOCK_V=16),
        )
        _argmax_chunk_kernel[(3, 4, 2)](
            *(logits, n_draft, out["part_max"], out["part_id"], 40),
            *logits.stride()[:2],
            BLOCK_V=32,
        )
        _verify_greedy_kernel[(3,)](
            *(choice, n_draft, out["part_max"], out["part_id"], out["best"], out["matched"]),
            *(4, 2, choice.stride(0)),
            **dict(BLOCK_K=4, BLOCK_N=2),
        )
    for name, tensor in out.items():
        lab.check_guard(name, tensor)
    results = out["tokens"], out["accepted"]
    assert_emits(results, expected_samples(p, q, draft, r, u, n_draft), 4)
    assert_emits((out["best"], out["matched"]), expected_greedy(logits, choice, n_draft), 4)


# Arguments


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("p", "q", "draft", "r", "u", "n_draft")
    return (
        dict(zip(names, sampled_inputs(Verify((3, 1), vocab=5), seeded()), strict=True)) | changes
    )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_DRAFTS = {
    "draft: shape": dict(draft=torch.ones(2, 4, dtype=torch.int32)),
    "draft: dtype": dict(draft=torch.ones(2, 3, dtype=torch.int64)),
    "draft: last stride": dict(draft=torch.ones(2, 6, dtype=torch.int32)[:, ::2]),
    "draft: -2": dict(draft=ints(0, 1, -2, 0, 0, 0).view(2, 3)),
    "draft: 5": dict(draft=ints(0, 5, 1, 0, 0, 0).view(2, 3)),
    "n_draft: shape": dict(n_draft=ints(1)),
    "n_draft: dtype": dict(n_draft=torch.ones(2)),
    "n_draft: -1": dict(n_draft=ints(3, -1)),
    "n_draft: 4": dict(n_draft=ints(4, 1)),
}
BAD = BAD_DRAFTS | {
    "p: shape": dict(p=torch.ones(2, 5)),
    "p: dtype": dict(p=torch.ones(2, 4, 5, dtype=torch.float16)),
    "p: last stride": dict(p=torch.ones(2, 4, 10)[..., ::2]),
    "p: 0 rows": dict(p=torch.ones(2, 0, 5)),
    "p: 33 rows": dict(p=torch.ones(2, 33, 5)),
    "p: vocabulary 0": dict(p=torch.ones(2, 4, 0)),
    "p: vocabulary 1048577": dict(p=torch.empty(2, 4, 2**20 + 1, device="meta")),
    "q: shape": dict(q=torch.ones(2, 4, 5)),
    "q: dtype": dict(q=torch.ones(2, 3, 5, dtype=torch.bfloat16)),
    "q: last stride": dict(q=torch.ones(2, 3, 10)[..., ::2]),
    "r: shape": dict(r=torch.ones(2, 4)),
    "r: dtype": dict(r=torch.ones(2, 3, dtype=torch.float64)),
    "r: last stride": dict(r=torch.ones(2, 6)[:, ::2]),
    "u: shape": dict(u=torch.ones(3)),
    "u: dtype": dict(u=torch.ones(2, dtype=torch.float64)),
    "u: last stride": dict(u=torch.ones(4)[::2]),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        verify_sampled(**changed(**BAD[start]))


@pytest.mark.parametrize("start", BAD_DRAFTS)
def test_bad_drafts_of_the_greedy_kind_are_named(start: str) -> None:
    inputs = changed(**BAD_DRAFTS[start])
    with pytest.raises(ValueError, match=f"^{start}"):
        verify_greedy(inputs["p"], inputs["draft"], inputs["n_draft"])


BAD_LOGITS = {
    "logits: shape": torch.ones(2, 5),
    "logits: dtype": torch.ones(2, 4, 5, dtype=torch.float64),
    "logits: last stride": torch.ones(2, 4, 10)[..., ::2],
    "logits: 0 rows": torch.ones(2, 0, 5),
    "logits: 33 rows": torch.ones(2, 33, 5),
    "logits: vocabulary 0": torch.ones(2, 4, 0),
}


@pytest.mark.parametrize("start", BAD_LOGITS)
def test_bad_logits_are_named(start: str) -> None:
    inputs = changed()
    with pytest.raises(ValueError, match=f"^{start}"):
        verify_greedy(BAD_LOGITS[start], inputs["draft"], inputs["n_draft"])


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    case = Verify((31, 7), 31, 60)
    sample, choice = sampled_inputs(case, seeded(), device), greedy_inputs(case, seeded(), device)
    with running():
        assert_emits(verify_sampled(*sample), expected_samples(*sample), 32)
        assert_emits(verify_greedy(*choice), expected_greedy(*choice), 32)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler; without drafts K + 1 is."""
    for drafts in (0, 1):
        case = Verify((drafts,), drafts, 1)
        for verify, inputs in ((verify_sampled, sampled_inputs), (verify_greedy, greedy_inputs)):
            args = inputs(case, seeded())
            assert len(compile_launches(functools.partial(verify, *args), target)) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_tile_fits(target: str) -> None:
    """The edge of the claim: 31 drafts and 2**20 tokens."""
    empty = functools.partial(torch.empty, device="meta")
    p, q = empty(1, 32, 2**20), empty(1, 31, 2**20)
    draft, n_draft = empty(1, 31, dtype=torch.int32), empty(1, dtype=torch.int32)
    launches = {
        "sampled": lambda: verify_sampled(p, q, draft, q[..., 0].clone(), n_draft.float(), n_draft),
        "greedy": lambda: verify_greedy(p.half(), draft, n_draft),
    }
    assert table.complaints(table.build(launches, [target]), STREAMING) == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_benchmarks_compare_like_with_like(benchmark, device, running) -> None:
    inputs = benchmark.small(torch.Generator(device).manual_seed(0), device)
    with running():
        ours = benchmark.ours(*inputs)
    for have, want in zip(ours, benchmark.reference(*inputs), strict=True):
        assert have.dtype == want.dtype and torch.equal(have, want)


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in VERIFY_CASES]
    axes = ("drafts", "vocab", "layout", "dtype")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
