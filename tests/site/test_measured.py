"""GPU results are drawn as ratios, and nothing is claimed where nothing was measured."""

from pathlib import Path

from coursesite.measured import NOTHING, gpu_results

from kernels.bench import save

MACHINE = {
    "device": "A device",
    "torch": "2.1",
    "triton": "3.1",
    "cuda": "12",
    "commit": "abc",
    "date": "2026-01-02",
    "floors": {"bytes_per_second": 2e12, "flops_per_second": 5e14},
}


def times(**medians: float) -> dict:
    return {name: {"p50": t, "p20": t, "p80": t} for name, t in medians.items()}


def test_nothing_measured(tmp_path: Path) -> None:
    assert gpu_results(tmp_path) == NOTHING


def test_ratios_and_failures(tmp_path: Path) -> None:
    good = {"floor_us": 40.0, "us": times(ours=50.0, SDPA=75.0), "left_out": {}}
    runs = {"B=1": good, "B=2": {"failed": "error 2 exceeds 1"}}
    save(tmp_path / "a-device.json", "one", MACHINE | {"tests": "passed", "runs": runs})
    save(tmp_path / "a-device.json", "two", MACHINE | {"tests": "2 failed", "runs": {}})
    text = gpu_results(tmp_path)
    assert "### A device" in text and "2.00 TB/s" in text and "500 TFLOP/s" in text
    assert "| B=1 | 50.0 | 80 | SDPA 1.50\u00d7 |" in text
    assert "| B=2 | | | not timed: error 2 exceeds 1 |" in text
    assert "**two**, 2026-01-02, commit abc" in text and "tests 2 failed." in text
    assert NOTHING not in text
