"""`python -m course.bench.lm`: tokens per second of `course.lm` beside its peers.

All run in this process, in fp32, on the same threads and prompts, greedily. Repeats are interleaved
and medians compared, so that a busy machine slows everyone alike. A peer that is not installed is
left out. A ratio above 1 means that ours is faster.
"""

import statistics
import time
from collections.abc import Callable

import torch

from course.lm import generate, load
from course.lm.weights import GGUF, model_dir

PROMPT, NEW, REPEATS = 128, 32, 5
Run = Callable[[list[list[int]], int], object]


def ours() -> Run:
    model = load()
    return lambda prompts, new: generate(model, prompts, new)


def transformers_run() -> Run:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every run has the same length

    def run(prompts: list[list[int]], new: int) -> object:
        ids = torch.tensor(prompts)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def llama_cpp_run() -> Run:
    """llama.cpp at batch 1, on its own Q4_1 weights: an eighth of the bytes, so no fair peer."""
    from llama_cpp import Llama

    model = Llama(
        str(model_dir() / GGUF), n_ctx=1024, n_threads=torch.get_num_threads(), verbose=False
    )

    def run(prompts: list[list[int]], new: int) -> object:
        model.reset()
        tokens = model.generate(prompts[0], top_k=1, temp=0.0)
        return [next(tokens) for _ in range(new)]

    return run


def measure(runs: dict[str, Run], prompts: list[list[int]]) -> dict[str, tuple[float, float]]:
    """Median (prefill, decode) seconds of each run: until the first id, and for the rest."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(prompts, 1)
            middle = time.perf_counter()
            run(prompts, 1 + NEW)
            end = time.perf_counter()
            if repeat:  # the first only warms up
                seconds[name].append((middle - start, end - middle - (middle - start)))
    return {
        name: (statistics.median(p for p, _ in times), statistics.median(d for _, d in times))
        for name, times in seconds.items()
    }


def main() -> None:
    runs: dict[str, Run] = {}
    makers = {"course.lm": ours, "transformers": transformers_run, "llama.cpp": llama_cpp_run}
    for name, make in makers.items():
        try:
            runs[name] = make()
        except ImportError as error:
            print(f"left out: {name} ({error})")
    print(f"{torch.get_num_threads()} threads, prompt {PROMPT}, {NEW} new tokens, fp32")
    print(f"{'batch':>5} {'':<13} {'prefill tok/s':>14} {'decode tok/s':>13}")
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 8):
        prompts = torch.randint(1000, 40_000, (batch, PROMPT), generator=generator).tolist()
        here = {name: run for name, run in runs.items() if batch == 1 or name != "llama.cpp"}
        times = measure(here, prompts)
        for name, (prefill, decode) in times.items():
            print(f"{batch:>5} {name:<13} {batch * PROMPT / prefill:>14.1f}", end=" ")
            print(f"{batch * NEW / decode:>13.1f}")
        for name, (prefill, decode) in times.items():
            if name != "course.lm":
                mine = times["course.lm"]
                print(f"      ratio to {name}: prefill {prefill / mine[0]:.2f}", end=", ")
                print(f"decode {decode / mine[1]:.2f}")


if __name__ == "__main__":
    main()
