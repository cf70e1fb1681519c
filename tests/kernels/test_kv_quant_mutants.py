"""Every automatic edit of the quantised cache must be noticed by the small cases below.

The cases are few, since 800 mutants run them; each has a reason. A mutant's module holds the
edited function alone, which then stands in for the original one: that keeps loading cheap.
"""

import ast
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.kv_quant as original
from course import lab
from course.lab.meter import Meter, metered
from kernels.cases.kv_quant import Int8, Kivi, int8_inputs, kivi_inputs
from tests.kernels.mutants import Detector, assert_every_mutant_is_noticed, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants could hang the GPU")

SOURCE = Path(original.__file__).read_text()
HALF, BRAIN = torch.float16, torch.bfloat16


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def alone(name: str) -> str:
    """Function `name` as a module that imports all the others."""
    body = ast.parse(SOURCE).body[1:]  # without the docstring
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    parts = [
        ast.get_source_segment(SOURCE, node)
        for node in body
        if not isinstance(node, ast.FunctionDef)
    ]
    node = functions.pop(name)
    parts.append(f"from kernels.kv_quant import {', '.join(functions)}")
    parts.append("@triton.jit" if node.decorator_list else "")
    return "\n".join([*parts, ast.get_source_segment(SOURCE, node), ""])


def in_place(name: str, detector: Detector) -> Detector:
    """`detector` of the original module with function `name` taken from a mutant's."""

    def look(mutant: ModuleType) -> bool:
        before = getattr(original, name)
        setattr(original, name, getattr(mutant, name))
        try:
            return detector(original)
        finally:
            setattr(original, name, before)

    look.__name__ = detector.__name__
    return look


# --- numbers ---

CASES: dict[str, tuple[Kivi | Int8, float]] = {
    # One program, one step of both parts: padded channels and heads, rows of a wider tensor.
    "one step": (Kivi((16,), (1,), 2, 16, 3, 1, 48, HALF, 1, "sliced", 64, 40), 1.0),
    # Sequences, heads and an empty part; a whole tile of query heads, four bits.
    "several": (Kivi((0, 16), (1, 1), 4, 16, 16, 2, 16, BRAIN, 1, "sliced", 16, 2), 1.0),
    # Two splits of two steps each.
    "splits": (Kivi((112,), (97,), 2, 16, 2, 1, 32, HALF, 2, "dense", 112, 97), 1.0),
    # Scales that float16 cannot hold four times, under a softmax that picks one value.
    "wide": (Kivi((16,), (0,), 2, 16, 1, 1, 64, HALF, 1, "dense", 16, 1), 1000.0),
    "int8, one step": (Int8((15,), 3, 1, 20, HALF, 1, "sliced", 18), 1.0),
    "int8, several": (Int8((1, 2), 16, 3, 3, BRAIN, 1, "sliced", 2), 1.0),
    # Fewer splits than heads, so that mistaking one for the other loses keys.
    "int8, splits": (Int8((33,), 2, 3, 16, HALF, 2, "dense", 33), 1.0),
    # Scores of both signs: a wrong maximum overflows.
    "int8, large": (Int8((33,), 2, 1, 16, HALF, 1, "dense", 33), 100.0),
}


@functools.cache
def inputs(name: str):
    case, factor = CASES[name]
    if isinstance(case, Int8):
        q, *rest = int8_inputs(case, seeded())
    else:
        q, *rest = kivi_inputs(case, seeded())
        if factor > 1:
            rest[3].copy_((rest[3][..., None].view(HALF) * 2**13).view(torch.int32)[..., 0])
    return q * factor, *rest


