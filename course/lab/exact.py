"""bfloat16 and float8 arithmetic for Triton's interpreter, bit for bit as a GPU rounds it.

The interpreter of Triton keeps these types as raw bits and computes with the bits (a bf16
product is nonsense), truncates float32 to bfloat16 and loses the carry when it rounds to float8.
Here every operation decodes to float32, computes, and rounds to nearest even; a value beyond
float8's range saturates, as the conversion instruction of NVIDIA GPUs does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle as Handle

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
RAW = {tl.bfloat16, *FLOAT8}  # kept as unsigned integers
PLAIN = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
_convert_float = triton_interpreter._convert_float


def decode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The float32 values of raw bfloat16 or float8 bits; other data is returned as it is."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in FLOAT8:
        every = torch.arange(256, dtype=torch.uint8).view(FLOAT8[dtype]).float().numpy()
        return every[data]
    return data


def encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The raw bits of `values` in `dtype`, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == tl.bfloat16:
        bits = values.view(np.uint32)
        odd = (bits >> 16) & 1
        rounded = ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    largest = torch.finfo(FLOAT8[dtype]).max
    clamped = torch.from_numpy(values).clamp(-largest, largest)
    return clamped.to(FLOAT8[dtype]).view(torch.uint8).numpy()


def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Replaces the interpreter's conversion between float types; returns bits as integers."""
    known = RAW | PLAIN.keys()
    towards_zero = rounding == triton_interpreter._ir.ROUNDING_MODE.RTZ
    if source not in known or target not in known or towards_zero:
        return _convert_float(data, source, target, rounding)
    values = decode(data, source)
    if target in RAW:
        return encode(values, target)
    result = values.astype(PLAIN[target])
    return result.view(f"uint{8 * result.itemsize}")


class ExactBuilder(triton_interpreter.InterpreterBuilder):
    """The interpreter's builder with right arithmetic for the types kept as raw bits."""

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable) -> Handle:
        dtype = lhs.dtype.scalar
        if dtype not in RAW:
            return super().binary_op(lhs, rhs, op)
        result = op(decode(lhs.data, dtype), decode(rhs.data, dtype))
        is_comparison = result.dtype == np.bool_
        return Handle(result if is_comparison else encode(result, dtype), dtype)

    def unary_op(self, arg: Handle, op: Callable) -> Handle:
        dtype = arg.dtype.scalar
        if dtype not in RAW:
            return super().unary_op(arg, op)
        return Handle(encode(op(decode(arg.data, dtype)), dtype), dtype)

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in RAW and target not in RAW:
            return super().cast_impl(src, dst_type)
        values = decode(src.data, source)
        if target in RAW:
            return Handle(encode(values, target), target)
        return Handle(values.astype(triton_interpreter._get_np_dtype(target)), target)

    def create_dot(self, a: Handle, b: Handle, d: Handle, *options: Any) -> Handle:
        if a.dtype.scalar not in RAW and b.dtype.scalar not in RAW:
            return super().create_dot(a, b, d, *options)
        product = np.matmul(decode(a.data, a.dtype.scalar), decode(b.data, b.dtype.scalar))
        return Handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)
