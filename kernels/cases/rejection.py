"""Cases of speculative verification: edge shapes, production launches, benchmarks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cases import Benchmark, pairwise, shifted
from kernels.rejection import verify_greedy, verify_sampled


@dataclass(frozen=True)
class Verify:
    """One call of a verification.

    `layout` is how [B, K + 1, V] lies in memory: "dense"; "padded", rows with
    room after the vocabulary; "rows first", [K + 1, B, V] seen as [B, K + 1,
    V]; "shared", one sequence expanded over the batch; "shifted", off the
    16-byte grid. `dtype` is that of the logits, for the greedy kind.
    """

    n_draft: tuple[int, ...]
    drafts: int = 3  # K
    vocab: int = 40  # V
    layout: str = "dense"
    dtype: torch.dtype = torch.float32


# Around chunks of 16 and 32 tokens, the step of the interpreter.
VERIFY_CASES = [
    Verify(n_draft=tuple(min(n, row["drafts"]) for n in (5, 0, 2)), **row)
    for row in pairwise(
        {
            "drafts": (0, 1, 3, 4, 5),
            "vocab": (1, 16, 31, 33, 100),
            "layout": ("dense", "padded", "rows first", "shared", "shifted"),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
        }
    )
]


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "padded":
        room = x.new_full((*x.shape[:2], x.shape[2] + 5), math.nan)
        room[..., :-5] = x
        return room[..., :-5]
    if layout == "rows first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "shared":
        return x[:1].expand(len(x), -1, -1)
    return shifted(x) if layout == "shifted" else x


def _unused(n_draft: torch.Tensor, rows: int) -> torch.Tensor:
    """[B, rows]: whether a row lies after those of a sequence's drafts."""
    return torch.arange(rows) >= n_draft[:, None]


