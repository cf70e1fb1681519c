"""The int8 product against exact integers, on sizes and layouts that break kernels."""

import numpy as np
import pytest
import torch

from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.cases.gemm_w8a8 import CASES, STREAMING, Product, product_inputs
from kernels.gemm_w8a8 import _w8a8_linear_kernel, w8a8_linear, w8a8_linear_ref

ON_CPU = not torch.cuda.is_available()
EPS = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(x, x_scales, w, w_scales) -> torch.Tensor:
    """In int64 and float64."""
    total = x.cpu().numpy().astype(np.int64) @ w.cpu().numpy().astype(np.int64).T
    scales = np.outer(x_scales.cpu().double().numpy(), w_scales.cpu().double().numpy())
    return torch.from_numpy(total * scales)


def assert_right(inputs, y, dtype) -> None:
    """Element by element: only the last roundings may show."""
    want = exact(*inputs)
    assert y.shape == want.shape and y.dtype == dtype and y.is_contiguous()
    limit = want.abs() * (EPS[dtype] + 2**-22) + 2**-24
    assert ((y.cpu().double() - want).abs() <= limit).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_integers(case: Product, device, running) -> None:
    inputs = product_inputs(case, seeded(), device)
    with running():
        assert_right(inputs, w8a8_linear(*inputs, case.dtype), case.dtype)


@pytest.mark.parametrize("dtype", EPS)
def test_the_reference_matches_integers(dtype, device) -> None:
    inputs = product_inputs(Product(5, 7, 300), seeded(), device)
    assert_right(inputs, w8a8_linear_ref(*inputs, dtype), dtype)


def test_the_product_of_quantized_rows_is_near_the_product(device, running) -> None:
    from kernels.quantize import quantize_int8_rows

    x, w = torch.randn(2, 9, 64, generator=seeded()).to(device).unbind()
    with running():
        y = w8a8_linear(*quantize_int8_rows(x), *quantize_int8_rows(w), torch.float32)
    error = (y - x @ w.T).square().mean().sqrt()
    assert 1e-3 < error < 2 * 8 * 4 / 127 / 12**0.5  # two roundings of 64 terms each


@pytest.mark.skipif(not ON_CPU, reason="large in the interpreter's tiles alone")
def test_the_longest_sum_fits_32_bits(running) -> None:
    """2**17 - 1 products of -128 with itself."""
    x = torch.full((1, 2**17 - 1), -128, dtype=torch.int8)
    one = torch.ones(1)
    with running(), pretending("sm_90"):
        y = w8a8_linear(x, one, x, one, torch.float32)
    assert y.item() == 128 * 128 * (2**17 - 1) < 2**31


def test_scales_of_any_size(device, running) -> None:
    x, x_scales, w, w_scales = product_inputs(Product(3, 4, 40), seeded(), device)
    inputs = x, x_scales * 1e-18, w, w_scales * 1e18
    with running():
        assert_right(inputs, w8a8_linear(*inputs, torch.float32), torch.float32)
        over = w8a8_linear(x, x_scales * 1e9, w, w_scales)
        assert over.isinf().all() and torch.equal(over.sign(), exact(*inputs).sign().half().to(x))
        x_scales = x_scales.clone()
        x_scales[1] = float("nan")
        y = w8a8_linear(x, x_scales, w, w_scales)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_inputs_stay(device, running) -> None:
    inputs = product_inputs(Product(17, 20, 40), seeded(), device)
    before = [x.clone() for x in inputs]
    with running():
        assert torch.equal(w8a8_linear(*inputs), w8a8_linear(*inputs))
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_empty() -> None:
    from course.lab.meter import metered

    def call(M: int, N: int, K: int) -> torch.Tensor:
        return w8a8_linear(*product_inputs(Product(M, N, K), seeded()))

    with metered() as meter:
        assert call(0, 3, 8).shape == (0, 3) and call(3, 0, 8).shape == (3, 0)
        assert meter.launches == 0
        assert torch.equal(call(2, 3, 0), torch.zeros(2, 3, dtype=torch.float16))


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_one_row_reads_the_weights_once() -> None:
    """At 4,096 columns, 512 of the 4,096 rows: the tiles are alike."""
    from course.lab.meter import metered

    inputs = product_inputs(Product(1, 512, 4096), seeded())
    with metered() as meter, pretending("sm_90"):
        w8a8_linear(*inputs)
    assert meter.read["w"] == inputs[2].nbytes
    compulsory = sum(t.nbytes for t in inputs) + 2 * 512
    assert meter.loads + meter.stores <= 1.25 * compulsory


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
def test_the_tiles_do_little_in_vain() -> None:
    from course.lab.meter import metered

    inputs = product_inputs(Product(250, 380, 500), seeded())
    with metered() as meter, pretending("sm_90"):
        w8a8_linear(*inputs)
    padded = 2 * 256 * 384 * 512
    assert meter.flops == padded <= 1.1 * 2 * 250 * 380 * 500


@pytest.mark.parametrize("which", [0, 2])
def test_offsets_beyond_32_bits(which: int, device, running) -> None:
    inputs = list(product_inputs(Product(3, 3, 16), seeded(), device))
    storage = torch.UntypedStorage(2**31 + 16, device=device)
    far = torch.empty(0, dtype=torch.int8, device=device).set_(storage)
    inputs[which] = far.as_strided((3, 16), (2**30, 1)).copy_(inputs[which])
    with running():
        assert_right(inputs, w8a8_linear(*inputs), torch.float16)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_output() -> None:
    from course import lab

    inputs = [lab.guarded(x) for x in product_inputs(Product(17, 20, 40), seeded())]
    y = lab.guarded(lab.poisoned((17, 20), torch.float16))
    with lab.interpreted():
        _w8a8_linear_kernel[(2, 2)](
            *(*inputs, y, 17, 20, 40, 40, 40), BLOCK_M=16, BLOCK_N=16, BLOCK_K=32
        )
    lab.check_guard("y", y)
    assert_right(inputs, y, torch.float16)


X, S = torch.ones(2, 4, dtype=torch.int8), torch.ones(2)
BAD = {
    "x: shape": (X[0], S, X, S),
    "x: dtype": (X.float(), S, X, S),
    "x: last stride": (torch.ones(2, 8, dtype=torch.int8)[:, ::2], S, X, S),
    "x: 131072 columns": (*(torch.ones(1, 2**17, dtype=torch.int8), S[:1]) * 2,),
    "x_scales: shape": (X, torch.ones(3), X, S),
    "x_scales: dtype": (X, S.half(), X, S),
    "w: shape": (X, S, X[:, :3], S),
    "w: dtype": (X, S, X.to(torch.uint8), S),
    "w: device": (X, S, X.to("meta"), S),
    "w: 1048577 rows": (*(X, S, X[:1].expand(2**20 + 1, 4), torch.ones(2**20 + 1)),),
    "w_scales: shape": (X, S, X, torch.ones(4)),
    "w_scales: last stride": (X, S, X, torch.ones(4)[::2]),
    "dtype: torch.float64": (X, S, X, S, torch.float64),
}


@pytest.mark.parametrize("start", BAD)
def test_bad_arguments_are_named(start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        w8a8_linear(*BAD[start])


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_all_sizes_one_compile(target: str) -> None:
    one, scale = torch.ones(1, 1, dtype=torch.int8), torch.ones(1)
    compiled = compile_launches(lambda: w8a8_linear(one, scale, one, scale), target)
    assert [kernel.name for kernel in compiled] == list(STREAMING)
