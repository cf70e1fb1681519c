"""Every automatic edit of the quantizers must be noticed by the small cases below."""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.quantize as original
from course import lab
from course.lab.meter import metered
from kernels.cases.quantize import Matrix, matrix
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches
from tests.kernels.test_quantize import special

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_round_half_even": {},
    "_quantize_int8_rows_kernel": {},
    "_quantize_int4_groups_kernel": {
        "constant#4: 0.0 to 1.0": "padded columns get no part in minimum and maximum",
    },
    "_quantize_nf4_kernel": {},
    "quantize_int8_rows": {},
    "quantize_int4_groups": {},
    "quantize_nf4": {},
    "_check_group": {},
    "_configuration": {},
}

CASES = [  # with the group size of the int4 codes
    (Matrix(3, 48, torch.float16, "sliced"), 48),  # padded rows and columns
    (Matrix(3, 32, torch.bfloat16), 16),  # several groups a row
    (Matrix(17, 48), 48),  # the special rows
]


@functools.cache
def inputs(number: int) -> torch.Tensor:
    if number == 2:
        return special(torch.device("cpu"))
    return matrix(CASES[number][0], torch.Generator().manual_seed(number))


@functools.cache
def expected(number: int):
    x = inputs(number)
    four = original.quantize_int4_groups_ref(x, CASES[number][1])
    return original.quantize_int8_rows_ref(x), four, original.quantize_nf4_ref(x, CASES[number][1])


def differ(got, want) -> bool:
    return any(
        have.dtype != need.dtype or not torch.allclose(have, need, 0, 0, equal_nan=True)
        for have, need in zip(got, want, strict=True)
    )


def notices_int8(module: ModuleType) -> bool:
    with metered():
        return any(
            differ(module.quantize_int8_rows(inputs(number)), expected(number)[0])
            for number in range(len(CASES))
        )


def notices_int4(module: ModuleType) -> bool:
    with metered():
        return any(
            differ(module.quantize_int4_groups(inputs(number), group), expected(number)[1])
            for number, (_, group) in enumerate(CASES)
        )


def notices_nf4(module: ModuleType) -> bool:
    edges = torch.tensor([[*original.NF4_EDGES.value, 1.0]])
    with metered():
        return any(
            differ(module.quantize_nf4(inputs(number), group), expected(number)[2])
            for number, (_, group) in enumerate(CASES)
        ) or differ(module.quantize_nf4(edges, 16), original.quantize_nf4_ref(edges, 16))


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    x, codes = torch.ones(2, 96), torch.ones(2, 96, dtype=torch.int8)
    half = torch.ones(2, 2, dtype=torch.float16)
    rows = lab.check_jit(
        module._quantize_int8_rows_kernel,
        args=(x, codes, x, 2, 96, 96),
        constexprs=dict(BLOCK_M=2, BLOCK_N=128),
    )
    groups = lab.check_jit(
        module._quantize_int4_groups_kernel,
        args=(x, codes.view(torch.uint8), half, half, 4, 2, 96),
        constexprs=dict(GROUP=48, BLOCK_R=2, BLOCK_G=64),
    )
    normal = lab.check_jit(
        module._quantize_nf4_kernel,
        args=(x, codes.view(torch.uint8), x, 4, 2, 96),
        constexprs=dict(GROUP=48, BLOCK_R=2, BLOCK_G=64),
    )
    return any(cost.int32_offsets for cost in (rows, groups, normal))


