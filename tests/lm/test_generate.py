"""Generation: greedy against a loop without a cache, sampling against its law."""

import pytest
import torch

from course.lm import Llama, generate, sample


def naive(model: Llama, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_full_recompute(tiny: Llama) -> None:
    for prompt in ([7], [1, 2, 3, 4, 5], [100, 0, 100]):
        assert generate(tiny, prompt, 12) == naive(tiny, prompt, 12)


def test_a_ragged_batch_equals_each_prompt_alone(tiny: Llama) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [30, 20, 10], [0, 0]]
    before = [list(prompt) for prompt in prompts]
    assert generate(tiny, prompts, 10) == [generate(tiny, prompt, 10) for prompt in prompts]
    assert prompts == before


def test_eos_ends_a_sequence_and_is_its_last_id(tiny: Llama) -> None:
    prompts = [[1, 2, 3], [9, 8, 7]]
    free = generate(tiny, prompts, 12)
    eos = free[0][4]
    cut = generate(tiny, prompts, 12, eos=eos)
    for whole, part in zip(free, cut, strict=True):
        end = whole.index(eos) + 1 if eos in whole else len(whole)
        assert part == whole[:end]
    assert len(cut[0]) <= 5


def test_nothing_to_generate(tiny: Llama) -> None:
    assert generate(tiny, [1, 2], 0) == []
    assert generate(tiny, [[1, 2], [3]], 0) == [[], []]


def test_generation_follows_the_weights_dtype(tiny: Llama) -> None:
    assert len(generate(tiny.bfloat16(), [1, 2, 3], 4)) == 4


def test_sampled_ids_follow_the_generator(tiny: Llama) -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate(tiny, [1, 2, 3], 20, temperature=3.0, generator=generator)

    assert draw(1) == draw(1) != draw(2)


def shares(temperature: float, top_k: int, top_p: float, draws: int = 40_000) -> torch.Tensor:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.9]).expand(draws, 5)
    generator = torch.Generator().manual_seed(4)
    ids = sample(logits, temperature, top_k, top_p, generator)
    return torch.bincount(ids, minlength=5) / draws


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, 0, 1.0, [0, 1, 2, 3, 4]),
        (2.5, 0, 1.0, [0, 1, 2, 3, 4]),
        (1.0, 3, 1.0, [1, 3, 4]),
        (1.0, 99, 1.0, [0, 1, 2, 3, 4]),
        (1.0, 0, 0.5, [1, 3]),  # 0.498 of the mass lies on id 1
        (1.0, 0, 0.49, [1]),
        (1.0, 0, 1e-9, [1]),
        (1.0, 2, 0.68, [1]),  # of the two kept, id 1 holds 0.69
        (1.0, 2, 0.70, [1, 3]),
        (0.5, 0, 0.72, [1]),  # temperature comes first: id 1 now holds 0.74
    ],
)
def test_sampling_law(temperature: float, top_k: int, top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.9], dtype=torch.float64)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = (logits[kept] / temperature).exp()
    expected /= expected.sum()
    measured = shares(temperature, top_k, top_p)
    assert measured[expected == 0].sum() == 0
    # Five standard deviations of a share over 40,000 draws are at most 0.0125.
    torch.testing.assert_close(measured.double(), expected, atol=0.0125, rtol=0)


def test_the_law_of_a_whole_model(tiny: Llama) -> None:
    logits = tiny(torch.tensor([[5, 6]]), torch.arange(2)[None])[0, -1]
    expected = (logits.double() / 4).softmax(-1)
    generator = torch.Generator().manual_seed(9)
    drawn = generate(tiny, [[5, 6]] * 4000, 1, temperature=4.0, generator=generator)
    measured = torch.bincount(torch.tensor(drawn)[:, 0], minlength=101) / 4000
    assert (measured - expected).abs().max() < 0.04
    # The total variation of an exact sampler here is below sqrt(101 / (2 * pi * 4000)) = 0.063.
    assert (measured - expected).abs().sum() / 2 < 0.08


def test_zero_temperature_is_argmax() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 2.0], [9.0, 0.0, 1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_sampling_options(tiny: Llama, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny, [1], 1, **options)


@pytest.mark.parametrize("ids", [[], [[]], [[1], []]])
def test_empty_prompts_are_refused(tiny: Llama, ids: list) -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        generate(tiny, ids, 3)


@pytest.mark.parametrize("token", [-1, 101])
def test_ids_outside_the_vocabulary_are_refused(tiny: Llama, token: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.100"):
        generate(tiny, [1, token], 3)
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        generate(tiny, [1], -1)
