"""The law of sampling by sweeping the uniform; then shapes and layouts that break kernels."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases.sampling import CASES, STREAMING, Sample, sample_inputs, vectors
from kernels.sampling import sample_tokens, sample_tokens_ref

ON_CPU = not torch.cuda.is_available()
INF, NAN = math.inf, math.nan
# With this temperature the weights are 2 ** logit, exactly.
BINARY = np.float32(1.4426950408889634).item()


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def keep(weights, k, p, min_p, wrong="") -> list[int]:
    """The tokens that the filters leave, from the largest down; `wrong` names a mistake."""
    sign = -1 if wrong == "ties by highest id" else 1
    left = sorted((t for t in range(len(weights)) if weights[t] > 0), key=lambda t: sign * t)
    left.sort(key=lambda t: -weights[t])
    everything = sum(weights[t] for t in left)

    def top_k(left):
        return left[:k] if k else left

    def top_p(left):
        total = everything if wrong == "top-p not renormalised" else sum(weights[t] for t in left)
        found, mass = [], 0
        for t in left:
            if wrong == "top-p excludes the crossing token":
                if found and mass + weights[t] > p * total:
                    break
            elif wrong == "top-p goes on when the sum is reached":
                if mass > p * total:
                    break
            elif found and mass >= p * total:
                break
            found.append(t)
            mass += weights[t]
        return found

    def at_least(left):
        return [t for t in left if weights[t] >= min_p * max(weights)]

    def nothing(left):
        return left

    order = {
        "top-p before top-k": (top_p, top_k, at_least),
        "min-p before top-p": (top_k, at_least, top_p),
        "no top-k": (nothing, top_p, at_least),
        "no min-p": (top_k, top_p, nothing),
    }
    for step in order.get(wrong, (top_k, top_p, at_least)):
        left = step(left)
    return left


def pick(weights, left, u, wrong="") -> int:
    """The first token, by id, at which the sum exceeds u * total."""
    total, mass = sum(weights[t] for t in left), 0
    for t in left if wrong == "in the order of weights" else sorted(left):
        mass += weights[t]
        if mass > u * total or (wrong == "compares with <=" and mass >= u * total > 0):
            return t
    return -1


def float64_weights(logits: torch.Tensor, temperature: float) -> list[float]:
    x = logits.cpu().double().numpy()
    x = np.minimum(np.where(np.isnan(x), -INF, x), np.finfo(np.float32).max)
    if x.max() == -INF:
        return [0.0] * len(x)
    w = np.exp((x - x.max()) / temperature)
    return np.where(w * 2.0**40 >= 1, w, 0).tolist()


def expected(logits, uniform, temperature, top_k, top_p, min_p) -> list[int]:
    ids = []
    rows = zip(*(x.tolist() for x in (uniform, temperature, top_k, top_p, min_p)), strict=True)
    for x, (u, t, k, p, least) in zip(logits, rows, strict=True):
        weights = float64_weights(x, t if t >= 1e-5 else 1)
        left = keep(weights, k, p, least)
        if left and t < 1e-5:
            finite = [value if value == value else -INF for value in x.tolist()]
            ids.append(finite.index(max(finite)))
        else:
            ids.append(pick(weights, left, u))
    return ids


# Logits, temperature in units of BINARY, top_k, top_p, min_p.
FIRST, LEVEL = [2, 3, 2, 0, 1, 0], [0] * 5  # weights 4 8 4 1 2 1, total 20; 1 1 1 1 1
LAWS = {
    "no filter": (FIRST, 1, 0, 1, 0),
    "level": (LEVEL, 1, 0, 1, 0),
    "top-k takes the first of a tie": (FIRST, 1, 2, 1, 0),
    "top-k takes three of five": (LEVEL, 1, 3, 1, 0),
    "top-k of all": (FIRST, 1, 6, 1, 0),
    "top-k of one": (LEVEL, 1, 1, 1, 0),
    "top-k beyond all": (FIRST, 1, 9, 1, 0),
    "top-p crosses": (FIRST, 1, 0, 0.5, 0),
    "top-p is reached exactly": (FIRST[:3], 1, 0, 0.75, 0),  # of 16, 12 are 0.75
    "top-p of a tie": (LEVEL, 1, 0, 0.5, 0),
    "top-p of nothing": (FIRST, 1, 0, 0, 0),
    "top-p of the least": (FIRST, 1, 0, 2**-24, 0),
    "top-p of nearly all": (FIRST, 1, 0, 0.9375, 0),
    "top-p of the top-k": (FIRST, 1, 3, 0.75, 0),
    "top-p of a tie of the top-k": (LEVEL, 1, 4, 0.5, 0),
    "top-p ends in the tie that ends the top-k": (FIRST, 1, 5, 0.9375, 0),
    "min-p keeps an equal": (FIRST, 1, 0, 1, 0.25),
    "min-p, total 16": (FIRST, 1, 0, 1, 0.3),
    "min-p of one": (FIRST, 1, 0, 1, 1),
    "min-p below top-k": (FIRST, 1, 3, 1, 0.01),
    "min-p after top-p": (FIRST, 1, 0, 0.75, 0.3),
    "all three": (FIRST, 1, 5, 0.875, 0.2),
    "temperature first": ([4, 6, 4, 0, 2, 0], 2, 4, 0.875, 0.25),
}
WRONG = (
    "top-p before top-k",
    "min-p before top-p",
    "no top-k",
    "no min-p",
    "top-p not renormalised",
    "top-p excludes the crossing token",
    "top-p goes on when the sum is reached",
    "ties by highest id",
    "compares with <=",
    "in the order of weights",
)


def sweep(name: str, wrong: str = "") -> tuple[list[float], list[int]]:
    """Uniforms at both ends of every token's interval, and on the grid between; the tokens."""
    x, temperature, k, *filters = LAWS[name]
    filters = k, *map(Fraction, filters)
    weights = [Fraction(2) ** Fraction(value, temperature) for value in x]
    left = sorted(keep(weights, *filters))
    total = sum(weights[t] for t in left)
    n = total / min(weights[t] for t in left)
    borders = {sum(weights[t] for t in left[: i + 1]) / total for i in range(len(left))}
    if n <= 6:
        borders |= {Fraction(i + 1, int(n)) for i in range(int(n))}
    # In units of 2 ** -24: the last below each border, the first at or above it.
    units = {0} | {math.ceil(border * 2**24) - below for border in borders for below in (0, 1)}
    uniforms = [Fraction(unit, 2**24) for unit in sorted(units) if unit < 2**24]
    left = keep(weights, *filters, wrong)
    return [float(u) for u in uniforms], [pick(weights, left, u, wrong) for u in uniforms]


