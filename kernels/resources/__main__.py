"""Compile the production launches of every family and write the tables."""

from pathlib import Path

from course.lab import table
from course.lab.aot import TARGETS
from kernels.cases import PRODUCTION

for family, launches in PRODUCTION.items():
    source = Path(__file__).parents[1] / f"{family}.py"
    rows = table.build(launches, TARGETS)
    print(f"wrote {table.save(family, source, rows)}: {len(rows)} rows")
