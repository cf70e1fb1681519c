"""Cases of linear attention: edge shapes and layouts, production launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cases import Benchmark, pairwise, shifted
from kernels.linear_attention import chunk_linear_attention


@dataclass(frozen=True)
class Linear:
    """One call of linear attention.

    `decay` is "none", "head" for a constant of each head, or "token" for a
    gate, some of which forget everything. `layout` is how q, k and v lie in
    memory: "dense"; "fused", in one tensor; "heads first", [B, H, T, D] seen
    as [B, T, H, D]; "shared", values expanded over the heads; "shifted", off
    the 16-byte grid.
    """

    T: int = 40
    Dk: int = 32
    Dv: int = 32
    dtype: torch.dtype = torch.float32
    n_splits: int | None = None
    layout: str = "dense"
    decay: str = "none"
    state: bool = False
    strict: bool = False
    feature_map: str = "elu"
    B: int = 1
    H: int = 2


# Around a chunk of 16 tokens, the step of the interpreter.
LINEAR_CASES = [
    Linear(**row)
    for row in pairwise(
        {
            "T": (1, 15, 16, 17, 55),
            "Dk": (16, 20, 64, 128, 3),
            "Dv": (16, 40, 33, 1),
            "dtype": (torch.float32, torch.float16, torch.bfloat16),
            "layout": ("dense", "fused", "heads first", "shared", "shifted"),
            "B": (1, 2),
        }
    )
]
# The options against each other, at one shape with a tail.
LINEAR_CASES += dict.fromkeys(
    Linear(**row)
    for row in pairwise(
        {
            "n_splits": (3, 1, 2),
            "decay": ("none", "head", "token"),
            "state": (True, False),
            "strict": (False, True),
            "feature_map": ("elu", "identity"),
        }
    )
)


def linear_inputs(
    case: Linear,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple:
    """q, k, v, decay and state of a case; what lies beside a view is NaN."""
    B, T, H, Dk, Dv = case.B, case.T, case.H, case.Dk, case.Dv

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        return x.to(device, case.dtype)

    q, k, v = draw(B, T, H, Dk), draw(B, T, H, Dk), draw(B, T, H, Dv)
    if case.layout == "fused":
        gap = torch.full_like(v, torch.nan)
        fused = torch.cat([q, gap, k, gap, v], -1)
        q, k, v = (
            fused[..., at : at + x.shape[-1]]
            for x, at in ((q, 0), (k, Dk + Dv), (v, 2 * Dk + 2 * Dv))
        )
    elif case.layout == "heads first":
        q, k, v = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
        )
    elif case.layout == "shared":
        v = v[:, :, :1].expand(-1, -1, H, -1)
    elif case.layout == "shifted":
        q, k, v = shifted(q), shifted(k), shifted(v)

    decay = state = None
    if case.decay == "head":
        decay = -torch.rand(H, generator=generator).to(device) / 8
    elif case.decay == "token":
        decay = -torch.rand(B, T, H, generator=generator).to(device)
        decay[:, 5::13] = -torch.inf
        decay[:, 3::7] = 0.0
    if case.state:
        seen = torch.rand(B, 9, H, Dk, generator=generator).to(device)
        values = torch.randn(B, 9, H, Dv, generator=generator).to(device)
        S = torch.einsum("bthk,bthv->bhkv", seen, values)
        state = S.contiguous(), seen.sum(1)
    return q, k, v, decay, state


def run(
    case: Linear,
    inputs: tuple,
    function: Callable[..., Any] = chunk_linear_attention,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out, S and z of a case."""
    return function(
        *inputs,
        strict=case.strict,
        feature_map=case.feature_map,
        n_splits=case.n_splits,
        return_state=True,
    )


def _launch(
    B: int, T: int, H: int, D: int, dtype: torch.dtype, gated: bool
) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    q = torch.empty(B, T, H, D, dtype=dtype, device="meta")
    S = torch.empty(B, H, D, D, device="meta")
    decay = torch.empty(B, T, H, device="meta") if gated else None
    chunk_linear_attention(
        q, q, q, decay, (S, S[..., 0].clone()), n_splits=4, return_state=True
    )