def swept(name: str, device, sampler) -> list[int]:
    x, temperature, k, p, least = LAWS[name]
    uniforms, _ = sweep(name)
    B = len(uniforms)
    logits = torch.tensor(x, dtype=torch.float32, device=device).expand(B, -1)
    filters = temperature * BINARY, k, p, least
    uniform = torch.tensor(uniforms, device=device)
    return sampler(logits, uniform, *vectors(B, filters, seeded(), device)[1:]).tolist()


@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_exact(name: str, device, running) -> None:
    """Every token is drawn on its own interval, from the first uniform to the last."""
    _, ids = sweep(name)
    assert swept(name, device, sample_tokens_ref) == ids
    with running():
        assert swept(name, device, sample_tokens) == ids


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_samplers_are_rejected(wrong: str) -> None:
    """By the same sweeps, no uniform more."""
    assert any(sweep(name, wrong) != sweep(name) for name in LAWS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Sample, device, running) -> None:
    inputs = sample_inputs(case, seeded(), device)
    with running():
        ids = sample_tokens(*inputs)
    assert ids.dtype == torch.int64 and ids.shape == (case.B,)
    assert ids.tolist() == expected(*inputs) == sample_tokens_ref(*inputs).tolist()


def test_a_row_does_not_depend_on_the_others(device, running) -> None:
    """Rows with filters of their own, together and alone, twice; inputs unchanged."""
    logits = 2 * torch.randn(4, 40, generator=seeded()).to(device)
    columns = [(0.9, 0.1, 0.5, 0.7), (1.0, 0.0, 0.5, 2.0), (0, 2, 7, 3), (1, 1, 0.4, 0.9)]
    uniform, temperature, top_k, top_p = (torch.tensor(x, device=device) for x in columns)
    min_p = torch.tensor((0.0, 0.5, 0.0, 0.1), device=device)
    inputs = logits, uniform, temperature, top_k.int(), top_p, min_p
    before = [x.clone() for x in inputs]
    with running():
        together, again = sample_tokens(*inputs), sample_tokens(*inputs)
        alone = [sample_tokens(*(x[i : i + 1] for x in inputs)).item() for i in range(4)]
    assert together.tolist() == again.tolist() == alone == expected(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


# Logits, filters and uniform of one row, and the token.
EDGES = {
    "nothing": ([-INF, NAN, -INF], (1, 0, 1, 0), 0.5, -1),
    "nothing, greedy": ([-INF, NAN, -INF], (0, 0, 1, 0), 0.5, -1),
    "one": ([-INF, -65504, NAN], (1, 2, 0.5, 0), 0.99, 1),
    "greedy, a tie and NaN": ([NAN, 1, 2, 2], (0, 0, 1, 0), 0.99, 2),
    "greedy, closer than weights tell": ([1e-9, 2e-9, 0], (0, 0, 1, 0), 0.0, 1),
    "the last temperature that is greedy": ([0, 0, 1], (9.9e-6, 0, 1, 0), 0.0, 2),
    "infinity": ([0, INF, -INF, INF], (1, 0, 1, 0), 0.5, 3),
    "the largest of all": ([-3e38, 3e38, 0], (1, 0, 1, 0), 0.9, 1),
    "very cold": ([1, 1.001, 1.001], (1.1e-5, 0, 1, 0), 0.5, 2),
    "very hot": ([-60, 60, 0], (1e5, 0, 1, 0), 0.34, 1),
    "uniform one": ([0, 0, 0, -INF], (1, 0, 1, 0), 1.0, 2),
    "the last below one": ([0, 0, 0, -INF], (1, 0, 1, 0), 1 - 2**-24, 2),
    "2 ** -40 is drawn": ([-40, 0], (BINARY, 0, 1, 0), 0.0, 0),
    "2 ** -41 is not": ([-41, 0], (BINARY, 0, 1, 0), 0.0, 1),
    "top-k counts only those": ([-41, 0, -1], (BINARY, 3, 1, 0), 0.0, 1),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, device, running) -> None:
    x, filters, u, token = EDGES[name]
    logits = torch.tensor([x], dtype=torch.float32, device=device)
    inputs = logits, torch.tensor([u], device=device), *vectors(1, filters, seeded(), device)[1:]
    with running():
        assert sample_tokens(*inputs).item() == token
    assert sample_tokens_ref(*inputs).item() == token


# temperature, top_k, top_p, min_p and the uniform, which a GPU does not check.
UNCHECKED = {
    "temperature NaN": ((NAN, 0, 1, 0), 0.5, 1),
    "temperature infinite": ((INF, 0, 1, 0), 0.5, None),
    "min_p NaN": ((1, 0, 1, NAN), 0.5, -1),
    "min_p beyond 1": ((1, 0, 1, 2), 0.5, -1),
    "top_p NaN": ((1, 0, NAN, 0), 0.5, None),
    "top_p beyond 1": ((1, 0, 2, 0), 0.5, None),
    "top_k negative": ((1, -1, 0.5, 0), 0.5, None),
    "uniform NaN": ((1, 0, 1, 0), NAN, None),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", UNCHECKED)
def test_unchecked_values_spoil_their_row_alone(name: str, device, running, monkeypatch) -> None:
    monkeypatch.setattr("kernels.sampling.check_values", lambda *_: None)
    filters, u, token = UNCHECKED[name]
    rows = [[-3e38, 3e38, 1.0] * 12, [0.0, 1.0, 2.0] * 12]
    bad, good = (vectors(1, f, seeded(), device)[1:] for f in (filters, (1, 3, 0.9, 0.1)))
    vector = [torch.cat(pair) for pair in zip(bad, good, strict=True)]
    inputs = torch.tensor(rows, device=device), torch.tensor([u, 0.5], device=device), *vector
    with running():
        one, two = sample_tokens(*inputs).tolist()
    assert [two] == expected(*(x[1:] for x in inputs))
    assert one == token or (token is None and -1 <= one < 36)


@pytest.mark.parametrize("k", [1, 15, 31, 70])
def test_ties_over_tiles_and_blocks(k: int, device, running) -> None:
    """70 equal logits between two larger: the last one of top-k, and none beyond it."""
    logits = torch.zeros(1, 75, device=device)
    logits[0, [0, 73]], logits[0, [1, 2, 74]] = 1.0, -1.0
    with running():
        for u, p, token in [(1.0, 1.0, 73), (0.5, 2**-24, 0)]:
            inputs = (logits, torch.tensor([u], device=device))
            rest = vectors(1, (1.0, k + 2, p, 0.0), seeded(), device)[1:]
            assert sample_tokens(*inputs, *rest).item() == token
        # without the last token, the last of the ties is the last of the row
        shorter = logits[:, :73]
        rest = vectors(1, (1.0, k + 1, 1.0, 0.0), seeded(), device)[1:]
        last = sample_tokens(shorter, torch.tensor([1.0], device=device), *rest)
    assert last.item() == 2 + k


@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 200])
def test_the_largest_uniform_draws_the_last_token(vocab: int, device, running) -> None:
    logits = torch.zeros(1, vocab, dtype=torch.float16, device=device)
    one = torch.ones(1, device=device)
    with running():
        ids = sample_tokens(logits, one, *vectors(1, (1.0, 0, 1.0, 0.0), seeded(), device)[1:])
    assert ids.item() == vocab - 1


