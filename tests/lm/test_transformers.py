"""SmolLM2 beside transformers, which reads the same GGUF with its own converter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from course.lm import Llama, generate
from course.lm.weights import GGUF, model_dir

PROMPTS = [
    "The capital of France is",
    "Monday, Tuesday, Wednesday,",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a",
    "Water boils at 100 degrees",
]


@pytest.fixture(scope="module")
def theirs(smollm2: Llama) -> LlamaForCausalLM:
    path = str(model_dir() / GGUF)
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_ids_agree(smollm2: Llama, theirs: LlamaForCausalLM, prompt: str) -> None:
    ids = smollm2.tokenizer.encode(prompt)
    batch = torch.tensor([ids])
    with torch.no_grad():
        expected = theirs(batch).logits
    logits = smollm2(batch, torch.arange(len(ids))[None])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    continued = theirs.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generate(smollm2, ids, 16) == continued[0, len(ids) :].tolist()


def test_a_ragged_batch_agrees_too(smollm2: Llama) -> None:
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 2
    together = generate(smollm2, prompts, 8)
    assert together == [generate(smollm2, prompt, 8) for prompt in prompts]


def test_transformers_loads_the_prepared_folder(smollm2: Llama) -> None:
    """Any engine that reads Hugging Face folders can serve the prepared model."""
    model = LlamaForCausalLM.from_pretrained(model_dir()).eval()
    ids = torch.tensor([smollm2.tokenizer.encode(PROMPTS[0])])
    with torch.no_grad():
        expected = model(ids).logits
    logits = smollm2(ids, torch.arange(ids.shape[1])[None])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def their_tokenizers(smollm2: Llama) -> list:
    from_gguf = AutoTokenizer.from_pretrained(model_dir(), gguf_file=GGUF)
    return [from_gguf, AutoTokenizer.from_pretrained(model_dir())]


TEXTS = [
    "",
    "Hello, world!",
    "  leading and trailing  ",
    "a\n\n\tb \r\n c\u00a0d",
    "naïve café — 日本語 مرحبا 😀👩‍👩‍👧 Ω≈ç√",
    "In 2024, 12,345.67 people; 0x1F, 3.14e-10, ½ ² Ⅷ",
    "don't WE'LL they're I'd 've",
    "for (int i = 0; i < n; ++i) { a[i] += 1; }",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "<|im_start |> <im_end>",
    "x" * 300,
    "bytes without a token: \x04\x06 \U00040000",
]


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_agree(smollm2: Llama, their_tokenizers: list, text: str) -> None:
    ids = smollm2.tokenizer.encode(text)
    for tokenizer in their_tokenizers:
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == (
            smollm2.tokenizer.decode(ids)
        )


def test_chats_agree(smollm2: Llama, their_tokenizers: list) -> None:
    messages = [
        {"role": "user", "content": "Count to 12."},
        {"role": "assistant", "content": "1, 2, 3 ..."},
        {"role": "user", "content": " And on? \n"},
    ]
    tokenizer = their_tokenizers[1]  # from a GGUF, transformers takes no chat template
    for start in (0, 2):
        for prompt in (True, False):
            text = tokenizer.apply_chat_template(
                messages[start:], add_generation_prompt=prompt, tokenize=False
            )
            ours = smollm2.tokenizer.chat(messages[start:], add_generation_prompt=prompt)
            assert ours == tokenizer(text).input_ids


def test_our_kernels_folder_is_not_taken_for_the_package_of_that_name() -> None:
    """transformers has an optional dependency called `kernels`, and so do we a top-level folder."""
    root = Path(__file__).parents[2]
    code = """
import sys, kernels
assert kernels.__path__[0].startswith(sys.argv[1]), kernels.__path__
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
assert not is_kernels_available()
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, vocab_size=11)
print(list(LlamaForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape))
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "[1, 2, 11]", result.stderr