@functools.cache
def expected(name: str):
    """Over the cache rounded to 16 bits, as the kernel has it; and the bytes it should move."""
    case, _ = CASES[name]
    if isinstance(case, Int8):
        q, k, k_scale, v, v_scale, lens = inputs(name)
        k, v = k * k_scale[..., None], (v * v_scale[..., None]).to(q.dtype)
        valid = torch.arange(k.shape[1]) < lens[:, None]
    else:
        q, kc, km, vc, vm, lens, kr, vr, rest, bits, group = inputs(name)
        k = original.kivi_unpack_ref(kc, km, bits, group, "channel").to(q.dtype)
        v = original.kivi_unpack_ref(vc, vm, bits, group, "token").to(q.dtype)
        parts = [torch.arange(x.shape[1]) < n[:, None] for x, n in ((k, lens), (kr, rest))]
        k, v, valid = torch.cat([k, kr], 1), torch.cat([v, vr], 1), torch.cat(parts, 1)
    with metered() as meter:
        launcher_of(case, original)(*inputs(name), n_splits=case.n_splits)
    return original._attention_ref(q, k, v, valid), moved(meter)


def launcher_of(case: Kivi | Int8, module: ModuleType):
    name = "kivi" if isinstance(case, Kivi) else "int8"
    return getattr(module, f"{name}_decode_attention")


def moved(meter: Meter) -> tuple:
    return meter.read, meter.written, meter.flops


def differs(got, want, dtype: torch.dtype) -> bool:
    (out, lse), (want_out, want_lse) = got, want
    tolerance = 2e-3 if dtype == HALF else 1e-2
    return (
        out.dtype != dtype
        or not torch.allclose(out, want_out, tolerance, tolerance)
        or not torch.allclose(lse, want_lse, 1e-5, 1e-5)
    )


def notices(name: str) -> Detector:
    def detector(module: ModuleType) -> bool:
        case, _ = CASES[name]
        want, bytes_and_flops = expected(name)
        with metered() as meter:
            got = launcher_of(case, module)(*inputs(name), n_splits=case.n_splits, return_lse=True)
        return moved(meter) != bytes_and_flops or differs(got, want, case.dtype)

    detector.__name__ = name
    return detector


KIVI = [notices(name) for name, (case, _) in CASES.items() if isinstance(case, Kivi)]
INT8 = [notices(name) for name, (case, _) in CASES.items() if isinstance(case, Int8)]


@functools.cache
def lost_block():
    """Keys of minus infinity: the first block of newest tokens, and with two splits one split."""
    case = Kivi((0,), (48,), 2, 16, 2, 1, slots=16, rest=48)
    q, *packs, lens, k, v, rest, bits, group = kivi_inputs(case, seeded(9))
    q, k = q.abs(), k.clone()
    k[:, :32] = -math.inf
    arguments = (q, *packs, lens, k, v, rest, bits, group)
    valid = torch.arange(48)[None] >= 32
    return arguments, original._attention_ref(q, k.nan_to_num(0, neginf=0), v, valid)


def notices_a_lost_block(module: ModuleType) -> bool:
    arguments, want = lost_block()
    for n_splits in (1, 2):
        with metered():
            got = module.kivi_decode_attention(*arguments, n_splits=n_splits, return_lse=True)
        if differs(got, want, HALF):
            return True
    return False


@functools.cache
def far_apart():
    """Words and scales of keys whose third row lies beyond what 32 bits count."""
    case = Kivi((48,), (0,), 2, 16, 1, 1, 16, HALF, slots=48, rest=0)
    inputs = [*kivi_inputs(case, seeded())]
    want = original.kivi_decode_attention_ref(*inputs)
    for i in (1, 2):
        storage = torch.UntypedStorage(4 * (2**31 + 64))  # a few pages are ever touched
        far = torch.empty(0, dtype=torch.int32).set_(storage)
        inputs[i] = far.as_strided((1, 3, 1, 16), (64, 2**30 + 1, 64, 1)).copy_(inputs[i])
    return inputs, want


def notices_far_rows(module: ModuleType) -> bool:
    inputs, (want, _) = far_apart()
    with metered():
        out = module.kivi_decode_attention(*inputs)
    return not torch.allclose(out, want, 4e-3, 4e-3)


def notices_the_deal(module: ModuleType) -> bool:
    """The newest tokens go to the last split first, since it has the fewest others."""
    case = Kivi((32,), (1,), 2, 16, 1, 1, 16, HALF, slots=64, rest=1)
    scope, seen = module.__dict__, []
    before = scope["merge_splits"]
    scope["merge_splits"] = lambda part_out, part_lse, out, lse: seen.append(part_lse)
    try:
        with metered():
            module.kivi_decode_attention(*kivi_inputs(case, seeded()), n_splits=2)
    finally:
        scope["merge_splits"] = before
    return not seen[0].isfinite().all()


