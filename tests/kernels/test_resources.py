"""The committed tables are what the kernels compile to, and hold nothing a kernel may not do."""

import os
from pathlib import Path

import pytest
import triton

import kernels
from course.lab import table
from course.lab.aot import TARGETS
from kernels.cases import families

FAMILIES = families()
REBUILD = "run `python -m kernels.resources` and review its diff"
# a change of the source changes the key; the weekly run compiles all again
AGAIN = TARGETS if os.environ.get("COURSE_TEST_ALL") else ["sm_90"]


@pytest.fixture
def same_compiler(family: str) -> None:
    """The tables are those of the pinned Triton; another allocates registers differently."""
    version = table.load(family)[0].split("/")[0]
    if version != triton.__version__:
        pytest.skip(f"the table was compiled by Triton {version}")


@pytest.mark.usefixtures("same_compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_belongs_to_the_source(family: str) -> None:
    source = Path(kernels.__path__[0]) / f"{family}.py"
    assert table.load(family)[0] == table.key(source), REBUILD


@pytest.mark.parametrize("family", FAMILIES)
def test_no_spills_wide_loads_tensor_cores(family: str) -> None:
    rows, cases = table.load(family)[1], FAMILIES[family]
    assert table.complaints(rows, cases.STREAMING) == []
    assert {(row["launch"], row["target"]) for row in rows} == {
        (launch, target) for launch in cases.PRODUCTION for target in TARGETS
    }
    for row in rows:
        if row["kernel"] in cases.TENSOR_CORE and "fp32" not in row["launch"]:
            assert row["tensor_core"], row
    assert {*cases.STREAMING, *cases.TENSOR_CORE} <= {row["kernel"] for row in rows}


@pytest.mark.usefixtures("same_compiler")
@pytest.mark.parametrize("target", AGAIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiling_again_gives_the_same(family: str, target: str) -> None:
    fresh = table.build(FAMILIES[family].PRODUCTION, [target])
    assert table.compare(table.load(family)[1], fresh) == [], REBUILD


def test_every_kernel_file_has_cases() -> None:
    files = {path.stem for path in Path(kernels.__path__[0]).glob("*.py")}
    assert files - {"__init__", "bench"} == set(FAMILIES)
