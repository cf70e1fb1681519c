"""The 8-bit linear layer: its sums against exact integers, its results bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from course import lab
from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases import error_limit
from kernels.cases.gemm_w8a8 import LINEAR8_CASES, STREAMING, Linear8, linear8_inputs
from kernels.gemm_w8a8 import (
    _w8a8_gemm_kernel,
    _w8a8_sum_kernel,
    w8a8_linear,
    w8a8_linear_ref,
)
from kernels.quantize import quantize_int8_rows_ref

ON_CPU = not torch.cuda.is_available()
RMS_RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def integers(x, w) -> np.ndarray:
    return x.cpu().numpy().astype(np.int64) @ w.cpu().numpy().astype(np.int64).T


def assert_right(inputs, y: torch.Tensor) -> None:
    """Against float64, and bit for bit: two float32 products, then the output's rounding."""
    x, x_scales, w, w_scales = (t.cpu() for t in inputs)
    total = integers(x, w)
    outer = x_scales.double().numpy()[:, None] * w_scales.double().numpy()
    want = torch.from_numpy(total * outer)
    x_real = (x * x_scales[:, None]).to(y.dtype)
    w_real = (w * w_scales[:, None]).to(y.dtype)
    error = (y.cpu().double() - want).abs()
    assert error.max().item() <= error_limit(want, x_real @ w_real.T, y.dtype)
    if want.any():
        assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[y.dtype]
    rounded = total.astype(np.float32) * x_scales.numpy()[:, None] * w_scales.numpy()
    assert torch.equal(y.cpu(), torch.from_numpy(rounded).to(y.dtype))


@pytest.mark.parametrize("case", LINEAR8_CASES, ids=str)
def test_matches_the_integers(case: Linear8, device, running) -> None:
    inputs = linear8_inputs(case, seeded(), device)
    with running():
        y = w8a8_linear(*inputs, case.dtype, case.n_splits)
    assert y.shape == (case.rows, case.outputs) and y.dtype == case.dtype
    assert_right(inputs, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference(dtype: torch.dtype, device) -> None:
    inputs = linear8_inputs(Linear8(3, 9, 200), seeded(), device)
    assert_right(inputs, w8a8_linear_ref(*inputs, dtype))


def test_the_layer_of_quantized_tensors(device, running) -> None:
    """Row by row, half a step of error a factor."""
    x = torch.randn(3, 200, generator=seeded())
    w = torch.randn(5, 200, generator=seeded(1))
    inputs = [t.to(device) for pair in map(quantize_int8_rows_ref, (x, w)) for t in pair]
    with running():
        y = w8a8_linear(*inputs, torch.float32)
    x_step, w_step = inputs[1].cpu(), inputs[3].cpu()
    limit = x_step[:, None] * w.abs().sum(1) + w_step * x.abs().sum(1)[:, None]
    assert ((y.cpu() - x @ w.T).abs() <= 0.51 * limit + 200 * x_step[:, None] * w_step).all()


@pytest.mark.skipif(not ON_CPU, reason="a block of columns that no GPU holds, to save steps")
def test_the_largest_sum_does_not_overflow(running) -> None:
    """128 * 128 * 131071 is below 2**31, and one column more is not."""
    x = torch.full((1, 131071), -128, dtype=torch.int8)
    one, part = torch.ones(1), torch.zeros(1, 1, dtype=torch.int32)
    tile = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32768, SCALED=False)
    with running():
        _w8a8_gemm_kernel[(1, 1, 1)](x, one, x, one, part, 1, 1, *x.shape[1:] * 3, **tile)
    assert part.item() == 128 * 128 * 131071


def test_splits_give_the_same_bits(device, running) -> None:
    inputs = linear8_inputs(Linear8(3, 9, 250), seeded(), device)
    with running():
        whole = w8a8_linear(*inputs, n_splits=1)
        for n_splits in (2, 3, 4):
            assert torch.equal(w8a8_linear(*inputs, n_splits=n_splits), whole)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's blocks of 64 columns make splits cheap")
