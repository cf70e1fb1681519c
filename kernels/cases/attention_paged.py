"""Cases of paged attention: page sizes, layouts, launches, benchmarks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from course.lab.launch import cdiv
from kernels.attention_decode import decode_attention
from kernels.attention_paged import (
    append_to_cache,
    paged_decode_attention,
    paged_prefill_attention,
)
from kernels.cases import Benchmark, pairwise, shifted


@dataclass(frozen=True)
class Paged:
    """One call of paged attention.

    `queries` is how many of each sequence's last tokens are queries, for
    prefill; None is one query a sequence, for decoding. `layout` is how the
    pages lie in memory: "dense"; "fused", K and V in one tensor and q in one
    with them; "heads first", [N, Hkv, P, D] seen as [N, P, Hkv, D]; "shared",
    one row of the block tables expanded over the batch; "shifted", off the
    16-byte grid.
    """

    seq_lens: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    group: int = 1
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    n_splits: int | None = None
    layout: str = "dense"


AXES: dict[str, Sequence[Any]] = {
    "group": (1, 3, 4, 7, 8),
    "head_dim": (16, 64, 80, 96, 128),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "n_splits": (1, 2, 3),
    "layout": ("dense", "fused", "heads first", "shared", "shifted"),
    "page_size": (1, 3, 16, 24, 64),
}
# Blocks of 16 keys, the step of the interpreter; an empty one in the middle.
DECODE_CASES = [
    Paged(seq_lens=(1, 0, 17, 48), **row) for row in pairwise(AXES)
]
# A whole prompt, nothing, a chunk after a prefix, a prefix alone.
PREFILL_CASES = [
    Paged(seq_lens=(2, 0, 33, 9), queries=(2, 0, 5, 0), **row)
    for row in pairwise(AXES)
]


def paged_inputs(
    case: Paged,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """q, k_pages, v_pages, block_tables, seq_lens, and cu_seqlens_q if asked.

    Pages lie in random order; slots that hold no token are NaN, and entries of
    the block tables beyond a sequence are no page. With a shared table all
    sequences are as long as the longest.
    """
    lengths, P, D = case.seq_lens, case.page_size, case.head_dim
    B, rows = len(lengths), len(lengths)
    if case.layout == "shared":
        lengths, rows = (max(lengths),) * B, 1
    used = [cdiv(n, P) for n in lengths[:rows]]
    width = max(used, default=0) + 1
    order = torch.randperm(sum(used) + 3, generator=generator).int()
    tables = torch.full((rows, width), -1, dtype=torch.int32)
    tables[1::2] = 2**31 - 1
    N = len(order)
    cache = torch.full((N * P, 2, case.kv_heads, D), math.nan)
    for b, (n, pages) in enumerate(zip(lengths, used, strict=False)):
        tables[b, :pages], order = order[:pages], order[pages:]
        slots = torch.arange(n)
        slots = tables[b, slots // P].long() * P + slots % P
        cache[slots] = torch.randn(n, *cache.shape[1:], generator=generator)
    cache = cache.unflatten(0, (N, P)).to(device, case.dtype)
    queries = (1,) * B if case.queries is None else case.queries
    H = case.kv_heads * case.group
    q = torch.randn(sum(queries), H + 2, D, generator=generator)
    q = q.to(device, case.dtype)

    k, v = cache[:, :, 0], cache[:, :, 1]  # views into one tensor
    if case.layout == "heads first":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "shifted":
        k, v = shifted(k), shifted(v)
    elif case.layout != "fused":
        k, v = k.contiguous(), v.contiguous()
    q = q[:, :H] if case.layout == "fused" else q[:, :H].contiguous()
    if case.layout == "shifted":
        q = shifted(q)
    block_tables = tables.to(device).expand(B, -1)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    if case.queries is None:
        return q, k, v, block_tables, seq_lens
    offsets = torch.tensor((0, *queries)).cumsum(0).to(device, torch.int32)
    return q, k, v, block_tables, seq_lens, offsets


def _launch(
    H: int,
    kv_heads: int,
    D: int,
    dtype: torch.dtype,
    tokens: int | None = None,
    n_splits: int = 1,
) -> None:
    """Call a launcher on tensors without memory, to be compiled only."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B = 16
    pages = empty(4096, 16, kv_heads, D)
    tables, lengths = (
        empty(B, 512, dtype=torch.int32),
        empty(B, dtype=torch.int32),
    )
    if tokens is None:
        paged_decode_attention(
            empty(B, H, D), pages, pages, tables, lengths, n_splits
        )
    else:
        offsets = empty(B + 1, dtype=torch.int32)
        q = empty(tokens, H, D)
        paged_prefill_attention(
            q, pages, pages, tables, lengths, offsets, n_splits
        )


