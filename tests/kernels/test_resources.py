"""The committed tables are what the kernels compile to, and hold nothing a kernel may not do."""

from pathlib import Path

import pytest
import torch
import triton

import kernels
from course.lab import table
from course.lab.aot import TARGETS, compile_launches
from kernels.attention_decode import decode_attention
from kernels.cases import PRODUCTION

STREAMING = {"attention_decode": {"_decode_attention_kernel"}}
REBUILD = "run `python -m kernels.resources` and review its diff"


@pytest.fixture
def same_compiler() -> None:
    """The tables are those of the pinned Triton; another allocates registers differently."""
    for family in PRODUCTION:
        version = table.load(family)[0].split("/")[0]
        if version != triton.__version__:
            pytest.skip(f"the tables were compiled by Triton {version}")


@pytest.mark.usefixtures("same_compiler")
@pytest.mark.parametrize("family", PRODUCTION)
def test_the_table_belongs_to_the_source(family: str) -> None:
    source = Path(kernels.__path__[0]) / f"{family}.py"
    assert table.load(family)[0] == table.key(source), REBUILD


@pytest.mark.parametrize("family", PRODUCTION)
def test_no_spills_wide_loads_tensor_cores(family: str) -> None:
    rows = table.load(family)[1]
    streaming = STREAMING[family]
    assert table.complaints(rows, streaming) == []
    assert {(row["launch"], row["target"]) for row in rows} == {
        (launch, target) for launch in PRODUCTION[family] for target in TARGETS
    }
    for row in rows:
        if row["kernel"] in streaming and "fp32" not in row["launch"]:
            assert row["tensor_core"], row


@pytest.mark.usefixtures("same_compiler")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", PRODUCTION)
def test_compiling_again_gives_the_same(family: str, target: str) -> None:
    fresh = table.build(PRODUCTION[family], [target])
    assert table.compare(table.load(family)[1], fresh) == [], REBUILD


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_all_sizes_one_compile(target: str) -> None:
    one = torch.ones(1, 1, 1, 1)
    lengths = torch.ones(1, dtype=torch.int32)
    compiled = compile_launches(lambda: decode_attention(one[0], one, one, lengths), target)
    assert [kernel.name for kernel in compiled] == ["_decode_attention_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_tile_fits(dtype: torch.dtype, target: str) -> None:
    """The edge of the claim: head_dim 128 and 64 query heads a KV head."""
    q = torch.empty(1, 64, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 256, 1, 128, dtype=dtype, device="meta")
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    rows = table.build({"": lambda: decode_attention(q, k, k, lengths, 1)}, [target])
    assert table.complaints(rows, STREAMING["attention_decode"]) == []