def test_splits_are_capped_by_the_blocks_of_a_row(running) -> None:
    inputs = linear8_inputs(Linear8(2, 4, 150), seeded())
    with running() as meter:
        w8a8_linear(*inputs, n_splits=32)
    assert meter.written["part"] == 3 * 2 * 4 * 4  # 150 columns are three blocks


def test_bad_scales_stay_where_they_are(device, running) -> None:
    inputs = _, x_scales, _, w_scales = linear8_inputs(Linear8(3, 5, 64), seeded(), device)
    with running():
        clean = w8a8_linear(*inputs)
        x_scales[1], w_scales[2] = torch.nan, -torch.inf
        y = w8a8_linear(*inputs)
    assert y[1].isnan().all() and not y[:, 2].isfinite().any()
    rows, columns = torch.tensor([[0], [2]]), torch.tensor([0, 1, 3, 4])
    assert torch.equal(y[rows, columns], clean[rows, columns])


def test_results_beyond_float16_are_infinite(device, running) -> None:
    x = torch.full((1, 64), 100, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    with running():
        assert w8a8_linear(x, one, x, one, torch.float16).item() == torch.inf


def test_twice_gives_the_same_bits_and_leaves_the_inputs(device, running) -> None:
    inputs = linear8_inputs(Linear8(3, 9, 130), seeded(), device)
    before = [t.clone() for t in inputs]
    with running():
        first = w8a8_linear(*inputs, n_splits=2)
        second = w8a8_linear(*inputs, n_splits=2)
    assert torch.equal(first, second)
    assert all(map(torch.equal, inputs, before))


def test_empty(device, running) -> None:
    with running() as meter:
        for rows, outputs, columns in [(0, 4, 8), (3, 0, 8), (3, 4, 0)]:
            inputs = linear8_inputs(Linear8(rows, outputs, columns), seeded(), device)
            y = w8a8_linear(*inputs)
            assert y.shape == (rows, outputs) and not y.any()
    if ON_CPU:
        assert meter.launches == 0


@pytest.mark.parametrize("far", [0, 2])
def test_offsets_beyond_32_bits(far: int, device, running) -> None:
    inputs = list(linear8_inputs(Linear8(3, 3, 64), seeded(), device))
    near = inputs[far]
    # Two gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage(2**31 + 64, device=device)
    room = torch.empty(0, dtype=torch.int8, device=device).set_(storage)
    inputs[far] = room.as_strided(near.shape, (2**30, 1))
    inputs[far].copy_(near)
    with running():
        y = w8a8_linear(*inputs)
    assert_right(inputs, y)


@pytest.mark.skipif(not ON_CPU, reason="reads the compiler's IR")
def test_output_offsets_have_64_bits() -> None:
    """Outputs of more than 2**31 numbers are too large to allocate here."""
    codes, scales = torch.ones(2, 64, dtype=torch.int8), torch.ones(2)
    part, out = torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2).half()
    tiles = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=64)
    for target, scaled in [(part, False), (out, True)]:
        cost = lab.check_jit(
            _w8a8_gemm_kernel,
            args=(codes, scales, codes, scales, target, 2, 2, 64, 64, 64),
            constexprs=dict(tiles, SCALED=scaled),
            needs=("load", "store", "dot"),
        )
        assert not cost.int32_offsets
    cost = lab.check_jit(
        _w8a8_sum_kernel,
        args=(part, scales, scales, out, 2, 4, 2),
        constexprs=dict(BLOCK_N=16),
    )
    assert not cost.int32_offsets


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_reads_the_weights_once_and_multiplies_no_more_than_it_needs() -> None:
    """At the tiles of a real GPU; more tiles are more programs of the same kind.

    At 16 rows x is read once for each 64 outputs, a quarter more than W: a cache has it. Rows
    below 16 pad the tile, where W is the time and not the products; so do rows between 17 and 42
    and between 65 and 85, by more than 1.5.
    """
    from course.lab.meter import metered

    for rows, outputs in [(16, 256), (64, 64), (128, 256)]:
        inputs = linear8_inputs(Linear8(rows, outputs, 512), seeded())
        with metered() as meter, pretending("sm_90"):
            y = w8a8_linear(*inputs, n_splits=1)
        assert_right(inputs, y)
        x, x_scales, w, w_scales = inputs
        assert meter.flops == 2 * rows * outputs * 512
        assert meter.read["w"] == w.nbytes and meter.stores == y.nbytes
        tiles = outputs // 64 if rows <= 64 else 1
        assert meter.read["x"] == tiles * x.nbytes
        scales = tiles * x_scales.nbytes + w_scales.nbytes
        assert meter.loads == w.nbytes + tiles * x.nbytes + scales


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    inputs = linear8_inputs(Linear8(3, 5, 150, layout="sliced"), seeded())
    x, x_scales, w, w_scales = map(lab.guarded, inputs)
    part = lab.guarded(lab.poisoned((3, 3, 5), torch.int32))
    out = lab.guarded(lab.poisoned((3, 5), torch.float16))
    whole = lab.guarded(lab.poisoned((3, 5), torch.float16))
    sizes, tiles = (3, 5, 150, 162, 162), dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=64)
    with lab.interpreted():
        for n_splits, target in [(3, part), (1, whole)]:
            _w8a8_gemm_kernel[(1, 1, n_splits)](
                *(x, x_scales, w, w_scales, target, *sizes), **tiles, SCALED=n_splits == 1
            )
        _w8a8_sum_kernel[(3, 1)](part, x_scales, w_scales, out, 5, 15, 3, BLOCK_N=16)
    for name, tensor in dict(part=part, out=out, whole=whole).items():
        lab.check_guard(name, tensor)
    assert_right(inputs, out)
    assert torch.equal(out, whole)


