"""Quantizers against NumPy's float32, code by code, and against float64 for the error."""

import dataclasses

import numpy as np
import pytest
import torch

from course import lab
from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases.quantize import GROUP_CASES, ROW_CASES, STREAMING, Matrix, matrix
from kernels.quantize import (
    NF4_EDGES,
    NF4_LEVELS,
    _quantize_int4_groups_kernel,
    _quantize_int8_rows_kernel,
    _quantize_nf4_kernel,
    quantize_int4_groups,
    quantize_int4_groups_ref,
    quantize_int8_rows,
    quantize_int8_rows_ref,
    quantize_nf4,
    quantize_nf4_ref,
)

ON_CPU = not torch.cuda.is_available()
TINY = 2.0**-149  # the smallest float32


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def rows_of(x: torch.Tensor) -> np.ndarray:
    return x.cpu().float().numpy()


def exact_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in NumPy, row by row."""
    codes, scales = np.zeros(x.shape, np.int8), np.ones(len(x), np.float32)
    for i, row in enumerate(rows_of(x)):
        sound = np.isfinite(row)
        if scale := np.abs(row, where=sound, out=np.zeros_like(row)).max() / np.float32(127):
            scales[i] = scale
            codes[i, sound] = np.clip(np.rint(row[sound] / scale), -127, 127)
        if not sound.all():
            scales[i] = np.nan
    return torch.from_numpy(codes), torch.from_numpy(scales)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def exact_int4(w: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """Codes (one a byte), scales and zeros in NumPy, group by group."""
    rows, columns = w.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((rows, columns // group), np.float16)
    zeros = np.zeros_like(scales)
    for i, row in enumerate(rows_of(w)):
        for j in range(columns // group):
            part = row[j * group : (j + 1) * group]
            sound = np.isfinite(part)
            part = np.nan_to_num(part, nan=0, posinf=0, neginf=0)
            low = part.min()
            scale = np.float16((part.max() - low) / np.float32(15))
            zero = np.float16(-low / np.float32(scale))
            if not np.isfinite(zero):
                scale, zero = np.float16(1), np.float16(-low)
            scales[i, j], zeros[i, j] = scale if sound.all() else np.nan, zero
            q = np.rint(part / np.float32(scale) + np.float32(zero))
            codes[i, j * group : (j + 1) * group] = np.clip(q, 0, 15)
    return tuple(map(torch.from_numpy, (codes, scales, zeros)))


def exact_nf4(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (one a byte) and scales, by the distance to each of the 16 levels."""
    levels = np.float32(NF4_LEVELS).astype(np.float64)
    parts = rows_of(w).reshape(-1, group)
    sound = np.isfinite(parts)
    parts = np.where(sound, parts, np.float32(0))
    scales = np.abs(parts).max(1, keepdims=True)
    scales[scales == 0] = 1
    distance = np.abs((parts / scales).astype(np.float64)[..., None] - levels)
    codes = distance.argmin(-1).astype(np.uint8).reshape(w.shape)
    scales[~sound.all(1)] = np.nan
    return torch.from_numpy(codes), torch.from_numpy(scales).view(len(w), -1)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] from two codes a byte, the even column in the low half."""
    return torch.stack([codes % 16, codes // 16], 2).flatten(1)


def assert_same(got, want) -> None:
    for have, need in zip(got, want, strict=True):
        assert have.dtype == need.dtype and have.is_contiguous()
        torch.testing.assert_close(have.cpu(), need.cpu(), rtol=0, atol=0, equal_nan=True)


def assert_right_int8(x: torch.Tensor, got) -> None:
    assert_same(got, exact_int8(x))


def assert_right_int4(w: torch.Tensor, group: int, got) -> None:
    codes, *rest = got
    assert_same((unpacked(codes), *rest), exact_int4(w, group))


def assert_right_nf4(w: torch.Tensor, group: int, got) -> None:
    codes, scales = got
    assert_same((unpacked(codes), scales), exact_nf4(w, group))


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_int8_codes(case: Matrix, device, running) -> None:
    x = matrix(case, seeded(), device)
    with running():
        got = quantize_int8_rows(x)
    assert_right_int8(x, got)
    codes, scales = (y.double().cpu() for y in got)
    error = (x.double().cpu() - scales[:, None] * codes).abs()
    assert (error <= 0.5 * (1 + 1e-4) * scales[:, None]).all()
    assert (codes.abs().amax(1) == 127).all()


@pytest.mark.parametrize("case, group", GROUP_CASES, ids=str)
def test_int4_codes(case: Matrix, group: int, device, running) -> None:
    w = matrix(case, seeded(), device)
    with running():
        got = quantize_int4_groups(w, group)
    assert_right_int4(w, group, got)
    codes, scales, zeros = (y.cpu() for y in got)
    scales, zeros = (y.double().repeat_interleave(group, 1) for y in (scales, zeros))
    error = (w.double().cpu() - scales * (unpacked(codes).double() - zeros)).abs()
    # Half a step; the ends may be cut by what float16 rounds off 15 steps and the zero point.
    assert (error <= 0.5 * scales + 2.0**-11 * scales * (15 + zeros.abs())).all()


@pytest.mark.parametrize("case, group", GROUP_CASES, ids=str)
def test_nf4_codes(case: Matrix, group: int, device, running) -> None:
    w = matrix(case, seeded(), device)
    with running():
        got = quantize_nf4(w, group)
    assert_right_nf4(w, group, got)
    codes, scales = (y.cpu() for y in got)
    back = torch.tensor(NF4_LEVELS)[unpacked(codes).int()] * scales.repeat_interleave(group, 1)
    # Half of the widest gap, between -1 and -0.696.
    assert ((w.cpu() - back).abs() <= 0.152 * scales.repeat_interleave(group, 1)).all()


def test_nf4_levels_and_edges(device, running) -> None:
    """Each level gives its own code; halfway between two, the lower."""
    levels = torch.tensor(NF4_LEVELS)
    edges = torch.tensor(NF4_EDGES.value)
    middle = (levels[:-1].double() + levels[1:].double()) / 2
    assert torch.equal(edges, middle.float())
    above = torch.nextafter(edges, levels[1:])
    w = torch.stack([levels, *(torch.cat([x, levels[15:]]) for x in (edges, above))])
    with running():
        codes, scales = quantize_nf4(w.to(device), 16)
    low = list(range(15))
    assert unpacked(codes).tolist() == [[*low, 15], [*low, 15], [*(i + 1 for i in low), 15]]
    assert torch.equal(scales.cpu(), torch.ones(3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_references(dtype: torch.dtype, device) -> None:
    x = matrix(Matrix(5, 96, dtype), seeded(), device).clone()
    x[1], x[2, 50], x[3, 3] = 0.1, torch.nan, -torch.inf
    assert_right_int8(x, quantize_int8_rows_ref(x))
    for group in (16, 32, 96):
        assert_right_int4(x, group, quantize_int4_groups_ref(x, group))
        assert_right_nf4(x, group, quantize_nf4_ref(x, group))


def test_the_examples_of_the_chapter(device, running) -> None:
    """Exercises of the chapter on quantization: groups of four, here as rows of a group of 16."""
    rows = torch.tensor(
        [
            [0, 0.7, -1.3, 2.1],
            [5, 1, -2, 3.3],
            [-0.4, -0.1, -0.9, -0.2],
            [0.25, 0.25, 0.25, 0.25],
        ]
    )
    want = torch.tensor([[6, 9, 0, 15], [15, 6, 0, 11], [9, 15, 0, 13], [0, 0, 0, 0]])
    with running():
        codes, scales, zeros = quantize_int4_groups(rows.repeat(1, 4).to(device), 16)
    assert torch.equal(unpacked(codes).cpu(), want.repeat(1, 4).to(torch.uint8))
    rounded = torch.tensor([3.4 / 15, 7 / 15, 0.8 / 15, 1]).half()
    assert torch.equal(scales[:, 0].cpu(), rounded)
    assert zeros[3, 0] == -0.25


def test_two_codes_share_a_byte(device, running) -> None:
    """The packing of the chapter: the even column in the low half."""
    w = torch.tensor([[0.0, 15, 1, 2, 3, 15] + [0] * 10], device=device)
    with running():
        codes, _, _ = quantize_int4_groups(w, 16)
    assert codes[0].tolist() == [15 * 16, 33, 243] + [0] * 5


def test_a_half_goes_to_the_even_code(device, running) -> None:
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=device)
    w = torch.tensor([[0, 15, 0.5, 1.5, 2.5, 3.5, 14.5, 13.5] * 2], device=device)
    with running():
        rows, groups = quantize_int8_rows(x)[0], quantize_int4_groups(w, 16)[0]
    assert rows[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert unpacked(groups)[0, :8].tolist() == [0, 15, 0, 2, 2, 4, 14, 14]


def special(device: torch.device) -> torch.Tensor:
    """Rows of 48 float32 numbers that a formula may stumble on."""
    x = torch.randn(17, 48, generator=seeded(3))
    x[0] = 0
    x[1] = TINY  # its int8 scale is 0
    x[2] = TINY * (torch.arange(48) - 24) * 7.9  # up to 190: an int8 scale of TINY, codes are cut
    x[3, 7] = torch.nan
    x[4, 8] = torch.inf
    x[5, 31] = -torch.inf
    x[6] *= 65504
    x[7] = 3.0e38 * x[7].sign()  # the range overflows float32
    x[8] = 1000 + 1e-4 * x[8]  # narrower than float16 can tell
    x[9] = x[9] - 3000  # the zero point is rounded by several codes, here up
    x[10] = x[10] - 3000  # and here down
    x[11] = 5001.7  # float16 knows 5000
    x[12] *= 1e-7  # a float16 scale below its normal range
    x[13] *= 1e-9  # a float16 scale of 0
    x[14] = 3 + x[14].abs()  # 0 is no minimum
    x[15] = -3 - x[15].abs()  # nor a maximum
    x[16] = torch.nan
    return x.to(device)


def test_special_rows(device, running) -> None:
    x = special(device)
    with running():
        rows, groups = quantize_int8_rows(x), quantize_int4_groups(x, 48)
        normal = quantize_nf4(x, 48)
    assert_right_int8(x, rows)
    assert_right_int4(x, 48, groups)
    assert_right_nf4(x, 48, normal)
    codes, scales = (y.cpu() for y in rows)
    assert not codes[[0, 1, 16]].any() and scales[:2].tolist() == [1, 1]
    assert codes[2].max() == -codes[2].min() == 127 and scales[2] == TINY
    assert scales[[3, 4, 5, 16]].isnan().all()
    codes, scales, zeros = (y.flatten(1).cpu() for y in groups)
    assert scales[[0, 1, 8, 11, 13]].eq(1).all() and not codes[[0, 1, 16]].any()
    assert scales[[3, 4, 5, 16]].isnan().all() and scales[7].isinf()
    assert zeros[8] == -1000 and 1000 < zeros[9] < 65504


def test_a_bad_number_stays_in_its_group(device, running) -> None:
    w = matrix(Matrix(2, 64), seeded(), device).clone()
    with running():
        clean = quantize_int4_groups(w, 16)
        w[0, 20] = torch.nan
        codes, scales, zeros = quantize_int4_groups(w, 16)
    others = torch.arange(8) != 1
    assert torch.equal(scales.isnan().flatten().cpu(), ~others)
    for have, want, width in zip((codes, scales, zeros), clean, (8, 1, 1), strict=True):
        assert torch.equal(have.view(8, width)[others], want.view(8, width)[others])


def test_twice_gives_the_same_bits_and_leaves_the_input(device, running) -> None:
    x = matrix(Matrix(3, 48, torch.float16), seeded(), device)
    before = x.clone()
    with running():
        first = *quantize_int8_rows(x), *quantize_int4_groups(x, 48), *quantize_nf4(x, 48)
        second = *quantize_int8_rows(x), *quantize_int4_groups(x, 48), *quantize_nf4(x, 48)
    assert_same(first, second)
    assert torch.equal(x, before)


def test_empty(device, running) -> None:
    with running() as meter:
        for rows, columns in [(0, 32), (3, 0), (0, 0)]:
            x = torch.empty(rows, columns, device=device)
            codes, scales = quantize_int8_rows(x)
            assert codes.shape == (rows, columns) and torch.equal(scales.cpu(), torch.ones(rows))
            codes, scales, zeros = quantize_int4_groups(x, 32)
            assert codes.shape == (rows, columns // 2)
            assert scales.shape == zeros.shape == (rows, columns // 32)
            codes, scales = quantize_nf4(x, 32)
            assert codes.shape == (rows, columns // 2)
            assert scales.shape == (rows, columns // 32)
    if ON_CPU:
        assert meter.launches == 0


def test_offsets_beyond_32_bits(device, running) -> None:
    small = matrix(Matrix(3, 16, torch.float16), seeded(), device)
    # Four gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2 * (2**31 + 16), device=device)
    far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
    spread = far.as_strided((3, 16), (2**30, 1))
    spread.copy_(small)
    with running():
        rows, groups = quantize_int8_rows(spread), quantize_int4_groups(spread, 16)
        normal = quantize_nf4(spread, 16)
    assert_right_int8(small, rows)
    assert_right_int4(small, 16, groups)
    assert_right_nf4(small, 16, normal)


@pytest.mark.skipif(not ON_CPU, reason="reads the compiler's IR")
def test_output_offsets_have_64_bits() -> None:
    """Outputs of more than 2**31 bytes are too large to allocate here."""
    x, codes = torch.ones(2, 96), torch.ones(2, 96, dtype=torch.int8)
    half = torch.ones(2, 2, dtype=torch.float16)
    rows = lab.check_jit(
        _quantize_int8_rows_kernel,
        args=(x, codes, x, 2, 96, 96),
        constexprs=dict(BLOCK_M=2, BLOCK_N=128),
    )
    groups = lab.check_jit(
        _quantize_int4_groups_kernel,
        args=(x, codes.view(torch.uint8), half, half, 4, 2, 96),
        constexprs=dict(GROUP=48, BLOCK_R=2, BLOCK_G=64),
    )
    normal = lab.check_jit(
        _quantize_nf4_kernel,
        args=(x, codes.view(torch.uint8), x, 4, 2, 96),
        constexprs=dict(GROUP=48, BLOCK_R=2, BLOCK_G=64),
    )
    assert not any(cost.int32_offsets for cost in (rows, groups, normal))


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_and_writes_each_byte_once() -> None:
    """At the tile of a real GPU; more rows are more programs of the same kind."""
    from course.lab.meter import metered

    x = matrix(Matrix(8, 4096, torch.float16), seeded())
    with metered() as meter, pretending("sm_90"):
        outputs = quantize_int8_rows(x)
    assert meter.loads == x.nbytes
    assert meter.stores == sum(y.nbytes for y in outputs)
    with metered() as meter, pretending("sm_90"):
        outputs = quantize_int4_groups(x)
    assert meter.loads == x.nbytes
    assert meter.stores == sum(y.nbytes for y in outputs)
    with metered() as meter, pretending("sm_90"):
        outputs = quantize_nf4(x)
    assert meter.loads == x.nbytes
    assert meter.stores == sum(y.nbytes for y in outputs)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    x = lab.guarded(matrix(Matrix(3, 48), seeded()))
    codes = lab.guarded(lab.poisoned((3, 48), torch.int8))
    scales = lab.guarded(lab.poisoned((3,), torch.float32))
    packed = lab.guarded(lab.poisoned((3, 24), torch.uint8))
    small = lab.guarded(lab.poisoned((3, 1), torch.float16))
    zeros = lab.guarded(lab.poisoned((3, 1), torch.float16))
    normal = lab.guarded(lab.poisoned((3, 24), torch.uint8))
    largest = lab.guarded(lab.poisoned((3, 1), torch.float32))
    with lab.interpreted():
        _quantize_int8_rows_kernel[(2,)](x, codes, scales, 3, 48, 48, BLOCK_M=2, BLOCK_N=64)
        _quantize_int4_groups_kernel[(2,)](
            x, packed, small, zeros, 3, 1, 48, GROUP=48, BLOCK_R=2, BLOCK_G=64
        )
        _quantize_nf4_kernel[(2,)](x, normal, largest, 3, 1, 48, GROUP=48, BLOCK_R=2, BLOCK_G=64)
    outputs = dict(codes=codes, scales=scales, packed=packed, small=small, zeros=zeros)
    outputs |= dict(normal=normal, largest=largest)
    for name, tensor in outputs.items():
        lab.check_guard(name, tensor)
    assert_right_int8(x, (codes.contiguous(), scales))
    assert_right_int4(x, 48, (packed, small, zeros))
    assert_right_nf4(x, 48, (normal, largest))


BAD = {
    "x: shape": lambda: quantize_int8_rows(torch.ones(3)),
    "x: dtype": lambda: quantize_int8_rows(torch.ones(3, 4, dtype=torch.int32)),
    "x: last stride 2": lambda: quantize_int8_rows(torch.ones(3, 8)[:, ::2]),
    "x: 32769 columns": lambda: quantize_int8_rows(torch.ones(1, 32769)),
    "w: shape": lambda: quantize_int4_groups(torch.ones(3), 16),
    "w: dtype": lambda: quantize_int4_groups(torch.ones(3, 16).double(), 16),
    "w: last stride 3": lambda: quantize_int4_groups(torch.ones(16, 3).t(), 16),
    "group: 0": lambda: quantize_int4_groups(torch.ones(3, 16), 0),
    "group: -16": lambda: quantize_int4_groups(torch.ones(3, 16), -16),
    "group: 16.0": lambda: quantize_int4_groups(torch.ones(3, 16), 16.0),
    "group: '16'": lambda: quantize_nf4(torch.ones(3, 16), "16"),
    "group: 8": lambda: quantize_int4_groups(torch.ones(3, 16), 8),
    "group: 24": lambda: quantize_int4_groups(torch.ones(3, 48), 24),
    "group: 32": lambda: quantize_int4_groups(torch.ones(3, 48), 32),
    "group: 32784": lambda: quantize_int4_groups(torch.ones(1, 32784), 32784),
    "group: 128": lambda: quantize_int4_groups(torch.ones(1, 64)),
    "group: 64": lambda: quantize_nf4(torch.ones(1, 96)),
    "group: 4112": lambda: quantize_nf4(torch.ones(1, 4112), 4112),
    "w: shape \\[3\\]": lambda: quantize_nf4(torch.ones(3)),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        BAD[start]()


def test_extremes_of_the_claim_are_accepted(device, running) -> None:
    x = matrix(Matrix(1, 32768, torch.bfloat16), seeded(), device)
    with running():
        rows, groups = quantize_int8_rows(x), quantize_int4_groups(x, 32768)
        normal = quantize_nf4(x, 4096)
    assert_right_int8(x, rows)
    assert_right_int4(x, 32768, groups)
    assert_right_nf4(x, 4096, normal)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one, group = torch.ones(1, 1), torch.ones(1, 16)

    def launch() -> None:
        quantize_int8_rows(one)
        quantize_int4_groups(group, 16)
        quantize_nf4(group, 16)

    compiled = compile_launches(launch, target)
    assert [kernel.name for kernel in compiled] == [*STREAMING]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_tile_fits(target: str) -> None:
    """The edge of the claim, rows and groups of 32,768, NF4 groups of 4,096."""
    x = torch.empty(64, 32768, dtype=torch.float32, device="meta")

    def launch() -> None:
        quantize_int8_rows(x)
        quantize_int4_groups(x, 32768)
        quantize_nf4(x, 4096)

    launches = {"": launch}
    rows = table.build(launches, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in ROW_CASES]
    groups = [
        dict(dataclasses.asdict(case), group=group, groups=case.columns // group)
        for case, group in GROUP_CASES
    ]
    for table_of, axes in [
        (rows, ("columns", "rows", "dtype", "layout")),
        (groups, ("group", "groups", "rows", "dtype", "layout")),
    ]:
        for i, one in enumerate(axes):
            for two in axes[i + 1 :]:
                values = [{row[axis] for row in table_of} for axis in (one, two)]
                pairs = {(row[one], row[two]) for row in table_of}
                assert len(pairs) == len(values[0]) * len(values[1]) > 1
