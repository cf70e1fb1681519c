"""The KV cache: the same logits as without one, whatever the schedule."""

import pytest
import torch

from course.lm import KVCache, Llama


@pytest.mark.parametrize("chunks", [[9], [8, 1], [1] * 9, [4, 5], [1, 3, 1, 4]])
def test_chunks_give_the_logits_of_one_pass(tiny: Llama, chunks: list[int]) -> None:
    ids = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(9).expand(2, 9)
    cache = KVCache(tiny.config, batch=2, max_tokens=12)
    parts = [
        tiny(i, p, cache.attend(p))
        for i, p in zip(ids.split(chunks, 1), positions.split(chunks, 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), tiny(ids, positions), atol=2e-4, rtol=0)


def test_sequences_of_different_lengths_share_a_batch(tiny: Llama) -> None:
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    cache = KVCache(tiny.config, batch=2, max_tokens=8)
    cache.k.fill_(3.0)  # stale keys and values of an earlier use
    cache.v.fill_(3.0)
    start = torch.arange(2).expand(2, 2)
    tiny(torch.tensor([row[:2] for row in rows]), start, cache.attend(start))
    # Row 0 now feeds tokens 2..5, row 1 its last token behind three pads that are overwritten.
    one = torch.tensor([[2], [2]])
    tiny(torch.tensor([[7], [13]]), one, cache.attend(one))
    two = torch.tensor([[3], [0]])  # row 1 stores its first token again
    last = tiny(torch.tensor([[8], [11]]), two, cache.attend(two))
    for row, length in ((0, 4), (1, 1)):
        alone = tiny(torch.tensor([rows[row][:length]]), torch.arange(length)[None])
        torch.testing.assert_close(last[row, -1], alone[0, -1], atol=2e-4, rtol=0)


def test_unequal_positions_in_one_chunk(tiny: Llama) -> None:
    ids = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(7).expand(2, 7)
    full = tiny(ids, positions)
    cache = KVCache(tiny.config, batch=2, max_tokens=7)
    first = positions[:, :4]
    tiny(ids[:, :4], first, cache.attend(first))
    chunk = torch.tensor([[4, 5], [2, 3]])  # row 1 repeats two tokens
    logits = tiny(ids.gather(1, chunk), chunk, cache.attend(chunk))
    for row in range(2):
        torch.testing.assert_close(logits[row], full[row, chunk[row]], atol=2e-4, rtol=0)


def test_positions_and_not_the_order_of_tokens_decide(tiny: Llama) -> None:
    ids, positions = torch.tensor([[5, 6, 7]]), torch.arange(3)[None]
    backwards = positions.flip(1)
    cache = KVCache(tiny.config, batch=1, max_tokens=3)
    logits = tiny(ids.flip(1), backwards, cache.attend(backwards))
    torch.testing.assert_close(logits, tiny(ids, positions).flip(1), atol=2e-4, rtol=0)


def test_unwritten_slots_cannot_leak(tiny: Llama) -> None:
    cache = KVCache(tiny.config, batch=2, max_tokens=6)
    positions = torch.tensor([[4], [0]])  # row 1 sees slot 0 only; slots 1..4 are unwritten
    logits = tiny(torch.tensor([[3], [9]]), positions, cache.attend(positions))
    alone = tiny(torch.tensor([[9]]), torch.tensor([[0]]))
    torch.testing.assert_close(logits[1], alone[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("positions", [[[4, 5]], [[-1]], [[0], [1]], [[]], [0]])
def test_bad_positions_are_refused_before_anything_is_stored(tiny: Llama, positions: list) -> None:
    cache = KVCache(tiny.config, batch=1, max_tokens=5)
    with pytest.raises(ValueError, match="positions"):
        cache.attend(torch.tensor(positions, dtype=torch.int64))
    assert not cache.k.any()


def test_dtype_and_size_of_the_buffers(tiny: Llama) -> None:
    cache = KVCache(tiny.config, batch=2, max_tokens=5, dtype=torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (3, 2, 5, 2, 10)
    assert cache.k.nbytes + cache.v.nbytes == 2 * 3 * 2 * 10 * 2 * (2 * 5)
