"""Every automatic edit of the cross entropy must be noticed by the small cases below.

The cases are few, since 500 mutants run them; each has a reason.
"""

import functools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.cross_entropy as original
from course import lab
from course.lab.launch import pretending
from course.lab.meter import metered
from kernels.cases.cross_entropy import IGNORE, Scoring, scoring_inputs
from tests.kernels.mutants import Detector, assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_log1p": {},
    "_logits_tile": {},
    "_token_nll_kernel": {
        "tl.load#1: drop other": "the stores mask the tokens that do not exist",
        "constant#5: 1 to 2": "any number will do that is no word",
        "constant#8: 1e+38 to 2e+38": "any floor below every logit will do",
        "operator#21: drop m_t &": "tokens that do not exist have no target",
    },
    "_token_nll_merge_kernel": {
        "constant#5: 1e+38 to 2e+38": "any floor below every logit will do",
    },
    "_token_nll_gradient_kernel": {
        "compare#4: < to <=": "both sides agree where they meet",
    },
    "linear_token_nll": {
        "nll.new_empty#1: swap the first two arguments": "a dense buffer of the same size",
    },
    "linear_token_nll_backward": {},
    "_check": {},
    "_grouped": {},
    "_configuration": {},
}

CASES = [
    # Full tiles, one a split; gradients in the inputs' dtype.
    (Scoring(16, 64, 16, torch.float16), 2, None, 1.0),
    # Large logits, of both signs: a wrong maximum overflows. Splits of two blocks and of one.
    (Scoring(5, 150, 3), 3, None, 100.0),
    # Three tiles in two groups, so a fourth is idle; padded words and widths; two chunks;
    # ignored tokens.
    (Scoring(48, 40, 20, layout="sliced"), 1, 25, 1.0),
]


# T, V and D in whole tiles; a chunk of 25 or 15 words takes a block of 32.
FORWARD_FLOPS = [2 * 16 * 16 * 64, 2 * 16 * 16 * 160, 2 * 48 * 32 * 64]
BACKWARD_FLOPS = [2 * 16 * 16 * 64, 2 * 16 * 16 * 160, 2 * 48 * 32 * (32 + 32)]


@functools.cache
def inputs(number: int):
    case, _, _, scale = CASES[number]
    generator = torch.Generator().manual_seed(number)
    hidden, weight, targets = scoring_inputs(case, generator)
    targets[2] = min(64, case.words - 1)  # the first word of a split
    return (hidden * scale, weight, targets), torch.randn(case.tokens, generator=generator)


@functools.cache
def expected(number: int):
    arguments, grad_nll = inputs(number)
    nll, lse = original.linear_token_nll_ref(*arguments)
    return nll, lse, *original.linear_token_nll_backward_ref(grad_nll, *arguments, nll, lse)


def differ(got, wanted, rtol: float, atol: float) -> bool:
    return any(
        one.dtype != two.dtype or not torch.allclose(one, two, rtol, atol, equal_nan=True)
        for one, two in zip(got, wanted, strict=True)
    )


def tolerance(number: int) -> tuple[float, float]:
    case, _, _, scale = CASES[number]
    limit = 2e-3 if case.dtype == torch.float16 else 1e-5 * scale
    return limit, limit


def notices_losses(module: ModuleType) -> bool:
    module.GROUP = 2
    for number, (_, n_splits, _, _) in enumerate(CASES):
        arguments, _ = inputs(number)
        with metered() as meter:
            got = module.linear_token_nll(*arguments, n_splits=n_splits)
        if differ(got, expected(number)[:2], *tolerance(number)):
            return True
        if meter.flops != FORWARD_FLOPS[number]:
            return True
    return False


def notices_gradients(module: ModuleType) -> bool:
    module.GROUP = 2
    for number, (_, _, chunk, _) in enumerate(CASES):
        arguments, grad_nll = inputs(number)
        nll, lse, *want = expected(number)
        with metered() as meter:
            got = module.linear_token_nll_backward(grad_nll, *arguments, nll, lse, chunk=chunk)
        if differ(got, want, *tolerance(number)) or meter.flops != BACKWARD_FLOPS[number]:
            return True
    return False


