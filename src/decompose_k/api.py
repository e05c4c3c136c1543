"""What people call: `matmul` and `linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decompose_k.arguments import (
    LINEAR,
    MATMUL,
    Names,
    Options,
    check_bias,
    check_operands,
    check_options,
    check_out,
    result_dtype,
)
from decompose_k.calls import CALLS, NO_KEY, Key, call_key, is_compiling
from decompose_k.execute import Keep, execute
from decompose_k.ops import autocast_operand, has_autocast, needs_composite, needs_operator, product

if TYPE_CHECKING:
    from decompose_k.config import Config

GUARDED = CALLS.guarded


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: complex = 1.0,
    beta: complex = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    static_b: bool = False,
    split_k: int | None = None,
    backend: str = "auto",
    config: Config | None = None,
) -> torch.Tensor:
    """Matrix product with a long K and a small output, its epilogue fused.

    out = activation(alpha * (a @ b) + beta * bias), summed in fp32 (fp64 and complex in their own dtype, integers
    exactly) and rounded once, to `out_dtype`.

    Args:
        a: [..., M, K]. Real floating dtypes mix freely with b's; integers and complex only with themselves.
        b: [K, N].
        bias: broadcastable to the result; ignored where `beta` is 0.
        alpha: factor of the product.
        beta: factor of the bias.
        activation: None, relu, gelu, gelu_tanh, silu, sigmoid or tanh.
        out_dtype: dtype of the result; torch's promotion of a and b by default.
        out: [..., M, N] of `out_dtype`, any strides, apart from the inputs in memory; not while gradients are recorded.
        precision: how fp32 operands are multiplied, `ieee`, `tf32x3` or `tf32`; by default what
            `torch.get_float32_matmul_precision()` allows.
        batch_invariant: a row's bits depend neither on M nor on the other rows.
        static_b: promise that nothing shortly before in the stream writes b.
        split_k: chunks of K, from 1 to K; chosen by default.
        backend: `auto`, `torch` or `triton`.
        config: exactly how, instead of a choice.

    Returns:
        [..., M, N]

    Raises:
        TypeError, ValueError: the message names the argument, what came and what is allowed.

    >>> a, b = torch.ones(2, 8192), torch.ones(8192, 3)
    >>> matmul(a, b, bias=torch.tensor([0.0, 1.0, -9000.0]), activation="relu")
    tensor([[8192., 8193.,    0.],
            [8192., 8193.,    0.]])
    """
    brief = None
    if out is None and not is_compiling():
        # Here and not in a function, which would cost every eager product 0.1 us.
        try:
            brief = (
                a.shape,
                b.numel(),
                bias is None,
                alpha,
                beta,
                activation,
                out_dtype,
                precision,
                batch_invariant,
                static_b,
                split_k,
                backend,
                config,
                MATMUL,
            )
            guarded = GUARDED.get(brief)
        except NO_KEY:
            guarded = None
        # Neither True may pass for 1, nor 4.0 for 4: equal keys do not tell.
        if (
            guarded is not None
            and isinstance(alpha, float)
            and isinstance(beta, float)
            and (batch_invariant is False or batch_invariant is True)
            and (static_b is False or static_b is True)
            and (split_k is None or split_k.__class__ is int)
        ):
            result = guarded(a, b, bias)
            if result is not None:
                return result
    options = Options(
        alpha, beta, activation, out_dtype, precision, batch_invariant, static_b, split_k, backend, config
    )
    return _by_key_or_anew(a, b, bias, options, out, MATMUL, brief)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    static_weight: bool = False,
    split_k: int | None = None,
    backend: str = "auto",
    config: Config | None = None,
) -> torch.Tensor:
    """Linear layer with many inputs and few outputs, its activation fused.

    out = activation(x @ weight.T + bias), summed and rounded as in `matmul`.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N], or broadcastable to the result.
        activation: None, relu, gelu, gelu_tanh, silu, sigmoid or tanh.
        out_dtype: dtype of the result; torch's promotion of x and weight by default.
        out: [..., N] of `out_dtype`, any strides, apart from the inputs in memory; not while gradients are recorded.
        precision: how fp32 operands are multiplied, `ieee`, `tf32x3` or `tf32`; by default what
            `torch.get_float32_matmul_precision()` allows.
        batch_invariant: a row's bits depend neither on the number of rows nor on the other rows.
        static_weight: promise that nothing shortly before in the stream writes the weight.
        split_k: chunks of K, from 1 to K; chosen by default.
        backend: `auto`, `torch` or `triton`.
        config: exactly how, instead of a choice.

    Returns:
        [..., N]

    Raises:
        TypeError, ValueError: the message names the argument, what came and what is allowed.

    >>> linear(torch.ones(4096), torch.ones(2, 4096), torch.tensor([0.5, -0.5]))
    tensor([4096.5000, 4095.5000])
    """
    brief = None
    if out is None and not is_compiling():
        try:
            brief = (
                x.shape,
                weight.numel(),
                bias is None,
                activation,
                out_dtype,
                precision,
                batch_invariant,
                static_weight,
                split_k,
                backend,
                config,
                LINEAR,
            )
            guarded = GUARDED.get(brief)
        except NO_KEY:
            guarded = None
        if (
            guarded is not None
            and (batch_invariant is False or batch_invariant is True)
            and (static_weight is False or static_weight is True)
            and (split_k is None or split_k.__class__ is int)
        ):
            result = guarded(x, weight, bias)
            if result is not None:
                return result
    options = Options(
        1.0, 1.0, activation, out_dtype, precision, batch_invariant, static_weight, split_k, backend, config
    )
    return _by_key_or_anew(x, weight, bias, options, out, LINEAR, brief)


def _by_key_or_anew(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    out: torch.Tensor | None,
    names: Names,
    brief: Key | None,
) -> torch.Tensor:
    """What no guard knew; `b` is the weight as `linear` takes it where `names` are those of `linear`."""
    keep = None
    if brief is not None:
        key = call_key(a, b, bias, *options, names)
        if key is not None:
            result = CALLS.by_key(key, a, b, bias, brief)
            if result is not None:
                return result
            keep = CALLS.keeper(key)
    if names is LINEAR:
        check_operands(a, b, names, b_rows=1, least_rank=1)
        b = b.t()
    else:
        check_operands(a, b, names, b_rows=0, least_rank=2)
    return _multiply(a, b, bias, options, out, names, keep)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    out: torch.Tensor | None,
    names: Names,
    keep: Keep | None,
) -> torch.Tensor:
    check_options(options, a.dtype, b.dtype, a.shape[-1], names)
    shape = (*a.shape[:-1], b.shape[1])
    if bias is not None:
        check_bias(bias, a, b, shape)
    if out is not None:
        return _into(out, a, b, bias, options, shape, names)
    if a.dim() == 2:
        return product(a, b, bias, options, keep)
    return product(_as_rows(a), b, _bias_of_rows(bias, shape), options, keep).reshape(shape)


def _into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    shape: tuple[int, ...],
    names: Names,
) -> torch.Tensor:
    traced = needs_operator(a, b, bias, out) or needs_composite(a, b, bias, out)
    inputs = ((names.a, a), (names.b, b), ("bias", bias))
    if has_autocast(a):
        dtype = result_dtype(options.out_dtype, _autocast_dtype(a), _autocast_dtype(b))
    else:
        dtype = result_dtype(options.out_dtype, a.dtype, b.dtype)
    check_out(out, shape, dtype, inputs, traced=traced)
    if traced:
        return out.copy_(product(_as_rows(a), b, _bias_of_rows(bias, shape), options).reshape(shape))
    if has_autocast(a):
        a, b = autocast_operand(a), autocast_operand(b)
    rows = _view_as_rows(out)
    result = execute(_as_rows(a), b, _bias_of_rows(bias, shape), options, rows)
    return out if rows is not None else out.copy_(result.reshape(shape))


def _autocast_dtype(operand: torch.Tensor) -> torch.dtype:
    if operand.is_floating_point() and operand.dtype != torch.float64:
        return torch.get_autocast_dtype(operand.device.type)
    return operand.dtype


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as [rows, K], without a copy wherever the strides allow."""
    if tensor.dim() == 2:
        return tensor
    rows = 1
    for size in tensor.shape[:-1]:
        rows = rows * size
    return tensor.reshape(rows, tensor.shape[-1])


def _view_as_rows(out: torch.Tensor) -> torch.Tensor | None:
    """`out` as [rows, N] in the same memory; None where its strides do not allow that."""
    if out.dim() == 2:
        return out
    rows = 1
    for size in out.shape[:-1]:
        rows *= size
    try:
        return out.view(rows, out.shape[-1])
    except RuntimeError:
        return None


def _bias_of_rows(bias: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The bias for the flattened rows: as it is where all rows share it, else expanded and flattened like them."""
    if bias is None or len(shape) == 2 or bias.dim() <= 1:
        return bias
    if all(size == 1 for size in bias.shape[:-1]):
        return bias.reshape(1, bias.shape[-1])
    return _as_rows(bias.expand(shape))
