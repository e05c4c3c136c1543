"""The gradient of a product as differentiable torch operations, so that it can be differentiated again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.arguments import Options
from decompose_k.dtypes import accumulate_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Options], torch.Tensor]

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def gradients(
    multiply: Multiply,
    grad: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    needed: tuple[bool, bool, bool],
) -> Gradients:
    """Gradients of activation(alpha * (a @ b) + beta * bias) with respect to a, b and bias, None where not needed.

    `multiply` is the differentiable product itself. The pre-activation is computed again, in the accumulate dtype,
    rather than kept from the forward pass.
    """
    wide = accumulate_dtype(a.dtype, b.dtype)
    if options.activation is not None:
        before = multiply(a, b, bias, _recompute(options, wide))
        grad = _through_activation(options.activation, grad.to(wide), before)
    elif grad.dtype.itemsize > wide.itemsize:
        grad = grad.to(wide)
    grad_a = grad_b = grad_bias = None
    alpha = _conjugate(options.alpha)
    if needed[0]:
        grad_a = multiply(grad, b.mH, None, _backward(options, alpha, a.dtype, batch_invariant=options.batch_invariant))
    if needed[1]:
        grad_b = multiply(a.mH, grad, None, _backward(options, alpha, b.dtype, batch_invariant=False))
    if needed[2] and bias is not None:
        beta = _conjugate(options.beta)
        scaled = grad.to(wide) if beta == 1 else grad.to(wide) * beta
        grad_bias = scaled.sum_to_size(bias.shape).to(bias.dtype)
    return grad_a, grad_b, grad_bias


def _recompute(options: Options, wide: torch.dtype) -> Options:
    config = options.config
    if config is not None and config.launch == "static_b":
        # The promise about the weight was made for the forward pass alone.
        config = replace(config, launch="wait_first")
    return options._replace(activation=None, out_dtype=wide, static_b=False, config=config)


def _backward(options: Options, alpha: complex, out_dtype: torch.dtype, *, batch_invariant: bool) -> Options:
    return Options(
        alpha=alpha,
        out_dtype=out_dtype,
        precision=options.precision,
        batch_invariant=batch_invariant,
        backend="torch" if options.backend == "torch" else "auto",
    )


def _conjugate(factor: complex) -> complex:
    # A symbolic number of a compiler is real and has no conjugate().
    return factor.conjugate() if isinstance(factor, complex) else factor


def _through_activation(activation: str, grad: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """grad times the activation's derivative at `before`, by torch's own differentiable formulas."""
    aten: Any = torch.ops.aten
    result: torch.Tensor
    if activation == "relu":
        result = aten.threshold_backward(grad, before, 0)
    elif activation in ("gelu", "gelu_tanh"):
        result = aten.gelu_backward(grad, before, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation == "silu":
        # torch differentiates its own silu_backward only inside its autograd engine.
        gate = torch.sigmoid(before)
        result = grad * (gate * (1 + before * (1 - gate)))
    elif activation == "sigmoid":
        result = aten.sigmoid_backward(grad, torch.sigmoid(before))
    else:
        result = aten.tanh_backward(grad, torch.tanh(before))
    return result