def changed(**changes):
    """Arguments of a small valid call with some replaced."""
    names = ("x", "x_scales", "w", "w_scales")
    inputs = linear8_inputs(Linear8(2, 3, 8), seeded())
    return dict(zip(names, inputs, strict=True), n_splits=1) | changes


WIDE = torch.zeros(3, 131072, dtype=torch.int8)
BAD = {
    "x: shape": dict(x=WIDE[0]),
    "x: dtype": dict(x=torch.ones(2, 8)),
    "x: last stride 2": dict(x=WIDE[:2, :16:2]),
    "x: 131072 columns": dict(x=WIDE[:2], w=WIDE),
    "x_scales: shape": dict(x_scales=torch.ones(3)),
    "x_scales: dtype": dict(x_scales=torch.ones(2).half()),
    "x_scales: last stride 2": dict(x_scales=torch.ones(4)[::2]),
    "w: shape": dict(w=WIDE[:, :9]),
    "w: dtype": dict(w=WIDE[:, :8].byte()),
    "w_scales: shape": dict(w_scales=torch.ones(3, 1)),
    "w_scales: dtype": dict(w_scales=torch.ones(3).double()),
    "dtype: torch.int32": dict(dtype=torch.int32),
    "n_splits: 0": dict(n_splits=0),
    "n_splits: 33": dict(n_splits=33),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        w8a8_linear(**changed(**BAD[start]))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""
    one = linear8_inputs(Linear8(1, 1, 1), seeded())
    compiled = compile_launches(lambda: w8a8_linear(*one), target)
    assert [kernel.name for kernel in compiled] == [*STREAMING]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_tiles_that_write_the_result_fit(target: str) -> None:
    """The production launches split K; a single split scales in the same kernel."""
    w = torch.empty(4096, 4096, dtype=torch.int8, device="meta")
    scales = torch.empty(4096, device="meta")
    launches = {"": lambda: w8a8_linear(w, scales, w, scales, n_splits=1)}
    rows = table.build(launches, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    rows = [dataclasses.asdict(case) for case in LINEAR8_CASES]
    axes = ("columns", "rows", "outputs", "dtype", "n_splits", "layout")
    for i, one in enumerate(axes):
        for two in axes[i + 1 :]:
            values = [{row[axis] for row in rows} for axis in (one, two)]
            pairs = {(row[one], row[two]) for row in rows}
            assert len(pairs) == len(values[0]) * len(values[1]) > 1
