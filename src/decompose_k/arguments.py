"""Every check of what callers pass, so that each wrong argument raises one clear ValueError or TypeError."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from decompose_k.config import Config
from decompose_k.dtypes import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    SUPPORTED,
    allowed_out_dtypes,
    can_multiply,
    default_out_dtype,
    dtype_name,
    multiplies_on,
)
from decompose_k.epilogue import ACTIVATIONS
from decompose_k.overlap import has_internal_overlap, share_memory
from decompose_k.problem import PRECISIONS, accumulates_fp32_operand
from decompose_k.settings import BACKENDS

_SUPPORTED = frozenset(SUPPORTED)
_FLOATS = frozenset(FLOATS)
_INTEGERS = frozenset(INTEGERS)


class Names(NamedTuple):
    """What the caller calls the operands, for messages."""

    a: str
    b: str
    static_b: str


MATMUL = Names("a", "b", "static_b")
LINEAR = Names("x", "weight", "static_weight")


class Options(NamedTuple):
    """Everything about a product besides its tensors; `out_dtype` and `precision` may be None, torch's default.

    A named tuple, because one is made for each call and a frozen dataclass takes microseconds to make.
    """

    alpha: complex = 1.0
    beta: complex = 1.0
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    precision: str | None = None
    batch_invariant: bool = False
    static_b: bool = False
    split_k: int | None = None
    backend: str = "auto"
    config: Config | None = None


DEFAULTS = Options()


def check_operands(a: Any, b: Any, names: Names, *, b_rows: int, least_rank: int) -> None:
    """a [..., K] of at least `least_rank` dimensions, b 2-D with K in dimension `b_rows`, of one device and kind."""
    check_tensor(names.a, a)
    check_tensor(names.b, b)
    if a.dim() < least_rank:
        raise ValueError(f"{names.a} must have at least {least_rank} dimensions; got shape {tuple(a.shape)}")
    if b.dim() != 2:
        raise ValueError(f"{names.b} must have 2 dimensions; got shape {tuple(b.shape)}")
    if a.shape[-1] != b.shape[b_rows]:
        raise ValueError(
            f"{names.b} must have K = {a.shape[-1]} in dimension {b_rows}, as {names.a} has in its last;"
            f" got {names.a} of shape {tuple(a.shape)} and {names.b} of shape {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"{names.b} must be on the device of {names.a}, {a.device}; got {b.device}")
    if not can_multiply(a.dtype, b.dtype):
        raise TypeError(
            f"{names.b} must have the dtype of {names.a} unless both are real floating;"
            f" got {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        )
    if not multiplies_on(a.dtype, a.device.type):
        raise TypeError(f"{names.a} must be floating or complex on a GPU, as for torch.mm; got {dtype_name(a.dtype)}")


def check_tensor(name: str, tensor: Any) -> None:
    """A dense tensor of a supported dtype."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor; got {kind}")
    if tensor.dtype not in _SUPPORTED:
        raise TypeError(f"{name} must have one of the dtypes {_names(SUPPORTED)}; got {tensor.dtype}")


def check_bias(bias: Any, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...]) -> None:
    """bias broadcastable to the output's shape, on its device, of its kind."""
    check_tensor("bias", bias)
    if bias.device != a.device:
        raise ValueError(f"bias must be on the device of the operands, {a.device}; got {bias.device}")
    allowed = allowed_out_dtypes(a.dtype)
    if bias.dtype not in allowed:
        raise TypeError(
            f"bias must have a dtype among {_names(allowed)} for operands {dtype_name(a.dtype)} x"
            f" {dtype_name(b.dtype)}; got {dtype_name(bias.dtype)}"
        )
    extra = bias.dim() - len(shape)
    if extra > 0 or any(size not in (1, shape[dim - extra]) for dim, size in enumerate(bias.shape)):
        raise ValueError(f"bias must broadcast to the output's shape {shape}; got shape {tuple(bias.shape)}")


def check_options(options: Options, a_dtype: torch.dtype, b_dtype: torch.dtype, k: int, names: Names) -> None:
    """Every argument that is no tensor, given the dtypes of the operands and K."""
    is_float = a_dtype in _FLOATS
    if options.activation is not None:
        _check_activation(options.activation, a_dtype)
    if not is_float or type(options.alpha) is not float:
        _check_scalar("alpha", options.alpha, a_dtype)
    if not is_float or type(options.beta) is not float:
        _check_scalar("beta", options.beta, a_dtype)
    if options.out_dtype is not None:
        _check_out_dtype(options.out_dtype, a_dtype)
    if options.precision is not None:
        _check_precision(options.precision, a_dtype, b_dtype)
    for name, value in (("batch_invariant", options.batch_invariant), (names.static_b, options.static_b)):
        if value is not True and value is not False:
            raise TypeError(f"{name} must be True or False; got {value!r}")
    check_backend(options.backend)
    if options.split_k is not None:
        check_split_k(options.split_k, k)
    if options.config is not None:
        _check_config(options.config, options.split_k, options.backend, k)


