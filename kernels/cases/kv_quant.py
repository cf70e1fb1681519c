"""Cases of the quantised KV cache: edge shapes, launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cases import Benchmark, pairwise, shifted
from kernels.kv_quant import (
    Axis,
    int8_decode_attention,
    int8_decode_attention_ref,
    kivi_decode_attention,
    kivi_decode_attention_ref,
    kivi_pack,
    kivi_pack_ref,
    kivi_unpack_ref,
)

LAYOUTS = ("dense", "sliced", "heads first", "shared", "shifted")


@dataclass(frozen=True)
class Kivi:
    """One call of attention over a KIVI cache.

    `layout` is how the cache lies in memory: "dense"; "sliced", a part of
    wider rows; "heads first", [B, Hkv, S, D] seen as [B, S, Hkv, D]; "shared",
    one cache expanded over the batch; "shifted", off the 16-byte grid.
    """

    packed_lens: tuple[int, ...]
    rest_lens: tuple[int, ...]
    bits: int = 2
    group: int = 16
    heads: int = 1  # query heads per KV head
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float16
    n_splits: int | None = None
    layout: str = "dense"
    slots: int = 64  # S
    rest: int = 40  # R


@dataclass(frozen=True)
class Int8:
    """One call of attention over an int8 cache; fields as in `Kivi`."""

    seq_lens: tuple[int, ...]
    heads: int = 1
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float16
    n_splits: int | None = None
    layout: str = "dense"
    slots: int = 40


# The interpreter's steps are 32 packed tokens, or a group, and 32 others.
KIVI_CASES = [
    Kivi((64, 0), (1, 33), group=group, head_dim=head_dim, **row)
    for row in pairwise(
        {
            "format": ((16, 16), (16, 80), (32, 96), (64, 64), (32, 128)),
            "bits": (2, 4),
            "heads": (1, 3, 4, 7, 8),
            "dtype": (torch.float16, torch.bfloat16),
            "n_splits": (1, 2, 3, 9),
            "layout": LAYOUTS,
        }
    )
    for group, head_dim in [row.pop("format")]
]
INT8_CASES = [
    Int8((33, 0), **row)
    for row in pairwise(
        {
            "head_dim": (16, 64, 80, 96, 128),
            "heads": (1, 3, 4, 7, 8),
            "dtype": (torch.float16, torch.bfloat16),
            "n_splits": (1, 2, 3, 9),
            "layout": LAYOUTS,
        }
    )
]


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout, see `Kivi`; rows are dense."""
    if layout == "sliced":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    if layout == "heads first" and tensor.dim() == 4:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "shared":
        return tensor[:1].expand_as(tensor)
    return shifted(tensor) if layout == "shifted" else tensor.contiguous()


def poison(
    tensor: torch.Tensor, lengths: tuple[int, ...], per_row: int = 1
) -> torch.Tensor:
    """Overwrite the rows from lengths[b] / per_row on with NaN or ones."""
    for row, length in zip(tensor, lengths, strict=True):
        row[length // per_row :] = (
            math.nan if tensor.is_floating_point() else -1
        )
    return tensor


