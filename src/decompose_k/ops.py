"""The product as a differentiable function of tensors, and as the operator `torch.ops.decompose_k.matmul`.

Crossing the operator boundary costs tens of microseconds, more than a product: plain eager tensors go straight to the
engine. Under a compiler, a dispatch mode or with fake tensors the operator carries the call, and its config is chosen
when it runs, from the sizes it then sees.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
from torch.autograd import forward_ad

from decompose_k.arguments import Options, result_dtype
from decompose_k.autograd import gradients
from decompose_k.calls import PLAIN_TYPES
from decompose_k.config import Config
from decompose_k.dtypes import dtype_from_name, dtype_name
from decompose_k.execute import Keep, execute
from decompose_k.reference import composite

_CONFIG_FIELDS = tuple(field.name for field in fields(Config))
_OPTION_FIELDS = Options._fields

_OUT_DTYPE = _OPTION_FIELDS.index("out_dtype")

# The result's dtype goes by its name: a package that torch 2.11 compiled ahead of time calls an operator with another
# dtype than it was given, fp64 for fp32.
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, Scalar alpha=1.0, Scalar beta=1.0, str? activation=None,"
    " str? out_dtype=None, str? precision=None, bool batch_invariant=False, bool static_b=False,"
    " int? split_k=None, str backend='auto', str? config=None) -> Tensor"
)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options, keep: Keep | None = None
) -> torch.Tensor:
    """Differentiable activation(alpha * (a @ b) + beta * bias) of valid 2-D operands, by the way that suits them.

    `keep` is for calls that go straight to the engine.
    """
    if needs_composite(a, b, bias):
        return _composite(a, b, bias, options)
    if torch.compiler.is_compiling():
        return _by_operator(a, b, bias, options)
    if has_autocast(a):
        a, b = autocast_operand(a), autocast_operand(b)
    if is_transformed():
        return _apply(_TransformedProduct, a, b, bias, options)
    if needs_operator(a, b, bias):
        return _by_operator(a, b, bias, options)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return _apply(_Product, a, b, bias, options)
    return execute(a, b, bias, options, keep=keep)


def _apply(function: Any, *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*inputs)
    return result


def is_transformed() -> bool:
    """Whether the call is made under a functorch transform, such as torch.func.grad or vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_dispatch_mode() -> bool:
    """Whether a mode sees every operation: those before autograd and the like have a stack of their own."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._dispatch_tls_is_dispatch_key_included(
        torch._C.DispatchKey.PreDispatch
    )


def needs_operator(*tensors: torch.Tensor | None) -> bool:
    """Whether a call must cross the operator boundary, because something other than the engine has to see it."""
    if torch.compiler.is_compiling():
        return True
    if is_transformed() or has_dispatch_mode() or torch._C._get_tracing_state() is not None:
        return True
    return any(tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_meta) for tensor in tensors)


def needs_composite(*tensors: torch.Tensor | None) -> bool:
    """Whether only torch's own operations will do: forward-mode differentiation, and foreign tensor subclasses."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    if any(tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors):
        # torch.autograd.grad(..., is_grads_batched=True) sends tensors without storage, which no kernel can read.
        return True
    kinds = [type(tensor) for tensor in tensors if tensor is not None and type(tensor) not in PLAIN_TYPES]
    return any(_is_foreign(kind) for kind in kinds)


@functools.cache
def _is_foreign(kind: type) -> bool:
    """Whether a tensor class gives torch's operations a meaning of its own, outside torch's tracing machinery."""
    if kind.__module__.startswith("torch._subclasses"):
        return False
    return (
        getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
        or kind.__torch_function__.__func__ is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    )


def has_autocast(operand: torch.Tensor) -> bool:
    """Whether autocast is on for the operand's device; meta tensors know no autocast."""
    return not operand.is_meta and torch.is_autocast_enabled(operand.device.type)


def autocast_operand(operand: torch.Tensor) -> torch.Tensor:
    """The operand as torch.mm sees it under autocast: floats other than fp64 in the autocast dtype."""
    if operand.is_floating_point() and operand.dtype != torch.float64:
        return operand.to(torch.get_autocast_dtype(operand.device.type))
    return operand


