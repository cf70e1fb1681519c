"""Text to token ids and back, and the chat template of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Tokenizer:
    """The tokenizer of a checkpoint folder in the Hugging Face layout.

    Reads `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` where present.
    `eos` is the id that ends a turn, or None if the checkpoint names none.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings_file = folder / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text("utf-8")) if settings_file.exists() else {}
        template_file = folder / "chat_template.jinja"
        self._template: str | None = (
            template_file.read_text("utf-8")
            if template_file.exists()
            else settings.get("chat_template")
        )
        # A special token is written either as its text or as a dict that holds its text.
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := settings.get(name)) is not None
        }
        eos = self._special.get("eos_token")
        self.eos: int | None = self._tokenizer.token_to_id(eos) if eos is not None else None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens that the checkpoint adds by itself.

        A special token written out in `text` becomes its id. Bytes that the vocabulary lacks are
        dropped; SmolLM2 lacks a few control characters and nothing that people write.
        """
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation of {"role": ..., "content": ...} in the chat template.

        `add_generation_prompt` opens the assistant's turn at the end. Raises ValueError if the
        checkpoint has no chat template or its template refuses the messages.
        """
        if self._template is None:
            raise ValueError("the tokenizer has no chat template: encode the text yourself")
        # Templates come with downloaded checkpoints: they run in jinja's sandbox.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            text = environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _refuse(message: str) -> None:
    raise TemplateError(message)