def _append_launch(kv_heads: int, D: int, dtype: torch.dtype) -> None:
    k = torch.empty(64, kv_heads, D, dtype=dtype, device="meta")
    pages = torch.empty(4096, 16, kv_heads, D, dtype=dtype, device="meta")
    slots = torch.empty(64, dtype=torch.int64, device="meta")
    append_to_cache(k, k, pages, pages, slots)


STREAMING = (
    "_paged_decode_kernel",
    "_paged_prefill_kernel",
    "_append_kernel",
)
TENSOR_CORE = ("_paged_decode_kernel", "_paged_prefill_kernel")
PRODUCTION: dict[str, Callable[[], Any]] = {
    "decode, Llama-3-8B, bf16": partial(
        _launch, 32, 8, 128, torch.bfloat16, n_splits=8
    ),
    "decode, SmolLM2-135M, fp16": partial(_launch, 9, 3, 64, torch.float16),
    "decode, SmolLM2-135M, fp32": partial(_launch, 9, 3, 64, torch.float32),
    "prefill, Llama-3-8B, bf16": partial(
        _launch, 32, 8, 128, torch.bfloat16, tokens=2048
    ),
    "prefill, SmolLM2-135M, fp32": partial(
        _launch, 9, 3, 64, torch.float32, tokens=512
    ),
    "append, Llama-3-8B, bf16": partial(
        _append_launch, 8, 128, torch.bfloat16
    ),
}


