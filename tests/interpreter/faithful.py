"""What Triton's interpreter does otherwise than a GPU, put right: bf16, and the larger of a number and NaN.

The interpreter keeps bf16 as raw 16-bit integers and computes with those: a dot is of bit patterns, a conversion to
bf16 truncates, and one from bf16 to anything but fp32 converts the pattern. Here conversions are torch's, a dot is of
the values, and arithmetic on bf16, which no kernel of ours does, raises instead of giving a wrong number. `tl.maximum`
and `tl.minimum` drop a NaN on a GPU and, before Triton 3.9, keep it in the interpreter, where a ReLU that loses NaN
would look right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_TORCH = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64}
_RAW = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}


def convert(handle: TensorHandle, dtype: tl.dtype) -> TensorHandle:
    """A block of floats in another float dtype, rounded as torch does."""
    data = np.ascontiguousarray(handle.data)
    source = handle.dtype.scalar
    values = (
        torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) if source == tl.bfloat16 else torch.from_numpy(data)
    )
    values = values.to(_TORCH[dtype])
    raw = (
        values.view(torch.int16).numpy().view(np.uint16) if dtype == tl.bfloat16 else values.numpy().astype(_RAW[dtype])
    )
    return TensorHandle(raw.reshape(handle.data.shape), dtype)


def patch(monkeypatch) -> None:
    """Make the interpreter faithful for as long as `monkeypatch` lasts."""
    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(InterpreterBuilder, name, _true_conversion(getattr(InterpreterBuilder, name)))
    for name in ("binary_op", "unary_op"):
        monkeypatch.setattr(InterpreterBuilder, name, _without_bf16(getattr(InterpreterBuilder, name)))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _true_dot(InterpreterBuilder.create_dot))
    for name, op in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(InterpreterBuilder, name, _binary(op))


def _true_conversion(original: Callable) -> Callable:
    def conversion(self, src, dst_type, *rest):
        pair = (src.dtype.scalar, dst_type.scalar)
        if tl.bfloat16 in pair and set(pair) <= set(_TORCH):
            return convert(src, dst_type.scalar)
        return original(self, src, dst_type, *rest)

    return conversion


def _true_dot(original: Callable) -> Callable:
    def dot(self, a, b, *rest):
        a, b = (convert(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original(self, a, b, *rest)

    return dot


def _without_bf16(original: Callable) -> Callable:
    def arithmetic(self, *operands_and_op):
        *operands, op = operands_and_op
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError("arithmetic on bf16 under the interpreter: convert to fp32 first")
        return original(self, *operands, op)

    return arithmetic


def _binary(op: Callable) -> Callable:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, op)
