"""Compile the production launches of every family and write the tables.

`python -m kernels.resources [family ...]` writes those of some families.
"""

import sys
from pathlib import Path

from course.lab import table
from course.lab.aot import TARGETS
from kernels.cases import families

known = families()
if unknown := set(sys.argv[1:]) - set(known):
    print(
        f"no family {', '.join(unknown)}: {', '.join(known)}", file=sys.stderr
    )
    raise SystemExit(2)
for family in sys.argv[1:] or known:
    source = Path(__file__).parents[1] / f"{family}.py"
    rows = table.build(known[family].PRODUCTION, TARGETS)
    print(f"wrote {table.save(family, source, rows)}: {len(rows)} rows")
