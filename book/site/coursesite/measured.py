"""The GPU results of a page, drawn as ratios from `book/results/<device>.json`."""

import json
from pathlib import Path

OURS = "ours"
NOTHING = "Not measured yet: the benchmark has not run on a GPU."


def gpu_results(folder: Path) -> str:
    """For each device a heading and a table for each family, newest code and versions named."""
    devices = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join(map(device, devices)) or NOTHING


def device(results: dict[str, dict]) -> str:
    """All that one device has measured; families may come from different days and versions."""
    one = next(iter(results.values()))
    copy, matmul = one["floors"]["bytes_per_second"], one["floors"]["flops_per_second"]
    shown = [
        f"### {one['device']}",
        f"A large copy runs at {copy / 1e12:.2f} TB/s here and a bfloat16 matrix product at "
        f"{matmul / 1e12:.0f} TFLOP/s. The floor is the longer of the two times that these rates "
        "allow.",
    ]
    for family, entry in results.items():
        about = (
            f"**{family}**, {entry['date']}, commit {entry['commit']}, torch {entry['torch']}, "
            f"Triton {entry['triton']}; tests {entry['tests']}."
        )
        rows = [row(name, run) for name, run in entry["runs"].items()]
        head = ["| sizes | \u00b5s | % of the floor | faster than |", "|---|--:|--:|---|"]
        shown.append("\n\n".join([about, "\n".join([*head, *rows])] if rows else [about]))
    return "\n\n".join(shown)


def row(name: str, run: dict) -> str:
    """A benchmark as a line: ratios are their time by ours, so above 1 ours is faster."""
    if "failed" in run:
        return f"| {name} | | | not timed: {run['failed']} |"
    ours = run["us"][OURS]["p50"]
    ratios = [
        f"{peer} {times['p50'] / ours:.2f}\u00d7"
        for peer, times in run["us"].items()
        if peer != OURS
    ]
    percent = 100 * run["floor_us"] / ours
    return f"| {name} | {ours:.1f} | {percent:.0f} | {', '.join(ratios)} |"
