"""Every automatic edit of the prefill family must be noticed by the small cases below.

The cases are few and of few programs, since 400 mutants run them; each has a reason.
"""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.attention_prefill as original
from course import lab
from course.lab.interp import BUILDER
from course.lab.launch import next_power_of_2
from course.lab.meter import metered
from kernels.cases.attention_prefill import Prefill, offsets, prefill_inputs
from tests.kernels.mutants import assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
FUNCTIONS: dict[str, dict[str, str]] = {  # the mutants that change nothing, and why
    "_attend_block": {
        "constant#3: 0.0 to 1.0": "K: cut keys get -inf later, padded columns meet zeros of q",
        "constant#6: 0.0 to 1.0": "V: cut keys weigh 0, padded columns are not stored",
    },
    "_prefill_attention_kernel": {
        "constant#11: 0.0 to 1.0": "q: padded rows are not stored, padded columns meet zeros of K",
        "constant#16: 0 to 1": "1 // BLOCK_N is 0 too",
        "constant#17: 1e+38 to 2e+38": "any floor below every score will do",
        "constant#19: False to True": "a mask that is true everywhere: the same, slower",
    },
    "prefill_attention": {},
    "_check_offsets": {},
    "_configuration": {},
}

CASES = [  # with the keys of every step, in order; the cheap ones first
    # Large scores, of both signs: a wrong maximum overflows.
    (Prefill(((3, 40),), (1, 1), 16), 200.0, [32, 16]),
    # The first query is the last, and the last but one, to see all of a block.
    (Prefill(((1, 64), (2, 32)), (1, 1), 3), 1.0, [32, 32, 16, 16]),
    # A chunk under a window: keys that its edge cuts, keys that all see, the diagonal.
    (Prefill(((5, 100),), (2, 2), 20, window=60, layout="fused"), 1.0, [32, 16, 16] * 2),
    # So many queries without keys that the first block of keys would lie before them.
    (Prefill(((40, 3),), (1, 1), 3), 1.0, [16]),
    # An empty sequence, two blocks of queries, none without keys; a group of heads.
    (Prefill(((0, 2), (17, 17), (2, 0)), (2, 1), 3, torch.float16), 1.0, [16, 16] * 2 + [16] * 2),
]


@functools.cache
def inputs(number: int):
    case, scale, _ = CASES[number]
    q, *rest = prefill_inputs(case, torch.Generator().manual_seed(number))
    return q * scale, *rest


@functools.cache
def expected(number: int):
    *tensors, _, window = inputs(number)
    return original.prefill_attention_ref(*tensors, window)


class Products:
    """Watches the interpreter: FLOPs of each product."""

    def __init__(self) -> None:
        self.flops: list[int] = []

    def start(self, name: str, arguments: dict) -> None: ...
    def access(self, kind, program, addresses, size) -> None: ...
    def dot(self, flops: int) -> None:
        self.flops.append(flops)


def notices_numbers(module: ModuleType) -> bool:
    """Results, and the blocks of keys that lead to them: masked work is right, but slow."""
    for number, (case, _, keys) in enumerate(CASES):
        products = Products()
        BUILDER.observers.append(products)
        try:
            with metered():
                got = module.prefill_attention(*inputs(number), return_lse=True)
        finally:
            BUILDER.observers.remove(products)
        tolerance = 2e-3 if case.dtype == torch.float16 else 1e-5
        for have, want in zip(got, expected(number), strict=True):
            if have.dtype != want.dtype or not torch.allclose(have, want, tolerance, tolerance):
                return True
        width = max(16, next_power_of_2(case.head_dim))
        if products.flops != [2 * 16 * n * width for n in keys for _ in range(2)]:
            return True
    return False


@functools.cache
def far_inputs():
    """Queries, keys and values so far apart that 32 bits cannot hold the offset in a block."""
    case = Prefill(((9, 9),), (1, 1), 16, torch.float16, spare=0)
    tensors = prefill_inputs(case, torch.Generator().manual_seed(7))
    storage = torch.UntypedStorage(2 * (2**31 + 64))  # of which a few pages are ever touched
    far = torch.empty(0, dtype=torch.float16).set_(storage)
    spread = [far.as_strided((9, 1, 16), (2**28, 16, 1), 16 * i) for i in range(3)]
    for tensor, copy in zip(tensors, spread, strict=False):
        copy.copy_(tensor)
    return (*spread, *tensors[3:]), original.prefill_attention_ref(*tensors[:5])[0]


