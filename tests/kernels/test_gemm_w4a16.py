"""The 4-bit linear layer against float64, on shapes and layouts that break kernels."""

import dataclasses

import numpy as np
import pytest
import torch

from course import lab
from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.gemm_w4a16 import LINEAR_CASES, STREAMING, Linear, linear_inputs
from kernels.gemm_w4a16 import (
    _w4a16_gemm_kernel,
    _w4a16_gemv_kernel,
    _w4a16_sum_kernel,
    w4a16_linear,
    w4a16_linear_ref,
)
from kernels.quantize import quantize_int4_groups_ref

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
HALF = torch.float16


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def dequantized(codes, scales, zeros) -> np.ndarray:
    """W in float64, one group at a time."""
    codes, scales, zeros = (t.cpu().numpy() for t in (codes, scales, zeros))
    w = np.empty((len(codes), 2 * codes.shape[1]))
    w[:, 0::2], w[:, 1::2] = codes % 16, codes // 16
    for group, columns in enumerate(np.split(w, scales.shape[1], 1)):
        columns -= zeros[:, group, None].astype(float)
        columns *= scales[:, group, None].astype(float)
    return w


def exact(x, *weights) -> torch.Tensor:
    return torch.from_numpy(x.cpu().double().numpy() @ dequantized(*weights).T)


def eager(x, *weights) -> torch.Tensor:
    """Torch's own product, of weights rounded to x's dtype."""
    return x.cpu() @ torch.from_numpy(dequantized(*weights)).to(x.dtype).T


