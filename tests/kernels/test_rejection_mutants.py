"""Every automatic edit of the rejection family must be noticed by the small cases below.

The cases are few, since 300 mutants run them; each has a reason.
"""

import ast
import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.rejection as original
from course import lab
from course.lab.meter import metered
from kernels.cases.rejection import Verify, greedy_inputs, sampled_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_argmax_chunk_kernel": {},
    "_verify_greedy_kernel": {
        "constant#5: 0 to 1": "rows after the last draft's end no match and are not emitted",
        "constant#6: 1 to 2": "-2 is no id either",
    },
    "_residual_chunk_kernel": {
        "constant#4: 1 to 2": "-2 is below 0 too",
        "constant#7: 0.0 to 1.0": "q of no draft: r and p are 0 there, and 0 * 1 < 0 is false",
        "constant#8: 0.0 to 1.0": "r of no draft: q and p are 0 there, and 1 * 0 < 0 is false",
        "compare#7: > to >=": "p - q is 0 where they are equal",
    },
    "_draw": {"constant#3: 2147483647 to 2147483646": "any number above every id will do"},
    "_verify_sampled_kernel": {"compare#7: > to >=": "p - q is 0 where they are equal"},
    "verify_greedy": {},
    "verify_sampled": {},
    "_check": {},
    "_configuration": {},
}

NAN = math.nan


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


LAST = 1 - 2**-24  # the largest uniform below 1
EDGES = [  # p, q, draft, r, u, tokens
    # A rejection: what p, or the residual in other units, or p - q would give.
    ((0.25, 0.5, 0.25), (0.75, 0.25, 0.0), 0, 0.9, 0.4, [1, -1]),
    ((0.25, 0.5, 0.25), (0.75, 0.25, 0.0), 0, 0.9, 0.6, [2, -1]),
    ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5), 0, 0.9, 0.5, [0, 1]),  # q = 0 passes; u on an edge
    ((0.5, 0.0, 0.5), (0.5, 0.25, 0.25), -1, 0.0, 0.5, [2, -1]),
    ((0.0, 0.5, 0.5), (1.0, 0.0, 0.0), 0, 0.0, -0.01, [1, -1]),  # as if rounded below 0
    ((0.5, 0.5, 0.0), (0.0, 0.0, 1.0), 2, 0.5, 1.5, [1, -1]),  # as if rounded above 1
    ((NAN, 0.5, 0.5), (0.0, NAN, 0.2), 0, 0.0, 0.1, [2, -1]),
    ((NAN, 0.5, 0.5), (0.0, 1.0, 1.0), 2, 0.9, 0.4, [1, -1]),  # no residual, and NaN in p
    ((0.0, NAN, 0.0), (0.5, 0.5, 0.0), 0, 0.5, 0.5, [-1, -1]),  # nothing to draw from
]
EDGE_TOKENS = (
    torch.tensor([edge[-1] for edge in EDGES], dtype=torch.int32),
    torch.tensor([edge[-1][1] >= 0 for edge in EDGES]).int(),
)
SEED = 2820  # draws from the second, the last, the first and again the last chunk


@functools.cache
def sampled(number: int):
    """Inputs, and what the reference makes of them.

    0: padded rows, free slots full of NaN; all drafts pass, the second fails, there is none,
       and one that fails though nothing of p is above q.
    1: `EDGES`.
    """
    if number:
        rows = [[torch.tensor(x) for x in edge[:-1]] for edge in EDGES]
        p, q, draft, r, u = (torch.stack(x) for x in zip(*rows, strict=True))
        ones = torch.ones(len(EDGES), dtype=torch.int32)
        inputs = p[:, None].repeat(1, 2, 1), q[:, None], draft[:, None].int(), r[:, None], u, ones
        return inputs, EDGE_TOKENS
    inputs = sampled_inputs(Verify((2, 2, 0, 1), 2, 40, "padded"), seeded(SEED))
    p, q, _, r, *_ = inputs
    q[3, 0], r[3, 0] = p[3, 0] * 1.001, LAST
    return inputs, original.verify_sampled_ref(*inputs)


@functools.cache
def greedy():
    """Ties in a chunk and over its border, NaN, minus infinity, free slots full of NaN."""
    case = Verify((2, 0, 4), 4, 70, "padded", torch.bfloat16)
    logits, draft, n_draft = greedy_inputs(case, seeded(1))
    logits[0, 0], logits[2, 1] = NAN, -math.inf
    logits[0, 1, :33], logits[0, 1, [36, 38, 69]] = NAN, 9.0
    logits[1, 0, 1] = 9.0
    logits[2, 0, [20, 10, 39]] = 9.0
    draft[0, :2], draft[2, :2] = torch.tensor([0, 36]), torch.tensor([10, 0])
    inputs = logits, draft, n_draft
    return inputs, original.verify_greedy_ref(*inputs)


