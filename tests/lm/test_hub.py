"""Checkpoints that transformers writes, read by our class: the same logits, or one clear error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from course.errors import CourseError
from course.lm import load_hub

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write(folder: Path, theirs: torch.nn.Module, **options) -> None:
    theirs.save_pretrained(folder, **options)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def random_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **SIZES | changes)).eval()


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4, "head_dim": 12},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_parameters": LLAMA3},
    ],
    ids=["tied", "untied", "mha-wide-heads", "mqa-eps", "theta", "llama3"],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, changes: dict) -> None:
    theirs = random_llama(**changes)
    write(tmp_path, theirs)
    model = load_hub(tmp_path)
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
    logits = model(ids, torch.arange(40).expand(2, 40))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
    assert model.config.tied == theirs.config.tie_word_embeddings
    assert model.tokenizer.encode("b a c") == [1, 0, 2]


def test_shards_mistral_and_dtype(tmp_path: Path) -> None:
    torch.manual_seed(4)
    theirs = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval().bfloat16()
    write(tmp_path, theirs, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids, positions = torch.tensor([[1, 2, 3, 4]]), torch.arange(4)[None]
    model = load_hub(str(tmp_path))
    assert model.embed.dtype == torch.float32
    with torch.no_grad():
        expected = theirs.float()(ids).logits
    torch.testing.assert_close(model(ids, positions), expected, atol=1e-5, rtol=1e-5)
    assert load_hub(tmp_path, torch.bfloat16)(ids, positions).dtype == torch.bfloat16


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, random_llama(tie_word_embeddings=True))
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(61, 32)}, file)
    assert load_hub(tmp_path).embed.any()


def test_older_config_spelling(tmp_path: Path) -> None:
    write(tmp_path, random_llama())
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "head_dim"):
        config.pop(name, None)
    config["rope_theta"] = 500.0
    config["rope_scaling"] = {**LLAMA3}
    config["rope_scaling"].pop("rope_theta")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_hub(tmp_path).config
    assert (ours.rope_theta, ours.head_dim) == (500.0, 8)
    assert ours.rope_scaling is not None and ours.rope_scaling.factor == 4.0


def test_weights_in_memory_do_not_write_through_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, random_llama())
    before = (tmp_path / "model.safetensors").read_bytes()
    load_hub(tmp_path).layers[0].q.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope type linear"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_features_are_named(tmp_path: Path, changes: dict, reason: str) -> None:
    write(tmp_path, random_llama())
    edit_config(tmp_path, **changes)
    with pytest.raises(CourseError, match=f"no support for {reason}"):
        load_hub(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write(tmp_path, random_llama())
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    down = "model.layers.1.mlp.down_proj.weight"

    save_file({n: w for n, w in weights.items() if n != down}, file)
    with pytest.raises(CourseError, match=f"{down} is missing"):
        load_hub(tmp_path)
    save_file(weights | {down: torch.zeros(3, 4)}, file)
    with pytest.raises(CourseError, match=r"down_proj.weight is \[3, 4\].*\[32, 48\]"):
        load_hub(tmp_path)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file)
    with pytest.raises(CourseError, match=r"no place for the weight .*q_proj.bias"):
        load_hub(tmp_path)
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, file)
    load_hub(tmp_path)  # old checkpoints carry these; they follow from the config
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(CourseError, match=r"model\.safetensors"):
        load_hub(tmp_path)
    file.unlink()
    with pytest.raises(CourseError, match=r"model\.safetensors"):
        load_hub(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, random_llama())
    (tmp_path / name).unlink()
    with pytest.raises(CourseError, match=f"it has no {name}"):
        load_hub(tmp_path)


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "not a repository name"])
def test_a_repository_that_cannot_be_fetched(monkeypatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CourseError, match=f"cannot fetch {name}"):
        load_hub(name)