@functools.cache
def to_pack(axis: str, dtype: torch.dtype, size: int):
    """Groups with ties, constants and wide ranges; two of all and lanes past a block, or one."""
    members, lanes = 16 * size, 5 if size == 1 else 17
    shape = (size, members, size, lanes) if axis == "channel" else (size, lanes, size, members)
    x = torch.randn(shape, generator=seeded()).to(dtype)
    x = torch.cat([x, x], -1)[..., : shape[-1]]
    rows = x[0, :, 0].T if axis == "channel" else x[0, :, 0]
    rows[0, :16] = torch.arange(16) % 7 / 2 - 5  # scale 1 at 2 bits, and halves
    rows[0, 15] = -2
    rows[1, :16] = 3000.7  # float16 has 3000: a difference of no scale
    rows[2, :16] = -3000.7 + torch.arange(16) / 5  # a zero above the smallest value
    rows[3, :16] *= 1000
    rows[4, :16] = torch.arange(16) * 4.3 / 15 * 2**-24  # a scale that lost its third
    return x


PACKS = [  # one program first, for speed
    *[("channel", 2, torch.float32, 1), ("token", 4, BRAIN, 1), ("channel", 2, HALF, 2)],
]


def notices_codes(module: ModuleType) -> bool:
    for axis, bits, dtype, size in PACKS:
        x = to_pack(axis, dtype, size)
        with metered():
            got = module.kivi_pack(x, bits, 16, axis)
        for one, two in zip(got, packed(axis, bits, dtype, size), strict=True):
            if one.dtype != two.dtype or not torch.equal(one, two):
                return True
    return False


@functools.cache
def packed(axis: str, bits: int, dtype: torch.dtype, size: int):
    return original.kivi_pack_ref(to_pack(axis, dtype, size), bits, 16, axis)


# --- what only the compiler knows ---


def notices_in_pack_ir(module: ModuleType) -> bool:
    x, word = torch.ones(1), torch.ones(1, dtype=torch.int32)
    found = lab.check_jit(
        module._kivi_pack_kernel,
        args=(x, word, word, 3, 17, *[32] * 12),
        constexprs=dict(BITS=2, GROUP=16, LANES=16),
    )
    return bool(found.int32_offsets or found.tf32_dot)


def notices_in_kivi_ir(module: ModuleType) -> bool:
    x, word = torch.ones(1, dtype=HALF), torch.ones(1, dtype=torch.int32)
    found = lab.check_jit(
        module._kivi_decode_kernel,
        args=(x, *[word] * 5, x, x, word, x, torch.ones(1), 0.1, *[32] * 20),
        constexprs=dict(BITS=2, GROUP=16, UNIT=4, HEAD_DIM=48, HEADS=3)
        | dict(BLOCK_D=64, BLOCK_H=16, BLOCK_T=32, BLOCK_R=32),
        needs=("load", "store", "dot"),
    )
    return bool(found.int32_offsets or found.tf32_dot)


def notices_in_int8_ir(module: ModuleType) -> bool:
    x, code, f = torch.ones(1, dtype=HALF), torch.ones(1, dtype=torch.int8), torch.ones(1)
    found = lab.check_jit(
        module._int8_decode_kernel,
        args=(x, code, f, code, f, f.int(), x, f, 0.1, *[32] * 12),
        constexprs=dict(HEAD_DIM=20, HEADS=3, BLOCK_D=32, BLOCK_H=16, BLOCK_T=16),
        needs=("load", "store", "dot"),
    )
    return bool(found.int32_offsets or found.tf32_dot)


# --- launchers ---


