"""Every automatic edit of the linear attention family must be noticed by the small cases below.

The cases are few, since 500 mutants run them; each has a reason.
"""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.linear_attention as original
from course import lab
from course.lab.meter import metered
from kernels.cases.linear_attention import Linear, linear_inputs, run
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_features": {},
    "_log_decay": {},
    "_linear_state_kernel": {},
    "_linear_output_kernel": {
        "constant#13: 0.0 to 1.0": "q: padded rows are not stored, padded columns meet zeros of k",
        "constant#16: 1e-37 to 2e-37": "any floor below every sum of features will do",
        "constant#17: 0.0 to 1.0": "k: padded rows fade to 0, padded columns are set to 0",
        "constant#21: 0.0 to 1.0": "v: padded rows meet keys of 0, padded columns are not stored",
        "constant#25: 1e-37 to 2e-37": "any floor below every sum of features will do",
        "constant#26: 1e+37 to 2e+37": "any finite ceiling: what it multiplies is 0",
    },
    "chunk_linear_attention": {
        "operator#11: - to +": "rows of scratch memory beyond the last that is used",
        "constant#13: 1 to 0": "a row of scratch memory beyond the last that is used",
        "out.new_empty#3: swap the first two arguments": "a dense buffer of the same size",
        "out.new_empty#4: swap the first two arguments": "a dense buffer of the same size",
        "constant#17: 0 to 1": "the stride of a decay that is not there",
        "constant#18: 0 to 1": "the stride of a decay that is not there",
    },
    "_configuration": {},
}


CASES = [
    # One program, one chunk; padded rows and columns, q, k and v in one tensor.
    Linear(T=15, Dk=3, Dv=5, H=1, n_splits=1, decay="token", state=True, layout="fused"),
    # The same for heads, and for splits with a tail.
    Linear(T=17, Dk=3, Dv=5, n_splits=2, decay="head", state=True, layout="fused"),
    # Several sequences; what the first case has, without.
    Linear(T=3, Dk=2, Dv=5, B=2, feature_map="identity", strict=True, decay="head"),
    # A state that grew in several splits, of several chunks, of which all but the last are full.
    Linear(T=70, Dk=16, Dv=16, H=1, B=2, n_splits=3, decay="head", dtype=torch.float16),
    # Blocks of values, several chunks of a split; nothing is seen by the first token.
    Linear(T=17, Dk=17, Dv=33, H=1, n_splits=1, strict=True),
]
SPLITS = 1  # the first case that runs the state kernel


@functools.cache
def inputs(number: int):
    return linear_inputs(CASES[number], torch.Generator().manual_seed(number))


@functools.cache
def expected(number: int):
    case = CASES[number]
    options = dict(strict=case.strict, feature_map=case.feature_map)
    with metered() as meter:
        run(case, inputs(number), original.chunk_linear_attention)
    return *original.chunk_linear_attention_ref(*inputs(number), **options), meter.flops


def notices_numbers(module: ModuleType, first: int = 0) -> bool:
    for number in (first, *range(first), *range(first + 1, len(CASES))):
        case = CASES[number]
        with metered() as meter:
            got = run(case, inputs(number), module.chunk_linear_attention)
        if meter.flops != expected(number)[3]:
            return True  # of chunks beyond the last token
        tolerance = 3e-3 if case.dtype == torch.float16 else 2e-5
        for have, want in zip(got, expected(number)[:3], strict=True):
            if have.dtype != want.dtype or not torch.allclose(have, want, tolerance, tolerance):
                return True
    return False


def sums(module: ModuleType) -> list[torch.Tensor]:
    """What the state kernel alone leaves of two heads' first 16 tokens."""
    _, k, v, decay, _ = inputs(SPLITS)
    parts = [lab.poisoned((2, 1, *shape), torch.float32) for shape in ((3, 5), (3,), ())]
    strides = *k.stride()[:3], *v.stride()[:3], *decay.expand(1, 17, 2).stride()[:2]
    tiles = dict(DIM_K=3, DIM_V=5, BLOCK_K=16, BLOCK_V=16, BLOCK_T=16, ELU=True)
    with metered():
        module._linear_state_kernel[(2, 1, 1)](
            *(k, v, decay.expand(1, 17, 2), *parts, 17, 2, 16, *strides), **tiles
        )
    return parts


@functools.cache
def expected_sums() -> list[torch.Tensor]:
    return sums(original)