def notices_far_offsets(module: ModuleType) -> bool:
    arguments, want = far_inputs()
    with metered():
        return not torch.allclose(module.prefill_attention(*arguments), want, 2e-3, 2e-3)


def notices_in_the_ir(module: ModuleType) -> bool:
    """Offsets that 32 bits cannot hold, and what only the compiler refuses."""
    q, k, v, cu_q, cu_k, *_ = inputs(2)
    found = lab.check_jit(
        module._prefill_attention_kernel,
        args=(q, k, v, cu_q, cu_k, q, q, 0.1, 3, 5, *range(20, 26)),
        constexprs=dict(HEAD_DIM=20, BLOCK_D=32, BLOCK_M=16, BLOCK_N=32, BLOCK_CUT=16),
        needs=("load", "store", "dot"),
    )
    return bool(found.int32_offsets or found.tf32_dot)


def notices_launches(module: ModuleType) -> bool:
    """Heads, blocks of the longest sequence, sequences; the tiles and options of the table."""
    meta = torch.device("meta")
    q = torch.empty(700, 6, 8, dtype=torch.bfloat16, device=meta)
    k = torch.empty(900, 2, 8, dtype=torch.bfloat16, device=meta)
    cu_seqlens = torch.empty(4, dtype=torch.int32, device=meta)
    for longest, blocks in ((256, 2), (257, 3)):
        asked = launches(
            lambda n=longest: module.prefill_attention(q, k, k, cu_seqlens, cu_seqlens, n)
        )
        tiles = dict(HEAD_DIM=8, BLOCK_D=16, BLOCK_M=128, BLOCK_N=64, BLOCK_CUT=64)
        options = tiles | dict(num_warps=8, num_stages=3)
        if asked != [("_prefill_attention_kernel", (6, blocks, 3), options)]:
            return True
    return False


def notices_arguments(module: ModuleType) -> bool:
    inputs = prefill_inputs(
        Prefill(((3, 3), (2, 4)), (4, 2), 8, spare=1), torch.Generator().manual_seed(1)
    )
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "window")
    right = dict(zip(names, inputs, strict=True))
    q, k, v, cu_q, cu_k, *_ = inputs
    many = torch.zeros(65_537, dtype=torch.int32)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    wide = {n: torch.ones(*x.shape[:2], 129) for n, x in zip(names[:3], (q, k, v), strict=True)}
    bad = {
        "q: shape": dict(q=q[0]),
        "k: shape": dict(k=k[0]),
        "k: shape again": dict(k=k[..., :4]),
        "v: shape": dict(v=v[1:]),
        "v: shape again": dict(v=v[:, :1]),
        "q: head_dim 129": wide,
        "q: head_dim 0": {n: x[..., :0] for n, x in wide.items()},
        "k: 2 KV": dict(q=q[:, :3]),
        "k: 0 KV": dict(k=k[:, :0], v=v[:, :0]),
        "max_seqlen_q: -1": dict(max_seqlen_q=-1),
        "max_seqlen_q: 1048577": dict(max_seqlen_q=2**20 + 1),
        "window: 0": dict(window=0),
        "window: 1073741825": dict(window=2**30 + 1),
        "cu_seqlens_q: dtype": dict(cu_seqlens_q=cu_q.long()),
        "cu_seqlens_q: -1 seq": dict(cu_seqlens_q=ints()),
        "cu_seqlens_q: 65536 seq": dict(cu_seqlens_q=many, cu_seqlens_k=many),
        "cu_seqlens_k: shape": dict(cu_seqlens_k=cu_k[1:]),
        "cu_seqlens_q: 1 at": dict(cu_seqlens_q=ints(1, 3, 5)),
        "cu_seqlens_q: -1 at": dict(cu_seqlens_q=ints(-1, 2, 5)),
        "cu_seqlens_q: 4 at": dict(cu_seqlens_q=ints(0, 3, 4)),
        "cu_seqlens_q: 6 at": dict(cu_seqlens_q=ints(0, 3, 6)),
        "cu_seqlens_q: length: -1 at [1]": dict(cu_seqlens_q=ints(0, 6, 5), max_seqlen_q=6),
        "cu_seqlens_q: length: 3 at [0]": dict(max_seqlen_q=2),
        "cu_seqlens_k: 9 at": dict(cu_seqlens_k=ints(0, 3, 9)),
        "cu_seqlens_k: length: -2 at [1]": dict(cu_seqlens_k=ints(0, 5, 3)),
    }
    for start, changes in bad.items():
        try:
            module.prefill_attention(**right | changes)
        except ValueError as error:
            if str(error).startswith(start.removesuffix(" again")):
                continue
        return True
    return notices_edges(module)