def check_backend(backend: Any) -> None:
    """One of `auto`, `torch` and `triton`."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


def check_split_k(split_k: Any, k: int) -> None:
    """An integer from 1 to K (1 where K is 0)."""
    if not isinstance(split_k, int) or isinstance(split_k, bool):
        raise TypeError(f"split_k must be None or an integer; got {split_k!r}")
    if split_k < 1 or split_k > max(k, 1):
        raise ValueError(f"split_k must be from 1 to K = {k}; got {split_k}")


def _check_activation(activation: Any, dtype: torch.dtype) -> None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if dtype not in _FLOATS:
        raise TypeError(f"activation must be None for {dtype_name(dtype)} operands; got {activation!r}")


def _check_scalar(name: str, value: Any, dtype: torch.dtype) -> None:
    kinds: tuple[type, ...] = (int, float, torch.SymInt, torch.SymFloat)
    if dtype in COMPLEX:
        kinds = (*kinds, complex)
    if isinstance(value, bool) or not isinstance(value, kinds):
        allowed = "a real or complex number" if dtype in COMPLEX else "a real number"
        raise TypeError(f"{name} must be {allowed}; got {value!r} of type {type(value).__name__}")
    if dtype in _INTEGERS and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name} must be a whole number for {dtype_name(dtype)} operands; got {value!r}")


def _check_out_dtype(out_dtype: Any, dtype: torch.dtype) -> None:
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be None or a torch.dtype; got {out_dtype!r}")
    allowed = allowed_out_dtypes(dtype)
    if out_dtype not in allowed:
        raise TypeError(f"out_dtype must be one of {_names(allowed)} for {dtype_name(dtype)} operands; got {out_dtype}")


def _check_precision(precision: Any, a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(PRECISIONS)}; got {precision!r}")
    if not accumulates_fp32_operand(a_dtype, b_dtype):
        raise ValueError(
            f"precision must be None where no fp32 operand is summed in fp32; got {precision!r} for"
            f" {dtype_name(a_dtype)} x {dtype_name(b_dtype)}"
        )


def _check_config(config: Any, split_k: int | None, backend: str, k: int) -> None:
    if not isinstance(config, Config):
        raise TypeError(f"config must be None or a decompose_k.Config; got {type(config).__name__}")
    if split_k is not None:
        raise ValueError(f"split_k must be None where config is given; got {split_k} and {config}")
    if backend not in ("auto", config.backend):
        raise ValueError(f"config must be of backend {backend!r}; got {config}, which is of {config.backend!r}")
    if config.split_k > max(k, 1):
        raise ValueError(f"config must have split_k from 1 to K = {k}; got {config.split_k}")


def check_out(
    out: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    inputs: tuple[tuple[str, torch.Tensor | None], ...],
    *,
    traced: bool,
) -> None:
    """A tensor that can take the result: exact shape and dtype, writable element by element, apart from every input."""
    check_tensor("out", out)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}; got {tuple(out.shape)}")
    if out.dtype is not dtype:
        raise TypeError(f"out must have dtype {dtype_name(dtype)}; got {dtype_name(out.dtype)}")
    device = inputs[0][1].device  # type: ignore[union-attr]
    if out.device != device:
        raise ValueError(f"out must be on the device of the operands, {device}; got {out.device}")
    if torch.is_grad_enabled():
        _check_no_gradients(out, inputs)
    if not traced:
        _check_memory(out, inputs)


def _check_no_gradients(out: torch.Tensor, inputs: tuple[tuple[str, torch.Tensor | None], ...]) -> None:
    for name, tensor in (("out", out), *inputs):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"out must be None where gradients are recorded; got out, and {name} requires them")


def _check_memory(out: torch.Tensor, inputs: tuple[tuple[str, torch.Tensor | None], ...]) -> None:
    if has_internal_overlap(out):
        raise ValueError(f"out must not overlap itself; got shape {tuple(out.shape)} with strides {out.stride()}")
    for name, tensor in inputs:
        if tensor is not None and share_memory(out, tensor):
            raise ValueError(
                f"out must not overlap {name} in memory; got out of shape {tuple(out.shape)} with strides"
                f" {out.stride()} and {name} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def result_dtype(out_dtype: torch.dtype | None, a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The asked-for dtype, or torch's promotion of the operands."""
    return default_out_dtype(a, b) if out_dtype is None else out_dtype


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dtype_name(dtype) for dtype in dtypes)
