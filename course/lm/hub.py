"""Load a model: the prepared SmolLM2, or a llama-layout checkpoint of a folder or the hub."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from course.errors import CourseError
from course.lm.model import Config, Llama, Llama3Rope
from course.lm.tokenizer import Tokenizer

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
FILES = (
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# Our names of a layer's weights, and theirs.
LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def load(name: str = "smollm2", dtype: torch.dtype = torch.float32) -> Llama:
    """SmolLM2-135M-Instruct with its tokenizer; prepared at first use (a download of 93 MB).

    fp32 weights stay memory-mapped and are shared between processes. With COURSE_OFFLINE=1 nothing
    is downloaded, and a model that is not prepared raises CourseError.
    """
    # Here, so that `python -m course.lm.weights` does not find its module loaded already.
    from course.lm.weights import model_dir, prepare

    if name != "smollm2":
        raise ValueError(f'name is {name!r}: only "smollm2" is prepared here, see load_hub')
    if os.environ.get("COURSE_OFFLINE") == "1" and not model_dir().is_dir():
        raise CourseError("the model is not prepared: run `make model`")
    return load_folder(prepare(lambda line: print(line, file=sys.stderr)), dtype)


def load_hub(repo_or_path: str | Path, dtype: torch.dtype = torch.float32) -> Llama:
    """The model and tokenizer of a local folder, or of a hub repository such as "owner/name".

    The folder holds `config.json`, safetensors (one file or shards with an index) and
    `tokenizer.json`. Weights stored in `dtype` stay memory-mapped; others are converted. A
    checkpoint that the model class cannot run exactly raises CourseError, and says why.
    """
    folder = Path(repo_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # slow to import

        try:
            folder = Path(snapshot_download(str(repo_or_path), allow_patterns=list(FILES)))
        except Exception as error:  # the hub client raises a dozen unrelated types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CourseError(
                f"cannot fetch {repo_or_path}: it is no folder, and the hub says: {reason}"
            ) from None
    return load_folder(folder, dtype)


def load_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    """`load_hub` for a folder that is there."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CourseError(f"cannot load {folder}: it has no {name}")
    config = read_config(folder)
    with torch.device("meta"):
        model = Llama(config)
    names = _their_names(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    stored = dict(_tensors(folder))
    weights = {}
    for name, theirs in names.items():
        if theirs not in stored:
            raise CourseError(f"cannot load {folder}: the weight {theirs} is missing")
        weight = stored.pop(theirs)
        if weight.shape != shapes[name]:
            raise CourseError(
                f"cannot load {folder}: {theirs} is {list(weight.shape)}, "
                f"config.json says {list(shapes[name])}"
            )
        weights[name] = nn.Parameter(weight.to(dtype), requires_grad=False)
    # Old checkpoints store the rotary frequencies, and some a tied head: both follow from the rest.
    derived = ("rotary_emb.inv_freq", "lm_head.weight")
    unknown = sorted(name for name in stored if not name.endswith(derived))
    if unknown:
        raise CourseError(f"cannot load {folder}: no place for the weight {unknown[0]}")
    model.load_state_dict(weights, assign=True)
    model.tokenizer = Tokenizer(folder)
    return model


def read_config(folder: Path) -> Config:
    """Our Config of a folder's `config.json`; CourseError names what we do not support."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    # transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling` stood apart.
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_scaling") or {}),
    }
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    architectures = raw.get("architectures") or ["none"]
    unsupported = {
        f"architecture {architectures[0]}": architectures[0] not in ARCHITECTURES,
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        f"activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        f"rope type {rope_type}": rope_type not in ("default", "llama3"),
        "partial rotary embedding": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding_window": raw.get("sliding_window"),
        "quantization_config": raw.get("quantization_config"),
    }
    reasons = [feature for feature, present in unsupported.items() if present]
    if reasons:
        raise CourseError(
            f"cannot load {folder}: no support for {', '.join(reasons)} (only plain llama layouts)"
        )
    scaling = None
    if rope_type == "llama3":
        scaling = Llama3Rope(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )
    heads = raw["num_attention_heads"]
    return Config(
        n_layers=raw["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        rope_scaling=scaling,
    )


def _their_names(model: Llama) -> dict[str, str]:
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    for layer in range(model.config.n_layers):
        for ours, theirs in LAYER.items():
            names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}.weight"
    if not model.config.tied:
        names["head"] = "lm_head.weight"
    return names


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor, memory-mapped."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CourseError(f"cannot load {folder}: {shard}: {error}") from None