def notices_edges(module: ModuleType) -> bool:
    """What the rules just allow, and what launches nothing."""
    one = torch.ones(1, 1, 128)
    empty = torch.zeros(65_536, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    with metered() as meter:
        module.prefill_attention(one, one, one, offsets((1,)), offsets((1,)), 1, 2**30)
        narrow = one[..., :1]
        out = module.prefill_attention(narrow, narrow, narrow, offsets((1,)), offsets((0,)), 1, 1)
        if not isinstance(out, torch.Tensor) or out.any() or meter.launches != 2:
            return True
        nothing = module.prefill_attention(one[:0], one, one, empty, empty, 2**20)
        both = module.prefill_attention(one[:0], one, one, none, none, 0, None, True)
        heads = module.prefill_attention(one[:, :0], one, one, offsets((1,)), none.repeat(2), 1)
    return (
        meter.launches != 2
        or not isinstance(nothing, torch.Tensor)
        or heads.shape != (1, 0, 128)
        or len(both) != 2
    )


def notices_gpu_offsets(module: ModuleType) -> bool:
    """On a GPU the values are not looked at: the stand-in has none."""

    class OnGpu:
        device = torch.device("cuda")

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COURSE_KERNEL_DEBUG", raising=False)
        module._check_offsets("cu_seqlens_q", OnGpu(), 0, 0, 0)
        patch.setenv("COURSE_KERNEL_DEBUG", "1")
        try:
            module._check_offsets("cu_seqlens_q", OnGpu(), 0, 0, 0)
        except TypeError:
            return False
    return True


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    half, single = torch.float16, torch.float32
    want = {
        ("sm_80", 64, half): (128, 64, 64, 8, 3),
        ("sm_80", 65, half): (128, 32, 32, 8, 3),
        ("sm_120", 128, torch.bfloat16): (128, 32, 32, 8, 3),
        ("sm_90", 64, torch.bfloat16): (128, 64, 64, 8, 3),
        ("sm_90", 65, half): (128, 128, 64, 8, 3),
        ("sm_100", 128, torch.bfloat16): (128, 128, 64, 8, 3),
        ("gfx942", 128, half): (128, 64, 64, 8, 2),
        ("gfx942", 64, half): (128, 64, 64, 8, 2),
        ("sm_90", 128, single): (32, 16, 16, 8, 2),
        ("gfx942", 64, single): (32, 16, 16, 4, 2),
    }
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_CUT", "num_warps", "num_stages")
    for arguments, numbers in want.items():
        if module._configuration(*arguments) != dict(zip(names, numbers, strict=True)):
            return True
    return module._configuration("cpu", 128, half) != dict(BLOCK_M=16, BLOCK_N=32, BLOCK_CUT=16)


IN_KERNELS = [notices_numbers, notices_in_the_ir, notices_far_offsets]
DETECTORS = {  # the cheap ones first
    "_attend_block": IN_KERNELS,
    "_prefill_attention_kernel": IN_KERNELS,
    "prefill_attention": [notices_launches, notices_arguments, notices_numbers],
    "_check_offsets": [notices_gpu_offsets, notices_arguments],
    "_configuration": [notices_configuration],
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    assert_every_mutant_is_noticed(SOURCE, name, FUNCTIONS[name], DETECTORS[name], tmp_path)
