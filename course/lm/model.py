"""A llama-layout language model on one page.

Shapes use B (batch), T (tokens), H (query heads), Hkv (KV heads), D (head size) and N = B * T: all
but attention treats tokens alike, so they lie in one row each, [N, hidden]. The one seam is the
attention operation: the model hands rotated queries and keys to `attention(layer, q, k, v)`, so
that a cache, a mask, an eviction rule or a kernel can stand behind it. Norm, rotary embedding,
linear and gate are arguments too, with plain torch as the default.

Architecture: Touvron et al. 2023 (arXiv 2302.13971); grouped KV heads: Ainslie et al. 2023
(arXiv 2305.13245); rotary embedding: Su et al. 2021 (arXiv 2104.09864).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lm.tokenizer import Tokenizer

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Llama3Rope:
    """The frequency scaling of Llama 3.1, named as in its `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Config:
    """Sizes of a model. `tied`: the output projection is the embedding matrix."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True
    rope_scaling: Llama3Rope | None = None

    def __post_init__(self) -> None:
        sizes = "n_layers n_heads n_kv_heads head_dim hidden intermediate vocab"
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}: not a multiple of {self.n_kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary embedding needs an even size")


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a cache: token i sees tokens 0..i of the same call.

    q: [B, T, H, D]; k, v: [B, T, Hkv, D]; returns [B, T, H, D]. Query head h reads KV head
    h // (H // Hkv); scores are scaled by 1/sqrt(D).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467). x: [..., hidden]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) of x [B, T, heads, D] by cos and sin [B, T, 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise (arXiv 2002.05202)."""
    return F.silu(gate).mul_(up)  # into the buffer that silu made: one large array less


def rope_frequencies(config: Config) -> Tensor:
    """Angle per position of each channel pair, fp32 [D/2]: theta^(-2i/D), scaled for Llama 3.1."""
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Pairs that turn often within the original context keep their speed, pairs that turn less than
    # low_freq_factor times are slowed by `factor`, and those between are interpolated.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class Block(nn.Module):
    """The weights of one layer. Linear weights are [out, in]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, intermediate = config.hidden, config.intermediate
        q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.attn_norm = _weight(hidden)
        self.q = _weight(q_size, hidden)
        self.k = _weight(kv_size, hidden)
        self.v = _weight(kv_size, hidden)
        self.o = _weight(hidden, q_size)
        self.mlp_norm = _weight(hidden)
        self.gate = _weight(intermediate, hidden)
        self.up = _weight(intermediate, hidden)
        self.down = _weight(hidden, intermediate)


class Llama(nn.Module):
    """A decoder with pre-norm, grouped-query attention, rotary embedding and a gated MLP.

    Weights are made uninitialised and without gradients: `load`, `load_hub` and `random_model` fill
    them. The operations default to plain torch; a kernel with the same signature may replace each:
    norm(x [N, hidden], weight, eps), rope(x [B, T, heads, D], cos, sin), linear(x [N, in], weight
    [out, in]) -> [N, out], swiglu(gate, up [N, intermediate]).
    """

    tokenizer: Tokenizer  # set by `load` and `load_hub`; a random model has none

    def __init__(
        self,
        config: Config,
        *,
        norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
        rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rope,
        linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
        swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu,
    ) -> None:
        super().__init__()
        self.config = config
        self.norm_op, self.rope_op, self.linear_op, self.swiglu_op = norm, rope, linear, swiglu
        self.frequencies = rope_frequencies(config)  # no buffer: `.to(bfloat16)` must not round it
        self.embed = _weight(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = _weight(config.hidden)
        if not config.tied:
            self.head = _weight(config.vocab, config.hidden)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Attention = causal_attention,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits of the next token after each of the last `logits_to_keep` tokens (0: after all).

        ids, positions: int64 [B, T]; returns [B, logits_to_keep or T, vocab] in the weights' dtype.
        `attention(layer, q, k, v)` gets the layer's index, q [B, T, H, D] and k, v [B, T, Hkv, D],
        q and k rotated to `positions`, and returns o like q. Raises ValueError on other shapes.
        """
        if ids.ndim != 2 or ids.shape != positions.shape:
            raise ValueError(
                f"ids {list(ids.shape)} and positions {list(positions.shape)} must both be [B, T]"
            )
        if not 0 <= logits_to_keep <= ids.shape[1]:
            raise ValueError(f"logits_to_keep is {logits_to_keep}: it must be 0..{ids.shape[1]}")
        norm, rope, linear, swiglu = self.norm_op, self.rope_op, self.linear_op, self.swiglu_op
        eps, (batch, tokens) = self.config.norm_eps, ids.shape
        heads = (batch, tokens, -1, self.config.head_dim)

        x = F.embedding(ids.flatten(), self.embed)  # [N, hidden]
        self.frequencies = self.frequencies.to(x.device)
        angles = positions[..., None, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # [B, T, 1, D/2]
        block: Any  # mypy sees only nn.Module in a ModuleList
        for layer, block in enumerate(self.layers):
            h = norm(x, block.attn_norm, eps)
            q = rope(linear(h, block.q).view(heads), cos, sin)  # [B, T, H, D]
            k = rope(linear(h, block.k).view(heads), cos, sin)  # [B, T, Hkv, D]
            v = linear(h, block.v).view(heads)  # [B, T, Hkv, D]
            o = attention(layer, q, k, v).reshape(batch * tokens, -1)  # [N, H * D]
            x = x + linear(o, block.o)
            h = norm(x, block.mlp_norm, eps)
            x = x + linear(swiglu(linear(h, block.gate), linear(h, block.up)), block.down)
        x = x.view(batch, tokens, -1)[:, -logits_to_keep:].flatten(0, 1)
        logits = linear(norm(x, self.norm, eps), self.embed if self.config.tied else self.head)
        return logits.view(batch, -1, self.config.vocab)


def random_model(config: Config, generator: torch.Generator) -> Llama:
    """A seeded fp32 model for checks: the same weights on any number of threads.

    The scales make an untrained model behave. Attention scores have a standard deviation of about
    2, so that positions matter. Logits spread over several units, so that the best two are seldom
    as close as rounding. The final norm is negative, and the output projection leans towards the
    embedding: the last token becomes the unlikeliest, and greedy ids do not get stuck on one.
    `generator` lives on the CPU.
    """

    def fill(weight: Tensor, gain: float = 1.0, mean: float | Tensor = 0.0) -> None:
        weight.copy_(mean + gain * torch.randn(weight.shape, generator=generator))

    model = Llama(config)
    fill(model.embed)
    if not config.tied:
        fill(model.head, mean=model.embed)
    gains = {"q": 1.5, "k": 1.5, "v": 1.0, "o": 2.0, "gate": 1.0, "up": 1.0, "down": 4.0}
    block: Any
    for block in model.layers:
        fill(block.attn_norm, gain=0.1, mean=1.0)
        fill(block.mlp_norm, gain=0.1, mean=1.0)
        for name, gain in gains.items():
            weight = block.get_parameter(name)
            fill(weight, gain / weight.shape[1] ** 0.5)
    fill(model.norm, gain=0.1, mean=-1.0)
    return model


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
