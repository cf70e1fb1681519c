"""`python -m course.bench.lm`: tokens per second of `course.lm` beside its peers.

All run in this process, in fp32, on the same threads and prompts, greedily. On a shared machine a
time says little, so the runs take turns, the order is reversed every other time, and the ratio is
the median over turns of their time to ours: above 1, ours is faster. A peer that is not installed
is left out.
"""

import statistics
import time
from collections.abc import Callable

import torch

from course.lm import generate, load
from course.lm.weights import GGUF, model_dir

PROMPT, NEW, REPEATS = 128, 32, 9
OURS = "course.lm"
Run = Callable[[list[list[int]], int], object]
Times = dict[str, list[float]]  # seconds of each repeat, by name


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


def measure(runs: dict[str, Run], prompts: list[list[int]]) -> dict[str, Times]:
    """Seconds until the first id (prefill) and for the NEW after it (decode)."""
    times: dict[str, Times] = {part: {name: [] for name in runs} for part in ("prefill", "decode")}
    order = list(runs)
    for name in order:  # warm up
        runs[name](prompts, 2)
    for _ in range(REPEATS):
        order.reverse()
        for name in order:
            times["prefill"][name].append(seconds(runs[name], prompts, 1))
        for name in order:
            both = seconds(runs[name], prompts, 1 + NEW)
            times["decode"][name].append(both - times["prefill"][name][-1])
    return times


def seconds(run: Run, prompts: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    run(prompts, new)
    return time.perf_counter() - start


def main() -> None:
    runs: dict[str, Run] = {}
    makers = {OURS: ours, "transformers": transformers_run, "llama.cpp": llama_cpp_run}
    for name, make in makers.items():
        try:
            runs[name] = make()
        except ImportError as error:
            print(f"left out: {name} ({error})")
    print(f"{torch.get_num_threads()} threads, prompt {PROMPT}, {NEW} new tokens, fp32")
    print(f"{'batch':>5}  {'':<13} {'':<8} {'tok/s':>7} {'ratio':>6}")
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 8):
        prompts = torch.randint(1000, 40_000, (batch, PROMPT), generator=generator).tolist()
        here = {name: run for name, run in runs.items() if batch == 1 or name != "llama.cpp"}
        for part, times in measure(here, prompts).items():
            tokens = batch * (PROMPT if part == "prefill" else NEW)
            for name, theirs in times.items():
                speed = tokens / statistics.median(theirs)
                ratio = statistics.median(t / o for t, o in zip(theirs, times[OURS], strict=True))
                print(f"{batch:>5}  {name:<13} {part:<8} {speed:>7.1f} {ratio:>6.2f}")


if __name__ == "__main__":
    main()
