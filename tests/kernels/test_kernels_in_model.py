"""A seeded two-layer model with kernels in every seam gives the logits of plain torch.

Each part replaces operations of `course.lm`, or what comes after its logits, by kernels. Between
them they launch every kernel there is, which is counted.
"""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

from course import lm
from kernels import (
    adam8bit,
    attention_cascade,
    attention_decode,
    attention_paged,
    attention_prefill,
    bitmask,
    cross_entropy,
    gemm_w4a16,
    gemm_w8a8,
    kv_quant,
    linear_attention,
    norms,
    quantize,
    rejection,
    sampling,
    swiglu,
)
from kernels import rope as rope_kernels
from kernels.cases import families

CONFIG = lm.Config(
    n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16, hidden=64, intermediate=64, vocab=53
)
HALF_ERROR = 0.1  # where both sides round activations to float16, each in its own place
GROUP = 32  # of quantized weights
MAX_ERROR = 2e-4  # of logits of up to 30; float32 sums in another order


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The model's rotary operation, by the kernel: tokens of all sequences in one row."""
    flat = rope_kernels.apply_rope(x.flatten(0, 1), cos.flatten(0, 2), sin.flatten(0, 2))
    return flat.view_as(x)


KERNELS: dict[str, Callable] = {"norm": norms.rms_norm, "rope": rope, "swiglu": swiglu.swiglu}


def model(**operations: Callable) -> lm.Llama:
    """The same weights every time."""
    weights = lm.random_model(CONFIG, torch.Generator().manual_seed(0))
    llama = lm.Llama(CONFIG, **operations)
    llama.load_state_dict(weights.state_dict())
    return llama