def _composite(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
    if not has_autocast(a):
        return composite(
            a,
            b,
            bias,
            alpha=options.alpha,
            beta=options.beta,
            activation=options.activation,
            out_dtype=result_dtype(options.out_dtype, a.dtype, b.dtype),
        )
    a, b = autocast_operand(a), autocast_operand(b)
    with torch.autocast(a.device.type, enabled=False):
        return _composite(a, b, bias, options)


class _Product(torch.autograd.Function):
    """The direct path with gradients: the forward pass is the engine's own, so its bits do not depend on them."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b, bias)
        ctx.options = options
        return execute(a, b, bias, options)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (*_backward(ctx, grad, ctx.options), None)


def _backward(ctx: Any, grad: torch.Tensor, options: Options) -> Any:
    a, b, bias = ctx.saved_tensors
    needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
    if not has_autocast(a):
        return gradients(product, grad, a, b, bias, options, needed)
    with torch.autocast(a.device.type, enabled=False):
        return gradients(product, grad, a, b, bias, options, needed)


class _TransformedProduct(torch.autograd.Function):
    """The same under functorch transforms, which torch's operators of their own gradient do not support."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
        if needs_operator(a, b, bias):
            return _by_operator(a, b, bias, options)
        return execute(a, b, bias, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004 - torch's signature
        a, b, bias, ctx.options = inputs
        ctx.save_for_backward(a, b, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (*_backward(ctx, grad, ctx.options), None)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options
    ) -> Any:
        call = functools.partial(product, options=options)
        return batched(call, info.batch_size, in_dims[:3], a, b, bias)


def _by_operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
    result: torch.Tensor = torch.ops.decompose_k.matmul(a, b, bias, *operator_values(options))
    return result


def operator_values(options: Options) -> tuple[Any, ...]:
    """Options as the operator takes them after its tensors: dtype and config as text.

    >>> operator_values(Options(activation="relu", out_dtype=torch.float32))[:4]
    (1.0, 1.0, 'relu', 'fp32')
    """
    config = None if options.config is None else _config_text(options.config)
    dtype = None if options.out_dtype is None else dtype_name(options.out_dtype)
    return options._replace(config=config, out_dtype=dtype)  # type: ignore[arg-type]


def _config_text(config: Config) -> str:
    return ";".join([str(getattr(config, name)) for name in _CONFIG_FIELDS])


@functools.lru_cache(maxsize=1024)
def _config_from_text(text: str) -> Config:
    words = text.split(";")
    if len(words) != len(_CONFIG_FIELDS):
        raise ValueError(f"config must hold {len(_CONFIG_FIELDS)} words; got {text!r}")
    values: list[Any] = [int(word) if word.isdecimal() else word for word in words]
    return Config(*values)


def _options(values: tuple[Any, ...]) -> Options:
    """The operator's trailing arguments as options; the dispatcher drops those at the end that are the defaults."""
    options = Options(*values)
    if options.out_dtype is not None:
        options = options._replace(out_dtype=dtype_from_name(values[_OUT_DTYPE]))
    return options if options.config is None else options._replace(config=_config_from_text(values[-1]))


def _run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *values: Any) -> torch.Tensor:
    return execute(a, b, bias, _options(values))


def _shape_of_result(a: torch.Tensor, b: torch.Tensor, *bias_and_values: Any) -> torch.Tensor:
    values = bias_and_values[1:]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=result_dtype(_options(values).out_dtype, a.dtype, b.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch's signature
    a, b, bias, *values = inputs
    ctx.save_for_backward(a, b, bias)
    ctx.options = _options(tuple(values))


def _operator_backward(ctx: Any, grad: torch.Tensor) -> Any:
    return (*_backward(ctx, grad, ctx.options), *(None for _ in _OPTION_FIELDS))


def _vmap(info: Any, in_dims: tuple[int | None, ...], a: Any, b: Any, bias: Any = None, *values: Any) -> Any:
    def call(*tensors: torch.Tensor | None) -> Any:
        return torch.ops.decompose_k.matmul(*tensors, *values)

    dims = (*in_dims[:3], None)[:3]
    return batched(call, info.batch_size, dims, a, b, bias)


def batched(
    call: Any,
    size: int,
    dims: tuple[int | None, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """One product where only a is batched, its rows being independent; else one product per example."""
    a_dim, b_dim, bias_dim = dims
    if b_dim is None and a_dim is not None:
        rows = a.movedim(a_dim, 0)
        m, k = rows.shape[1:]
        result = call(rows.reshape(size * m, k), b, _rows_of_bias(bias, bias_dim, size, m))
        return result.reshape(size, m, b.shape[1]), 0
    examples = [
        call(_example(a, a_dim, index), _example(b, b_dim, index), _example(bias, bias_dim, index))
        for index in range(size)
    ]
    return torch.stack(examples), 0


def _example(tensor: torch.Tensor | None, dim: int | None, index: int) -> torch.Tensor | None:
    return tensor if tensor is None or dim is None else tensor.select(dim, index)


def _rows_of_bias(bias: torch.Tensor | None, dim: int | None, size: int, m: int) -> torch.Tensor | None:
    """The bias of the flattened batch: as it is where it has no rows, else one row for each of size * m."""
    if bias is None or (dim is None and (bias.dim() < 2 or bias.shape[0] == 1)):
        return bias
    if dim is None:
        stacked = bias.unsqueeze(0)
    else:
        stacked = bias.movedim(dim, 0)
        while stacked.dim() < 3:
            stacked = stacked.unsqueeze(1)
    return stacked.expand(size, m, stacked.shape[2]).reshape(size * m, stacked.shape[2])


def autocast_rule(key: torch._C.DispatchKey, operator: Any) -> Any:
    """An operator's kernel under autocast: its first two tensors in the autocast dtype, as for torch.mm."""

    def rule(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return operator(autocast_operand(a), autocast_operand(b), *rest)

    return rule


def _register() -> Any:
    # Exact strides: the engine takes any, so they cost no copy, and a compiled call then sees the layouts, hence the
    # config and the bits, of the eager one.
    operator = torch.library.custom_op(
        "decompose_k::matmul", _run, mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.needs_exact_strides,)
    )
    operator.register_fake(_shape_of_result)
    operator.register_autograd(_operator_backward, setup_context=_save)
    operator.register_vmap(_vmap)
    torch_library: Any = torch.library
    library = torch_library.Library("decompose_k", "FRAGMENT")
    for key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
        library.impl("matmul", autocast_rule(key, torch.ops.decompose_k.matmul), key.name)
    return library


_LIBRARY = _register()