AHEAD = (-20.0, -2.0, 0.0, 0.5, 1.0, 2.0, 3.55, 4.3, 6.0, 8.0)


@functools.cache
def sure():
    """hidden, weight and targets whose logits have no rounding, and the results in float64."""
    z = torch.zeros(len(AHEAD), 32, dtype=torch.float64) - 200
    z[:, 2], z[:, 20] = 0, -1
    z[:, 30] = torch.tensor(AHEAD).double()
    r = z[:, [2, 20]].logsumexp(1) - z[:, 30]
    nll = torch.where(r > 0, r, 0) + torch.log1p(torch.exp(-r.abs()))
    p = torch.exp(z - nll[:, None] - z[:, 30:31])
    p[:, 30] = torch.expm1(-nll)
    hidden, weight = torch.eye(len(AHEAD)), z.T.float().contiguous()
    targets = torch.full((len(AHEAD),), 30)
    return (hidden, weight, targets), nll, p.T[[2, 30]]


def notices_a_lost_small_loss(module: ModuleType) -> bool:
    arguments, nll, _ = sure()
    with metered():
        got = module.linear_token_nll(*arguments)[0]
    return differ([got.double()], [nll], 1e-6, 0)


def notices_a_lost_small_gradient(module: ModuleType) -> bool:
    arguments, nll, columns = sure()
    lse = nll + arguments[1][30]  # z of the targets, since hidden is one-hot
    row = torch.ones(len(AHEAD))
    with metered():
        got = module.linear_token_nll_backward(row, *arguments, nll.float(), lse.float())[1]
    return differ([got[[2, 30]].double()], [columns], 1.5e-6, 1e-30)


@functools.cache
def special():
    """Words of minus infinity, a split of two blocks and the first block of another; a target
    among them; NaN; an ignored id that is a word."""
    hidden, weight, _ = scoring_inputs(Scoring(5, 102, 16), torch.Generator().manual_seed(9))
    hidden, weight = hidden.abs(), weight.clone()
    weight[:96] = -math.inf
    hidden[4, 2] = math.nan
    seen = torch.tensor([5, 1, 5, IGNORE, IGNORE])
    nll, lse = original.linear_token_nll_ref(hidden, weight[96:], seen)
    nll[2] = math.inf
    return hidden, weight, nll, lse


def notices_special_losses(module: ModuleType) -> bool:
    hidden, weight, *want = special()
    targets = torch.tensor([101, 97, 3, 98, 98])
    with metered():
        got = module.linear_token_nll(hidden, weight, targets, 98, 2)
    return differ(got, want, 1e-5, 1e-5)


def notices_gradients_of_the_ignored(module: ModuleType) -> bool:
    hidden, weight, nll, lse = special()
    grad_nll, ignored = torch.full((5,), math.nan), torch.full((5,), 2)
    with metered():
        gradients = module.linear_token_nll_backward(
            grad_nll, hidden, weight[96:], ignored, nll, lse, 2
        )
    return bool(gradients[0].count_nonzero())


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    (hidden, weight, targets), row = inputs(0)
    tiles = dict(BLOCK_T=16, BLOCK_V=32, BLOCK_D=16)
    checks = [
        (
            module._token_nll_kernel,
            (hidden, weight, targets, row, row, 17, 70, 20, IGNORE, 23, 23),
            tiles,
            ("load", "store", "dot"),
        ),
        (
            module._token_nll_merge_kernel,
            (row, row, targets, row, row, 17, 3, IGNORE),
            dict(BLOCK_N=4, BLOCK_T=16),
            ("load", "store", "reduce"),
        ),
        (
            module._token_nll_gradient_kernel,
            (row, hidden, weight, targets, row, row, row, 17, 70, 20, 0, IGNORE, 23, 23, 70),
            tiles,
            ("load", "store", "dot"),
        ),
    ]
    return any(
        lab.check_jit(kernel, args=args, constexprs=constants, needs=needs).int32_offsets
        for kernel, args, constants, needs in checks
    )