def notices_sums(module: ModuleType) -> bool:
    """The cases are held to the reference; this only compares, and is quick."""
    same = map(torch.allclose, sums(module), expected_sums())
    return not all(same) or notices_numbers(module, SPLITS)


def notices_extremes(module: ModuleType) -> bool:
    """Sums that float16 cannot hold, queries without features, decays that forget all."""
    case = Linear(T=18, Dk=2, Dv=2, H=1, dtype=torch.float16)
    q, k, v, *_ = linear_inputs(case, torch.Generator().manual_seed(9))
    large = q.sign() * 65504, k.sign() * 65504, v.sign() * 65504
    none = torch.full_like(q, -200), k, v
    decay = torch.full((1,), -50.0)
    calls = [((*large, None), 64.0, 1), ((*large, None), 64.0, 2), ((*none, None), 0.0, 2)]
    calls += [((q, k, v, decay), 3e-3, 2)]
    with metered():
        for arguments, tolerance, n_splits in calls:
            got = module.chunk_linear_attention(*arguments, n_splits=n_splits)
            want = original.chunk_linear_attention_ref(*arguments)[0]
            if not torch.allclose(got, want, 0, tolerance):
                return True
        state = torch.full((1, 1, 2, 2), 1e30), torch.full((1, 1, 2), 1e30)
        one = q[:, :1], k[:, :1], v[:, :1], decay - 50, state  # counts as -60
        S = module.chunk_linear_attention(*one, return_state=True)[1]
    return not torch.allclose(S, original.chunk_linear_attention_ref(*one)[1], 1e-3)


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    q, k, v, decay, state = inputs(0)
    q, k, v = q.half(), k.half(), v.half()
    parts = [torch.ones(2, 3, 4)] * 3
    strides = [*k.stride()[:3], *v.stride()[:3], *decay.stride()[:2]]
    tiles = dict(DIM_K=20, DIM_V=20, BLOCK_K=32, BLOCK_V=32, BLOCK_T=16, ELU=True)
    one = lab.check_jit(
        module._linear_state_kernel,
        args=(k, v, decay, *parts, 35, 2, 32, *strides),
        constexprs=tiles,
        needs=("load", "store", "dot"),
    )
    two = lab.check_jit(
        module._linear_output_kernel,
        args=(
            *(q, k, v, decay, *state, *parts, q, *state),
            *(35, 2, 32, *q.stride()[:3], *strides),
        ),
        constexprs=tiles | dict(STRICT=False),
        needs=("load", "store", "dot"),
    )
    return bool(one.int32_offsets or two.int32_offsets or one.tf32_dot or two.tf32_dot)


def launches_of(module: ModuleType, B, T, Dv, n_splits, processors):
    """Grids and options that the launcher asks for, on tensors without memory."""
    meta = torch.device("meta")
    q = torch.empty(B, T, 2, 8, dtype=torch.bfloat16, device=meta)
    v = torch.empty(B, T, 2, Dv, dtype=torch.bfloat16, device=meta)
    module.processors = lambda device: processors
    return launches(lambda: module.chunk_linear_attention(q, q, v, n_splits=n_splits), "sm_80")


