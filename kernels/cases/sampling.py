"""Cases of sampling: vocabularies, filters and layouts, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.sampling import sample_tokens, sample_tokens_ref

# temperature, top_k, top_p, min_p; float32 on any device
Filters = tuple[float, int, float, float]
FILTERS: dict[str, Filters] = {
    "none": (1.0, 0, 1.0, 0.0),
    "greedy": (0.0, 3, 0.5, 0.0),
    "top-k": (0.7, 5, 1.0, 0.0),
    "top-p": (1.3, 0, 0.8, 0.0),
    "all": (1.0, 20, 0.9, 0.05),
}


@dataclass(frozen=True)
class Sample:
    """One call on logits [B, vocab].

    `filters` is a key of FILTERS, the same for all rows. `layout` is how the
    logits lie: "dense"; "padded", rows further apart than the vocabulary, over
    slots of NaN; "shifted", off the 16-byte grid; "one row", expanded.
    `spread` is the standard deviation of the logits; `ties` rounds them.
    """

    vocab: int
    dtype: torch.dtype = torch.float32
    filters: str = "all"
    layout: str = "dense"
    spread: float = 3.0
    ties: bool = False
    B: int = 2


# Around a block of 32 tokens and tiles of 16, the interpreter's.
CASES = [
    Sample(**row)
    for row in pairwise(
        {
            "vocab": (7, 31, 32, 33, 150),
            "filters": tuple(FILTERS),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "padded", "shifted", "one row"),
            "ties": (False, True),
        }
    )
]


def vectors(
    B: int,
    filters: Filters,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """uniform, temperature, top_k, top_p and min_p for B rows."""
    temperature, top_k, top_p, min_p = filters
    uniform = torch.rand(B, generator=generator, device=generator.device)
    return (
        uniform.to(device),
        torch.full((B,), temperature, dtype=torch.float32, device=device),
        torch.full((B,), top_k, dtype=torch.int32, device=device),
        torch.full((B,), top_p, dtype=torch.float32, device=device),
        torch.full((B,), min_p, dtype=torch.float32, device=device),
    )


def sample_inputs(
    case: Sample,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """The arguments of a case; one logit in ten is -inf or NaN."""
    B, V = case.B, case.vocab
    x = case.spread * torch.randn(B, V, generator=generator)
    if case.ties:
        x = x.round()
    odd = torch.randint(20, (B, V), generator=generator)
    x[odd == 0], x[odd == 1] = -torch.inf, torch.nan
    x[:, V // 2] = 1.0
    logits = x.to(device, case.dtype)
    if case.layout == "padded":
        wide = logits.new_full((B, V + 16 - V % 16), torch.nan)
        wide[:, :V] = logits
        logits = wide[:, :V]
    elif case.layout == "shifted":
        logits = shifted(logits)
    elif case.layout == "one row":
        logits = logits[:1].expand(B, -1)
    return logits, *vectors(B, FILTERS[case.filters], generator, device)


def _launch(B: int, V: int, dtype: torch.dtype) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    logits = torch.empty(B, V, dtype=dtype, device=meta)
    single = torch.empty(B, dtype=torch.float32, device=meta)
    top_k = torch.empty(B, dtype=torch.int32, device=meta)
    sample_tokens(logits, single, single, top_k, single, single)


# The pass that gathers reads the row from the cache, 16 bytes at a time; with
# four scalars a thread it would not pass for streaming.
STREAMING = ("_sample_max_kernel", "_sample_bins_kernel")
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3, fp32": partial(_launch, 64, 128_256, torch.float32),
    "SmolLM2, bf16": partial(_launch, 8, 49_152, torch.bfloat16),
}


def _flashinfer(logits, uniform, temperature, top_k, top_p, min_p):
    """FlashInfer's own draw: the same filters but min-p, other uniforms."""
    import flashinfer

    return flashinfer.sampling.top_k_top_p_sampling_from_logits(
        logits / temperature[:, None], top_k, top_p
    )


def _multinomial(logits, uniform, temperature, top_k, top_p, min_p):
    """PyTorch's draw without filters, other uniforms."""
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    return torch.multinomial(probabilities, 1)[:, 0]


def _benchmark(
    name: str,
    B: int,
    V: int,
    filters: Filters,
    **peers: Callable[..., torch.Tensor],
) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        B: int = B,
        V: int = V,
    ) -> tuple[torch.Tensor, ...]:
        logits = torch.randn(B, V, generator=generator, device=device)
        return 3 * logits, *vectors(B, filters, generator, device)

    return Benchmark(
        f"{name}, B={B}, V={V}, fp32",
        inputs,
        partial(inputs, B=2, V=100),
        sample_tokens,
        sample_tokens_ref,
        bytes=4 * B * V,
        flops=0,
        bound="memory",
        tolerance=1e-3,  # a border moves by 1e-7: to the token beside it
        peers=peers,
        deterministic=False,
    )


BENCHMARKS = [
    _benchmark(
        "top-k 50, top-p 0.9",
        *(64, 128_256, (0.7, 50, 0.9, 0.0)),
        FlashInfer=_flashinfer,
    ),
    _benchmark(
        "top-k 50, top-p 0.9",
        *(8, 49_152, (0.7, 50, 0.9, 0.0)),
        FlashInfer=_flashinfer,
    ),
    _benchmark("top-p 0.95", 64, 128_256, (1.0, 0, 0.95, 0.0)),
    _benchmark(
        "no filter", 64, 128_256, (1.0, 0, 1.0, 0.0), multinomial=_multinomial
    ),
]
