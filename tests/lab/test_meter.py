"""The meter counts bytes and catches planted faults; guards and poison show the rest."""

import pytest
import torch
import triton
import triton.language as tl

from course import lab


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < n, other=0.0) if MASK_LOAD else tl.load(x + o)
    if MASK_STORE:
        tl.store(out + o, b_x, mask=o < n)
    else:
        tl.store(out + o, b_x)


@triton.jit
def _overlapping(x, out, STEP: tl.constexpr):
    o = tl.program_id(0) * STEP + tl.arange(0, 4)
    tl.store(out + o, tl.load(x + o))


@triton.jit
def _prefix(x):
    i = tl.program_id(0)
    tl.store(x + i + 1, tl.load(x + i) + 1)


@triton.jit
def _shift_down(x):
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i + 1))


@triton.jit
def _scalar(x, offset):
    tl.store(x + offset, 1.0)


@triton.jit
def _add(x):
    tl.atomic_add(x, 1.0)


@triton.jit
def _matmul(a, b, out):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(out + i * 16 + j, tl.dot(tl.load(a + i * 16 + j), tl.load(b + i * 16 + j)))


def copy(x: torch.Tensor, out: torch.Tensor, load: bool = True, store: bool = True) -> None:
    n = x.numel()
    _copy[(triton.cdiv(n, 8),)](x, out, n, BLOCK=8, MASK_LOAD=load, MASK_STORE=store)


def test_bytes_by_argument() -> None:
    with lab.metered() as meter:
        copy(torch.ones(19), torch.zeros(19))
    assert (meter.loads, meter.stores, meter.launches) == (76, 76, 1)
    assert meter.read == {"x": 76} and meter.written == {"out": 76}


def test_flops() -> None:
    a = torch.ones(16, 16)
    with lab.metered() as meter:
        _matmul[(1,)](a, a, torch.zeros(16, 16))
    assert meter.flops == 2 * 16**3


def test_an_atomic_counts_as_load_and_store_and_is_no_race() -> None:
    x = torch.zeros(1)
    with lab.metered() as meter:
        _add[(5,)](x)
    assert (x.item(), meter.loads, meter.stores) == (5.0, 20, 20)


@pytest.mark.parametrize("load, verb, name", [(False, "reads", "x"), (True, "writes", "out")])
def test_a_missing_mask_is_outside(load: bool, verb: str, name: str) -> None:
    fault = (
        rf"_copy, program \(2, 0, 0\).*{verb} outside every argument.*past the end of {name} \[19\]"
    )
    with lab.metered(), pytest.raises(lab.KernelError, match=fault):
        copy(torch.ones(19), torch.zeros(19), load, not load)


def test_a_view_ends_where_it_ends_not_where_its_storage_does() -> None:
    base = torch.ones(64)
    with lab.metered(), pytest.raises(lab.KernelError, match="past the end of x"):
        copy(base[:19], torch.zeros(19), load=False)


def test_between_the_rows_of_a_sliced_view() -> None:
    view = torch.zeros(4, 8)[:, :5]
    with lab.metered():
        _scalar[(1,)](view, 8 + 4)
    with lab.metered(), pytest.raises(lab.KernelError, match="between the rows of x"):
        _scalar[(1,)](view, 8 + 5)


def test_before_the_start() -> None:
    with lab.metered(), pytest.raises(lab.KernelError, match="starts 2 elements before x"):
        _scalar[(1,)](torch.zeros(8)[4:], -2)


def test_interleaved_views_are_told_apart() -> None:
    pair = torch.zeros(4, 2)
    with lab.metered() as meter:
        _overlapping[(1,)](pair[:, 0].contiguous(), pair.view(-1)[:4], STEP=4)
    assert meter.read == {"x": 16} and meter.written == {"out": 16}


def test_two_programs_that_store_the_same_element() -> None:
    fault = r"program \(1, 0, 0\).*race: stores to out\[3\].*program \(0, 0, 0\) writes"
    with lab.metered(), pytest.raises(lab.KernelError, match=fault):
        _overlapping[(2,)](torch.ones(8), torch.zeros(8), STEP=3)
    with lab.metered():
        _overlapping[(2,)](torch.ones(8), torch.zeros(8), STEP=4)


def test_a_program_that_reads_what_another_writes() -> None:
    with lab.metered(), pytest.raises(lab.KernelError, match=r"race: loads x\[1\]"):
        _prefix[(3,)](torch.zeros(4))


def test_a_store_to_what_another_program_has_read() -> None:
    fault = r"race: stores to x\[1\], which program \(0, 0, 0\) reads"
    with lab.metered(), pytest.raises(lab.KernelError, match=fault):
        _shift_down[(2,)](torch.zeros(4))


def test_launches_do_not_race_with_each_other() -> None:
    x, out = torch.ones(19), torch.zeros(19)
    with lab.metered() as meter:
        copy(x, out)
        copy(out, x)
    assert meter.launches == 2


def test_poison_shows_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        assert lab.poisoned((2, 3), dtype).float().isnan().all()
    assert lab.poisoned((3,), torch.int32).tolist() == [-1, -1, -1]
    assert lab.poisoned((0, 4), torch.float32).shape == (0, 4)


def test_poisoning_reaches_what_a_launcher_allocates() -> None:
    empty = torch.empty
    with lab.poisoning():
        x = torch.ones(3)
        assert torch.empty(2, 2).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert x.new_empty(4, dtype=torch.float16).isnan().all()
        assert torch.empty_like(torch.ones(1, 1, 2)[..., 0]).isnan().all()  # last stride 2
    assert torch.empty is empty


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(12.0).view(2, 6)[:, ::2],
        torch.arange(6.0).view(2, 3).T,
        torch.arange(3.0).expand(4, 3),
        torch.arange(3, dtype=torch.int32),
        torch.ones(2, 0),
    ],
)
def test_guarded_copies_keep_values_and_strides(tensor: torch.Tensor) -> None:
    copy = lab.guarded(tensor)
    assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
    lab.check_guard("copy", copy)


def test_a_store_beside_a_guarded_tensor_is_found() -> None:
    out = lab.guarded(torch.zeros(19))
    with lab.interpreted():
        copy(torch.ones(24)[:19], out, store=False)
    with pytest.raises(lab.KernelError, match=r"out: 5 elements .*, the first 19 elements"):
        lab.check_guard("out", out)


def test_a_load_beside_a_guarded_tensor_gives_nan() -> None:
    out = torch.zeros(24)
    with lab.interpreted():
        copy(lab.guarded(torch.ones(19)), out[:19], load=False, store=False)
    assert out[:19].tolist() == [1.0] * 19 and out[19:].isnan().all()


def test_a_store_into_the_gap_of_a_guarded_view_is_found() -> None:
    view = lab.guarded(torch.zeros(4, 8)[:, :5])
    with lab.interpreted():
        _scalar[(1,)](view, 8 + 5)
    with pytest.raises(lab.KernelError, match="x: 1 elements"):
        lab.check_guard("x", view)
