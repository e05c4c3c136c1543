"""The Triton engine: a config and two matrices in, the finished product out."""

from __future__ import annotations

import contextlib

import torch
import triton.language as tl

from decompose_k.config import Config
from decompose_k.dtypes import accumulate_dtype
from decompose_k.kernels.gemv import launch_dot
from decompose_k.kernels.partial import count_splits, launch_partial
from decompose_k.kernels.reduce import launch_reduce

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
) -> torch.Tensor:
    """out = activation(alpha * (a @ b) + beta * bias), summed in fp32 (fp64 where an operand is), rounded once.

    a [M, K] and b [K, N] of real floating dtypes with any strides, M, N, K >= 1; bias broadcastable to [M, N]; `out`
    [M, N] of `out_dtype` with any strides, or None. The arguments are taken as checked.
    """
    if config.backend != "triton":
        raise ValueError(f"config must name a Triton kernel, pair or dot; got {config}")
    m, n = a.shape[0], b.shape[1]
    accumulate = accumulate_dtype(a.dtype, b.dtype)
    with _on_device_of(a):
        out = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
        bias = None if bias is None else bias.expand(m, n)
        if config.kernel == "dot":
            if n < m:
                # Few columns: the same kernel on the transposed product, where the rows of a are what it streams.
                a, b, bias, transposed = b.T, a.T, None if bias is None else bias.T, out.T
            else:
                transposed = out
            launch_dot(
                a,
                b,
                transposed,
                config,
                _TRITON_DTYPES[accumulate],
                bias=bias,
                alpha=alpha,
                beta=beta,
                activation=activation,
            )
        else:
            partials = torch.empty((count_splits(a.shape[1], config), m, n), dtype=accumulate, device=a.device)
            launch_partial(a, b, partials, config)
            launch_reduce(partials, out, config, bias=bias, alpha=alpha, beta=beta, activation=activation)
    return out


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, which need not be the operands'."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
