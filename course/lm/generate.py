"""Greedy and sampled generation with the KV cache."""

from typing import TypeVar, cast

import torch
from torch import Tensor

from course.lm.cache import KVCache
from course.lm.model import Llama

Ids = TypeVar("Ids", list[int], list[list[int]])


@torch.inference_mode()
def generate(
    model: Llama,
    ids: Ids,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    eos: int | None = None,
) -> Ids:
    """The new ids after one prompt (a list of ids), or after each of a batch (a list of prompts).

    Prompts may differ in length. A sequence stops after `max_new_tokens`, or earlier at `eos`,
    which is then its last id. `temperature`, `top_k`, `top_p`, `generator`: see `sample`. Greedy
    ids do not depend on the rest of the batch, up to rounding. Raises ValueError on an empty
    prompt or an id outside the vocabulary.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: it must not be negative")
    single = bool(ids) and isinstance(ids[0], int)
    prompts = cast(list[list[int]], [ids] if single else ids)
    if not prompts or not all(prompts):
        raise ValueError("ids holds an empty prompt: each needs at least one token")
    vocab, device = model.config.vocab, model.embed.device
    if not all(0 <= token < vocab for prompt in prompts for token in prompt):
        raise ValueError(f"ids must lie in 0..{vocab - 1}, the model's vocabulary")

    # Prompts are padded on the right. A pad lies in a slot that the sequence overwrites with a
    # token of its own before any query of that sequence may see it.
    lengths = [len(prompt) for prompt in prompts]
    longest, shortest = max(lengths), min(lengths)
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    batch = torch.tensor(padded, device=device)  # [B, T]
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    cache = KVCache(model.config, len(prompts), longest + max_new_tokens, model.embed.dtype, device)
    outputs: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))

    logits = model(batch, positions, cache.attend(positions), longest - shortest + 1)
    positions = torch.tensor(lengths, device=device)[:, None]  # of the token to come, [B, 1]
    logits = logits.take_along_dim(positions[..., None] - shortest, dim=1)  # [B, 1, vocab]
    for step in range(max_new_tokens):
        if step:
            logits = model(batch, positions, cache.attend(positions), 1)
            positions = positions + 1
        batch = sample(logits[:, -1], temperature, top_k, top_p, generator)[:, None]
        tokens = batch[:, 0].tolist()
        for row in sorted(running):
            outputs[row].append(tokens[row])
            if tokens[row] == eos:
                running.remove(row)
        if not running:
            break
    return cast(Ids, outputs[0] if single else outputs)


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id per row of logits [B, vocab]; returns int64 [B].

    temperature 0 takes the largest logit. Otherwise an id is drawn from softmax(logits /
    temperature), kept to the `top_k` likeliest ids (0: all), then to the smallest set of likeliest
    ids that holds at least `top_p` of what is left (Holtzman et al. 2020, arXiv 1904.09751).
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must not be negative")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}: it must not be negative")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: it must lie in (0, 1]")
    if temperature == 0:
        return logits.argmax(dim=-1)
    probs = (logits.float() / temperature).softmax(dim=-1)
    if top_k == 0 and top_p == 1:
        return torch.multinomial(probs, 1, generator=generator)[:, 0]
    vocab = logits.shape[-1]
    probs, order = probs.topk(min(top_k or vocab, vocab), dim=-1)  # likeliest first
    before = probs.cumsum(dim=-1) - probs  # mass of the likelier ids
    probs[before >= top_p * probs.sum(dim=-1, keepdim=True)] = 0
    drawn = torch.multinomial(probs, 1, generator=generator)  # normalises its weights itself
    return order.gather(1, drawn)[:, 0]
