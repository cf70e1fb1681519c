"""Cases of the fused cross entropy: shapes, layouts, launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.cross_entropy import linear_token_nll, linear_token_nll_backward

IGNORE = -100


@dataclass(frozen=True)
class Scoring:
    """One call of the cross entropy; every third target is ignored.

    `layout` is how the rows lie in memory: "dense"; "sliced", wider rows whose
    ends hold NaN; "shared", one hidden state expanded over the tokens;
    "shifted", off the 16-byte grid. `pieces` cuts the vocabulary: splits of
    the forward, chunks of the backward.
    """

    tokens: int = 17  # T
    words: int = 70  # V
    width: int = 33  # D
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    pieces: int | None = None


# Around the interpreter's blocks of 16 tokens, 32 words and 16 elements.
SCORING_CASES = [
    Scoring(**row)
    for row in pairwise(
        {
            "words": (1, 31, 32, 33, 100),
            "tokens": (1, 15, 16, 17, 50),
            "width": (1, 15, 16, 17, 40),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "sliced", "shared", "shifted"),
            "pieces": (None, 1, 2, 3),
        }
    )
]


def scoring_inputs(
    case: Scoring,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight and targets of a case; the last word is a target too."""
    T, V, D = case.tokens, case.words, case.width
    rows = 1 if case.layout == "shared" else T
    room = D + 3 if case.layout == "sliced" else D
    hidden = torch.randn(rows, room, generator=generator)
    weight = torch.randn(V, room, generator=generator)
    hidden[:, D:] = weight[:, D:] = math.nan
    hidden, weight = (
        hidden.to(device, case.dtype),
        weight.to(device, case.dtype),
    )
    if case.layout == "shifted":
        hidden, weight = shifted(hidden), shifted(weight)
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[::3] = V - 1
    targets[1::3] = IGNORE
    hidden, weight = hidden[:, :D], weight[:, :D]
    return hidden.expand(T, -1), weight, targets.to(device)


def _launch(
    T: int, V: int, D: int, dtype: torch.dtype, chunk: int | None = None
) -> None:
    """Call the launchers on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    hidden = torch.empty(T, D, dtype=dtype, device=meta)
    weight = torch.empty(V, D, dtype=dtype, device=meta)
    targets = torch.empty(T, dtype=torch.int64, device=meta)
    nll, lse = linear_token_nll(hidden, weight, targets)
    linear_token_nll_backward(
        nll, hidden, weight, targets, nll, lse, chunk=chunk or V
    )


STREAMING = ("_token_nll_kernel", "_token_nll_gradient_kernel")
TENSOR_CORE = ("_token_nll_kernel", "_token_nll_gradient_kernel")
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, bf16": partial(_launch, 8192, 128_256, 4096, torch.bfloat16),
    "SmolLM2-135M, 8 tokens, fp16": partial(
        _launch, 8, 49_152, 576, torch.float16
    ),
    "SmolLM2-135M, fp32": partial(_launch, 2048, 49_152, 576, torch.float32),
}


def _in_memory(hidden, weight, targets):
    """The logits as a tensor, for `torch.compile` and for cuBLAS."""
    logits = (hidden @ weight.T).float()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return logits.logsumexp(-1) - chosen


def _loss(hidden, weight, targets):
    return linear_token_nll(hidden, weight, targets)[0]


def _training(grad_nll, hidden, weight, targets):
    """Loss and gradients, as a training step asks for them."""
    nll, lse = linear_token_nll(hidden, weight, targets)
    gradients = linear_token_nll_backward(
        grad_nll, hidden, weight, targets, nll, lse
    )
    return nll, *gradients


def _training_in_memory(grad_nll, hidden, weight, targets):
    logits = (hidden @ weight.T).float()
    lse = logits.logsumexp(-1)
    nll = lse - logits.gather(1, targets[:, None])[:, 0]
    words = torch.arange(weight.shape[0], device=weight.device)
    p = (logits - lse[:, None]).exp()
    dz = (p - (words == targets[:, None]).float()) * grad_nll[:, None]
    dz = dz.to(hidden.dtype)
    return nll, dz @ weight, dz.T @ hidden


def _training_by(loss, grad_nll, hidden, weight, targets):
    """Another library's loss, driven by autograd."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    nll = loss(hidden, weight, targets)
    return nll, *torch.autograd.grad(nll, (hidden, weight), grad_nll)


def _liger(hidden, weight, targets):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return loss(weight, hidden, targets)


def _cut(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, targets, reduction="none")


def _benchmark(T: int, V: int, D: int, training: bool = False) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        T: int = T,
        V: int = V,
        D: int = D,
    ) -> tuple[torch.Tensor, ...]:
        def draw(rows: int) -> torch.Tensor:
            return torch.randn(
                (rows, D),
                generator=generator,
                device=device,
                dtype=torch.bfloat16,
            )

        targets = torch.randint(0, V, (T,), generator=generator, device=device)
        scored = draw(T), draw(V) / math.sqrt(D), targets
        return (torch.ones(T, device=device), *scored) if training else scored

    in_memory = _training_in_memory if training else _in_memory
    libraries = {"Liger Kernel": _liger, "Cut Cross-Entropy": _cut}
    peers: dict[str, Callable[..., Any]] = {
        name: partial(_training_by, loss) if training else loss
        for name, loss in libraries.items()
    }
    peers["logits in memory, cuBLAS"] = in_memory
    passes = 3 if training else 1
    floor_bytes = 2 * (T + V) * D * (2 if training else 1)
    flops = 2 * T * V * D * passes
    what = "loss and gradients" if training else "loss"
    return Benchmark(
        f"{what}, T={T:,}, V={V:,}, D={D:,}, bf16",
        inputs,
        partial(inputs, T=20, V=70, D=32),
        _training if training else _loss,
        in_memory,
        floor_bytes,
        flops,
        # an H200 does 200 FLOPs in the time of a byte
        "compute" if flops > 200 * floor_bytes else "memory",
        2e-2,  # the reference rounds its logits to bfloat16
        peers,
    )


BENCHMARKS = [
    _benchmark(4096, 128_256, 4096),
    _benchmark(8, 128_256, 4096),
    _benchmark(4096, 49_152, 2048, training=True),
]
