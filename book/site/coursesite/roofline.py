"""The roofline page: its picture and its table, from the vendors' rates in `book/devices.yml`."""

import math

import yaml

from course.catalog import ROOT

DEVICES = ROOT / "book" / "devices.yml"
WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 26, 58  # the margins of the plot
SPAN = (0, 12)  # log2 of operations per byte: 1 to 4,096
STEPS = {1: "decode, 1 sequence", 64: "decode, batch of 64", 2048: "prefill, 2,048 tokens"}
PICTURE = "H100 SXM"


def devices() -> list[dict]:
    """Name, bytes_per_second, flops_per_second, source (a key of the bibliography) and year."""
    return yaml.safe_load(DEVICES.read_text(encoding="utf-8"))


def ridge(device: dict) -> float:
    """Operations per byte at which memory and arithmetic take equally long."""
    return device["flops_per_second"] / device["bytes_per_second"]


def table() -> str:
    """The devices as a Markdown table."""
    rows = [
        f"| {d['name']} | {d['bytes_per_second'] / 1e12:.2f} | {d['flops_per_second'] / 1e12:,.0f} "
        f"| {ridge(d):.0f} | [data sheet of {d['year']}](#{d['source']}) |"
        for d in devices()
    ]
    head = "| device | memory, TB/s | bfloat16, TFLOP/s | ridge, FLOP/byte | source |"
    return "\n".join([head, "|---|--:|--:|--:|---|", *rows])


def picture() -> str:
    """The roof of one device with three steps of a language model on it, as a figure in SVG."""
    device = next(d for d in devices() if d["name"] == PICTURE)
    roof, peak = ridge(device), device["flops_per_second"] / 1e12
    rate = {n: min(n * device["bytes_per_second"] / 1e12, peak) for n in STEPS}
    top = math.log2(peak) + 1.2

    def x(intensity: float) -> float:
        share = (math.log2(intensity) - SPAN[0]) / (SPAN[1] - SPAN[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(tflops: float) -> float:
        return HEIGHT - BOTTOM - math.log2(tflops) / top * (HEIGHT - TOP - BOTTOM)

    start, end = 2.0 ** SPAN[0], 2.0 ** SPAN[1]
    slope = y(start * device["bytes_per_second"] / 1e12)
    floor = HEIGHT - BOTTOM
    drawn = [
        _text(x(n), floor + 20, f"{n:,}", "middle") for n in (1, 4, 16, 64, 256, 1024, 4096)
    ] + [_text(LEFT - 10, y(n) + 5, f"{n:,}", "end") for n in (1, 10, 100, 1000)]
    drawn += [f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}"/>']
    drawn += [
        f'<path class="guide" d="M{x(roof):.1f} {y(peak):.1f}V{floor}"/>',
        _text(x(roof) + 6, floor - 10, f"ridge, {roof:.0f}"),
        f'<path class="roof" d="M{x(start):.1f} {slope:.1f}L{x(roof):.1f} {y(peak):.1f}'
        f'H{x(end):.1f}"/>',
        _text(x(16), TOP + 4, "waits for memory", "middle"),
        _text(x(1100), TOP + 4, "waits for arithmetic", "middle"),
    ]
    beside = {1: (10, 18, "start"), 64: (-12, -6, "end"), 2048: (0, 26, "middle")}
    for n, name in STEPS.items():
        right, down, anchor = beside[n]
        drawn.append(f'<circle class="step" cx="{x(n):.1f}" cy="{y(rate[n]):.1f}" r="6"/>')
        drawn.append(_text(x(n) + right, y(rate[n]) + down, name, anchor))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "operations per byte", "middle"))
    drawn.append(_text(4, 14, "TFLOP/s"))
    told = ", ".join(f"{name} at {rate[n]:,.0f} TFLOP/s" for n, name in STEPS.items())
    label = f"Attainable rate over arithmetic intensity: {told}; the ridge is at {roof:.0f}."
    return (
        f'<figure class="drawn"><svg role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg>'
        f'<figcaption><span class="caption-text">The roof of an {PICTURE} by its data sheet, and '
        f"three steps of a model with 2-byte weights, cache reads left out. Both axes are "
        f"logarithmic.</span></figcaption></figure>"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