def test_empty_launches_nothing(device, running) -> None:
    with running() as meter:
        for B, V in ((0, 5), (3, 0)):
            logits = torch.empty(B, V, device=device)
            ids = sample_tokens(logits, *vectors(B, (1.0, 0, 1.0, 0.0), seeded(), device))
            assert ids.tolist() == [-1] * B and ids.dtype == torch.int64
    assert meter is None or meter.launches == 0


def test_offsets_beyond_32_bits(device, running) -> None:
    inputs = sample_inputs(Sample(20, torch.float16, B=3), seeded(), device)
    logits, stride = inputs[0], 2**30
    assert 2 * stride == 2**31
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (2**31 + 64), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    spread = far.as_strided((3, 20), (stride, 1))
    spread.copy_(logits)
    with running():
        assert sample_tokens(spread, *inputs[1:]).tolist() == expected(*inputs)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_row_three_times() -> None:
    """At the tile of a real GPU. The exception to 1.25 times the compulsory bytes, and why.

    The weights need the maximum, and the cut needs the weights of the whole row: three passes,
    with nothing between them but 12 kilobytes a row. 8 rows of float32 are 1.5 megabytes, which
    stay in the cache of any target (40 megabytes or more) after the first: memory sees them once.
    The search reads its candidates, some 100, instead of the row.
    """
    from course.lab.meter import metered

    B, V = 8, 49_152
    logits = 3 * torch.randn(B, V, generator=seeded())
    inputs = logits, *vectors(B, (0.7, 50, 0.9, 0.0), seeded(1))
    with metered() as meter, pretending("sm_90"):
        ids = sample_tokens(*inputs)
    assert ids.tolist() == expected(*inputs) == sample_tokens_ref(*inputs).tolist()
    assert meter.launches == 5
    assert meter.read["logits"] == 3 * logits.nbytes
    assert meter.loads + meter.stores <= 3.25 * logits.nbytes
    assert meter.written["weights"] + meter.written["tokens"] <= 0.005 * logits.nbytes


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_buffers(monkeypatch) -> None:
    from triton.runtime.jit import KernelInterface

    from course import lab
    from course.lab.interp import interpret

    inputs = sample_inputs(Sample(70, torch.float16, layout="padded"), seeded())
    seen: dict[int, torch.Tensor] = {}  # every buffer once, by its address

    def launcher(kernel, grid):
        def launch(*args, **options):
            guards = [
                seen.setdefault(a.data_ptr(), lab.guarded(a)) if torch.is_tensor(a) else a
                for a in args
            ]
            interpret(kernel, grid, *guards, **options)
            for number, guard in enumerate(guards):
                if torch.is_tensor(guard):
                    lab.check_guard(f"{kernel.__name__}, argument {number}", guard)
            final.append(guards)

        return launch

    final: list[list] = []
    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    sample_tokens(*inputs)
    assert final[-1][9].tolist() == expected(*inputs) and len(final) == 5  # ids


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("uniform", "temperature", "top_k", "top_p", "min_p")
    rest = dict(zip(names, vectors(2, (1.0, 3, 0.9, 0.1), seeded()), strict=True))
    return dict(logits=torch.zeros(2, 40)) | rest | changes