def on_meta(T: int, V: int, dtype: torch.dtype = torch.bfloat16):
    meta = torch.device("meta")
    hidden = torch.empty(T, 8, dtype=dtype, device=meta)
    weight = torch.empty(V, 8, dtype=dtype, device=meta)
    row = torch.empty(T, device=meta)
    return (hidden, weight, torch.empty(T, dtype=torch.int64, device=meta)), row


def notices_launches(module: ModuleType) -> bool:
    """Eight programs a processor but sixteen splits, runs of equal length, groups of sixteen."""
    for T, V, n_splits, processors, grid, merged in [
        (130, 128 * 50, None, 13, (2, 50, 1), 64),  # 52 splits, of which 50 have a block
        (130, 128 * 300, None, 13, (2, 50, 1), 64),  # runs of six blocks
        (2048 + 1, 128 * 64, None, 1, (9, 16, 2), 16),
        (2048, 128 * 100, None, 1, (16, 15, 1), 16),  # runs of seven blocks
        (300, 128 * 1000, None, 10, (3, 27, 1), 32),  # runs of 38 blocks
        (8, 128 * 2000, None, 1000, (1, 1000, 1), 1024),
        (8, 128 * 2048, 1024, 1, (1, 1024, 1), 1024),
        (8, 129, 1024, 1, (1, 2, 1), 2),
        (8, 129, 1, 1, (1, 1, 1), 1),
    ]:
        arguments, _ = on_meta(T, V)
        module.processors = lambda device, count=processors: count
        first, second = launches(
            lambda arguments=arguments, n=n_splits: module.linear_token_nll(*arguments, n_splits=n)
        )
        if (first[0], first[1]) != ("_token_nll_kernel", grid):
            return True
        if second[1:] != (((T + 15) // 16,), dict(BLOCK_N=merged, BLOCK_T=16, num_warps=4)):
            return True
        if first[2] != original._configuration("sm_90", T, torch.bfloat16):
            return True
    return False


def notices_chunks(module: ModuleType) -> bool:
    """2**27 elements, in whole blocks, at least 2,048 words; the last buffer is not longer."""
    for T, V, chunk, width, blocks in [
        (1000, 300_000, None, 134_144, [1048, 1048, 248]),
        (2**17, 5000, None, 2048, [16, 16, 8]),
        (65, 1000, None, 1000, [8]),
        (65, 1000, 500, 500, [4, 4]),
        (65, 3, 1, 1, [1, 1, 1]),
    ]:
        arguments, row = on_meta(T, V)
        before, kernel = module._token_nll_gradient_kernel, Recorder()
        module._token_nll_gradient_kernel = kernel
        with pretending("sm_90"):
            module.linear_token_nll_backward(row, *arguments, row, row, chunk=chunk)
        module._token_nll_gradient_kernel = before
        if [grid[1] for grid, _, _ in kernel.launches] != blocks:
            return True
        configuration = original._configuration("sm_90", T, torch.bfloat16)
        for _, given, options in kernel.launches:
            if given[6].stride() != (width, 1) or options != configuration:
                return True
    return False


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid: tuple):
        return lambda *given, **options: self.launches.append((grid, given, options))


def run(module: ModuleType, arguments, grad_nll, n_splits=None, chunk=None, **options):
    nll, lse = module.linear_token_nll(*arguments, n_splits=n_splits, **options)
    gradients = module.linear_token_nll_backward(
        grad_nll, *arguments, nll, lse, chunk=chunk, **options
    )
    return nll, lse, *gradients


def notices_arguments(module: ModuleType) -> bool:
    (hidden, weight, targets), row = inputs(0)
    nll = row.abs()
    bad = [
        ("hidden: shape", dict(hidden=hidden[0])),
        ("weight: shape", dict(weight=weight[:, 1:])),
        ("weight: shape [0, 16]", dict(weight=weight[:0])),
        ("weight: shape [64, 0]", dict(weight=weight[:, :0], hidden=hidden[:, :0])),
        ("targets: shape", dict(targets=targets[1:])),
        ("targets: 64", dict(targets=torch.where(targets >= 0, targets + 1, targets))),
        ("targets: -1", dict(targets=targets.clamp(min=-1))),
        ("grad_nll: shape", dict(grad_nll=row[1:])),
        ("nll: dtype", dict(nll=row.double())),
        ("lse: dtype", dict(lse=row.double())),
        ("chunk: 0", dict(chunk=0)),
        ("ignore_index: 0.5", dict(ignore_index=0.5)),
    ]
    valid = dict(hidden=hidden, weight=weight, targets=targets)
    valid |= dict(grad_nll=row, nll=nll, lse=row)
    calls = [(start, module.linear_token_nll_backward, valid | changes) for start, changes in bad]
    for start, changes in bad[:7]:
        arguments = {name: changes.get(name, valid[name]) for name in [*valid][:3]}
        calls.append((start, module.linear_token_nll, arguments))
    forward = dict(hidden=hidden, weight=weight, targets=targets)
    for wrong in (0, 1025):
        calls.append((f"n_splits: {wrong}", module.linear_token_nll, forward | {"n_splits": wrong}))
    for start, call, arguments in calls:
        try:
            call(**arguments)
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    one, ids = torch.ones(2, 1), torch.tensor([0, IGNORE])
    with metered() as meter:  # a single word, so nothing but the target
        nll, lse, *gradients = run(module, (one, one[:1], ids), one[:, 0], 1024, 1)
        if meter.launches != 3 or nll.any() or (lse != 1).any() or gradients[0].any():
            return True
        empty = run(module, (hidden[:0], weight, targets[:0]), row[:0])
    shapes = [tuple(result.shape) for result in empty]
    dense = all(result.is_contiguous() for result in empty)
    return (
        meter.launches != 3
        or shapes != [(0,), (0,), (0, 16), (64, 16)]
        or [result.dtype for result in empty[2:]] != [torch.float16] * 2
        or not dense
        or bool(empty[3].any())
    )


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    half, single = torch.float16, torch.float32
    names = ("BLOCK_T", "BLOCK_V", "BLOCK_D", "num_warps", "num_stages")
    want = {
        ("sm_90", 16, half): (16, 128, 64, 4, 4),
        ("gfx942", 16, half): (16, 128, 128, 4, 2),
        ("sm_80", 17, half): (64, 128, 64, 4, 4),
        ("sm_90", 64, half): (64, 128, 64, 4, 4),
        ("gfx942", 64, half): (64, 128, 64, 4, 2),
        ("sm_90", 65, half): (128, 128, 64, 4, 3),
        ("sm_80", 65, half): (128, 128, 64, 8, 3),
        ("gfx942", 65, torch.bfloat16): (128, 128, 64, 4, 2),
        ("sm_90", 1, single): (64, 64, 32, 8, 2),
        ("gfx942", 1, single): (64, 64, 32, 8, 2),
    }
    for arguments, values in want.items():
        if module._configuration(*arguments) != dict(zip(names, values, strict=True)):
            return True
    small = dict(zip(names, (16, 32, 16), strict=False))
    return module._configuration("cpu", 128, half) != small


FORWARD = [notices_a_lost_small_loss, notices_special_losses, notices_losses]
BACKWARD = [
    notices_a_lost_small_gradient,
    notices_gradients_of_the_ignored,
    notices_gradients,
]
LAUNCHES = [notices_configuration, notices_launches, notices_chunks, notices_arguments]


def detectors(name: str) -> list[Detector]:
    """The cheap ones first."""
    if f"@triton.jit\ndef {name}(" not in SOURCE:
        first, second = (BACKWARD, FORWARD) if "backward" in name else (FORWARD, BACKWARD)
        return LAUNCHES + first + second
    numbers = BACKWARD if name == "_token_nll_gradient_kernel" else FORWARD
    return [*numbers, notices_in_the_ir, notices_arguments]


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore:An output with one or more")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors(name), tmp_path)
