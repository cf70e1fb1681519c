"""The SmolLM2 tokenizer: every text comes back, digits stand alone, chats follow the template."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from course.lm import Llama, Tokenizer
from course.lm.weights import model_dir


@pytest.fixture
def tokenizer(smollm2: Llama) -> Tokenizer:
    return smollm2.tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\t \r\n",
        "naïve café — 日本語 مرحبا 😀👩‍👩‍👧",
        "x = {'a': [1, 2]}\n\tpass",
        "\x00\x7f\u200b",
    ],
)
def test_encode_then_decode_gives_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_of_unicode_but_what_the_vocabulary_lacks(tokenizer: Tokenizer) -> None:
    """SmolLM2 has no token for 6 control bytes and for F1 and F2, which start planes 4 to 11."""
    lacking = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D} | set(range(0x40000, 0xC0000))
    surrogates = range(0xD800, 0xE000)
    sample = [*range(0x800), *range(0x800, 0x110000, 61)]
    text = "".join(chr(c) for c in sample if c not in lacking and c not in surrogates)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("".join(chr(c) for c in sorted(lacking) if c < 0x20)) == []


def test_digits_are_split_before_spaces_are(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("In 2024,  17")]
    # Two spaces before a digit are one token: the digit is split off first.
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", "  ", "1", "7"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos == 2
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_chat_follows_the_template(tokenizer: Tokenizer) -> None:
    question = {"role": "user", "content": "2 + 2?"}
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    closed = tokenizer.chat([question], add_generation_prompt=False)
    assert tokenizer.decode(closed) == text
    assert tokenizer.decode(tokenizer.chat([question])) == text + "<|im_start|>assistant\n"
    own = tokenizer.chat([{"role": "system", "content": "Be brief."}, question])
    assert tokenizer.decode(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def variant(folder: Path, settings: dict, template: str | None = None) -> Tokenizer:
    shutil.copy(model_dir() / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def test_a_template_file_and_special_tokens_as_objects(smollm2: Llama, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|endoftext|>"}, "chat_template": "unused"}
    tokenizer = variant(tmp_path, settings, "{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.eos == 0
    assert tokenizer.decode(tokenizer.chat([{"content": "hi"}])) == "hi<|endoftext|>"


def test_a_checkpoint_that_adds_bos_does_not_add_it_to_chats(
    smollm2: Llama, tmp_path: Path
) -> None:
    inner = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    variant(tmp_path, {}, "<|im_start|>{{ messages[0].content }}")
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    plain = smollm2.tokenizer.encode("hi")
    assert tokenizer.encode("hi") == [1, *plain]
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == [1, *plain]


def test_no_template_no_eos(smollm2: Llama, tmp_path: Path) -> None:
    tokenizer = variant(tmp_path, {})
    assert tokenizer.eos is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",  # the sandbox lets no template change its input
        "{{ ''.__class__.__mro__ }}",  # nor reach for Python's internals
        "{% if %}",
    ],
)
def test_a_refusing_or_unsafe_template(smollm2: Llama, tmp_path: Path, template: str) -> None:
    tokenizer = variant(tmp_path, {}, template)
    with pytest.raises(ValueError, match="messages: the chat template refuses them"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