def prompt(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(CONFIG.vocab, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(tokens).expand(batch, -1)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def counted(counts: Counter) -> Iterator[None]:
    """Count launches by the kernel's name."""
    before = KernelInterface.__getitem__

    def getitem(kernel, grid):
        counts[kernel.__name__] += 1
        return before(kernel, grid)

    KernelInterface.__getitem__ = getitem
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and want.std() > 1
    assert (got - want).abs().max() <= MAX_ERROR


def contiguous_cache() -> None:
    """Prompts of two sequences by prefill attention, then three tokens by decode attention."""
    ids, positions = prompt(2, 20)
    want = model()(ids, positions)
    cache = torch.full((2, CONFIG.n_layers, 2, 24, 2, 16), float("nan"))
    ours = model(**KERNELS)

    def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache[:, layer, :, : q.shape[1]] = torch.stack((k, v))
        ends = lengths(0, q.shape[1], 2 * q.shape[1])
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return attention_prefill.prefill_attention(q, k, v, ends, ends, 17).view(2, 17, 6, 16)

    assert_same(ours(ids[:, :17], positions[:, :17], prefill), want[:, :17])
    for t in range(17, 20):

        def decode(layer: int, q: Tensor, k: Tensor, v: Tensor, t: int = t) -> Tensor:
            cache[:, layer, :, t] = torch.stack((k, v))[:, :, 0]
            k, v = cache[:, layer]
            out = attention_decode.decode_attention(q[:, 0], k, v, lengths(t + 1, t + 1), 2)
            return out[:, None]

        assert_same(ours(ids[:, t:][:, :1], positions[:, t:][:, :1], decode), want[:, t : t + 1])


def paged_cache() -> None:
    """Ragged prompts in chunks over permuted pages, then a step of the whole batch."""
    ids, positions = prompt(2, 20)
    want = model()(ids, positions)
    pages = torch.full((2, CONFIG.n_layers, 12, 4, 2, 16), float("nan"))
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(2)).int().view(2, 6)
    ours = model(**KERNELS)

    def slots(sequence: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return tables[sequence, at // 4].long() * 4 + at % 4

    for sequence, n in enumerate((19, 11)):
        for start, end in ((0, 7), (7, n)):

            def chunk(layer, q, k, v, s=sequence, start=start, end=end):
                k_pages, v_pages = pages[:, layer]
                attention_paged.append_to_cache(k[0], v[0], k_pages, v_pages, slots(s, start, end))
                return attention_paged.paged_prefill_attention(
                    q[0], k_pages, v_pages, tables[s : s + 1], lengths(end), lengths(0, end - start)
                )[None]

            part = slice(sequence, sequence + 1), slice(start, end)
            assert_same(ours(ids[part], positions[part], chunk), want[part])

    ends = torch.tensor([19, 11])

    def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pages, v_pages = pages[:, layer]
        new = torch.cat([slots(s, n, n + 1) for s, n in enumerate(ends.tolist())])
        attention_paged.append_to_cache(k[:, 0], v[:, 0], k_pages, v_pages, new)
        return attention_paged.paged_decode_attention(
            q[:, 0], k_pages, v_pages, tables, (ends + 1).int(), 2
        )[:, None]

    rows = torch.arange(2)
    logits = ours(ids[rows, ends][:, None], ends[:, None], step)
    assert_same(logits[:, 0], want[rows, ends])


def shared_prefix() -> None:
    """One token over a prefix that both sequences share and a suffix of each."""
    ids, positions = prompt(2, 20)
    ids[1, :13] = ids[0, :13]
    cache = lm.KVCache(CONFIG, 2, 20)
    plain = model()
    plain(ids[:, :19], positions[:, :19], cache.attend(positions[:, :19]))
    last = positions[:, 19:]
    want = plain(ids[:, 19:], last, cache.attend(last))

    def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.k[layer], cache.v[layer]
        out, _ = attention_cascade.cascade_decode_attention(
            *(q[:, 0], keys[0, :13], values[0, :13]),
            *(keys[:, 13:], values[:, 13:], lengths(7, 7), 2),
        )
        alone, lse = attention_cascade.cascade_prefix_attention(
            q[:, 0], keys[0, :13], values[0, :13], 1
        )
        rest, rest_lse = attention_decode.decode_attention(
            q[:, 0], keys[:, 13:], values[:, 13:], lengths(7, 7), 1, return_lse=True
        )
        merged, _ = attention_cascade.merge_lse(
            torch.stack((alone, rest)), torch.stack((lse, rest_lse))
        )
        torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-6)
        return out[:, None]

    assert_same(model(**KERNELS)(ids[:, 19:], last, step), want)


def quantized_weights() -> None:
    """Against the same codes, expanded and multiplied by torch: three rows at once, then one."""
    ids, positions = prompt(1, 3)

    def four_bits(weight: Tensor) -> tuple[Tensor, ...]:
        return quantize.quantize_int4_groups(weight, GROUP)

    def by_four_bits(x: Tensor, packed: tuple[Tensor, ...], product: Callable) -> Tensor:
        return product(x.half(), *packed).float()

    def by_eight_bits(x: Tensor, packed: tuple[Tensor, ...], product: Callable) -> Tensor:
        return product(*quantize.quantize_int8_rows(x), *packed).float()

    int4 = partial(gemm_w4a16.w4a16_linear, n_splits=2)
    int8 = partial(gemm_w8a8.w8a8_linear, n_splits=2)
    for pack, seam, ours, theirs in (
        (four_bits, by_four_bits, int4, gemm_w4a16.w4a16_linear_ref),
        (quantize.quantize_int8_rows, by_eight_bits, int8, gemm_w8a8.w8a8_linear_ref),
    ):
        packed: dict[int, tuple[Tensor, ...]] = {}
        product: list[Callable] = []

        def linear(x, weight, pack=pack, seam=seam, packed=packed, product=product) -> Tensor:
            if weight.data_ptr() not in packed:
                packed[weight.data_ptr()] = pack(weight)
            return seam(x, packed[weight.data_ptr()], product[0])

        quantized = model(**KERNELS, linear=linear)
        for tokens in (3, 1):
            part = ids[:, :tokens], positions[:, :tokens]
            product[:] = [ours]
            got = quantized(*part)
            product[:] = [theirs]
            want = quantized(*part)
            assert (got - want).abs().max() <= HALF_ERROR < want.std()

    weight = model().layers[0].gate
    for got, want in zip(
        quantize.quantize_nf4(weight), quantize.quantize_nf4_ref(weight), strict=True
    ):
        assert torch.equal(got, want)


def quantized_cache() -> None:
    """A KIVI and an int8 cache, against attention over the expanded values."""
    ids, positions = prompt(1, 20)
    cache = lm.KVCache(CONFIG, 1, 20)
    model()(ids[:, :19], positions[:, :19], cache.attend(positions[:, :19]))
    last = positions[:, 19:]
    decoded: dict[bool, list[Tensor]] = {}
    for use_kernel in (True, False):
        kivi = kv_quant.kivi_decode_attention if use_kernel else kv_quant.kivi_decode_attention_ref
        int8 = kv_quant.int8_decode_attention if use_kernel else kv_quant.int8_decode_attention_ref

        def four_bits(layer: int, q: Tensor, k: Tensor, v: Tensor, attend=kivi) -> Tensor:
            keys, values = cache.k[layer].half(), cache.v[layer].half()
            k_packed = kv_quant.kivi_pack(keys[:, :16], 4, 16, "channel")
            v_packed = kv_quant.kivi_pack(values[:, :16], 4, 16, "token")
            rest = (torch.cat((x[:, 16:19], new.half()), 1) for x, new in ((keys, k), (values, v)))
            k_rest, v_rest = rest
            out = attend(
                *(q[:, 0].half(), *k_packed, *v_packed, lengths(16), k_rest, v_rest, lengths(4)),
                *(4, 16),
            )
            return (out if isinstance(out, Tensor) else out[0])[:, None].float()

        def eight_bits(layer: int, q: Tensor, k: Tensor, v: Tensor, attend=int8) -> Tensor:
            packed = []
            for stored, new in ((cache.k, k), (cache.v, v)):
                x = torch.cat((stored[layer][:, :19], new), 1)  # [1, 20, Hkv, D]
                codes, scales = quantize.quantize_int8_rows(x.flatten(0, 2))
                packed += [codes.view_as(x), scales.view(x.shape[:3])]
            out = attend(q[:, 0].half(), *packed, lengths(20))
            return (out if isinstance(out, Tensor) else out[0])[:, None].float()

        ours = model(**KERNELS)
        decoded[use_kernel] = [
            ours(ids[:, 19:], last, attention) for attention in (four_bits, eight_bits)
        ]
    for got, want in zip(decoded[True], decoded[False], strict=True):
        assert (got - want).abs().max() <= HALF_ERROR < want.std()


def other_attention() -> None:
    """Linear attention in the place of softmax: the whole prompt, KV heads repeated."""
    ids, positions = prompt(2, 20)

    def seam(attend: Callable) -> lm.model.Attention:
        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))
            return out if isinstance(out, Tensor) else out[0]

        return attention

    want = model()(ids, positions, seam(linear_attention.chunk_linear_attention_ref))
    for n_splits in (1, 2):
        ours = partial(linear_attention.chunk_linear_attention, n_splits=n_splits)
        assert_same(model(**KERNELS)(ids, positions, seam(ours)), want)