def kivi_inputs(
    case: Kivi, generator: torch.Generator, device: torch.device | str = "cpu"
) -> tuple[Any, ...]:
    """The arguments of `kivi_decode_attention` up to `group`.

    One channel of K is large. Free slots hold NaN, also as scales. In a shared
    cache all sequences are as long as the first.
    """
    B, H = len(case.packed_lens), case.kv_heads
    shape = (H, case.head_dim)
    packed, rest = case.packed_lens, case.rest_lens
    if case.layout == "shared":
        packed, rest = packed[:1] * B, rest[:1] * B
    q = torch.randn(B, H * case.heads, case.head_dim, generator=generator)
    k, v = torch.randn(
        2, B, case.slots + case.rest, *shape, generator=generator
    )
    k[..., case.head_dim // 2] *= 10
    split = [case.slots, case.rest]
    (k, k_rest), (v, v_rest) = k.split(split, 1), v.split(split, 1)
    k_codes, k_meta = kivi_pack_ref(k, case.bits, case.group, "channel")
    v_codes, v_meta = kivi_pack_ref(v, case.bits, case.group, "token")
    poison(k_codes, packed, 32 // case.bits)
    poison(k_meta, packed, case.group)
    cache = [k_codes, k_meta, poison(v_codes, packed), poison(v_meta, packed)]
    recent = [poison(x.to(case.dtype), rest) for x in (k_rest, v_rest)]
    cache, recent = (
        [laid_out(tensor.to(device), case.layout) for tensor in tensors]
        for tensors in (cache, recent)
    )
    lens = [
        torch.tensor(n, dtype=torch.int32, device=device)
        for n in (packed, rest)
    ]
    q = shifted(q) if case.layout == "shifted" else q
    q = q.to(device, case.dtype)
    return q, *cache, lens[0], *recent, lens[1], case.bits, case.group


def int8_inputs(
    case: Int8, generator: torch.Generator, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """The arguments of `int8_decode_attention`, as `kivi_inputs`."""
    B, H = len(case.seq_lens), case.kv_heads
    lens = case.seq_lens[:1] * B if case.layout == "shared" else case.seq_lens
    q = torch.randn(B, H * case.heads, case.head_dim, generator=generator)
    shape = (2, B, case.slots, H, case.head_dim)
    codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scales = torch.rand(shape[:-1], generator=generator) / 64
    k, v, k_scale, v_scale = (
        laid_out(poison(tensor, lens).to(device), case.layout)
        for tensor in (*codes, *scales)
    )
    q = shifted(q) if case.layout == "shifted" else q
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return q.to(device, case.dtype), k, k_scale, v, v_scale, seq_lens


def _kivi_launch(
    B: int,
    S: int,
    H: int,
    kv_heads: int,
    bits: int,
    dtype: torch.dtype,
    D: int = 128,
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    k_codes, k_meta = (empty(B, S // n, kv_heads, D) for n in (32 // bits, 32))
    v_codes, v_meta = (empty(B, S, kv_heads, D // n) for n in (32 // bits, 32))
    rest, lens = empty(B, 128, kv_heads, D, dtype=dtype), empty(B)
    q = empty(B, H, D, dtype=dtype)
    cache = (k_codes, k_meta, v_codes, v_meta, lens)
    kivi_decode_attention(q, *cache, rest, rest, lens, bits, 32, n_splits=1)


def _int8_launch(
    B: int, S: int, H: int, kv_heads: int, dtype: torch.dtype, D: int = 128
) -> None:
    meta = torch.device("meta")
    q = torch.empty(B, H, D, dtype=dtype, device=meta)
    k = torch.empty(B, S, kv_heads, D, dtype=torch.int8, device=meta)
    scale = torch.empty(B, S, kv_heads, device=meta)
    seq_lens = torch.empty(B, dtype=torch.int32, device=meta)
    int8_decode_attention(q, k, scale, k, scale, seq_lens, n_splits=1)


def _pack_launch(bits: int, axis: Axis) -> None:
    x = torch.empty(1, 8192, 8, 128, dtype=torch.bfloat16, device="meta")
    kivi_pack(x, bits, 32, axis)


STREAMING = ("_kivi_decode_kernel", "_int8_decode_kernel")
TENSOR_CORE = ("_kivi_decode_kernel", "_int8_decode_kernel")
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, 2 bits, bf16": partial(
        _kivi_launch, 16, 8192, 32, 8, 2, torch.bfloat16
    ),
    "Llama-3-8B, 4 bits, bf16": partial(
        _kivi_launch, 16, 8192, 32, 8, 4, torch.bfloat16
    ),
    "Qwen2.5-7B, 2 bits, fp16": partial(
        _kivi_launch, 16, 8192, 28, 4, 2, torch.float16
    ),
    "Llama-3-8B, int8, bf16": partial(
        _int8_launch, 16, 8192, 32, 8, torch.bfloat16
    ),
    "Qwen2.5-7B, int8, fp16": partial(
        _int8_launch, 16, 8192, 28, 4, torch.float16
    ),
    "keys, 2 bits": partial(_pack_launch, 2, "channel"),
    "values, 2 bits": partial(_pack_launch, 2, "token"),
}


def _kivi_bench(
    B: int,
    S: int,
    R: int,
    kv_heads: int,
    bits: int,
    generator: torch.Generator,
    device: Any,
) -> tuple[Any, ...]:
    """Random codes: the sizes of Llama-3-8B with groups of 32, in bf16."""
    on: Any = dict(device=device, generator=generator)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, **on)

    def meta(*shape: int) -> torch.Tensor:
        scale = (0.5 + torch.rand(*shape, 1, **on)) * 3 / (2**bits - 1)
        return (
            torch.cat([scale, -1.5 * scale], -1)
            .half()
            .view(torch.int32)[..., 0]
        )

    D, H = 128, 4 * kv_heads
    cache = (
        words(B, S * bits // 32, kv_heads, D),
        meta(B, S // 32, kv_heads, D),
        words(B, S, kv_heads, D * bits // 32),
        meta(B, S, kv_heads, D // 32),
    )
    q = torch.randn(B, H, D, **on).bfloat16()
    k_rest, v_rest = torch.randn(2, B, R, kv_heads, D, **on).bfloat16()
    lens = [
        torch.full((B,), n, dtype=torch.int32, device=device) for n in (S, R)
    ]
    return q, *cache, lens[0], k_rest, v_rest, lens[1], bits, 32


def _int8_bench(
    B: int, S: int, kv_heads: int, generator: torch.Generator, device: Any
) -> tuple[torch.Tensor, ...]:
    on: Any = dict(device=device, generator=generator)
    shape = (2, B, S, kv_heads, 128)
    k, v = torch.randint(-127, 128, shape, dtype=torch.int8, **on)
    k_scale, v_scale = torch.rand(shape[:-1], **on) / 64
    q = torch.randn(B, 4 * kv_heads, 128, **on).bfloat16()
    seq_lens = torch.full((B,), S, dtype=torch.int32, device=device)
    return q, k, k_scale, v, v_scale, seq_lens


def _bench_lse(launcher: Callable[..., Any], *arguments: Any) -> Any:
    return launcher(*arguments, return_lse=True)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention over all of k, v [B, S, Hkv, D]."""
    k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q[:, :, None], k, v, enable_gqa=True
    )[:, :, 0]


def _kivi_sdpa(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_meta: torch.Tensor,
    v_codes: torch.Tensor,
    v_meta: torch.Tensor,
    packed_lens: torch.Tensor,
    k_rest: torch.Tensor,
    v_rest: torch.Tensor,
    rest_lens: torch.Tensor,
    bits: int,
    group: int,
) -> torch.Tensor:
    k = kivi_unpack_ref(k_codes, k_meta, bits, group, "channel").to(q.dtype)
    v = kivi_unpack_ref(v_codes, v_meta, bits, group, "token").to(q.dtype)
    return _sdpa(q, torch.cat([k, k_rest], 1), torch.cat([v, v_rest], 1))


def _int8_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    return _sdpa(q, k * k_scale[..., None], v * v_scale[..., None])


def _kivi_benchmark(B: int, S: int, bits: int) -> Benchmark:
    R, kv_heads, D = 128, 8, 128
    codes = B * S * kv_heads * D * bits // 8
    meta = B * S * kv_heads * D // 32 * 4
    q = B * 4 * kv_heads * D * 2
    return Benchmark(
        name=f"{bits} bits, B={B}, S={S}+{R}, 32/8 heads of 128, bf16",
        inputs=partial(_kivi_bench, B, S, R, kv_heads, bits),
        small=partial(_kivi_bench, 2, 64, 20, 1, bits),
        ours=partial(_bench_lse, kivi_decode_attention),
        reference=kivi_decode_attention_ref,
        bytes=2 * (codes + meta + B * R * kv_heads * D * 2)
        + 2 * q
        + B * 4 * kv_heads * 4,
        flops=4 * B * 4 * kv_heads * D * (S + R),
        bound="memory",
        tolerance=2e-2,
        peers={"torch SDPA over a dequantised copy": _kivi_sdpa},
    )


BENCHMARKS = [
    _kivi_benchmark(32, 8192, 2),
    _kivi_benchmark(1, 65_536, 2),
    _kivi_benchmark(32, 8192, 4),
    Benchmark(
        name="int8, B=32, S=8192, 32/8 heads of 128, bf16",
        inputs=partial(_int8_bench, 32, 8192, 8),
        small=partial(_int8_bench, 2, 40, 1),
        ours=partial(_bench_lse, int8_decode_attention),
        reference=int8_decode_attention_ref,
        bytes=2 * 32 * 8192 * 8 * (128 + 4)
        + 2 * 32 * 32 * 128 * 2
        + 32 * 32 * 4,
        flops=4 * 32 * 32 * 128 * 8192,
        bound="memory",
        tolerance=2e-2,
        peers={"torch SDPA over a dequantised copy": _int8_sdpa},
    ),
]