def notices_launches(module: ModuleType) -> bool:
    """A program a processor, no split under four chunks of 16 tokens, at most 32, none empty."""
    for B, T, Dv, n_splits, processors, splits in [
        (3, 1000, 64, None, 13, 2),
        (3, 1000, 64, None, 17, 2),
        (1, 16 * 33, 64, None, 1000, 7),  # 33 chunks, 8 splits would be 5, 5, 5, 5, 5, 5, 3, 0
        (1, 16 * 400, 64, None, 1000, 31),  # 13 chunks each
        (3, 1000, 80, None, 25, 2),  # two blocks of values
        (40, 1000, 64, None, 2, 1),
        (2, 17, 3, 32, 1, 2),
        (2, 1000, 17, 2, 1000, 2),
    ]:
        asked = launches_of(module, B, T, Dv, n_splits, processors)
        blocks = 2 if Dv == 80 else 1
        want = [("_linear_output_kernel", (2 * B, blocks, splits))]
        if splits > 1:
            want = [("_linear_state_kernel", (2 * B, blocks, splits - 1)), *want]
        if [(name, grid) for name, grid, _ in asked] != want:
            return True
        block_v = {3: 16, 17: 32}.get(Dv, 64)
        tiles = dict(DIM_K=8, DIM_V=Dv, BLOCK_K=16, BLOCK_V=block_v, BLOCK_T=16, ELU=True)
        tiles |= dict(num_warps=4, num_stages=2)
        if any(options | tiles != options for _, _, options in asked):
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    q, k, v, decay, (S, z) = inputs(SPLITS)
    wide = torch.ones(1, 1, 1, 129)
    bad = {
        "q: shape": dict(q=q[0]),
        "k: shape": dict(k=k[:, 1:]),
        "v: shape": dict(v=v[:, 1:]),
        "q: head_dim 129": dict(q=wide, k=wide, v=wide[..., :1], decay=None, state=None),
        "q: head_dim 0": dict(q=q[..., :0], k=k[..., :0]),
        "v: head_dim 129": dict(v=torch.ones(1, 17, 2, 129)),
        "v: head_dim 0": dict(v=v[..., :0]),
        "decay: shape": dict(decay=decay[0]),
        "decay: shape [3]": dict(decay=torch.zeros(3)),
        "decay: 0.5": dict(decay=torch.full((2,), 0.5)),
        "decay: dtype": dict(decay=decay.half()),
        "state[0]: shape": dict(state=(S[..., 1:], z)),
        "state[0]: dtype": dict(state=(S.half(), z)),
        "state[1]: shape": dict(state=(S, z[..., 1:])),
        "state[1]: dtype": dict(state=(S, z.half())),
        "state: strides": dict(state=(torch.ones(1, 2, 3, 6)[..., :5], z)),
        "state: strides ": dict(state=(S, torch.ones(1, 2, 4)[..., :3])),
        "feature_map: 'relu'": dict(feature_map="relu"),
        "n_splits: 0": dict(n_splits=0),
        "n_splits: 33": dict(n_splits=33),
    }
    for start, changes in bad.items():
        try:
            module.chunk_linear_attention(
                **dict(q=q, k=k, v=v, decay=decay, state=(S, z)) | changes
            )
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    edge = torch.ones(1, 1, 1, 128)
    with metered() as meter:
        out = module.chunk_linear_attention(edge, edge, edge, n_splits=32)
        one = module.chunk_linear_attention(*[edge[..., :1]] * 3)
        if not isinstance(out, torch.Tensor) or meter.launches != 2 or one.item() != 1:
            return True
        none = q[:, :0], k[:, :0], v[:, :0]
        nothing = module.chunk_linear_attention(*none)
        zeros = module.chunk_linear_attention(*none, return_state=True)
        kept = module.chunk_linear_attention(*none, state=(S, z), return_state=True)
    if meter.launches != 2 or not isinstance(nothing, torch.Tensor):
        return True
    want = (nothing, S, z)
    return (
        any(x.any() or x.shape != y.shape for x, y in zip(zeros, want, strict=True))
        or not all(map(torch.equal, kept, want))
        or kept[1] is S
        or kept[2] is z
    )


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    half, single = torch.float16, torch.float32
    want = {
        ("sm_80", half, True): (16, 64, 4, 2),
        ("sm_120", torch.bfloat16, True): (16, 64, 4, 2),
        ("sm_90", half, True): (64, 128, 8, 3),
        ("sm_90", half, False): (64, 128, 8, 2),
        ("sm_100", torch.bfloat16, True): (64, 128, 8, 1),
        ("gfx942", half, True): (64, 64, 4, 2),
    }
    for arguments, (block_t, block_v, warps, stages) in want.items():
        options = {"num_warps": warps, "num_stages": stages}
        if module._configuration(*arguments) != (block_t, block_v, options):
            return True
    options = {"num_warps": 4, "num_stages": 1}
    return (
        any(
            module._configuration(target, single, True) != (32, 32, options)
            for target in ("sm_90", "gfx942")
        )
        or module._configuration("cpu", half, True) != (16, 32, {})
        or module._configuration("cpu", single, True) != (16, 32, {})
    )


LAUNCHER = [notices_configuration, notices_launches, notices_arguments]  # cheap, so first
KERNELS = [notices_numbers, notices_extremes, notices_in_the_ir]
DETECTORS = {name: [*LAUNCHER, *KERNELS] for name in FUNCTIONS}
for name in ("_features", "_log_decay", "_linear_output_kernel"):
    DETECTORS[name] = [*KERNELS, *LAUNCHER]
DETECTORS["_linear_state_kernel"] = [notices_sums, *KERNELS[1:], *LAUNCHER]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS[name], tmp_path)