def asked(module: ModuleType, start: Callable[[], object], processors: int = 1, target="sm_90"):
    """(name, grid, options) of the launches, on a device with so many processors."""
    scope = module._outputs.__globals__  # a mutant has its own
    before = scope["processors"]
    scope["processors"] = lambda device: processors
    try:
        return launches(start, target)
    finally:
        scope["processors"] = before


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def notices_kivi_launches(module: ModuleType) -> bool:
    """Two programs a processor, at most a split a block of either part, at most 128."""
    for B, S, R, D, n_splits, processors, splits in [
        (3, 1024, 0, 128, None, 13, 5),  # 26 programs over 6 pieces, rounded up
        (3, 1056, 0, 128, None, 1000, 9),
        (1, 0, 65, 128, None, 1000, 3),
        (1, 128 * 200, 0, 128, None, 1000, 128),
        (40, 1024, 0, 64, None, 2, 1),
        (2, 256, 0, 64, 99, 1, 2),
        (2, 1024, 0, 128, 2, 1000, 2),
    ]:
        q, rest = empty(B, 4, D, dtype=HALF), empty(B, R, 2, D, dtype=HALF)
        cache = (
            *(empty(B, S // 16, 2, D), empty(B, S // 32, 2, D)),
            *(empty(B, S, 2, D // 16), empty(B, S, 2, D // 32)),
        )
        arguments = (q, *cache, empty(B), rest, rest, empty(B), 2, 32, n_splits)
        tiles = dict(HEAD_DIM=D, HEADS=2, BLOCK_D=D, BLOCK_H=16, BLOCK_R=32)
        tiles |= dict(BLOCK_T=128, num_warps=4, num_stages=3)
        tiles |= dict(BITS=2, GROUP=32, UNIT=4 if D == 128 else 1)  # 64: two scales a head
        found = asked(
            module,
            functools.partial(module.kivi_decode_attention, *arguments),
            processors,
        )
        if found[0] != ("_kivi_decode_kernel", (B, 2, splits), tiles):
            return True
        merges = [("_decode_merge_kernel", (B * 4,))] * (splits > 1)
        if [(name, grid) for name, grid, _ in found[1:]] != merges:
            return True
    return False


def notices_int8_launches(module: ModuleType) -> bool:
    for S, D, n_splits, processors, splits in [
        (1024, 16, None, 13, 5),
        (129, 9, 128, 1, 3),
        (1024, 3, 1, 1, 1),
    ]:
        q, k = empty(3, 4, D, dtype=HALF), empty(3, S, 2, D, dtype=torch.int8)
        scale = empty(3, S, 2, dtype=torch.float32)
        arguments = (q, k, scale, k, scale, empty(3), n_splits)
        start = functools.partial(module.int8_decode_attention, *arguments)
        tiles = dict(HEAD_DIM=D, HEADS=2, BLOCK_D=16, BLOCK_H=16, BLOCK_T=64)
        tiles |= dict(num_warps=4, num_stages=3)
        found = asked(module, start, processors)
        if found[0] != ("_int8_decode_kernel", (3, 2, splits), tiles):
            return True
        if len(found) != 1 + (splits > 1):
            return True
    return False


def notices_pack_launches(module: ModuleType) -> bool:
    """4096 values a program; lanes are what the groups do not run along."""
    for axis, group, T, grid in [("channel", 32, 2048, (64, 5, 2)), ("token", 64, 321, (12, 5, 2))]:
        x, got = empty(2, T, 5, 128, dtype=HALF), []
        found = launches(lambda a=(x, 4, group, axis), g=got: g.extend(module.kivi_pack(*a)))
        want = dict(BITS=4, GROUP=group, LANES=4096 // group, num_warps=4)
        if found != [("_kivi_pack_kernel", grid, want)]:
            return True
        if axis == "channel" and [t.shape[1] for t in got] != [256, 64]:
            return True
    return False


def refused(start: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError as error:
        return str(error).startswith(start)
    return False


def notices_kivi_arguments(module: ModuleType) -> bool:
    names = (
        *("q", "k_codes", "k_meta", "v_codes", "v_meta", "packed_lens"),
        *("k_rest", "v_rest", "rest_lens", "bits", "group"),
    )
    values = inputs("one step")  # B 1, H 3, D 48, 64 slots, 40 others, groups of 16
    valid = dict(zip(names, values, strict=True), n_splits=1)
    words, q = valid["v_codes"], valid["q"]
    for start, changes in [
        ("q: shape", dict(q=q[0])),
        ("bits: 3", dict(bits=3)),
        ("v_codes: shape", dict(v_codes=words[..., :2])),
        ("v_codes: dtype", dict(v_codes=words.float())),
        ("v_codes: 2 KV", dict(v_codes=words.expand(-1, -1, 2, -1))),
        ("n_splits: 0", dict(n_splits=0)),
        ("group: 32 must divide", dict(group=32)),
        ("group: 16 must divide", dict(v_codes=words[:, :40])),
        ("group: 16 must divide", dict(q=q[..., :40], v_codes=words[..., :2])),
        ("k_codes: shape", dict(k_codes=valid["k_codes"][:, :3])),
        ("k_codes: dtype", dict(k_codes=valid["k_codes"].long())),
        ("k_meta: shape", dict(k_meta=valid["k_meta"][:, :3])),
        ("v_meta: shape", dict(v_meta=valid["v_meta"][..., :2])),
        ("k_rest: shape", dict(k_rest=valid["k_rest"][..., :40])),
        ("k_rest: dtype", dict(k_rest=valid["k_rest"].float())),
        ("v_rest: shape", dict(v_rest=valid["v_rest"][:, :20])),
        ("v_rest: dtype", dict(v_rest=valid["v_rest"].float())),
        ("packed_lens: dtype", dict(packed_lens=valid["packed_lens"].long())),
        ("packed_lens: -1", dict(packed_lens=valid["packed_lens"] - 17)),
        ("packed_lens: 65", dict(packed_lens=valid["packed_lens"] + 49)),
        ("rest_lens: 41", dict(rest_lens=valid["rest_lens"] + 40)),
    ]:
        if not refused(start, lambda c=changes: module.kivi_decode_attention(**(valid | c))):
            return True
    none = [x[:0] if isinstance(x, torch.Tensor) else x for x in values]
    with metered() as meter:
        alone = module.kivi_decode_attention(*none)
        both = module.kivi_decode_attention(*none, return_lse=True)
    return meter.launches != 0 or not isinstance(alone, torch.Tensor) or len(both) != 2


def notices_int8_arguments(module: ModuleType) -> bool:
    values = inputs("int8, one step")  # B 1, H 3, D 20, 18 slots, of which 15 are used
    names = ("q", "k", "k_scale", "v", "v_scale", "seq_lens")
    valid = dict(zip(names, values, strict=True), n_splits=1)
    k, scale = valid["k"], valid["k_scale"]
    wide = dict(q=torch.ones(1, 3, 129, dtype=HALF), k=k[..., :1].repeat(1, 1, 1, 129))
    for start, changes in [
        ("q: dtype", dict(q=valid["q"].float())),
        ("k: shape", dict(k=k[..., :10])),
        ("k: dtype", dict(k=k.int())),
        ("q: head_dim 129", wide),
        ("n_splits: 129", dict(n_splits=129)),
        ("v: shape", dict(v=valid["v"][:, :17])),
        ("v: dtype", dict(v=valid["v"].int())),
        ("k_scale: shape", dict(k_scale=scale[:, :17])),
        ("k_scale: dtype", dict(k_scale=scale.half())),
        ("v_scale: shape", dict(v_scale=scale[:, :17])),
        ("seq_lens: shape", dict(seq_lens=valid["seq_lens"].expand(2))),
        ("seq_lens: dtype", dict(seq_lens=valid["seq_lens"].long())),
        ("seq_lens: -1", dict(seq_lens=valid["seq_lens"] - 16)),
        ("seq_lens: 19", dict(seq_lens=valid["seq_lens"] + 4)),
    ]:
        if not refused(start, lambda c=changes: module.int8_decode_attention(**(valid | c))):
            return True
    with metered():
        valid["seq_lens"] = torch.zeros(1, dtype=torch.int32)
        if module.int8_decode_attention(**valid).any():
            return True
    with metered() as meter:
        none = [x[:0] for x in values]
        alone = module.int8_decode_attention(*none)
        both = module.int8_decode_attention(*none, return_lse=True)
    return meter.launches != 0 or not isinstance(alone, torch.Tensor) or len(both) != 2


def notices_pack_arguments(module: ModuleType) -> bool:
    x = torch.ones(1, 16, 1, 32)
    for start, *arguments in [
        ("x: shape", x[0], 2, 16, "token"),
        ("x: dtype", x.int(), 2, 16, "token"),
        ("axis: 'head'", x, 2, 16, "head"),
        ("bits: 3", x, 3, 16, "token"),
        ("group: 8", x, 2, 8, "token"),
        ("x: size 16 of axis 1 must be a multiple of 32", x, 2, 32, "channel"),
        ("x: size 24 of axis 3 must be a multiple of 16", x[..., :24], 2, 16, "token"),
    ]:
        if not refused(start, functools.partial(module.kivi_pack, *arguments)):
            return True
    with metered() as meter:
        codes, meta = module.kivi_pack(x[:, :, :0], 2, 16, "token")
    return meter.launches != 0 or codes.shape != (1, 16, 0, 2) or meta.shape != (1, 16, 0, 2)


def notices_format(module: ModuleType) -> bool:
    for bits, group in ((2, 16), (4, 128)):
        module._check_format(bits, group)
    for bits in (1, 3, 5, 8, 2.0):
        if not refused(f"bits: {bits}", functools.partial(module._check_format, bits, 16)):
            return True
    return not all(
        refused(f"group: {group}", functools.partial(module._check_format, 2, group))
        for group in (8, 16.0)
    )


def notices_query_heads(module: ModuleType) -> bool:
    check = module._query_heads
    for arguments, group in [
        ((16, 1, 1, None), 16),
        ((6, 128, 2, 1), 3),
        ((0, 64, 0, 128), 0),
    ]:
        if check("k", *arguments) != group:
            return True
    for start, *arguments in [
        ("q: head_dim 0", 1, 0, 1, None),
        ("q: head_dim 129", 1, 129, 1, None),
        ("k: 2 KV heads", 5, 8, 2, None),
        ("k: 1 KV heads", 17, 8, 1, None),
        ("k: 0 KV heads", 1, 8, 0, None),
        ("n_splits: 0", 1, 8, 1, 0),
        ("n_splits: 129", 1, 8, 1, 129),
    ]:
        if not refused(start, functools.partial(check, "k", *arguments)):
            return True
    return False


def notices_outputs(module: ModuleType) -> bool:
    """Shapes and dtypes, the default that fills the processors, and its limits."""
    q = torch.empty(3, 4, 8, dtype=HALF)
    for kv_heads, blocks, n_splits, processors, splits in [
        (2, 99, None, 13, 5),
        (2, 3, None, 13, 3),
        (2, 0, None, 13, 1),
        (2, 999, None, 999, 128),
        (2, 9, None, 1, 1),
        (0, 9, None, 2, 4),
        (2, 9, 7, 1, 7),
    ]:
        found: list[torch.Tensor] = []
        arguments = (q, kv_heads, blocks, n_splits)
        asked(module, lambda a=arguments, f=found: f.extend(module._outputs(*a)), processors)
        out, lse, part_out, part_lse = found
        if (out.shape, out.dtype, lse.shape, lse.dtype) != (q.shape, HALF, (3, 4), torch.float32):
            return True
        shapes = ((3, 4, splits, 8), (3, 4, splits)) if splits > 1 else ((3, 4, 8), (3, 4, 1))
        if (part_out.shape, part_lse.shape) != shapes or part_lse.dtype != torch.float32:
            return True
        if part_out.dtype != (torch.float32 if splits > 1 else HALF):
            return True
        if splits == 1 and part_lse.data_ptr() != lse.data_ptr():
            return True
    return False


def notices_merged(module: ModuleType) -> bool:
    out, lse = torch.zeros(2, 1, 4), torch.zeros(2, 1)
    part_out, part_lse = torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3)
    with metered() as meter:
        if module._merged(out, lse, out, lse[..., None], False) is not out or meter.launches:
            return True
        got = module._merged(out, lse, part_out, part_lse, True)
        two = part_out[:, :, :2].contiguous(), part_lse[..., :2].contiguous()
        module._merged(out, lse, *two, False)
    right = meter.launches == 2 and (out == 1).all() and got[0] is out and got[1] is lse
    return not right


def notices_configuration(module: ModuleType) -> bool:
    """The choices that the committed table was compiled from."""
    nvidia, amd = dict(num_warps=4, num_stages=3), dict(num_warps=2, num_stages=2)
    want = {
        ("cpu", 8, 128): (16, {}),
        ("cpu", 2, 16): (32, {}),
        ("cpu", 4, 128): (128, {}),
        ("sm_90", 8, 128): (64, nvidia),
        ("gfx942", 8, 128): (128, amd),
        ("sm_80", 2, 32): (128, nvidia),
        ("sm_100", 4, 16): (128, nvidia),
        ("gfx942", 2, 32): (128, amd),
    }
    return any(module._configuration(*key) != value for key, value in want.items())


# function -> what looks at it, the cheap ones first, and the mutants that change nothing, and why
FUNCTIONS: dict[str, tuple[list[Detector], dict[str, str]]] = {
    "_kivi_pack_kernel": (
        [notices_codes, notices_in_pack_ir],
        {
            "constant#1: 32 to 33": "33 // 2 and 33 // 4 are 32 // 2 and 32 // 4",
            "constant#16: True to False": "2^23 + n as an integer ends in the bits of n too",
        },
    ),
    "_dequantize": (
        KIVI,
        {"constant#2: 1 to 2": "the mask's next bit is set afterwards, as a part of 1.0"},
    ),
    "_head": ([*INT8[:2], notices_in_int8_ir], {}),
    "_load_rows": (INT8[:1], {}),
    "_scores": (INT8[:1], {}),
    "_softmax_step": ([INT8[0], INT8[3], INT8[1], INT8[2]], {}),
    "_share": (INT8[:3], {}),
    "_store_split": ([*INT8[:3], notices_a_lost_block, notices_in_int8_ir], {}),
    "_kivi_decode_kernel": (
        [*KIVI, notices_far_rows, notices_the_deal, notices_in_kivi_ir],
        {
            "constant#1: 32 to 33": "33 // 2 and 33 // 4 are 32 // 2 and 32 // 4",
            "constant#5: 1e+38 to 2e+38": "any floor below every score will do",
        },
    ),
    "_int8_decode_kernel": (
        [*INT8[:2], notices_in_int8_ir],
        {
            "constant#3: 1e+38 to 2e+38": "any floor below every score will do",
            "constant#10: 0.0 to 1.0": "scale of masked values: codes are finite and weigh 0",
        },
    ),
    "kivi_pack": (
        [notices_pack_launches, notices_pack_arguments, notices_codes],
        {"constant#5: 4096 to 4097": "no group divides 4097, so the quotient is the same"},
    ),
    "kivi_decode_attention": (
        [notices_kivi_launches, notices_kivi_arguments, *KIVI],
        {"constant#2: 32 to 33": "33 // 2 and 33 // 4 are 32 // 2 and 32 // 4"},
    ),
    "int8_decode_attention": (
        [notices_int8_launches, notices_int8_arguments, *INT8[:2]],
        {},
    ),
    "_check_format": ([notices_format], {}),
    "_query_heads": ([notices_query_heads], {}),
    "_outputs": ([notices_outputs], {}),
    "_merged": ([notices_merged], {}),
    "_configuration": ([notices_configuration], {}),
}


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    detectors, equivalent = FUNCTIONS[name]
    looks = [in_place(name, detector) for detector in detectors]
    assert_every_mutant_is_noticed(alone(name), name, equivalent, looks, tmp_path)


def test_every_function_is_mutated() -> None:
    functions = {n.name for n in ast.parse(SOURCE).body if isinstance(n, ast.FunctionDef)}
    assert {name for name in functions if not name.endswith("_ref")} == FUNCTIONS.keys()