STREAMING = ("_linear_state_kernel", "_linear_output_kernel")
TENSOR_CORE = ("_linear_state_kernel", "_linear_output_kernel")
PRODUCTION: dict[str, Callable[[], Any]] = {
    "32 heads of 128, gated, bf16": partial(
        _launch, 1, 8192, 32, 128, torch.bfloat16, True
    ),
    "9 heads of 64, fp16": partial(
        _launch, 1, 8192, 9, 64, torch.float16, False
    ),
    "9 heads of 64, gated, fp32": partial(
        _launch, 1, 8192, 9, 64, torch.float32, True
    ),
}


def _by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    elu: bool,
    C: int = 64,
) -> torch.Tensor:
    """The formula on all chunks at once, for `torch.compile`."""
    T, H = q.shape[1:3]
    q, k, v, dtype = q.float(), k.float(), v.float(), q.dtype
    if elu:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        v = F.pad(v, (0, 1), value=1.0)  # its sums are the normaliser
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, -T % C)).unflatten(1, (-1, C))
        for x in (q, k, v)
    )
    g = q.new_zeros(H) if decay is None else decay
    steps = torch.arange(1, C + 1, device=q.device)[:, None] * g  # [C, H]
    apart = steps[:, None] - steps[None]  # [C, C, H]
    seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    fade = apart.masked_fill(~seen[..., None], -torch.inf).exp()
    a = torch.einsum("bnthd,bnshd->bnhts", q, k) * fade.permute(2, 0, 1)
    out = torch.einsum("bnhts,bnshv->bnthv", a, v)

    rest = (steps[-1] - steps).exp()
    added = torch.einsum("bnshd,sh,bnshv->bnhdv", k, rest, v)
    N = added.shape[1]
    order = torch.arange(N, device=q.device)
    gone = (order[:, None] - 1 - order[None])[..., None] * steps[-1]
    past = (order[:, None] > order[None])[..., None]
    kept = gone.masked_fill(~past, -torch.inf).exp()  # [N, N, H]
    S = torch.einsum("nmh,bmhdv->bnhdv", kept, added)
    out = out + torch.einsum("bnthd,bnhdv,th->bnthv", q, S, steps.exp())
    out = out.flatten(1, 2)[:, :T]
    if elu:
        out = out[..., :-1] / out[..., -1:]
    return out.to(dtype)


def _fla_normalised(q, k, v):
    """flash-linear-attention; it takes features, which torch computes."""
    from fla.ops.linear_attn import chunk_linear_attn

    q, k = F.elu(q) + 1, F.elu(k) + 1
    return chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0]


def _fla_retention(q, k, v, decay):
    """flash-linear-attention's kernel for a constant decay of each head."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0)[0]


def _benchmark(B: int, T: int, H: int, D: int, elu: bool) -> Benchmark:
    def inputs(
        generator: torch.Generator,
        device: torch.device,
        B: int = B,
        T: int = T,
        H: int = H,
    ) -> tuple[torch.Tensor, ...]:
        def draw() -> torch.Tensor:
            return torch.randn(
                (B, T, H, D),
                generator=generator,
                device=device,
                dtype=torch.bfloat16,
            )

        q, k, v = draw(), draw(), draw()
        if elu:
            return q, k, v
        # As in retentive networks: a head remembers 32 to 512 tokens.
        heads = torch.linspace(5, 9, H, device=device)
        return q, k, v, torch.log1p(-(2**-heads))

    name = "elu + 1" if elu else "identity, decay of each head"
    ours = partial(
        chunk_linear_attention, feature_map="elu" if elu else "identity"
    )
    return Benchmark(
        f"B={B}, T={T}, {H} heads of {D}, {name}, bf16",
        inputs,
        partial(inputs, B=1, T=100, H=2),
        ours,
        partial(_by_chunks, decay=None, elu=True)
        if elu
        else partial(_by_chunks, elu=False),
        bytes=2 * 4 * B * T * H * D,
        flops=B * H * T * (4 * D * D + 2 * 64 * D),
        bound="memory",
        tolerance=2e-2,
        peers={"FLA": _fla_normalised if elu else _fla_retention},
    )


BENCHMARKS = [
    _benchmark(8, 4096, 32, 128, elu=True),
    _benchmark(1, 32_768, 16, 128, elu=True),
    _benchmark(8, 4096, 32, 128, elu=False),
]