def sampled_inputs(
    case: Verify,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """p, q, draft, r, u and n_draft; drafts drawn from q, free slots NaN."""
    B, K, V = len(case.n_draft), case.drafts, case.vocab
    n_draft = torch.tensor(case.n_draft, dtype=torch.int32)
    if case.layout == "shared":
        n_draft[:] = n_draft.max()
    p = torch.rand(B, K + 1, V, generator=generator) ** 4
    q = p[:, :K] + torch.rand(B, K, V, generator=generator) ** 4
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if case.layout == "shared":
        q = q[:1].expand(B, -1, -1)
    # By hand: torch.multinomial refuses an empty batch.
    place = torch.rand(B, K, 1, generator=generator)
    draft = (q.cumsum(-1) < place).sum(-1).clamp(max=V - 1).int()
    r = torch.rand(B, K, generator=generator)
    u = torch.rand(B, generator=generator)

    p = p.masked_fill(_unused(n_draft + 1, K + 1)[..., None], math.nan)
    free = _unused(n_draft, K)
    q = q.masked_fill(free[..., None], math.nan)
    draft, r = draft.masked_fill(free, -1), r.masked_fill(free, math.nan)
    inputs = (x.to(device) for x in (p, q, draft, r, u, n_draft))
    p, q, draft, r, u, n_draft = inputs
    p, q = _laid_out(p, case.layout), _laid_out(q, case.layout)
    if case.layout == "shifted":
        draft, r, u = shifted(draft), shifted(r), shifted(u)
    return p, q, draft, r, u, n_draft


def greedy_inputs(
    case: Verify,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits, draft and n_draft; many ties, most drafts right."""
    B, K, V = len(case.n_draft), case.drafts, case.vocab
    n_draft = torch.tensor(case.n_draft, dtype=torch.int32)
    if case.layout == "shared":
        n_draft[:] = n_draft.max()
    logits = torch.randn(B, K + 1, V, generator=generator).mul(2).round()
    if case.layout == "shared":
        logits = logits[:1].expand(B, -1, -1)
    right = logits[:, :K].argmax(-1)
    wrong = torch.randint(V, (B, K), generator=generator)
    chosen = torch.rand(B, K, generator=generator) < 0.8
    draft = torch.where(chosen, right, wrong).int()
    free = _unused(n_draft, K)
    unused = _unused(n_draft + 1, K + 1)[..., None]
    logits = logits.masked_fill(unused, math.nan).to(device, case.dtype)
    draft = draft.masked_fill(free, -1).to(device)
    if case.layout == "shifted":
        draft = shifted(draft)
    return _laid_out(logits, case.layout), draft, n_draft.to(device)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _sampled_launch(B: int, K: int, V: int) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    draft, n_draft = (
        _meta(B, K, dtype=torch.int32),
        _meta(B, dtype=torch.int32),
    )
    p, q = _meta(B, K + 1, V), _meta(B, K, V)
    verify_sampled(p, q, draft, _meta(B, K), _meta(B), n_draft)


def _greedy_launch(B: int, K: int, V: int, dtype: torch.dtype) -> None:
    draft, n_draft = (
        _meta(B, K, dtype=torch.int32),
        _meta(B, dtype=torch.int32),
    )
    verify_greedy(_meta(B, K + 1, V, dtype=dtype), draft, n_draft)


STREAMING = ("_argmax_chunk_kernel", "_residual_chunk_kernel")
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "Llama-3-8B, 16 sequences, 4 drafts, sampled": partial(
        _sampled_launch, 16, 4, 128256
    ),
    "SmolLM2-135M, 16 sequences, 4 drafts, sampled": partial(
        _sampled_launch, 16, 4, 49152
    ),
    "Llama-3-8B, 16 sequences, 4 drafts, greedy, bf16": partial(
        _greedy_launch, 16, 4, 128256, torch.bfloat16
    ),
    "SmolLM2-135M, 16 sequences, 4 drafts, greedy, fp32": partial(
        _greedy_launch, 16, 4, 49152, torch.float32
    ),
}


def _top_probabilities(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Softmax over the k largest logits, zero elsewhere."""
    kept, places = logits.topk(min(k, logits.shape[-1]))
    return torch.zeros_like(logits).scatter(-1, places, kept.softmax(-1))


def _sampled_draw(
    B: int,
    K: int,
    V: int,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Of two models that agree roughly, after top-k sampling with k = 50."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    logits = normal(B, K + 1, V).mul_(4)
    p = _top_probabilities(logits, 50)
    q = _top_probabilities(logits[:, :K] + normal(B, K, V), 50)
    flat = q.reshape(B * K, V)
    draft = torch.multinomial(flat, 1, generator=generator).view(B, K).int()
    n_draft = torch.full((B,), K, dtype=torch.int32, device=device)
    return p, q, draft, uniform(B, K), uniform(B), n_draft


def _greedy_draw(
    B: int,
    K: int,
    V: int,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Every draft right, so that all rows must be looked at."""
    logits = torch.randn(
        (B, K + 1, V), generator=generator, device=device
    ).bfloat16()
    n_draft = torch.full((B,), K, dtype=torch.int32, device=device)
    return logits, logits[:, :K].argmax(-1).int(), n_draft


def _emitted(
    draft: torch.Tensor, accepted: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """The accepted drafts, the token, then -1: [B, K + 1]."""
    o_k = torch.arange(draft.shape[1] + 1, device=draft.device)
    end = accepted[:, None]
    padded = torch.nn.functional.pad(draft, (0, 1), value=-1)
    out = torch.where(o_k < end, padded, -1)
    return torch.where(o_k == end, token[:, None], out).int()


def _sampled_eager(
    p: torch.Tensor,
    q: torch.Tensor,
    draft: torch.Tensor,
    r: torch.Tensor,
    u: torch.Tensor,
    n_draft: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    K, ids = draft.shape[1], draft.long()[..., None]
    ratio = r * q.gather(2, ids)[..., 0] < p[:, :K].gather(2, ids)[..., 0]
    used = torch.arange(K, device=p.device) < n_draft[:, None]
    accepted = (ratio & used).int().cumprod(1).sum(1, dtype=torch.int32)
    zero = torch.nn.functional.pad(q, (0, 0, 0, 1))
    place = accepted.long()[:, None, None].expand(-1, -1, p.shape[2])
    row = p.gather(1, place)[:, 0]
    subtracted = zero.gather(1, place)[:, 0]
    subtracted = subtracted * (accepted < n_draft)[:, None]
    residual = (row - subtracted).clamp(min=0).double()
    weights = torch.where(residual.any(1)[:, None], residual, row.double())
    edges = weights.cumsum(1)
    beyond = (edges <= u[:, None] * edges[:, -1:]).sum(1)
    token = beyond.clamp(max=p.shape[2] - 1).int()
    return _emitted(draft, accepted, token), accepted


def _greedy_eager(
    logits: torch.Tensor, draft: torch.Tensor, n_draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    K, best = draft.shape[1], logits.argmax(-1).int()
    used = torch.arange(K, device=draft.device) < n_draft[:, None]
    same = (best[:, :K] == draft) & used
    accepted = same.int().cumprod(1).sum(1, dtype=torch.int32)
    token = best.gather(1, accepted.long()[:, None])[:, 0]
    return _emitted(draft, accepted, token), accepted


def _flashinfer(
    p: torch.Tensor,
    q: torch.Tensor,
    draft: torch.Tensor,
    r: torch.Tensor,
    u: torch.Tensor,
    n_draft: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """It draws its own uniforms: the same work, other tokens."""
    import flashinfer

    tokens, accepted, _ = flashinfer.sampling.chain_speculative_sampling(
        q, draft, p
    )
    return tokens, accepted


BENCHMARKS = [
    Benchmark(
        name=f"Llama-3 vocabulary, {B} sequences, 4 drafts, sampled",
        inputs=partial(_sampled_draw, B, 4, 128256),
        small=partial(_sampled_draw, 3, 2, 70),
        ours=verify_sampled,
        reference=_sampled_eager,
        peers={"FlashInfer chain_speculative_sampling": _flashinfer},
        bytes=8 * B * 128256,  # if a draft fails; half if all pass
        flops=2 * B * 128256,
        bound="memory",
        tolerance=0.0,
    )
    for B in (8, 64)
] + [
    Benchmark(
        name="Llama-3 vocabulary, 64 sequences, 4 drafts, greedy",
        inputs=partial(_greedy_draw, 64, 4, 128256),
        small=partial(_greedy_draw, 3, 2, 70),
        ours=verify_greedy,
        reference=_greedy_eager,
        bytes=2 * 64 * 5 * 128256,
        flops=64 * 5 * 128256,
        bound="memory",
        tolerance=0.0,
    )
]
