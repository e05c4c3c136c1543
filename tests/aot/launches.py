"""What the compile tests launch: the engine, on operands with a shape, strides and a dtype but no memory."""

from __future__ import annotations

from typing import Any

import torch

from decompose_k.config import Config
from decompose_k.kernels.engine import triton_matmul
from decompose_k.kernels.read import read_launch
from decompose_k.problem import Problem
from targets import Target

# Strides in elements, as multiples that keep 16-byte alignment where a real operand of the layout would have it.
_PADDING = {"row": (0, 1), "column": (0, 1), "strided": (3, 2)}


def engine(
    target: Target, problem: dict[str, Any], config: dict[str, Any], scaled: bool = False, wide: bool = False
) -> None:
    """One call of the Triton engine; `scaled` passes alpha and beta, `wide` makes a's rows lie 2^31 elements apart."""
    described = Problem.from_json(problem)
    a = operand(described.m, described.k, described.a_dtype, described.a_layout, row_stride=2**31 if wide else None)
    b = operand(described.k, described.n, described.b_dtype, described.b_layout)
    bias = None if described.bias_dtype is None else torch.empty(described.n, dtype=described.bias_dtype, device="meta")
    triton_matmul(
        Config.from_json(config),
        a,
        b,
        bias=bias,
        alpha=0.5 if scaled else 1.0,
        beta=2.0 if scaled else 1.0,
        activation=described.activation,
        out_dtype=described.out_dtype,
    )


def read_floor(target: Target, words: int, programs: int, num_warps: int, launch: str) -> None:
    """One call of the read floor on two operands of `words` 32-bit words."""
    a, b, out = (torch.empty(count, dtype=torch.int32, device="meta") for count in (words, words, programs))
    read_launch(a, b, out, launch=launch, num_warps=num_warps).run()


def operand(rows: int, columns: int, dtype: torch.dtype, layout: str, row_stride: int | None = None) -> torch.Tensor:
    """A matrix without memory in the named layout; `row_stride` overrides the distance between its rows."""
    if layout == "column":
        return operand(columns, rows, dtype, "row").T
    padding, step = _PADDING[layout]
    strides = (row_stride or columns * step + padding, step)
    return torch.empty_strided((rows, columns), strides, dtype=dtype, device="meta")
