"""The gate of a Llama MLP: silu(gate) * up, elementwise.

    out[t, i] = gate[t, i] / (1 + exp(-gate[t, i])) * up[t, i]

Through memory: gate, up and out, 3 * T * F elements; unfused the silu would be
written and read once more. About 5 FLOPs an element, so the time is the time
to move them.

How it fills a GPU: a program per row and block of columns. Gate and up
may be two halves of one matrix, as a fused projection leaves them. A known bug
that this avoids: exp(-gate) in float16 overflows below -11.
"""

import torch
import triton
import triton.language as tl

from course.lab.launch import arch, cdiv, check_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BLOCKS = 65_535  # of the grid's second axis


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same result in plain torch, in float32: the specification."""
    gate_32 = gate.float()
    return (gate_32 * gate_32.sigmoid() * up.float()).to(gate.dtype)


@triton.jit
def _swiglu_kernel(
    gate,  # [T, F]
    up,  # [T, F]
    out,  # [T, F], dense
    F,
    s_g,
    s_u,
    BLOCK: tl.constexpr,
):
    """A block of one row. Grid (T, cdiv(F, BLOCK))."""
    t = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_f = o_f < F
    b_gate = tl.load(gate + t * s_g + o_f, mask=m_f).to(tl.float32)
    b_up = tl.load(up + t * s_u + o_f, mask=m_f)
    tl.store(out + t * F + o_f, b_gate * tl.sigmoid(b_gate) * b_up, mask=m_f)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate, up: [T, F], float16, bfloat16 or float32, of the same dtype; the
            outer strides are free, the last ones are 1.

    Returns:
        [T, F] in the inputs' dtype, dense, computed in float32 and rounded
        once.

    Raises:
        ValueError: an argument breaks one of the rules above.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    check_tensor("gate", gate, ("T", "F"), DTYPES, gate.device)
    check_tensor("up", up, gate.shape, (gate.dtype,), gate.device)
    T, F = gate.shape
    block = _block(arch(gate.device), gate.itemsize)
    if cdiv(F, block) > MAX_BLOCKS:
        raise ValueError(
            f"gate: {F} columns must be at most {MAX_BLOCKS * block}"
        )
    out = torch.empty(T, F, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        _swiglu_kernel[(T, cdiv(F, block))](
            gate,
            up,
            out,
            F,
            gate.stride(0),
            up.stride(0),
            BLOCK=block,
            num_warps=4,
        )
    return out


def _block(target: str, itemsize: int) -> int:
    """Columns of a program: four warps that load 16 bytes a thread.

    Small in the interpreter, so that tests have many blocks.
    """
    if target == "cpu":
        return 16
    lanes = 64 if target.startswith("gfx") else 32
    return 4 * lanes * 16 // itemsize