def residual_stream() -> None:
    """The norm that adds: a layer's two steps as one launch."""
    x, residual = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3)).unbind()
    weight = model().layers[0].mlp_norm
    want = lm.rms_norm(x + residual, weight, CONFIG.norm_eps)
    got = norms.add_rms_norm(x, residual, weight, CONFIG.norm_eps)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def after_the_logits() -> None:
    """Masks, choices, verification and scores on the model's own logits."""
    ids, positions = prompt(2, 20)
    hidden: list[Tensor] = []

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        hidden[:] = [x]  # the last one is what the output layer gets
        return torch.nn.functional.linear(x, weight)

    llama = model(**KERNELS, linear=linear)
    logits = llama(ids, positions)[:, -4:]  # three drafts and the token after them
    last = logits[:, -1].contiguous()

    mask = lengths(*torch.randint(-(2**31), 2**31 - 1, (4,), generator=seeded(4)).tolist())
    mask = mask.view(2, 2)
    masked = bitmask.apply_token_bitmask_ref(last.clone(), mask)
    assert torch.equal(bitmask.masked_argmax(last, mask), masked.argmax(-1))
    assert torch.equal(bitmask.apply_token_bitmask(last.clone(), mask), masked)

    settings = (
        torch.full((2,), 0.8),
        lengths(20, 50),
        torch.full((2,), 0.9),
        torch.full((2,), 0.05),
    )
    uniform = torch.rand(2, generator=seeded(5))
    assert torch.equal(
        sampling.sample_tokens(last, uniform, *settings),
        sampling.sample_tokens_ref(last, uniform, *settings),
    )

    best = logits.argmax(-1).int()  # of the target after each draft
    draft = best[:, :3].clone()
    draft[1, 1] = (draft[1, 1] + 1) % CONFIG.vocab
    tokens, accepted = rejection.verify_greedy(logits, draft, lengths(3, 3))
    assert accepted.tolist() == [3, 1]
    assert tokens[0].tolist() == best[0].tolist()
    p, q = logits.softmax(-1), (logits[:, :3] / 2).softmax(-1)
    uniforms = torch.rand(2, 3, generator=seeded(6)), torch.rand(2, generator=seeded(7))
    for got, want in zip(
        rejection.verify_sampled(p, q, draft, *uniforms, lengths(3, 3)),
        rejection.verify_sampled_ref(p, q, draft, *uniforms, lengths(3, 3)),
        strict=True,
    ):
        assert torch.equal(got, want)

    targets = ids.flatten().roll(-1)
    nll, lse = cross_entropy.linear_token_nll(hidden[0], llama.embed, targets, n_splits=2)
    want = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden[0], llama.embed), targets, reduction="none"
    )
    torch.testing.assert_close(nll, want, rtol=1e-5, atol=1e-4)

    # One step of training of the output layer changes the logits as the reference's does.
    grads = cross_entropy.linear_token_nll_backward(
        torch.ones_like(nll), hidden[0], llama.embed, targets, nll, lse
    )
    trained = []
    for step in (adam8bit.adam8bit_blockwise_step, adam8bit.adam8bit_blockwise_step_ref):
        weights = llama.embed.detach().clone()
        n = weights.numel()
        blocks = -(-n // 256)
        state = (
            *torch.zeros(2, n, dtype=torch.uint8).unbind(),
            *torch.zeros(2, blocks).unbind(),
        )
        codes = adam8bit.dynamic_code(True), adam8bit.dynamic_code(False)
        step(weights.view(-1), grads[1].reshape(-1), *state, *codes, step=1, lr=1e-3)
        trained.append(torch.nn.functional.linear(hidden[0], weights))
    assert_same(trained[0], trained[1])
    assert (trained[0] - torch.nn.functional.linear(hidden[0], llama.embed)).abs().max() > 1e-3


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


PARTS = [
    contiguous_cache,
    paged_cache,
    shared_prefix,
    quantized_weights,
    quantized_cache,
    other_attention,
    residual_stream,
    after_the_logits,
]


def every_kernel() -> set[str]:
    """Jitted functions that are launched, not called by others."""
    names = set()
    for family in families():
        module = importlib.import_module(f"kernels.{family}")
        for name, function in inspect.getmembers(module):
            if isinstance(function, JITFunction) and name.endswith("_kernel"):
                names.add(name)
    return names


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, on the CPU")
def test_same_logits_and_every_kernel_is_launched() -> None:
    from course.lab.interp import interpreted

    counts: Counter[str] = Counter()
    with interpreted(), counted(counts):
        for part in PARTS:
            part()
    assert set(counts) == every_kernel()


def test_a_wrong_operation_would_be_noticed() -> None:
    ids, positions = prompt(1, 6)
    want = model()(ids, positions)
    for name, wrong in {
        "norm": lambda x, weight, eps: lm.rms_norm(x, weight, eps) * 1.0001,
        "rope": lambda x, cos, sin: lm.rope(x, cos, -sin),
        "swiglu": lambda gate, up: lm.swiglu(up, gate.clone()),
    }.items():
        with pytest.raises(AssertionError):
            assert_same(model(**{name: wrong})(ids, positions), want)