BAD = {
    "logits: shape": dict(logits=torch.zeros(40)),
    "logits: dtype": dict(logits=torch.zeros(2, 40, dtype=torch.float64)),
    "logits: last stride 2": dict(logits=torch.zeros(2, 80)[:, ::2]),
    "logits: 262145 tokens": dict(logits=torch.zeros(2, 2**18 + 1)),
    "uniform: shape": dict(uniform=torch.zeros(3)),
    "uniform: dtype": dict(uniform=torch.zeros(2, dtype=torch.float64)),
    "uniform: -0.5": dict(uniform=torch.tensor([0.5, -0.5])),
    "uniform: 1.5": dict(uniform=torch.tensor([0.5, 1.5])),
    "temperature: shape": dict(temperature=torch.ones(2, 1)),
    "temperature: -1.0": dict(temperature=-torch.ones(2)),
    "temperature: 200000.0": dict(temperature=torch.full((2,), 2e5)),
    "temperature: last stride": dict(temperature=torch.ones(4)[::2]),
    "top_k: dtype": dict(top_k=torch.ones(2, dtype=torch.int64)),
    "top_k: -1": dict(top_k=-torch.ones(2, dtype=torch.int32)),
    "top_p: dtype": dict(top_p=torch.ones(2, dtype=torch.float16)),
    "top_p: 1.5": dict(top_p=torch.full((2,), 1.5)),
    "min_p: shape": dict(min_p=torch.ones(1)),
    "min_p: -0.5": dict(min_p=torch.full((2,), -0.5)),
    "min_p: nan": dict(min_p=torch.full((2,), NAN)),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        sample_tokens(**changed(**BAD[start]))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    inputs = torch.zeros(1, 1), *vectors(1, (1.0, 1, 1.0, 1.0), seeded())
    assert len(compile_launches(lambda: sample_tokens(*inputs), target)) == 5


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_vocabulary_fits(target: str) -> None:
    """The edge of the claim, 2**18 tokens: 64 blocks."""
    logits = torch.empty(2, 2**18, dtype=torch.float16, device="meta")
    rest = [x.to("meta") for x in vectors(2, (1.0, 1, 1.0, 1.0), seeded())]
    rows = table.build({"": lambda: sample_tokens(logits, *rest)}, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in CASES]
    axes = ("vocab", "filters", "dtype", "layout", "ties")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
