"""The published flow: a custom operator whose decompositions Inductor times while it compiles, one for each split.

`torch._inductor.kernel.custom_op.register_custom_op_autotuning` is private and its arguments differ between releases;
only those that all of 2.10 to 2.14 take are passed. A split is offered where it divides K, since the decomposition
reshapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from decompose_k.bench.compiled import without_torch_s_own_warnings
from decompose_k.dtypes import HALVES, dtype_name
from decompose_k.epilogue import apply_activation

NAMESPACE = "published_flow"
SPLITS = (2, 4, 8, 16, 32, 64, 128, 256)


def split_product(
    a: torch.Tensor, b: torch.Tensor, k_splits: int, out_dtype: torch.dtype, activation: str | None
) -> torch.Tensor:
    """activation(sum over s of a[:, chunk s] @ b[chunk s]): a batched product into fp32, a sum, one rounding.

    `k_splits` must divide K.
    """
    m, k = a.shape
    chunk = k // k_splits
    lefts = a.reshape(m, k_splits, chunk).permute(1, 0, 2)
    rights = b.reshape(k_splits, chunk, b.shape[1])
    return apply_activation(_batched(lefts, rights).sum(0), activation).to(out_dtype)


def plain_product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, activation: str | None) -> torch.Tensor:
    """activation(a @ b) as torch.mm gives it."""
    if out_dtype != a.dtype and a.is_cuda and a.dtype in HALVES and out_dtype == torch.float32:
        product = torch.mm(a, b, out_dtype=out_dtype)
    elif out_dtype != a.dtype:
        product = torch.mm(a.to(out_dtype), b.to(out_dtype))
    else:
        product = torch.mm(a, b)
    return apply_activation(product, activation)


def splits_of(k: int) -> tuple[int, ...]:
    """The splits that divide K.

    >>> splits_of(12)
    (2, 4)
    """
    return tuple(split for split in SPLITS if k % split == 0)


def op_name(out_dtype: torch.dtype, activation: str | None) -> str:
    """What the operator and its autotuning are called.

    >>> op_name(torch.bfloat16, "relu")
    'mm_relu_bf16'
    """
    return "_".join(("mm", *([activation] if activation else []), dtype_name(out_dtype)))


@functools.cache
def autotuned_op(out_dtype: torch.dtype, activation: str | None) -> Callable[..., torch.Tensor]:
    """The operator `op(a, b)` for a result dtype and a fused activation, registered once a process with its choices."""
    with without_torch_s_own_warnings():
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

    def decomposed(a: torch.Tensor, b: torch.Tensor, k_splits: int = 1) -> torch.Tensor:
        return split_product(a, b, k_splits, out_dtype, activation)

    def plain(a: torch.Tensor, b: torch.Tensor, k_splits: int = 1) -> torch.Tensor:
        del k_splits
        return plain_product(a, b, out_dtype, activation)

    def choices(operands: dict[str, torch.Tensor]) -> list[Any]:
        # By place: releases differ in whose names they go by.
        first, *_ = operands.values()
        splits = splits_of(int(first.shape[1]))
        return [CustomOpConfig(plain, k_splits=1)] + [CustomOpConfig(decomposed, k_splits=s) for s in splits]

    def fake(a: torch.Tensor, b: torch.Tensor, k_splits: int = 1) -> torch.Tensor:
        del k_splits
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)

    name, schema = op_name(out_dtype, activation), "(Tensor a, Tensor b, int k_splits=1) -> Tensor"
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", plain, mutates_args=(), schema=schema)
    op.register_fake(fake)
    register_custom_op_autotuning(op, config_generator=choices, name=name)
    return op


def _batched(lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
    """A batched product summed and kept in fp32, or in fp64 where that is what comes."""
    if lefts.dtype not in HALVES:
        return torch.bmm(lefts, rights)
    if lefts.is_cuda:
        return torch.bmm(lefts, rights, out_dtype=torch.float32)
    # A CPU has no such product, and one rounded to halves would lose what the split is to keep.
    return torch.bmm(lefts.float(), rights.float())
