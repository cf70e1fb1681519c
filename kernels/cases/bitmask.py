"""Cases of token bitmasks: vocabularies, masks and layouts, production launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from course.lab.launch import cdiv
from kernels.bitmask import (
    allowed_tokens,
    apply_token_bitmask,
    apply_token_bitmask_ref,
    masked_argmax,
    masked_argmax_ref,
)
from kernels.cases import Benchmark, pairwise, shifted


@dataclass(frozen=True)
class Masked:
    """One call on logits [B, vocab].

    `mask` is what each row allows: "none"; "few", two tokens; "half"; "most",
    all but one of 25; "all". `layout` is how logits and words lie: "dense";
    "padded", rows further apart than the vocabulary, over slots of NaN;
    "shifted", off the 16-byte grid; "one mask", expanded over the rows.
    `rows` are the rows to work on.
    """

    vocab: int
    dtype: torch.dtype = torch.float32
    mask: str = "half"
    layout: str = "dense"
    rows: tuple[int, ...] | None = None
    B: int = 3


# Around a word of 32 tokens and a block of 64, the interpreter's.
CASES = [
    Masked(**row)
    for row in pairwise(
        {
            "vocab": (31, 32, 33, 65, 1000),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "mask": ("none", "few", "half", "most", "all"),
            "layout": ("dense", "padded", "shifted", "one mask"),
            "rows": (None, (2, 0), (1,)),
        }
    )
]


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Bools [B, V] -> words [B, ceil(V / 32)] int32; spare bits are 1."""
    rows, vocab = allowed.shape
    spare = 32 * cdiv(vocab, 32) - vocab
    bits = torch.cat([allowed, allowed.new_ones(rows, spare)], 1)
    weights = 2 ** torch.arange(32, device=allowed.device)  # int64
    words = (bits.view(rows, -1, 32) * weights).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def draw_mask(
    kind: str, rows: int, vocab: int, generator: torch.Generator
) -> torch.Tensor:
    """Bools [rows, vocab], drawn on the generator's device."""
    device = generator.device
    if kind == "few":
        allowed = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        two = torch.randint(
            vocab, (rows, 2), generator=generator, device=device
        )
        return allowed.scatter_(1, two, True)
    share = {"none": 0.0, "half": 0.5, "most": 0.96, "all": 1.0}[kind]
    return torch.rand(rows, vocab, generator=generator, device=device) < share


def bitmask_inputs(
    case: Masked,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """logits, bitmask and row_idx of a case.

    The logits are small integers, so that there are ties, with a few of -inf,
    65504 and, where forbidden, NaN. Spare bits of the last word are ones.
    """
    B, V = case.B, case.vocab
    mask_rows = 1 if case.layout == "one mask" else B
    allowed = draw_mask(case.mask, mask_rows, V, generator)
    x = torch.randint(-4, 4, (B, V), generator=generator).float()
    odd = torch.randint(20, (B, V), generator=generator)
    x[odd == 0], x[odd == 1] = -math.inf, -65504.0
    x[(odd == 2) & ~allowed] = 65504.0
    x[(odd == 3) & ~allowed] = math.nan
    logits, words = x.to(device, case.dtype), pack(allowed).to(device)
    if case.layout == "padded":
        room = 16 * cdiv(V, 16) + 16
        wide = logits.new_full((B, room), math.nan)
        wide[:, :V] = logits
        more = words.new_full((B, words.shape[1] + 3), -1)
        more[:, :-3] = words
        logits, words = wide[:, :V], more[:, :-3]
    elif case.layout == "shifted":
        logits, words = shifted(logits), shifted(words)
    elif case.layout == "one mask":
        words = words.expand(B, -1)
    rows = None
    if case.rows is not None:
        rows = torch.tensor(case.rows, dtype=torch.int32, device=device)
    return logits, words, rows


def _launch(B: int, V: int, dtype: torch.dtype) -> None:
    """Call the launchers on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    logits = torch.empty(B, V, dtype=dtype, device=meta)
    words = torch.empty(B, cdiv(V, 32), dtype=torch.int32, device=meta)
    apply_token_bitmask(logits, words)
    masked_argmax(logits, words)


STREAMING = ("_apply_token_bitmask_kernel", "_masked_argmax_kernel")
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3, bf16": partial(_launch, 64, 128_256, torch.bfloat16),
    "SmolLM2, fp32": partial(_launch, 8, 49_152, torch.float32),
}


def _bool_masked_fill(logits, bitmask):
    """PyTorch's way: a bool per token, in place."""
    allowed = allowed_tokens(bitmask, logits.shape[1])
    return logits.masked_fill_(~allowed, -math.inf)


def _bool_argmax(logits, bitmask):
    allowed = allowed_tokens(bitmask, logits.shape[1])
    return logits.masked_fill(~allowed, -math.inf).argmax(-1)


def _xgrammar(logits, bitmask):
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, bitmask)
    return logits


def _benchmark(
    name: str,
    B: int,
    V: int,
    mask: str,
    ours: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    moved: int,
    **peers: Callable[..., torch.Tensor],
) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        B: int = B,
        V: int = V,
    ) -> tuple[torch.Tensor, ...]:
        logits = torch.randn(
            B, V, generator=generator, device=device, dtype=torch.bfloat16
        )
        return logits, pack(draw_mask(mask, B, V, generator)).to(device)

    return Benchmark(
        f"{name}, B={B}, V={V}, bf16",
        inputs,
        partial(inputs, B=2, V=200),
        ours,
        reference,
        bytes=B * V // 8 + moved,
        flops=0,
        bound="memory",
        tolerance=0.0,
        peers=peers,
    )


_LLAMA = 128_256
BENCHMARKS = [
    _benchmark(
        "mask, two legal tokens",
        *(64, _LLAMA, "few", apply_token_bitmask, apply_token_bitmask_ref),
        2 * 64 * _LLAMA,
        masked_fill=_bool_masked_fill,
        XGrammar=_xgrammar,
    ),
    _benchmark(
        "argmax, 96% legal",
        *(64, _LLAMA, "most", masked_argmax, masked_argmax_ref),
        2 * 64 * _LLAMA,
        masked_fill_argmax=_bool_argmax,
    ),
    _benchmark(
        "argmax, 96% legal",
        *(1, _LLAMA, "most", masked_argmax, masked_argmax_ref),
        2 * _LLAMA,
        masked_fill_argmax=_bool_argmax,
    ),
]