def differs(got, want) -> bool:
    return any(
        have.dtype != right.dtype or not torch.equal(have, right)
        for have, right in zip(got, want, strict=True)
    )


def notices_samples(module: ModuleType) -> bool:
    with metered():
        return any(
            differs(module.verify_sampled(*inputs), want) for inputs, want in map(sampled, (0, 1))
        )


# One kernel of a pair alone costs half; what the other one sees comes from the unbroken module.


def judge(module: ModuleType, number: int) -> list[torch.Tensor]:
    """What the first kernel of the sampled kind writes: accepted, and the two sums."""
    (p, q, draft, r, _, n_draft), _ = sampled(number)
    B, V = p.shape[0], p.shape[2]
    out = [torch.empty_like(n_draft), *(torch.empty(B, -(-V // 16)) for _ in range(2))]
    strides = (*p.stride()[:2], *q.stride()[:2], draft.stride(0), r.stride(0))
    with metered():
        module._residual_chunk_kernel[tuple(out[1].shape)](
            p, q, draft, r, n_draft, *out, V, *strides, BLOCK_K=4, BLOCK_V=16
        )
    return out


@functools.cache
def judged(number: int) -> list[torch.Tensor]:
    return judge(original, number)


def notices_sums(module: ModuleType) -> bool:
    return any(differs(judge(module, number), judged(number)) for number in (0, 1))


def notices_draws(module: ModuleType) -> bool:
    for number in (0, 1):
        (p, q, draft, _, u, n_draft), (want, _) = sampled(number)
        B, rows, V = p.shape
        tokens, strides = torch.empty_like(want), (*p.stride()[:2], *q.stride()[:2])
        with metered():
            module._verify_sampled_kernel[(B,)](
                *(p, q, draft, u, n_draft, *judged(number), tokens),
                *(rows, V, -(-V // 16), *strides, draft.stride(0)),
                **dict(BLOCK_K=4, BLOCK_N=4, BLOCK_V=16),
            )
        if not torch.equal(tokens, want):
            return True
    return False


@functools.cache
def searched() -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of every chunk, and its id."""
    (logits, _, n_draft), (tokens, _) = greedy()
    B, rows, V = logits.shape
    out = torch.empty(B, rows, -(-V // 32)), tokens.new_empty((B, rows, -(-V // 32)))
    with metered():
        original._argmax_chunk_kernel[tuple(out[0].shape)](
            logits, n_draft, *out, V, *logits.stride()[:2], BLOCK_V=32
        )
    return out


def notices_matches(module: ModuleType) -> bool:
    (_, draft, n_draft), want = greedy()
    parts = searched()
    rows, n_chunks = parts[0].shape[1:]
    got = [torch.empty_like(x) for x in want]
    with metered():
        module._verify_greedy_kernel[(len(draft),)](
            draft, n_draft, *parts, *got, rows, n_chunks, draft.stride(0), BLOCK_K=8, BLOCK_N=4
        )
    return differs(got, want)


def notices_choices(module: ModuleType) -> bool:
    inputs, want = greedy()
    with metered():
        return differs(module.verify_greedy(*inputs), want)


def notices_edges(module: ModuleType) -> bool:
    """What the claim just includes, and what needs no launch."""
    sizes = [(Verify((1,), 1, 1), 4), (Verify((31,), 31, 2), 4), (Verify((0,), 0, 40), 4)]
    for case, count in [*sizes, (Verify(()), 0)]:
        sample, choice = sampled_inputs(case, seeded(1)), greedy_inputs(case, seeded(1))
        with metered() as meter:
            if differs(module.verify_sampled(*sample), original.verify_sampled_ref(*sample)):
                return True
            if differs(module.verify_greedy(*choice), original.verify_greedy_ref(*choice)):
                return True
        if meter.launches != count:
            return True
    return False


def notices_undefined_lanes(module: ModuleType) -> bool:
    """A masked load without `other` leaves lanes undefined on a GPU; here they happen to be NaN."""
    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
    ]
    return any("mask" in names and "other" not in names for names in calls)


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    ids, x = torch.ones(3, 4, dtype=torch.int32), torch.ones(3, 4, 40)
    tile = dict(BLOCK_K=4, BLOCK_V=16)
    found = [
        lab.check_jit(
            module._argmax_chunk_kernel,
            args=(x, ids, x, ids, 40, 160, 45),
            constexprs=dict(BLOCK_V=32),
        ),
        lab.check_jit(
            module._verify_greedy_kernel,
            args=(ids, ids, x, ids, ids, ids, 4, 2, 3),
            constexprs=dict(BLOCK_K=4, BLOCK_N=2),
        ),
        lab.check_jit(
            module._residual_chunk_kernel,
            args=(x, x, ids, x, ids, ids, x, x, 40, 160, 45, 120, 45, 3, 3),
            constexprs=tile,
        ),
        lab.check_jit(
            module._verify_sampled_kernel,
            args=(x, x, ids, x, ids, ids, x, x, ids, 4, 40, 3, 160, 45, 120, 45, 3),
            constexprs=tile | dict(BLOCK_N=4),
        ),
    ]
    return any(kernel.int32_offsets for kernel in found)


def notices_launches(module: ModuleType) -> bool:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    p, draft, n_draft = empty(3, 6, 5000), empty(3, 5, dtype=torch.int32), empty(3).int()
    asked = launches(
        lambda: module.verify_sampled(p, p[:, 1:], draft, draft.float(), empty(3), n_draft)
    )
    asked += launches(lambda: module.verify_greedy(p, draft, n_draft))
    return asked != [
        ("_residual_chunk_kernel", (3, 3), dict(BLOCK_K=8, BLOCK_V=2048, num_warps=2)),
        ("_verify_sampled_kernel", (3,), dict(BLOCK_K=8, BLOCK_N=4, BLOCK_V=2048, num_warps=4)),
        ("_argmax_chunk_kernel", (3, 6, 2), dict(BLOCK_V=4096, num_warps=4)),
        ("_verify_greedy_kernel", (3,), dict(BLOCK_K=8, BLOCK_N=2, num_warps=4)),
    ]


def notices_arguments(module: ModuleType) -> bool:
    p, q, draft, r, u, n_draft = sampled(0)[0]
    meta = torch.empty(3, 4, 2**20 + 1, device="meta")
    bad = [
        ("p: shape", p[0], q, draft, r, u, n_draft),
        ("p: dtype", p.half(), q, draft, r, u, n_draft),
        ("p: 0 rows", p[:, :0], q, draft, r, u, n_draft),
        ("p: 33 rows", p.repeat(1, 11, 1), q, draft, r, u, n_draft),
        ("p: vocabulary 0", p[..., :0], q, draft, r, u, n_draft),
        ("p: vocabulary 1048577", meta, q, draft, r, u, n_draft),
        ("q: shape", p, p, draft, r, u, n_draft),
        ("draft: shape", p, q, draft[:, 1:], r, u, n_draft),
        ("draft: dtype", p, q, draft.long(), r, u, n_draft),
        ("draft: -2", p, q, draft.clamp(max=-1) - 1, r, u, n_draft),
        ("draft: 40", p, q, draft * 0 + 40, r, u, n_draft),
        ("r: shape", p, q, draft, r[:, 1:], u, n_draft),
        ("u: shape", p, q, draft, r, u[1:], n_draft),
        ("n_draft: shape", p, q, draft, r, u, n_draft[1:]),
        ("n_draft: -1", p, q, draft, r, u, n_draft - 1),
        ("n_draft: 3", p, q, draft, r, u, n_draft + 1),
        ("logits: shape", p[0], draft, n_draft),
        ("logits: dtype", p.double(), draft, n_draft),
        ("logits: 0 rows", p[:, :0], draft, n_draft),
        ("draft: 40", p, draft * 0 + 40, n_draft),
    ]
    for start, *arguments in bad:
        try:
            (module.verify_greedy if len(arguments) == 3 else module.verify_sampled)(*arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    edge = torch.empty(3, 4, 2**20, device="meta")  # the largest vocabulary is no error
    ids = torch.full((3, 3), 2**20 - 1, dtype=torch.int32, device="meta")
    counts = torch.empty(3, dtype=torch.int32, device="meta")
    return len(launches(lambda: module.verify_greedy(edge, ids, counts))) != 2


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    names = ("cpu", "sm_80", "sm_100", "gfx942")
    want = [(16, 4), (2048, 2), (2048, 2), (2048, 1)]
    return [module._configuration(name) for name in names] != want


DETECTORS = [  # the cheap ones first
    notices_configuration,
    notices_launches,
    notices_arguments,
    notices_undefined_lanes,
    notices_choices,
    notices_samples,
    notices_in_the_ir,
    notices_edges,
]
ALONE = {
    "_verify_greedy_kernel": notices_matches,
    "_residual_chunk_kernel": notices_sums,
    "_verify_sampled_kernel": notices_draws,
    "_draw": notices_draws,
}
GREEDY = {"_argmax_chunk_kernel", "_verify_greedy_kernel", "verify_greedy"}
SHARED = {"_check", "_configuration"}


def detectors(name: str) -> list:
    """Those of the kernel alone, and not those of the kind that `name` has no part in."""
    useless = notices_samples if name in GREEDY else notices_choices
    chosen = [detector for detector in DETECTORS if detector != useless or name in SHARED]
    if name in ALONE:
        chosen.insert(DETECTORS.index(notices_choices), ALONE[name])
    return chosen


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors(name), tmp_path)
