"""What Decompose-K is measured against: torch eager, torch.compile in its modes, and the published custom-op flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from decompose_k.accuracy import mm_of_copies, then_activation, torch_product
from decompose_k.bench.compiled import Compiled
from decompose_k.bench.custom_op import autotuned_op, op_name, split_product, splits_of
from decompose_k.bench.variant import (
    COMPILED,
    COMPILED_MAX,
    COMPILED_MAX_NO_GRAPHS,
    COMPILED_SPLIT,
    CUSTOM_OP,
    CUSTOM_OP_FUSED,
    TORCH,
    TORCH_CAST,
    Variant,
)
from decompose_k.dtypes import HALVES

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case
    from decompose_k.device import Device

# The study's fixed split: every K of its grid is divisible by it.
FIXED_SPLIT = 32


def torch_eager(case: Case, device: Device) -> Variant:
    """Torch's product as one would write it in these dtypes, and the activation as a call of its own."""
    label, product = torch_product(case.problem(device.type))
    return Variant(TORCH, label, product, "torch")


def torch_cast(case: Case, device: Device) -> Variant | None:
    """Halves through fp32 copies: the faster baseline on a CPU without half-precision instructions."""
    shape = case.shape
    if device.type != "cpu" or not shape.a_dtype == shape.b_dtype == shape.out_dtype or shape.a_dtype not in HALVES:
        return None
    product = then_activation(mm_of_copies(torch.float32, torch.float32), case.activation)

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b).to(shape.out_dtype)

    return Variant(TORCH_CAST, "torch.mm of fp32 copies", call, "torch")


def compiled_split(case: Case, device: Device) -> Variant | None:
    """The hand-written decomposition with a fixed split, through torch.compile."""
    del device
    shape = case.shape
    fitting = [split for split in splits_of(shape.k) if split <= FIXED_SPLIT]
    if not fitting or shape.a_dtype != shape.b_dtype:
        return None
    split = fitting[-1]

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return split_product(a, b, split, shape.out_dtype, case.activation)

    return Variant(COMPILED_SPLIT, f"torch.compile of bmm over {split} chunks + sum", Compiled(call), "torch")


def compiled(case: Case, device: Device) -> Variant:
    """What `torch_eager` does, through torch.compile."""
    return _compiled(case, device, COMPILED, None)


def compiled_max(case: Case, device: Device) -> Variant | None:
    """The same with autotuning, Inductor's own decompose-K among its choices, and its CUDA graphs."""
    if device.type != "cuda":
        return None
    return _compiled(case, device, COMPILED_MAX, "max-autotune", capturable=False)


def compiled_max_no_graphs(case: Case, device: Device) -> Variant | None:
    """The same with autotuning alone."""
    if device.type != "cuda":
        return None
    return _compiled(case, device, COMPILED_MAX_NO_GRAPHS, "max-autotune-no-cudagraphs")


def custom_op(case: Case, device: Device) -> Variant | None:
    """The custom operator of the product alone, tuned over its splits; an activation follows it in the same graph."""
    del device
    if case.shape.a_dtype != case.shape.b_dtype:
        return None
    product = then_activation(autotuned_op(case.shape.out_dtype, None), case.activation)
    return _custom(CUSTOM_OP, "torch.compile of a custom op mm", product, op_name(case.shape.out_dtype, None))


def custom_op_fused(case: Case, device: Device) -> Variant | None:
    """The custom operator of product and relu, tuned over its splits."""
    del device
    shape = case.shape
    if shape.a_dtype != shape.b_dtype or case.activation != "relu":
        return None
    product = autotuned_op(shape.out_dtype, "relu")
    return _custom(CUSTOM_OP_FUSED, "torch.compile of a custom op mm_relu", product, op_name(shape.out_dtype, "relu"))


BASELINE_MAKERS: dict[str, Callable[[Case, Device], Variant | None]] = {
    TORCH_CAST: torch_cast,
    COMPILED_SPLIT: compiled_split,
    COMPILED: compiled,
    COMPILED_MAX: compiled_max,
    COMPILED_MAX_NO_GRAPHS: compiled_max_no_graphs,
    CUSTOM_OP: custom_op,
    CUSTOM_OP_FUSED: custom_op_fused,
}


def _compiled(case: Case, device: Device, name: str, mode: str | None, *, capturable: bool = True) -> Variant:
    label, product = torch_product(case.problem(device.type))
    call = Compiled(product, mode)
    text = f"torch.compile of {label}" if mode is None else f"torch.compile({mode}) of {label}"
    return Variant(name, text, call, "torch", chosen=call.chosen, capturable=capturable)


def _custom(name: str, label: str, product: Callable[..., torch.Tensor], tuned: str) -> Variant:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    compiled_call = Compiled(call, tuned=tuned)
    return Variant(name, label, compiled_call, "torch", chosen=compiled_call.chosen)
