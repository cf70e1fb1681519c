"""Measurements, run by hand: `python -m course.bench.NAME`."""
