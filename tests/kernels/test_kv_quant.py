"""The quantised KV cache: codes bit for bit, attention against float64 over what they stand for."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from course.lab.launch import pretending
from kernels.attention_decode import decode_attention_ref
from kernels.cases import error_limit, shifted
from kernels.cases.kv_quant import (
    INT8_CASES,
    KIVI_CASES,
    STREAMING,
    Int8,
    Kivi,
    int8_inputs,
    kivi_inputs,
)
from kernels.kv_quant import (
    _kivi_decode_kernel,
    _kivi_pack_kernel,
    int8_decode_attention,
    int8_decode_attention_ref,
    kivi_decode_attention,
    kivi_decode_attention_ref,
    kivi_pack,
    kivi_pack_ref,
    kivi_unpack_ref,
)

ON_CPU = not torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16]
RMS_RATIO = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
AXIS = {"channel": 1, "token": 3}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# --- packing ---


def packed(x: torch.Tensor, bits: int, group: int, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and (scale, zero) pairs, a group at a time, with NumPy's own rounding."""
    dim, per_word = AXIS[axis], 32 // bits
    rows = np.moveaxis(x.cpu().float().numpy(), dim, -1)
    words = np.zeros((*rows.shape[:-1], rows.shape[-1] // per_word), np.uint32)
    meta = np.zeros((*rows.shape[:-1], rows.shape[-1] // group, 2), np.float16)
    for place in np.ndindex(meta.shape[:-1]):
        first = place[-1] * group
        values = rows[place[:-1]][first : first + group]
        zero = np.float16(values.min())
        scale = np.float16((values.max() - values.min()) / np.float32(2**bits - 1))
        meta[place] = scale, zero
        for i, value in enumerate(values if scale else ()):
            code = int(np.rint((value - np.float32(zero)) / np.float32(scale)))
            code = min(max(code, 0), 2**bits - 1)
            word, position = divmod(first + i, per_word)
            words[place[:-1]][word] |= np.uint32(code << bits * position)
    return np.moveaxis(words, -1, dim), np.moveaxis(meta, -2, dim)


def unpacked(codes: torch.Tensor, meta: torch.Tensor, bits: int, group: int, axis: str):
    """What the codes stand for, float64 [B, S, Hkv, D]."""
    dim, per_word = AXIS[axis], 32 // bits
    codes = codes.cpu().numpy().view(np.uint32) if codes.is_contiguous() else codes.cpu().numpy()
    pairs = np.ascontiguousarray(meta.cpu().numpy())[..., None].view(np.float16).astype(float)
    index = np.arange(codes.shape[dim] * per_word)
    shape = [1] * 4
    shape[dim] = -1
    words = np.take(codes, index // per_word, dim).astype(np.uint32)
    code = words >> (bits * (index % per_word)).reshape(shape).astype(np.uint32)
    scale, zero = np.moveaxis(np.take(pairs, index // group, dim), -1, 0)
    return torch.from_numpy((code & (2**bits - 1)) * scale + zero)


def assert_packed(got, x: torch.Tensor, bits: int, group: int, axis: str) -> None:
    words, meta = packed(x, bits, group, axis)
    assert [t.dtype for t in got] == [torch.int32] * 2
    np.testing.assert_array_equal(got[0].cpu().numpy().view(np.uint32), words)
    halves = got[1].cpu().contiguous().numpy()[..., None].view(np.float16)
    np.testing.assert_array_equal(halves, meta)


PACKING = [
    (2, 16, (1, 32, 1, 17), "channel", torch.float32),
    (4, 32, (1, 96, 3, 5), "channel", torch.bfloat16),
    (2, 64, (1, 64, 2, 33), "channel", torch.float16),
    (4, 128, (1, 128, 1, 1), "channel", torch.float16),
    (2, 16, (1, 17, 1, 80), "token", torch.float16),
    (4, 32, (1, 5, 3, 96), "token", torch.float32),
    (2, 128, (1, 1, 1, 128), "token", torch.bfloat16),
    (4, 64, (1, 33, 2, 64), "token", torch.bfloat16),
]


@pytest.mark.parametrize("bits, group, shape, axis, dtype", PACKING)
def test_codes_are_exact(bits, group, shape, axis, dtype, device, running) -> None:
    x = torch.randn(shape, generator=seeded()) * torch.randn(shape[-1], generator=seeded(1)).exp()
    x = x.to(device, dtype)
    with running():
        got = kivi_pack(x, bits, group, axis)
    assert_packed(got, x, bits, group, axis)
    for one, two in zip(got, kivi_pack_ref(x, bits, group, axis), strict=True):
        assert torch.equal(one, two) and one.is_contiguous()
    values = kivi_unpack_ref(*got, bits, group, axis)
    torch.testing.assert_close(values.cpu().double(), unpacked(*got, bits, group, axis))


@pytest.mark.parametrize("axis", AXIS)
def test_packing_any_strides(axis: str, device, running) -> None:
    dense = torch.randn(2, 16, 2, 32, generator=seeded(), dtype=torch.float16).to(device)
    fused = torch.cat([dense, dense], -1)[..., :32]
    first = dense.transpose(1, 2).contiguous().transpose(1, 2)
    want = kivi_pack_ref(dense, 2, 16, axis)
    with running():
        for x in (fused, first, shifted(dense)):
            for one, two in zip(kivi_pack(x, 2, 16, axis), want, strict=True):
                assert torch.equal(one, two)
        shared = kivi_pack(dense[:1].expand(3, -1, -1, -1), 2, 16, axis)
    for one, two in zip(shared, want, strict=True):
        assert torch.equal(one, two[:1].expand_as(one))


@pytest.mark.parametrize("axis", AXIS)
@pytest.mark.parametrize("bits", [2, 4])
def test_ties_constants_and_extremes(bits: int, axis: str, device, running) -> None:
    """Halves go to the even code; a scale of 0 gives codes 0, and the zero point."""
    levels = 2**bits - 1
    ties = torch.arange(16) % (2 * levels + 1) / 2  # 0 to levels in halves: scale 1, zero 0
    ties[-1] = levels
    tiny = torch.full((16,), 0.125)  # a range that as a scale rounds to 0
    tiny[1::2] += 2.0**-26
    large = torch.tensor([32768.0, -32768.0] * 8)
    subnormal = torch.arange(16) * 2.0**-24
    negative = torch.full((16,), -0.0)
    constant = torch.full((16,), 3000.7)  # float16 has 3000: the difference would be a code
    rows = torch.stack([ties, ties - 100, tiny, large, subnormal, negative, constant])
    x = rows[None, :, None] if axis == "token" else rows.T[None, :, None]
    x = x.contiguous().to(device)
    with running():
        codes, meta = kivi_pack(x, bits, 16, axis)
    assert_packed((codes, meta), x, bits, 16, axis)
    values = unpacked(codes, meta, bits, 16, axis).squeeze()
    values = values if axis == "token" else values.T
    even = torch.round(ties.double())  # torch rounds halves to even
    assert torch.equal(values[0], even) and torch.equal(values[1], even - 100)
    assert torch.equal(values[2], torch.full((16,), 0.125, dtype=torch.double))
    assert torch.equal(values[6], torch.full((16,), 3000.0, dtype=torch.double))


@pytest.mark.parametrize("shape", [(0, 16, 1, 16), (2, 0, 1, 16), (2, 16, 0, 16), (2, 16, 1, 0)])
@pytest.mark.parametrize("axis", AXIS)
def test_packing_nothing(axis: str, shape: tuple[int, ...], device, running) -> None:
    with running() as meter:
        codes, meta = kivi_pack(torch.empty(shape, device=device), 2, 16, axis)
    want = kivi_pack_ref(torch.empty(shape), 2, 16, axis)
    assert (codes.shape, meta.shape) == (want[0].shape, want[1].shape)
    assert not ON_CPU or meter.launches == 0


@pytest.mark.parametrize("axis", AXIS)
def test_packing_beyond_32_bits(axis: str, device, running) -> None:
    """A head, a sequence and a token that lie 2^31 elements away."""
    for dim, size in ((0, 3), (1, 17), (2, 3)):
        shape = [1, 16, 1, 16]
        shape[dim] = 32 if dim == 1 else size
        if dim == 1 and axis == "token":
            shape[dim] = 17
        stride = 2**31 // (shape[dim] - 1) + 1
        strides = [16, 16, 16, 1]
        strides[dim] = stride
        furthest = (shape[dim] - 1) * stride
        assert furthest >= 2**31
        storage = torch.UntypedStorage(2 * (furthest + 16 * 33), device=device)
        far = torch.empty(0, dtype=torch.float16, device=device).set_(storage)
        x = torch.randn(shape, generator=seeded(), dtype=torch.float16).to(device)
        spread = far.as_strided(shape, strides)
        spread.copy_(x)
        with running():
            got = kivi_pack(spread, 2, 16, axis)
        for one, two in zip(got, kivi_pack_ref(x, 2, 16, axis), strict=True):
            assert torch.equal(one, two)


# --- attention ---


def exact(inputs, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64 over the dequantised cache, one query head at a time.

    rounded: keys and values rounded to the dtype of q, as the kernel has them.
    """
    q, keys, values = inputs[0].cpu(), *dequantised(inputs, rounded)
    B, H, D = q.shape
    out, lse = np.zeros((B, H, D)), np.full((B, H), -np.inf)
    for b in range(B):
        k, v = keys[b].numpy(), values[b].numpy()
        group = H // k.shape[1]
        for h in range(H if len(k) else 0):
            scores = k[:, h // group] @ q[b, h].double().numpy() / math.sqrt(D)
            top = scores.max()
            weights = np.exp(scores - top)
            out[b, h] = weights @ v[:, h // group] / weights.sum()
            lse[b, h] = top + np.log(weights.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def dequantised(inputs, rounded: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The keys and the values of each sequence, float64 [tokens, Hkv, D]."""
    dtype = inputs[0].dtype if rounded else torch.float64
    if len(inputs) == 6:
        _, k, k_scale, v, v_scale, lens = (x.cpu() for x in inputs)
        k, v = k * k_scale.double()[..., None], v * v_scale.double()[..., None]
        v = v.to(dtype).double()  # the scale of a key is applied to its score
        return tuple([x[b, :n] for b, n in enumerate(lens.tolist())] for x in (k, v))
    _, kc, km, vc, vm, lens, kr, vr, rest, bits, group = inputs
    cache = (unpacked(kc, km, bits, group, "channel"), unpacked(vc, vm, bits, group, "token"))
    return tuple(
        [
            torch.cat([old[b, :n].to(dtype).double(), new[b, :r].cpu().double()])
            for b, (n, r) in enumerate(zip(lens.tolist(), rest.tolist(), strict=True))
        ]
        for old, new in zip(cache, (kr, vr), strict=True)
    )


def eager(inputs) -> torch.Tensor:
    """Torch's own attention in q's dtype over the dequantised cache."""
    q = inputs[0].cpu()
    out = torch.zeros_like(q)
    for b, (k, v) in enumerate(zip(*dequantised(inputs, False), strict=True)):
        if len(k):
            k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (k, v))
            query = q[b, None, :, None]
            out[b] = F.scaled_dot_product_attention(query, k, v, enable_gqa=True)[0, :, 0]
    return out


def assert_right(inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Near what the codes stand for, as eager torch is; nearer to that rounded to 16 bits."""
    want, _ = exact(inputs)
    error = (out.cpu().double() - want).abs()
    assert error.max().item() <= error_limit(want, eager(inputs), out.dtype)
    want, want_lse = exact(inputs, rounded=True)
    error = out.cpu().double() - want
    assert (error.square().mean() / want.square().mean()).sqrt() < RMS_RATIO[out.dtype]

    empty = want_lse.isneginf()
    assert not out.cpu()[empty].any()
    assert torch.equal(torch.isneginf(lse.cpu()), empty)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


def call(case: Kivi | Int8, inputs, **options):
    launcher = kivi_decode_attention if isinstance(case, Kivi) else int8_decode_attention
    return launcher(*inputs, **dict(n_splits=case.n_splits) | options)


def drawn(case: Kivi | Int8, device):
    return (kivi_inputs if isinstance(case, Kivi) else int8_inputs)(case, seeded(), device)


@pytest.mark.parametrize("case", [*KIVI_CASES, *INT8_CASES], ids=str)
def test_matches_float64(case: Kivi | Int8, device, running) -> None:
    inputs = drawn(case, device)
    with running():
        out, lse = call(case, inputs, return_lse=True)
    assert out.shape == inputs[0].shape and out.dtype == case.dtype
    assert lse.shape == out.shape[:2] and lse.dtype == torch.float32
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_references_match_float64(bits: int, dtype, device) -> None:
    if bits == 8:
        inputs = drawn(Int8((9, 0, 40), 3, dtype=dtype), device)
        out, lse = int8_decode_attention_ref(*inputs)
    else:
        inputs = drawn(Kivi((16, 0, 0), (9, 0, 40), bits, 16, 3, dtype=dtype), device)
        out, lse = kivi_decode_attention_ref(*inputs)
    want, want_lse = exact(inputs)
    assert (out.cpu().double() - want).abs().max() <= torch.finfo(dtype).eps / 2 * want.abs().max()
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-6)


ROUND_BLOCKS = [
    Kivi((0, 16, 32, 48, 64), (0, 31, 32, 33, 1), 2, 16, kv_heads=1, n_splits=2),
    Kivi((0, 0, 0, 16, 48), (1, 7, 40, 0, 0), 4, 16, kv_heads=1, n_splits=3),
    Kivi((128,), (0,), 2, 128, 16, 1, 128, slots=128, rest=0),
    Kivi((0,), (40,), 2, 16, 2, 1, slots=0),
    Kivi((16,), (0,), 4, 16, 1, 1, slots=16, rest=1),
    Int8((0, 15, 16, 17, 31, 40), kv_heads=1, head_dim=20, n_splits=2),
    Int8((1,), 16, 1, 1, slots=1),
    Int8((5, 33), 5, 1, 33, torch.bfloat16, n_splits=9),
]


@pytest.mark.parametrize("case", ROUND_BLOCKS, ids=str)
def test_lengths_around_blocks_and_smallest_sizes(case, device, running) -> None:
    inputs = drawn(case, device)
    with running():
        out, lse = call(case, inputs, return_lse=True)
    assert_right(inputs, out, lse)


SMALL = [Kivi((64, 16), (1, 35), 2, 16, 3, kv_heads=1), Int8((33, 20), 3, kv_heads=1)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_twice_gives_the_same_bits_and_leaves_the_inputs(case, device, running) -> None:
    inputs = drawn(case, device)
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with running():
        first = call(case, inputs, n_splits=2)
        second = call(case, inputs, n_splits=2)
    assert torch.equal(first, second)
    for x, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_number_of_splits_does_not_matter(case, device, running) -> None:
    inputs = drawn(case, device)
    with running():
        whole, lse = call(case, inputs, n_splits=1, return_lse=True)
        for n_splits in (2, 3):
            out, other = call(case, inputs, n_splits=n_splits, return_lse=True)
            torch.testing.assert_close(out, whole, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(other, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not ON_CPU, reason="the interpreter's small blocks make splits cheap")
@pytest.mark.parametrize(
    "case, splits",
    [
        (Kivi((32,), (0,), kv_heads=1, slots=48, rest=16), 2),  # two blocks of 32
        (Kivi((16,), (40,), kv_heads=1, slots=16, rest=70), 3),  # the newest tokens have more
        (Int8((33,), kv_heads=1, slots=40), 3),  # three of 16
    ],
    ids=str,
)
def test_splits_are_capped_by_the_blocks_of_the_cache(case, splits: int, running) -> None:
    inputs = drawn(case, "cpu")
    with running() as meter:
        call(case, inputs, n_splits=100)
    assert meter.written["part_lse"] == splits * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype, device, running) -> None:
    case = Kivi((64, 32), (17, 3), 4, 16, 5, 1, 32, dtype, n_splits=2)
    q, *cache = drawn(case, device)
    with running():
        out, lse = call(case, (q * 40, *cache), return_lse=True)
    want, want_lse = exact((q * 40, *cache), rounded=True)
    assert (out.cpu().double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-6, atol=2e-5)


def test_largest_values(device, running) -> None:
    """32768 * 32768 * 32 overflows float16 and not float32; so does no scale."""
    case = Kivi((64,), (20,), 2, 16, 2, 1, 32, n_splits=2)
    generator = seeded()
    q, k, v = torch.randn(3, 64, 2, 32, generator=generator).sign() * 32768
    q, k, v = (x.half().to(device) for x in (q[:1], k[None, :, :1], v[None, :, :1]))
    packs = (*kivi_pack_ref(k, 2, 16, "channel"), *kivi_pack_ref(v, 2, 16, "token"))
    lens = [torch.tensor([n], dtype=torch.int32, device=device) for n in (64, 20)]
    inputs = (q, *packs, lens[0], k[:, :20], v[:, :20], lens[1], 2, 16)
    with running():
        out = call(case, inputs)
    want, _ = exact(inputs)
    assert (out.cpu().double() - want).abs().max() <= 2**-10 * want.abs().max()

    case = Int8((20,), 2, 1, 32, n_splits=2)
    q, k, k_scale, v, v_scale, seq_lens = drawn(case, device)
    inputs = (q.sign() * 65504, k, k_scale * 1e4, v, v_scale / 1e6, seq_lens)
    with running():
        out = call(case, inputs)
    want, _ = exact(inputs, rounded=True)  # values that are subnormal in float16
    assert (out.cpu().double() - want).abs().max() <= 2**-24


def test_keys_of_minus_infinity_have_no_weight(device, running) -> None:
    case = Kivi((0,), (40,), 2, 16, 2, 1, slots=16)
    q, *packs, lens, k_rest, v_rest, rest, bits, group = drawn(case, device)
    q, k_rest = q.abs(), k_rest.clone()
    k_rest[:, :32] = -math.inf  # a block, and with two splits one of them whole
    tail = (q, *packs, lens, k_rest[:, 32:], v_rest[:, 32:], rest - 32, bits, group)
    for n_splits in (1, 2):
        inputs = (q, *packs, lens, k_rest, v_rest, rest, bits, group)
        with running():
            out, lse = call(case, inputs, n_splits=n_splits, return_lse=True)
        assert_right(tail, out, lse)


def test_nan_stays_in_its_own_head(device, running) -> None:
    case = Kivi((32, 32), (5, 5), 2, 16, 3, n_splits=2)
    inputs = drawn(case, device)
    clean = kivi_decode_attention_ref(*inputs)[0]
    inputs[2][1, 1, 1] = -1  # a scale of K that is NaN
    with running():
        out = call(case, inputs)
    assert out[1, 3:].isnan().all()
    torch.testing.assert_close(out[0], clean[0], rtol=0, atol=4e-3)
    torch.testing.assert_close(out[1, :3], clean[1, :3], rtol=0, atol=4e-3)


@pytest.mark.parametrize("maker", [Kivi, Int8])
def test_empty_batch_and_empty_cache(maker, device, running) -> None:
    lens = [()] * 2 if maker is Kivi else [()]
    case = maker(*lens, slots=16)
    with running() as meter:
        assert call(case, drawn(case, device)).shape == (0, 2, 16)
        assert len(call(case, drawn(case, device), return_lse=True)) == 2
    assert not ON_CPU or meter.launches == 0
    lens = [(0, 0)] * len(lens)
    case = maker(*lens, slots=0, **(dict(rest=0) if maker is Kivi else {}))
    with running():
        out, lse = call(case, drawn(case, device), return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


# A stride of each axis of the cache at which its last row begins just beyond 32 bits.
FAR = [
    *[(Kivi((32, 32, 16), (2, 0, 5), kv_heads=1, slots=32), x, 0) for x in (1, 2, 3, 4, 6, 7)],
    *[(Kivi((64,), (33,), kv_heads=1), x, 1) for x in (1, 2, 3, 4, 6, 7)],
    *[(Kivi((16,), (3,), kv_heads=3, slots=16), x, 2) for x in (1, 2, 3, 4, 6, 7)],
    *[(Int8((3, 3, 3), kv_heads=1, slots=3), x, 0) for x in (1, 2, 3, 4)],
    *[(Int8((17,), kv_heads=1, slots=17), x, 1) for x in (1, 2, 3, 4)],
    *[(Int8((3,), kv_heads=3, slots=3), x, 2) for x in (1, 3)],
]


@pytest.mark.parametrize("case, argument, axis", FAR)
def test_offsets_beyond_32_bits(case, argument: int, axis: int, device, running) -> None:
    inputs = drawn(case, device)
    near = inputs[argument]
    stride = 2**31 // (near.shape[axis] - 1) + 1
    strides = [*near.stride()]
    strides[axis] = stride
    furthest = (near.shape[axis] - 1) * stride
    assert furthest >= 2**31
    # Gigabytes, of which a few pages are ever touched.
    storage = torch.UntypedStorage((furthest + near.numel()) * near.itemsize, device=device)
    far = torch.empty(0, dtype=near.dtype, device=device).set_(storage)
    spread = far.as_strided(near.shape, strides)
    spread.copy_(near)
    with running():
        out = call(case, (*inputs[:argument], spread, *inputs[argument + 1 :]), n_splits=1)
    reference = kivi_decode_attention_ref if isinstance(case, Kivi) else int8_decode_attention_ref
    torch.testing.assert_close(out, reference(*inputs)[0], rtol=0, atol=4e-3)


def test_a_cache_of_16_bits_gives_nearly_the_same(device, running) -> None:
    """End to end: 4 bits lose little, where K has a large channel; per token they would."""
    k, v = torch.randn(2, 1, 64, 1, 64, generator=seeded()).to(device)
    k[..., 5] *= 20
    q = torch.randn(1, 2, 64, generator=seeded(1)).half().to(device)
    lens = torch.tensor([64], dtype=torch.int32, device=device)
    none, zero = k[:, :0].half(), torch.zeros_like(lens)
    with running():
        packs = (*kivi_pack(k, 4, 32, "channel"), *kivi_pack(v, 4, 32, "token"))
        out = kivi_decode_attention(q, *packs, lens, none, none, zero, 4, 32)
    want, _ = decode_attention_ref(q.float(), k, v, lens)
    assert (out - want).norm() < 0.15 * want.norm()


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_reads_the_cache_once(bits: int) -> None:
    """At most 1.25 times the bytes of codes, scales and newest tokens, at a real GPU's tile."""
    from course.lab.meter import metered

    if bits == 8:
        case = Int8((1024,) * 4, 4, 1, 128, n_splits=4, slots=1024)
        names = ("k", "k_scale", "v", "v_scale")
    else:
        lens = (896,) * 4, (128,) * 4
        case = Kivi(*lens, bits, 32, 4, 1, 128, n_splits=4, slots=896, rest=128)
        names = ("k_codes", "k_meta", "v_codes", "v_meta", "k_rest", "v_rest")
    inputs = drawn(case, "cpu")
    with metered() as meter, pretending("sm_90"):
        call(case, inputs)
    cache = [x for x in inputs[1:] if isinstance(x, torch.Tensor) and x.dim() > 1]
    assert [meter.read[name] for name in names] == [x.nbytes for x in cache]
    assert meter.loads <= 1.25 * sum(x.nbytes for x in cache)
    useful = 4 * 4 * 4 * 1024 * 128
    assert meter.flops == useful * 16 // 4  # four query heads fill a tile of sixteen rows


@pytest.mark.skipif(not ON_CPU, reason="meters the interpreter")
@pytest.mark.parametrize("axis", AXIS)
def test_packs_in_one_pass(axis: str) -> None:
    from course.lab.meter import metered

    x = torch.randn(1, 256, 2, 128, generator=seeded(), dtype=torch.float16)
    with metered() as meter, pretending("sm_90"):
        got = kivi_pack(x, 2, 32, axis)
    assert meter.loads == x.nbytes
    assert meter.stores == sum(t.nbytes for t in got)


@pytest.mark.skipif(not ON_CPU, reason="interpreted with guarded memory")
def test_writes_nothing_around_its_outputs() -> None:
    from course import lab

    case = Kivi((48, 16), (9, 0), 2, 16, 3, 2, 48, slots=64, rest=9)
    *tensors, bits, group = drawn(case, "cpu")
    tensors = [lab.guarded(x) for x in tensors]
    strides = [tensors[0].stride()[:2], *(tensors[i].stride()[:3] for i in (1, 2, 3, 4, 6, 7))]
    out = lab.guarded(lab.poisoned((2, 6, 1, 48), torch.float16))
    lse = lab.guarded(lab.poisoned((2, 6, 1), torch.float32))
    with lab.interpreted():
        _kivi_decode_kernel[(2, 2, 1)](
            *(*tensors, out, lse, 48**-0.5 / math.log(2)),
            *(stride for triple in strides for stride in triple),
            **dict(BITS=bits, GROUP=group, UNIT=1, HEAD_DIM=48, HEADS=3),
            **dict(BLOCK_D=64, BLOCK_H=16, BLOCK_T=32, BLOCK_R=32),
        )
    lab.check_guard("out", out)
    lab.check_guard("lse", lse)
    assert_right((*tensors, bits, group), out[:, :, 0], lse[..., 0])

    x = lab.guarded(torch.randn(1, 32, 1, 20, generator=seeded()))
    codes = lab.guarded(lab.poisoned((1, 2, 1, 20), torch.int32))
    meta = lab.guarded(lab.poisoned((1, 2, 1, 20), torch.int32))
    axes = (0, 2, 1, 3)
    with lab.interpreted():
        _kivi_pack_kernel[(4, 1, 1)](
            *(x, codes, meta, 2, 20, *(t.stride(i) for t in (x, codes, meta) for i in axes)),
            **dict(BITS=2, GROUP=16, LANES=16),
        )
    lab.check_guard("codes", codes)
    lab.check_guard("meta", meta)
    assert_packed((codes, meta), x, 2, 16, "channel")


# --- arguments ---

NAMES = {
    Kivi: [
        *("q", "k_codes", "k_meta", "v_codes", "v_meta", "packed_lens"),
        *("k_rest", "v_rest", "rest_lens", "bits", "group"),
    ],
    Int8: ["q", "k", "k_scale", "v", "v_scale", "seq_lens"],
}
VALID = {
    Kivi: Kivi((16, 32), (3, 4), 2, 16, 2, 2, 32, slots=32, rest=4),
    Int8: Int8((3, 4), 2, 2, slots=4),
}


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def bytes_(*shape: int) -> torch.Tensor:
    return ints(*shape, dtype=torch.int8)


def halves(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


BAD = [
    (Kivi, "q: shape", dict(q=halves(2, 1, 4, 32))),
    (Kivi, "q: dtype", dict(q=torch.ones(2, 4, 32))),
    (Kivi, "q: last stride 2", dict(q=halves(2, 4, 64)[..., ::2])),
    (Kivi, "q: head_dim 144", dict(q=halves(2, 4, 144), v_codes=ints(2, 32, 2, 9))),
    (Kivi, "q: head_dim 0", dict(q=halves(2, 4, 0), v_codes=ints(2, 32, 2, 0))),
    (Kivi, "bits: 3", dict(bits=3)),
    (Kivi, "bits: 2.0", dict(bits=2.0)),
    (Kivi, "group: 16.0", dict(group=16.0)),
    (Kivi, "group: 8 must be one of", dict(group=8)),
    (Kivi, "group: 64 must divide", dict(group=64)),
    (Kivi, "group: 16 must divide", dict(v_codes=ints(2, 24, 2, 2))),
    (Kivi, "k_codes: shape", dict(k_codes=ints(2, 3, 2, 32))),
    (Kivi, "k_codes: dtype", dict(k_codes=ints(2, 2, 2, 32, dtype=torch.int64))),
    (Kivi, "k_meta: shape", dict(k_meta=ints(2, 1, 2, 32))),
    (Kivi, "v_codes: shape", dict(v_codes=ints(2, 32, 2, 4))),
    (Kivi, "v_codes: dtype", dict(v_codes=halves(2, 32, 2, 2))),
    (Kivi, "v_codes: 3 KV heads", dict(v_codes=ints(2, 32, 3, 2))),
    (Kivi, "v_codes: 0 KV heads", dict(v_codes=ints(2, 32, 0, 2))),
    (Kivi, "v_codes: 1 KV heads", dict(q=halves(2, 17, 32), v_codes=ints(2, 32, 1, 2))),
    (Kivi, "v_meta: shape", dict(v_meta=ints(2, 32, 2, 1))),
    (Kivi, "k_rest: shape", dict(k_rest=halves(2, 4, 2, 16))),
    (Kivi, "k_rest: dtype", dict(k_rest=torch.ones(2, 4, 2, 32))),
    (Kivi, "v_rest: shape", dict(v_rest=halves(2, 5, 2, 32))),
    (Kivi, "packed_lens: shape", dict(packed_lens=ints(3))),
    (Kivi, "packed_lens: dtype", dict(packed_lens=ints(2, dtype=torch.int64))),
    (Kivi, "packed_lens: 33", dict(packed_lens=ints(2) * 33)),
    (Kivi, "rest_lens: -1", dict(rest_lens=-ints(2))),
    (Kivi, "rest_lens: 5", dict(rest_lens=ints(2) * 5)),
    (Kivi, "n_splits: 0", dict(n_splits=0)),
    (Kivi, "n_splits: 129", dict(n_splits=129)),
    (Int8, "q: dtype", dict(q=torch.ones(2, 4, 16))),
    (Int8, "q: head_dim 129", dict(q=halves(2, 4, 129), k=bytes_(2, 4, 2, 129))),
    (Int8, "k: shape", dict(k=bytes_(3, 4, 2, 16))),
    (Int8, "k: dtype", dict(k=ints(2, 4, 2, 16))),
    (Int8, "k: 3 KV heads", dict(k=bytes_(2, 4, 3, 16))),
    (Int8, "v: shape", dict(v=bytes_(2, 5, 2, 16))),
    (Int8, "k_scale: shape", dict(k_scale=torch.ones(2, 4, 1))),
    (Int8, "k_scale: last stride", dict(k_scale=torch.ones(2, 4, 4)[..., ::2])),
    (Int8, "v_scale: dtype", dict(v_scale=halves(2, 4, 2))),
    (Int8, "seq_lens: dtype", dict(seq_lens=ints(2, dtype=torch.int64))),
    (Int8, "seq_lens: 5", dict(seq_lens=ints(2) * 5)),
    (Int8, "n_splits: 129", dict(n_splits=129)),
]


@pytest.mark.parametrize("maker, start, changes", BAD, ids=lambda x: x if type(x) is str else "")
def test_bad_arguments_are_named(maker, start: str, changes) -> None:
    case = VALID[maker]
    arguments = dict(zip(NAMES[maker], drawn(case, "cpu"), strict=True)) | changes
    launcher = kivi_decode_attention if maker is Kivi else int8_decode_attention
    with pytest.raises(ValueError, match=f"^{start}"):
        launcher(**arguments)


@pytest.mark.parametrize(
    "start, arguments",
    [
        ("x: shape", (halves(1, 16, 16), 2, 16, "token")),
        ("x: dtype", (ints(1, 16, 1, 16), 2, 16, "token")),
        ("x: last stride", (halves(1, 16, 1, 32)[..., ::2], 2, 16, "token")),
        ("bits: 8", (halves(1, 16, 1, 16), 8, 16, "token")),
        ("group: 256", (halves(1, 16, 1, 16), 2, 256, "token")),
        ("axis: 'head'", (halves(1, 16, 1, 16), 2, 16, "head")),
        ("x: size 20 of axis 1", (halves(1, 20, 1, 16), 2, 16, "channel")),
        ("x: size 20 of axis 3", (halves(1, 16, 1, 20), 2, 16, "token")),
    ],
)
def test_bad_arguments_of_packing_are_named(start: str, arguments) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        kivi_pack(*arguments)


# --- compiled ---


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    """An argument equal to 1 is a constant to the compiler."""

    def launch() -> None:
        x, one = torch.ones(1, 16, 1, 16), torch.ones(1, dtype=torch.int32)
        keys, values = kivi_pack(x, 2, 16, "channel"), kivi_pack(x[:, :1], 2, 16, "token")
        kivi_pack(x[..., :1], 4, 16, "channel")
        q, rest = halves(1, 1, 16), halves(1, 1, 1, 16)
        values = [v.expand(1, 16, 1, 1) for v in values]
        kivi_decode_attention(q, *keys, *values, one, rest, rest, one, 2, 16)
        k, scale = torch.ones(1, 1, 1, 1, dtype=torch.int8), torch.ones(1, 1, 1)
        int8_decode_attention(halves(1, 1, 1), k, scale, k, scale, one)

    names = [kernel.name for kernel in compile_launches(launch, target)]
    assert names == ["_kivi_pack_kernel"] * 3 + ["_kivi_decode_kernel", "_int8_decode_kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_tile_fits(target: str) -> None:
    """The edge of the claim: head_dim 128, 16 query heads a KV head, the most scales."""

    def launch() -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q, lens = empty(1, 16, 128, dtype=torch.bfloat16), empty(1)
        rest = empty(1, 128, 1, 128, dtype=torch.bfloat16)
        k_codes, k_meta = empty(1, 64, 1, 128), empty(1, 32, 1, 128)
        v_codes, v_meta = empty(1, 512, 1, 16), empty(1, 512, 1, 8)
        packs = (k_codes, k_meta, v_codes, v_meta)
        kivi_decode_attention(q, *packs, lens, rest, rest, lens, 4, 16, n_splits=1)

    rows = table.build({"": launch}, [target])
    assert table.complaints(rows, STREAMING) == []


def test_cases_cover_every_pair() -> None:
    """Of the values of any two axes."""
    axes = {
        Kivi: ("bits", "head_dim", "heads", "dtype", "n_splits", "layout"),
        Int8: ("head_dim", "heads", "dtype", "n_splits", "layout"),
    }
    for cases in (KIVI_CASES, INT8_CASES):
        rows = [dataclasses.asdict(case) for case in cases]
        for i, one in enumerate(axes[type(cases[0])]):
            for two in axes[type(cases[0])][i + 1 :]:
                values = [{row[axis] for row in rows} for axis in (one, two)]
                pairs = {(row[one], row[two]) for row in rows}
                assert len(pairs) == len(values[0]) * len(values[1]) > 1