def assert_right(inputs, y: torch.Tensor) -> None:
    want = exact(*inputs)
    error = (y.cpu().double() - want).abs()
    assert error.max().item() <= error_limit(want, eager(*inputs), y.dtype)
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[y.dtype]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_matches_float64(case: Linear, device, running) -> None:
    inputs = linear_inputs(case, seeded(), device)
    with running():
        y = w4a16_linear(*inputs, case.n_splits)
    assert y.shape == (case.rows, case.outputs) and y.dtype == case.dtype
    assert_right(inputs, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_matches_float64(dtype: torch.dtype, device) -> None:
    inputs = linear_inputs(Linear(3, 9, 96, 2, dtype), seeded(), device)
    assert_right(inputs, w4a16_linear_ref(*inputs))


@pytest.mark.parametrize("rows", [1, 2])
def test_reads_what_the_quantizer_writes(rows: int, device, running) -> None:
    """And that it is the layer of the original weights, but for half a step each."""
    w = torch.randn(5, 64, generator=seeded())
    x = torch.randn(rows, 64, generator=seeded(1), dtype=torch.bfloat16)
    weights = quantize_int4_groups_ref(w, 32)
    assert np.abs(dequantized(*weights) - w.numpy()).max() < 0.51 * weights[1].max()
    inputs = tuple(t.to(device) for t in (x, *weights))
    with running():
        assert_right(inputs, w4a16_linear(*inputs))


def test_every_code_at_every_place(device, running) -> None:
    """One-hot rows of x read W back, exactly: codes and zeros are small integers."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(16, 32)
    scales, zeros = torch.full((16, 2), 2.0).half(), torch.full((16, 2), 8.0).half()
    weights = tuple(t.to(device) for t in (codes, scales, zeros))
    eye = torch.eye(64, dtype=HALF, device=device)
    with running():
        rows = [w4a16_linear(eye[i : i + 1], *weights) for i in range(11)]
        whole = w4a16_linear(eye, *weights)
    want = torch.from_numpy(dequantized(*weights)).half().T
    assert torch.equal(whole.cpu(), want)
    assert torch.equal(torch.cat(rows).cpu(), want[:11])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("far", [1, 1000])
def test_scales_from_small_to_large(rows: int, far: int, device, running) -> None:
    """1e-4 to 1e2, zero points far from the codes: each output is judged by its own size."""
    case = Linear(rows, 7, 32, 2, torch.bfloat16)
    x, codes, _, zeros = linear_inputs(case, seeded(), device)
    scales = torch.logspace(-4, 2, 7)[:, None].expand(-1, 2).half().to(device)
    inputs = (x, codes, scales, far * zeros)
    with running():
        y = w4a16_linear(*inputs)
    want = exact(*inputs)
    size = x.cpu().double().abs() @ torch.from_numpy(dequantized(*inputs[1:])).abs().T
    assert ((y.cpu().double() - want).abs() <= 2.0**-8 * (size + want.abs())).all()


def test_largest_halves(device, running) -> None:
    """Sums beyond float16's range that come back into it."""
    codes = torch.tensor([[255] * 16 + [0] * 16], dtype=torch.uint8, device=device)
    scales = torch.tensor([[0.5, 0.5]], dtype=HALF, device=device)
    zeros = torch.tensor([[0, 15]], dtype=HALF, device=device)
    for rows in (1, 2):
        x = torch.full((rows, 64), 65504.0, dtype=HALF, device=device)
        with running():
            y = w4a16_linear(x, codes, scales, zeros)
        assert not y.any()


def test_zero_weights(device, running) -> None:
    """A code that is its zero point is a weight of 0, whatever the scale."""
    codes = torch.full((3, 32), 0x33, dtype=torch.uint8, device=device)
    zeros = torch.full((3, 1), 3, dtype=HALF, device=device)
    for rows in (1, 2):
        x = torch.randint(-8, 9, (rows, 64), generator=seeded()).to(device, torch.bfloat16)
        with running():
            assert not w4a16_linear(x, codes, zeros * 100, zeros).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_number_of_splits_does_not_matter(rows: int, device, running) -> None:
    inputs = linear_inputs(Linear(rows, 5, 32, 5, torch.bfloat16), seeded(), device)
    with running():
        whole = w4a16_linear(*inputs, n_splits=1).float()
        for n_splits in (2, 3):
            y = w4a16_linear(*inputs, n_splits=n_splits).float()
            torch.testing.assert_close(y, whole, rtol=2**-7, atol=1e-5)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's blocks of 64 columns make splits cheap")
@pytest.mark.parametrize("rows", [1, 3])
def test_splits_are_capped_by_the_blocks_of_a_row(rows: int, running) -> None:
    inputs = linear_inputs(Linear(rows, 4, 32, 5), seeded())
    with running() as meter:
        w4a16_linear(*inputs, n_splits=32)
    assert meter.written["part"] == 3 * rows * 4 * 4  # 160 columns are three blocks


@pytest.mark.parametrize("rows", [1, 2])
def test_bad_numbers_stay_where_they_are(rows: int, device, running) -> None:
    inputs = x, codes, scales, zeros = linear_inputs(Linear(rows, 5, 32, 2), seeded(), device)
    with running():
        clean = w4a16_linear(*inputs)
        spoiled = scales.clone()
        spoiled[2, 1] = torch.nan
        y = w4a16_linear(x, codes, spoiled, zeros)
        assert y[:, 2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(y[:, others], clean[:, others])
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = x.clone()
            x[-1, 40] = bad
            y = w4a16_linear(x, codes, scales, zeros)
            assert not y[-1].isfinite().any()
            assert torch.equal(y[:-1], clean[:-1])


@pytest.mark.parametrize("rows", [1, 3])
def test_twice_gives_the_same_bits_and_leaves_the_inputs(rows: int, device, running) -> None:
    inputs = linear_inputs(Linear(rows, 9, 64, 3), seeded(), device)
    before = [t.clone() for t in inputs]
    with running():
        first = w4a16_linear(*inputs, n_splits=2)
        second = w4a16_linear(*inputs, n_splits=2)
    assert torch.equal(first, second)
    assert all(map(torch.equal, inputs, before))


def test_empty(device, running) -> None:
    with running() as meter:
        for rows, outputs in [(0, 4), (3, 0), (0, 0)]:
            inputs = linear_inputs(Linear(rows, outputs, 32), seeded(), device)
            assert w4a16_linear(*inputs).shape == (rows, outputs)
    if ON_CPU:
        assert meter.launches == 0


# The rows of which tensor lie 2**30 elements apart (2**31 bytes of codes at the third).
@pytest.mark.parametrize("far, rows", [(0, 3), (1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_offsets_beyond_32_bits(far: int, rows: int, device, running) -> None:
    inputs = list(linear_inputs(Linear(rows, 3, 32, 2), seeded(), device))
    near = inputs[far]
    # A few gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(near.itemsize * (2**31 + 64), device=device)
    room = torch.empty(0, dtype=near.dtype, device=device).set_(storage)
    inputs[far] = room.as_strided(near.shape, (2**30, 1))
    inputs[far].copy_(near)
    with running():
        y = w4a16_linear(*inputs, n_splits=1)
    assert_right(inputs, y)


@pytest.mark.skipif(not ON_CPU, reason="reads the compiler's IR")
def test_output_offsets_have_64_bits() -> None:
    """Outputs of more than 2**31 numbers are too large to allocate here."""
    assert not any(cost.int32_offsets for cost in costs())


def costs():
    half, part = torch.ones(2, 2, dtype=HALF), torch.ones(2, 2)
    codes = torch.ones(2, 48, dtype=torch.uint8)
    constants = dict(GROUP=48, SEG=16, BLOCK_N=16, BLOCK_K=64)
    yield lab.check_jit(
        _w4a16_gemv_kernel,
        args=(half, codes.view(torch.int32), half, half, part, 2, 3, 3, 2, 2),
        constexprs=constants | dict(STAGES=2),
        needs=("load", "store", "reduce"),
    )
    yield lab.check_jit(
        _w4a16_gemm_kernel,
        args=(half, codes, half, half, part, 2, 2, 3, 96, 48, 2, 2),
        constexprs=constants | dict(BLOCK_M=16),
        needs=("load", "store", "dot"),
    )
    yield lab.check_jit(_w4a16_sum_kernel, args=(part, half, 2, 4, 2), constexprs=dict(BLOCK_N=16))


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_one_row_reads_the_weights_once() -> None:
    """At the tile of a real GPU, and 1.23 times the compulsory bytes for 4096 x 4096.

    The rest is x, which every program of 16 outputs reads again (from a cache). Metered for
    fewer outputs: more are more programs of the same kind.
    """
    from course.lab.meter import metered

    inputs = linear_inputs(Linear(1, 256, 128, 32), seeded())
    with metered() as meter, pretending("sm_90"):
        y = w4a16_linear(*inputs, n_splits=1)
    assert_right(inputs, y)
    x, codes, scales, zeros = inputs
    assert meter.read["words"] == codes.nbytes
    assert meter.read["scales"] == scales.nbytes and meter.read["zeros"] == zeros.nbytes
    assert meter.read["x"] == 256 // 16 * x.nbytes and meter.stores == y.nbytes
    weights = 4096 // 256 * (codes.nbytes + 2 * scales.nbytes)
    moved = weights + 4096 // 16 * x.nbytes + 2 * 4096
    assert moved <= 1.25 * (weights + x.nbytes + 2 * 4096)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_many_rows_multiply_no_more_than_they_need() -> None:
    """Whole tiles do useful work only; weights are read once for each 128 rows.

    x is read once for each 128 outputs, so at 16 rows the bytes are 1.4 times the compulsory
    ones for many outputs: these reads hit a cache, since x is small. Fewer rows than 16 pad the
    tile: there the weights are the time, not the products. From 17 rows on the tile is 64 rows
    high, from 65 on 128: padded work is below 1.5 times the useful from 43 and 86 rows on, and
    at fewer the weights are still the time (295 FLOPs a byte take 75 rows).
    """
    from course.lab.meter import metered

    for rows, outputs in [(16, 256), (64, 128), (128, 128)]:
        inputs = linear_inputs(Linear(rows, outputs, 128, 2), seeded())
        with metered() as meter, pretending("sm_90"):
            y = w4a16_linear(*inputs, n_splits=1)
        assert meter.flops == 2 * rows * outputs * 256
        x, codes, scales, _ = inputs
        assert meter.read["codes"] == codes.nbytes
        assert meter.read["x"] == x.nbytes * outputs // 128
        again = 1 if rows == 16 else 2  # columns a step: 128, or 64 of a group of 128
        assert meter.read["scales"] == meter.read["zeros"] == again * scales.nbytes
        assert meter.stores == y.nbytes


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
@pytest.mark.parametrize("rows", [1, 3])
def test_writes_nothing_around_its_outputs(rows: int) -> None:
    inputs = linear_inputs(Linear(rows, 5, 32, 3), seeded())
    x, codes, scales, zeros = map(lab.guarded, inputs)
    part = lab.guarded(lab.poisoned((2, rows, 5), torch.float32))
    out = lab.guarded(lab.poisoned((rows, 5), HALF))
    constants = dict(GROUP=32, SEG=32, BLOCK_N=4, BLOCK_K=64)
    with lab.interpreted():
        if rows == 1:
            words = codes.view(torch.int32)
            _w4a16_gemv_kernel[(2, 2)](
                *(x, words, scales, zeros, part, 5, 3, 3, 3, 3), **constants, STAGES=2
            )
        else:
            _w4a16_gemm_kernel[(2, 1, 2)](
                *(x, codes, scales, zeros, part, rows, 5, 3, 96, 48, 3, 3),
                **constants,
                BLOCK_M=16,
            )
        _w4a16_sum_kernel[(rows, 1)](part, out, 5, rows * 5, 2, BLOCK_N=16)
    lab.check_guard("part", part)
    lab.check_guard("out", out)
    assert_right(inputs, out)


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("x", "codes", "scales", "zeros")
    inputs = linear_inputs(Linear(2, 3, 32, 2), seeded())
    return dict(zip(names, inputs, strict=True), n_splits=1) | changes


CODES = torch.zeros(3, 64, dtype=torch.uint8)
BAD = {
    "x: shape": dict(x=torch.ones(64).half()),
    "x: dtype": dict(x=torch.ones(2, 64)),
    "x: last stride 2": dict(x=torch.ones(2, 128).half()[:, ::2]),
    "codes: shape": dict(codes=CODES),
    "codes: dtype": dict(codes=CODES[:, :32].char()),
    "codes: last stride 2": dict(codes=CODES[:, ::2]),
    "codes: row stride 40": dict(codes=torch.zeros(3, 40, dtype=torch.uint8)[:, :32]),
    "codes: row stride 48 and offset 4": dict(codes=CODES.view(4, 48)[:3, 4:36]),
    "scales: shape": dict(scales=torch.ones(2, 2).half()),
    "scales: dtype": dict(scales=torch.ones(3, 2)),
    "zeros: shape": dict(zeros=torch.ones(3, 1).half()),
    "zeros: dtype": dict(zeros=torch.ones(3, 2, dtype=torch.uint8)),
    "scales: 0 groups": dict(scales=torch.ones(3, 0).half(), zeros=torch.ones(3, 0).half()),
    "scales: 4 groups": dict(scales=torch.ones(3, 4).half(), zeros=torch.ones(3, 4).half()),
    "scales: 3 groups": dict(scales=torch.ones(3, 3).half(), zeros=torch.ones(3, 3).half()),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 33": dict(n_splits=33),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        w4a16_linear(**changed(**BAD[start]))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one = linear_inputs(Linear(1, 1, 32), seeded())
    two = linear_inputs(Linear(2, 1, 32), seeded())
    compiled = compile_launches(lambda: (w4a16_linear(*one), w4a16_linear(*two)), target)
    assert [kernel.name for kernel in compiled] == ["_w4a16_gemv_kernel", "_w4a16_gemm_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_other_tiles_fit(target: str) -> None:
    """Those that no production launch takes: 64 rows, and the smallest group."""
    launches = {}
    for rows, group in [(1, 32), (64, 32)]:
        scales = torch.empty(4096, 4096 // group, dtype=HALF, device="meta")
        codes = torch.empty(4096, 2048, dtype=torch.uint8, device="meta")
        x = torch.empty(rows, 4096, dtype=HALF, device="meta")
        launches[str(rows)] = lambda a=(x, codes, scales, scales, 1): w4a16_linear(*a)
    rows = table.build(launches, [target])
    # A scale for 16 bytes of codes: two of 2 bytes are not wide.
    assert table.complaints(rows, ()) == []
    assert all(row["wide_loads"] >= 80 for row in rows)
    assert STREAMING[0] in {row["kernel"] for row in rows}


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in LINEAR_CASES]
    axes = ("rows", "outputs", "group", "groups", "dtype", "n_splits", "layout")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