def _gathered(pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """[B, S, Hkv, D]: the pages of each sequence, copied into order."""
    return pages[block_tables.long()].flatten(1, 2)


def _gather_and_attend(
    q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q=None
):
    """Torch's attention after a copy; as many queries in each sequence."""
    B, T = len(seq_lens), len(q)
    k = _gathered(k_pages, block_tables)
    v = _gathered(v_pages, block_tables)
    key = torch.arange(k.shape[1], device=q.device)
    query = torch.arange(T // B, device=q.device) + 1 - T // B
    mask = key < (seq_lens[:, None] + query)[..., None]  # [B, n, S]
    out = F.scaled_dot_product_attention(
        q.unflatten(0, (B, -1)).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask[:, None],
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(0, 1)


def _batched_reference(
    q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q=None
):
    """The formula on the whole batch at once, for `torch.compile`."""
    B, heads, D = len(seq_lens), k_pages.shape[2], q.shape[2]
    k = _gathered(k_pages, block_tables).float()
    v = _gathered(v_pages, block_tables).float()
    groups = q.float().view(B, len(q) // B, heads, -1, D)
    scores = torch.einsum("bqhgd,bthd->bhgqt", groups, k) / math.sqrt(D)
    key = torch.arange(k.shape[1], device=q.device)
    query = torch.arange(groups.shape[1], device=q.device)
    seen = seq_lens[:, None] + query + 1 - groups.shape[1]  # [B, n]
    hidden = (key >= seen[..., None])[:, None, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = torch.einsum("bhgqt,bthd->bqhgd", weights, v)
    return out.reshape(q.shape).to(q.dtype)


def _contiguous(q, k_pages, v_pages, block_tables, seq_lens):
    """Our kernel without pages: what the indirection costs.

    The pages of a sequence lie side by side in another order, to which a sum
    over keys is indifferent.
    """
    shape = (len(q), -1, *k_pages.shape[2:])
    return decode_attention(
        q, k_pages.view(shape), v_pages.view(shape), seq_lens
    )


@lru_cache(maxsize=32)
def _flashinfer_plan(
    block_tables: torch.Tensor,
    queries: int,
    H: int,
    kv_heads: int,
    D: int,
    page_size: int,
) -> Any:
    """FlashInfer's schedule for full tables: made once, outside the timing."""
    import flashinfer

    B, width = block_tables.shape
    steps = torch.arange(B + 1, dtype=torch.int32)
    pages = block_tables.flatten()
    last = torch.full((B,), page_size, dtype=torch.int32)
    room = torch.empty(1 << 28, dtype=torch.uint8, device=pages.device)
    shape = (H, kv_heads, D, page_size)
    if queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=True
        )
        offsets = [steps * width]
        causal = {}
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        offsets = [steps * queries, steps * width]
        causal = {"causal": True}
    wrapper.plan(
        *offsets, pages, last, *shape, q_data_type=torch.bfloat16, **causal
    )
    return wrapper


def _flashinfer(
    q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q=None
):
    B, (H, D) = len(seq_lens), q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    plan = _flashinfer_plan(
        block_tables, len(q) // B, H, kv_heads, D, page_size
    )
    return plan.run(q, (k_pages, v_pages))


def _attention_benchmark(
    name: str, B: int, S: int, queries: int | None = None
) -> Benchmark:
    """Llama-3-8B in bfloat16, pages of 16, every sequence S tokens long."""
    H, kv_heads, D, P = 32, 8, 128, 16
    n = queries or 1

    def inputs(
        generator: torch.Generator,
        device: torch.device,
        B: int = B,
        S: int = S,
        n: int = n,
    ) -> tuple[torch.Tensor, ...]:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(
                shape, generator=generator, device=device, dtype=torch.bfloat16
            )

        q = draw(B * n, H, D)
        k, v = (draw(B * S // P, P, kv_heads, D) for _ in range(2))
        order = torch.rand(B, S // P, generator=generator, device=device)
        first = torch.arange(B, device=device)[:, None] * (S // P)
        tables = (first + order.argsort()).int()
        lengths = torch.full((B,), S, dtype=torch.int32, device=device)
        if queries is None:
            return q, k, v, tables, lengths
        offsets = torch.arange(B + 1, dtype=torch.int32, device=device) * n
        return q, k, v, tables, lengths, offsets

    decoding = queries is None
    seen = B * (n * (S - n) + n * (n + 1) // 2)  # (query, key) pairs
    values = 2 * B * S * kv_heads * D + 2 * B * n * H * D
    return Benchmark(
        f"{name}, 32/8 heads of 128, bf16",
        inputs,
        partial(inputs, B=min(B, 2), S=48, n=min(n, 3)),
        paged_decode_attention if decoding else paged_prefill_attention,
        _batched_reference if decoding else _gather_and_attend,
        bytes=2 * values + 4 * B * S // P,
        flops=4 * H * D * seen,
        bound="memory" if decoding else "compute",
        tolerance=2e-2,
        peers={"gather, then SDPA": _gather_and_attend}
        | ({"contiguous": _contiguous} if decoding else {})
        | {"FlashInfer": _flashinfer},
    )


def _append_inputs(
    generator: torch.Generator,
    device: torch.device,
    T: int = 8192,
    pages: int = 1024,
) -> tuple[torch.Tensor, ...]:
    k, v = (
        torch.randn(
            *(T, 8, 128),
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        for _ in range(2)
    )
    cache = torch.zeros(2, pages, 16, 8, 128, dtype=k.dtype, device=device)
    order = torch.rand(pages * 16, generator=generator, device=device)
    return k, v, cache[0], cache[1], order.argsort()[:T]


def _appended(k, v, k_pages, v_pages, slot_mapping):
    append_to_cache(k, v, k_pages, v_pages, slot_mapping)
    return k_pages, v_pages


def _appended_by_torch(k, v, k_pages, v_pages, slot_mapping):
    """Without skipping, since there is nothing to skip."""
    k_pages.flatten(0, 1)[slot_mapping] = k
    v_pages.flatten(0, 1)[slot_mapping] = v
    return k_pages, v_pages


def _appended_by_vllm(k, v, k_pages, v_pages, slot_mapping):
    from vllm import _custom_ops

    one = torch.ones((), device=k.device)
    _custom_ops.reshape_and_cache_flash(
        k, v, k_pages, v_pages, slot_mapping, "auto", one, one
    )
    return k_pages, v_pages


BENCHMARKS = [
    _attention_benchmark("decode, B=64, S=4096", 64, 4096),
    _attention_benchmark("decode, B=1, S=65536", 1, 65_536),
    _attention_benchmark("prefill, 4 chunks of 2048, S=8192", 4, 8192, 2048),
    Benchmark(
        "append, 8192 tokens, 8 heads of 128, bf16",
        _append_inputs,
        partial(_append_inputs, T=20, pages=3),
        _appended,
        _appended_by_torch,
        bytes=8192 * (2 * 2 * 8 * 128 * 2 + 8),
        flops=0,
        bound="memory",
        tolerance=0.0,
        peers={"vLLM": _appended_by_vllm},
    ),
]
