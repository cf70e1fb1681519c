"""The committed tables of what each kernel compiles to, so that a change in it shows in a diff.

`kernels/resources/<family>.json` holds one row per kernel, target and production launch, and a
key over the family's source and Triton's version: rows are compiled again when it changes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from course.errors import CourseError

FOLDER = Path(__file__).parents[2] / "kernels" / "resources"
WIDE_PERCENT = 90
_COLUMNS = {
    "kernel": "kernel",
    "target": "target",
    "registers": "regs",
    "spills": "spills",
    "shared": "shared B",
    "occupancy": "occ. %",
    "wide_loads": "wide %",
    "tensor_core": "tensor core",
}

Row = dict[str, Any]


def key(source: Path) -> str:
    """What the rows of a family depend on: "Triton's version/digest of the source file"."""
    import triton

    return f"{triton.__version__}/{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"


def build(launches: Mapping[str, Callable[[], Any]], targets: Iterable[str]) -> list[Row]:
    """Compile every launch for every target; one row per kernel started.

    Args:
        launches: label -> a call of a launcher, on meta tensors.
        targets: keys of `course.lab.aot.TARGETS`.
    """
    from course.lab import aot

    return [
        {
            "kernel": kernel.name,
            "launch": label,
            "target": target,
            "warps": kernel.metadata.num_warps,
            "stages": kernel.metadata.num_stages,
            **vars(aot.resources(kernel)),
        }
        for label, launch in launches.items()
        for target in targets
        for kernel in aot.compile_launches(launch, target)
    ]


def complaints(rows: Iterable[Row], streaming: Iterable[str]) -> list[str]:
    """What a committed table may not contain, one sentence each.

    No kernel may spill or take more shared memory than a block can have; a kernel named in
    `streaming` moves the bulk of the data and must do so with 16-byte loads.
    """
    from course.lab.aot import SHARED_LIMIT

    streaming, found = set(streaming), []
    for row in rows:
        where = f"{row['kernel']}, {row['launch']}, {row['target']}"
        if row["spills"]:
            found.append(f"{where}: spills {row['spills']}")
        if row["shared"] > SHARED_LIMIT[row["target"]]:
            found.append(f"{where}: {row['shared']} bytes of shared memory do not fit a block")
        if row["kernel"] in streaming and row["wide_loads"] < WIDE_PERCENT:
            found.append(f"{where}: only {row['wide_loads']}% of the bytes in 16-byte loads")
    return found


def compare(recorded: Iterable[Row], fresh: Iterable[Row]) -> list[str]:
    """How `fresh` rows differ from the recorded ones of the same kernel, launch and target."""
    before = {_name(row): row for row in recorded}
    found = []
    for row in _as_json(fresh):
        old = before.get(_name(row))
        if old is None:
            found.append(f"{', '.join(_name(row))}: not in the table")
        elif old != row:
            changes = [f"{k} {old[k]} to {row[k]}" for k in row if old.get(k) != row[k]]
            found.append(f"{', '.join(_name(row))}: {', '.join(changes)}")
    return found


def save(family: str, source: Path, rows: Iterable[Row], folder: Path = FOLDER) -> Path:
    """Write a family's table, one row a line."""
    lines = ",\n".join("  " + json.dumps(row) for row in _as_json(rows))
    path = folder / f"{family}.json"
    path.write_text(f'{{"key": "{key(source)}", "rows": [\n{lines}\n]}}\n')
    return path


def load(family: str, folder: Path = FOLDER) -> tuple[str, list[Row]]:
    """A family's key and rows. Raises CourseError if there is no table."""
    path = folder / f"{family}.json"
    if not path.exists():
        raise CourseError(f"no table of {family}: write it with `python -m kernels.resources`")
    table = json.loads(path.read_text())
    return table["key"], table["rows"]


def print_tables(folder: Path = FOLDER) -> None:
    """Print every committed table. Compiles nothing and needs no Triton."""
    from rich import box  # here, since a bare GPU machine compares tables without it
    from rich.console import Console
    from rich.table import Table

    families = sorted(path.stem for path in folder.glob("*.json"))
    if not families:
        raise CourseError(f"no tables in {folder}: write them with `python -m kernels.resources`")
    console = Console()
    for family in families:
        rows = load(family, folder)[1]
        for launch in dict.fromkeys(row["launch"] for row in rows):
            title = f"{family}: {launch}"
            table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=0)
            for column in _COLUMNS.values():
                table.add_column(column, no_wrap=True)
            for row in rows:
                if row["launch"] == launch:
                    name = row["kernel"].strip("_").removesuffix("_kernel")
                    table.add_row(name, *(_cell(row[column]) for column in [*_COLUMNS][1:]))
            console.print(table)


def _name(row: Row) -> tuple[str, str, str]:
    return row["kernel"], row["launch"], row["target"]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(re.sub(r"v_(mfma)_f32_(\w+)_(\w+)", r"\1 \2 \3", name) for name in value)
    return str(value)


def _as_json(rows: Iterable[Row]) -> list[Row]:
    return json.loads(json.dumps(list(rows)))
