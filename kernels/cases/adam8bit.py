"""Cases of 8-bit AdamW: states and gradients, launches, benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from course.lab.launch import cdiv
from kernels.adam8bit import (
    BLOCK,
    adam8bit_blockwise_step,
    adam8bit_blockwise_step_ref,
    dynamic_code,
)
from kernels.cases import Benchmark, pairwise, shifted


@dataclass(frozen=True)
class Step:
    """One call of the optimizer.

    `gradients` are "normal"; "zero"; "outlier", one of a block a thousand
    times the others; "scales", blocks of different magnitude; "tiny", whose
    squares float32 hardly holds. `state` is "fresh", with scale 0 and
    arbitrary indices, or "used".
    """

    n: int = 600
    step: int = 2
    p_dtype: torch.dtype = torch.float32
    g_dtype: torch.dtype = torch.float32
    gradients: str = "normal"
    weight_decay: float = 0.0
    state: str = "used"
    layout: str = "dense"


# Around a block, and around the interpreter's two blocks of a program.
STEP_CASES = [
    Step(**row)
    for row in pairwise(
        {
            "n": (1, 255, 256, 257, 600, 1300),
            "gradients": ("normal", "zero", "outlier", "scales", "tiny"),
            "step": (1, 2, 1000),
            "p_dtype": (torch.float32, torch.bfloat16),
            "g_dtype": (torch.float32, torch.bfloat16),
            "weight_decay": (0.0, 0.1),
            "state": ("fresh", "used"),
            "layout": ("dense", "shifted"),
        }
    )
]


def step_inputs(
    case: Step,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """p, g, both indices, both scales and both codes of a case."""
    n, blocks = case.n, cdiv(case.n, BLOCK)
    p = torch.randn(n, generator=generator)
    g = torch.randn(n, generator=generator)
    block = torch.arange(n) // BLOCK
    if case.gradients == "zero":
        g.zero_()
    elif case.gradients == "outlier":
        g[BLOCK // 2 :: BLOCK] *= 1000
    elif case.gradients == "scales":
        g *= torch.tensor([1.0, 1e-3, 10.0])[block % 3]
    elif case.gradients == "tiny":
        g *= 1e-17
    # Where v is 0 by rounding a step has no bound, so its places are not 0.
    m_index, v_index = (
        torch.randint(
            low, 256, (n,), generator=generator, dtype=torch.uint8
        ).to(device)
        for low in (0, 100)
    )
    m_scale = torch.rand(blocks, generator=generator).to(device)
    v_scale = torch.rand(blocks, generator=generator).to(device)
    if case.state == "fresh":
        m_scale.zero_()
        v_scale.zero_()
    p, g = p.to(device, case.p_dtype), g.to(device, case.g_dtype)
    if case.layout == "shifted":
        p, g = shifted(p), shifted(g)
        m_index, v_index = shifted(m_index), shifted(v_index)
        m_scale, v_scale = shifted(m_scale), shifted(v_scale)
    codes = dynamic_code(True, device), dynamic_code(False, device)
    return p, g, m_index, v_index, m_scale, v_scale, *codes


def _launch(n: int, p_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    """Call the launcher on tensors without memory, to be compiled only."""
    meta = torch.device("meta")
    index = torch.empty(n, dtype=torch.uint8, device=meta)
    scale = torch.empty(cdiv(n, BLOCK), device=meta)
    code = torch.empty(256, device=meta)
    adam8bit_blockwise_step(
        torch.empty(n, dtype=p_dtype, device=meta),
        torch.empty(n, dtype=g_dtype, device=meta),
        *(index, index, scale, scale, code, code),
        step=3,
        lr=1e-3,
    )


STREAMING = ("_adam8bit_kernel",)
TENSOR_CORE = ()
PRODUCTION: dict[str, Callable[[], Any]] = {
    "float32 master and gradient": partial(
        _launch, 4096 * 4096, torch.float32, torch.float32
    ),
    "float32 master, bf16 gradient": partial(
        _launch, 4096 * 4096, torch.float32, torch.bfloat16
    ),
    "bf16 alone": partial(
        _launch, 4096 * 4096, torch.bfloat16, torch.bfloat16
    ),
}

_RATES: dict[str, Any] = dict(step=10, lr=1e-3, weight_decay=0.01)


def _ours(*state: Any) -> torch.Tensor:
    adam8bit_blockwise_step(*state[:8], **_RATES)
    return state[0]


def _reference(*state: Any) -> torch.Tensor:
    adam8bit_blockwise_step_ref(*state[:8], **_RATES)
    return state[0]


def _bitsandbytes(*state: torch.Tensor) -> torch.Tensor:
    """The same update by the library that introduced it."""
    from bitsandbytes.functional import optimizer_update_8bit_blockwise

    p, g, m_index, v_index, m_scale, v_scale, m_code, v_code = state[:8]
    optimizer_update_8bit_blockwise(
        "adam",
        g,
        p,
        m_index,
        v_index,
        beta1=0.9,
        beta2=0.999,
        beta3=0.0,
        alpha=0.0,
        eps=1e-8,
        step=10,
        lr=1e-3,
        qmap1=m_code,
        qmap2=v_code,
        absmax1=m_scale,
        absmax2=v_scale,
        weight_decay=0.01,
    )
    return p


def _fused(*state: torch.Tensor) -> torch.Tensor:
    """Torch's kernel with float32 moments: the memory this family saves."""
    from torch.optim.adamw import adamw

    p, g, *_, m, v, step = state
    adamw(
        [p],
        [g],
        [m],
        [v],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=1e-3,
        weight_decay=0.01,
        eps=1e-8,
        maximize=False,
    )
    return p


def _benchmark(n: int) -> Benchmark:
    def inputs(
        generator: torch.Generator, device: torch.device, n: int = n
    ) -> tuple[torch.Tensor, ...]:
        def index(low: int) -> torch.Tensor:
            return torch.randint(
                low,
                256,
                (n,),
                generator=generator,
                device=device,
                dtype=torch.uint8,
            )

        p, g = torch.randn(2, n, generator=generator, device=device)
        scale = torch.full((cdiv(n, BLOCK),), 0.1, device=device)
        codes = dynamic_code(True, device), dynamic_code(False, device)
        ours = p, g, index(0), index(100), scale, scale.clone(), *codes
        # what the indices stand for, and the count of steps before this one
        moments = (
            code[place.int()] * 0.1
            for code, place in zip(codes, ours[2:4], strict=True)
        )
        return *ours, *moments, torch.tensor(9.0, device=device)

    return Benchmark(
        f"n={n:,}, float32 parameters and gradients",
        inputs,
        partial(inputs, n=600),
        _ours,
        _reference,
        bytes=16 * n + 16 * cdiv(n, BLOCK),
        flops=40 * n,
        bound="memory",
        tolerance=1e-5,
        peers={
            "bitsandbytes": _bitsandbytes,
            "fused AdamW, float32 moments": _fused,
        },
    )


BENCHMARKS = [_benchmark(4096 * 4096), _benchmark(128_256 * 4096)]