def notices_launches(module: ModuleType) -> bool:
    """Blocks of 4,096 numbers where a row is shorter; grids of all rows and no more."""
    for rows, columns, group, eight, four in [
        (33, 576, 64, (9, (4, 1024)), (5, (64, 64))),
        (32, 96, 48, (1, (32, 128)), (1, (64, 64))),
        (3, 4096, 4096, (3, (1, 4096)), (3, (1, 4096))),
        (5, 1536, 1536, (3, (2, 2048)), (3, (2, 2048))),
    ]:
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        int8 = launches(lambda x=x: module.quantize_int8_rows(x))
        int4 = launches(lambda x=x, group=group: module.quantize_int4_groups(x, group))
        warps = {"num_warps": 4}
        tile = dict(zip(("BLOCK_M", "BLOCK_N"), eight[1], strict=True)) | warps
        if int8 != [("_quantize_int8_rows_kernel", (eight[0],), tile)]:
            return True
        warps = {"num_warps": 4}
        tile = dict(zip(("BLOCK_R", "BLOCK_G"), four[1], strict=True)) | warps
        if int4 != [("_quantize_int4_groups_kernel", (four[0],), dict(tile, GROUP=group))]:
            return True
        nf4 = launches(lambda x=x, group=group: module.quantize_nf4(x, group))
        if nf4 != [("_quantize_nf4_kernel", (four[0],), dict(tile, GROUP=group))]:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    one = torch.ones(1, 48)
    for start, call in {
        "x: shape": lambda: module.quantize_int8_rows(one[0]),
        "w: shape": lambda: module.quantize_int4_groups(one[0], 16),
        "x: 32769": lambda: module.quantize_int8_rows(torch.ones(1, 32769)),
        "group: 0": lambda: module.quantize_int4_groups(one, 0),
        "group: -16": lambda: module.quantize_int4_groups(one, -16),
        "group: 1 must be a multiple": lambda: module.quantize_int4_groups(one, 1),
        "group: 24": lambda: module.quantize_int4_groups(one, 24),
        "group: 32": lambda: module.quantize_int4_groups(one, 32),
        "group: 128": lambda: module.quantize_int4_groups(one),
        "w: shape ": lambda: module.quantize_nf4(one[0], 16),
        "group: 64": lambda: module.quantize_nf4(one),
        "group: 4112": lambda: module.quantize_nf4(torch.ones(1, 4112), 4112),
        "group: 32784": lambda: module.quantize_int4_groups(torch.ones(1, 32784), 32784),
    }.items():
        try:
            call()
        except ValueError as error:
            if str(error).startswith(start):
                continue
        return True
    largest, empty = torch.ones(1, 32768), torch.ones(3, 0)
    with metered() as meter:
        module.quantize_int8_rows(largest)
        module.quantize_int4_groups(largest, 32768)
        module.quantize_nf4(largest, 4096)
        _, scales = module.quantize_int8_rows(empty)
        module.quantize_int4_groups(empty)
        module.quantize_nf4(empty)
        module.quantize_int8_rows(one[:0])
    return meter.launches != 3 or not torch.equal(scales, torch.ones(3))


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    want = {
        ("sm_90", 128): (32, 4),
        ("sm_80", 4096): (1, 4),
        ("sm_90", 1): (4096, 4),
        ("sm_90", 2048): (2, 4),
        ("sm_90", 10239): (1, 9),
        ("sm_100", 32768): (1, 32),
        ("gfx942", 8192): (1, 8),
        ("gfx942", 32768): (1, 16),
    }
    for arguments, (rows, warps) in want.items():
        if module._configuration(*arguments) != (rows, {"num_warps": warps}):
            return True
    return module._configuration("cpu", 128) != (2, {})


DETECTORS = [  # the cheap ones first
    notices_configuration,
    notices_launches,
    notices_int8,
    notices_int4,
    notices_nf4,
    notices_in_the_ir,
    notices_arguments,
]
FIRST = {  # those that know a function best
    "_quantize_int4_groups_kernel": [notices_int4],
    "_quantize_nf4_kernel": [notices_nf4],
    "quantize_int8_rows": [notices_launches, notices_int8],
    "quantize_int4_groups": [notices_launches, notices_int4],
    "quantize_nf4": [notices_launches, notices_nf4],
    "_check_group": [notices_launches, notices_arguments],
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    first = FIRST.get(name, [])
    detectors = first + [d for d in DETECTORS if d not in first]
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], detectors, tmp_path)
