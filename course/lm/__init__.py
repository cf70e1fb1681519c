"""The small language model of the course: SmolLM2-135M in our own few hundred lines.

model = load()
ids = model.tokenizer.chat([{"role": "user", "content": "What is the capital of Japan?"}])
print(model.tokenizer.decode(generate(model, ids, 20, eos=model.tokenizer.eos)))
"""

from course.lm.cache import KVCache
from course.lm.generate import generate, sample
from course.lm.hub import load, load_hub
from course.lm.model import (
    Config,
    Llama,
    Llama3Rope,
    causal_attention,
    random_model,
    rms_norm,
    rope,
    swiglu,
)
from course.lm.text import evaluation_text
from course.lm.tokenizer import Tokenizer

__all__ = [
    "Config",
    "KVCache",
    "Llama",
    "Llama3Rope",
    "Tokenizer",
    "causal_attention",
    "evaluation_text",
    "generate",
    "load",
    "load_hub",
    "random_model",
    "rms_norm",
    "rope",
    "sample",
    "swiglu",
]
