"""The Triton engine: a config and two matrices in, the finished product out, and a shortcut for the next time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch
import triton.language as tl

from decompose_k.dtypes import accumulate_dtype
from decompose_k.kernels.gemv import dot_launch
from decompose_k.kernels.partial import count_splits, partial_launch
from decompose_k.kernels.reduce import reduce_launch
from decompose_k.kernels.repeat import Repeat, repeat_dot, repeat_pair

if TYPE_CHECKING:
    from decompose_k.config import Config

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def triton_matmul(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    keep: Callable[[Repeat], None] | None = None,
) -> torch.Tensor:
    """out = activation(alpha * (a @ b) + beta * bias), summed in fp32 (fp64 where an operand is), rounded once.

    a [M, K] and b [K, N] of real floating dtypes with any strides, M, N, K >= 1; bias broadcastable to [M, N]; `out`
    [M, N] of `out_dtype` with any strides, or None. The arguments are taken as checked. `keep` is handed the shortcut
    for further calls, `repeat(a, b, bias, m)`, where there is one: for operands alike in everything but the data and
    the M within its bucket, aligned to 16 bytes, on the current device, without `out`.
    """
    if config.backend != "triton":
        raise ValueError(f"config must name a Triton kernel, pair or dot; got {config}")
    m, n = a.shape[0], b.shape[1]
    a, b = _in_memory(a), _in_memory(b)
    bias = None if bias is None else _in_memory(bias)
    with _on_device_of(a):
        addend = None if bias is None else bias.expand(m, n)
        result = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
        epilogue = _Epilogue(alpha=alpha, beta=beta, activation=activation)
        compute = _compute_dot if config.kernel == "dot" else _compute_pair
        repeat = compute(config, a, b, addend, result, epilogue, keep is not None)
        if keep is not None and repeat is not None:
            keep(repeat)
    return result


class _Epilogue(TypedDict):
    alpha: float
    beta: float
    activation: str | None


def _compute_pair(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None,
    result: torch.Tensor,
    epilogue: _Epilogue,
    is_kept: bool,
) -> Repeat | None:
    splits = count_splits(a.shape[1], config)
    partials = torch.empty((splits, *result.shape), dtype=accumulate_dtype(a.dtype, b.dtype), device=a.device)
    partial = partial_launch(a, b, partials, config)
    first = partial.run()
    reduce = reduce_launch(partials, result, config, bias=addend, **epilogue)
    second = reduce.run()
    if not is_kept or first is None or second is None:
        return None
    return repeat_pair(partial, first, reduce, second, config)


def _compute_dot(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None,
    result: torch.Tensor,
    epilogue: _Epilogue,
    is_kept: bool,
) -> Repeat | None:
    accumulate = _TRITON_DTYPES[accumulate_dtype(a.dtype, b.dtype)]
    # Few columns: the same kernel on the transposed product, where the rows of a are what it streams.
    transposed = result.shape[1] < result.shape[0]
    if transposed:
        a, b, result, addend = b.T, a.T, result.T, None if addend is None else addend.T
    dot = dot_launch(a, b, result, config, accumulate, bias=addend, **epilogue)
    compiled = dot.run()
    if not is_kept or compiled is None:
        return None
    return repeat_dot(dot, compiled, config.block_n, transposed=transposed)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel can read it: a pending negation carried out, zeros that torch only imagines written."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, which need not be the operands'."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
