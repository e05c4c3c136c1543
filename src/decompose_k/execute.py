"""Run one valid 2-D product: settle what the defaults mean, take the plan's config, call its engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from decompose_k.arguments import result_dtype
from decompose_k.config import TORCH_KERNELS
from decompose_k.device import Device
from decompose_k.forgetting import forgettable
from decompose_k.plan import TORCH_MM, choose, triton_objection
from decompose_k.problem import HIGHEST, Problem, accumulates_fp32_operand, layout_of
from decompose_k.record import RECORDINGS
from decompose_k.reference import Product, torch_matmul, torch_shortcuts
from decompose_k.settings import default_backend

if TYPE_CHECKING:
    from decompose_k.arguments import Options
    from decompose_k.config import Config

# (a, b, bias, m) -> result, or None where it cannot be had this way at the moment. As `linear` was called with x and
# weight, so is its shortcut; the result may have all rows in one dimension.
Shortcut = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", int], "torch.Tensor | None"]


class Shortcuts(NamedTuple):
    """What further calls like one come down to: of `matmul`, and of `linear` with x [..., K] and weight [N, K].

    Where they go `by_address`, nothing after them asks whether there is memory, how it is aligned, and whose it is.
    `direct` is a function of torch's that takes the tensors as they came and gives the result as it is to be, of
    `matmul` without a bias and of `linear` with an x that `guards.is_folded`; None where there is none.
    """

    for_matmul: Shortcut
    for_linear: Shortcut
    direct_matmul: Product | None
    direct_linear: Product | None
    by_address: bool


Keep = Callable[[Shortcuts], None]


def execute(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    out: torch.Tensor | None = None,
    keep: Keep | None = None,
) -> torch.Tensor:
    """activation(alpha * (a @ b) + beta * bias) for a [M, K], b [K, N] and bias broadcastable to [M, N].

    `keep` is handed the shortcuts for further such calls, where there are any.
    """
    out_dtype = result_dtype(options.out_dtype, a.dtype, b.dtype)
    precision = None
    if accumulates_fp32_operand(a.dtype, b.dtype):
        precision = options.precision or default_precision()
    m, k = a.shape
    key = (
        m,
        b.shape[1],
        k,
        a.dtype,
        b.dtype,
        out_dtype,
        None if bias is None else bias.dtype,
        layout_of(a),
        layout_of(b),
        options.activation,
        precision,
        options.batch_invariant,
        options.static_b,
        a.device.type,
    )
    if options.config is None:
        if RECORDINGS.active:
            RECORDINGS.add(_problem(key))
        backend = default_backend() if options.backend == "auto" else options.backend
        config = _chosen(key, a.device, backend, options.split_k)
    else:
        config = options.config
        if config.backend == "triton":
            _check_triton(config, key, a.device)
            if 0 in key[:3]:
                config = TORCH_MM
    if config.kernel in TORCH_KERNELS:
        if keep is not None and not options.batch_invariant and options.precision is None:
            shortcuts = torch_shortcuts(
                config,
                a,
                b,
                bias,
                alpha=options.alpha.real,
                beta=options.beta.real,
                activation=options.activation,
                out_dtype=out_dtype,
                precision=precision,
            )
            if shortcuts is not None:
                keep(Shortcuts(*shortcuts, by_address=False))
        return torch_matmul(
            config,
            a,
            b,
            bias=bias,
            alpha=options.alpha,
            beta=options.beta,
            activation=options.activation,
            out_dtype=out_dtype,
            out=out,
            precision=precision,
            batch_invariant=options.batch_invariant,
        )
    from decompose_k.kernels.engine import triton_matmul

    return triton_matmul(
        config,
        a,
        b,
        bias=bias,
        alpha=options.alpha.real,
        beta=options.beta.real,
        activation=options.activation,
        out_dtype=out_dtype,
        out=out,
        keep=None if keep is None else lambda repeat: keep(Shortcuts(repeat, repeat, None, None, by_address=True)),
    )


def default_precision() -> str:
    """What `precision=None` stands for: tf32 where torch's own setting allows it for fp32 products, else `highest`."""
    # The setting by backend is the one that torch's own kernels obey: the older, global one only writes to it.
    return "tf32" if _product_setting("cuda", "matmul") == "tf32" else HIGHEST


def cpu_precision() -> str:
    """What torch's setting lets fp32 products on a CPU be rounded to."""
    return _product_setting("mkldnn", "matmul")


def _read_setting(backend: str, operation: str) -> str:
    return str(getattr(getattr(torch.backends, backend), operation).fp32_precision)


# The settings' own reader, if there is one: by their public names it takes 1.3 us instead of 0.3.
_product_setting: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", _read_setting)


@forgettable(4096)
def _chosen(key: tuple[Any, ...], device: torch.device, backend: str, split_k: int | None) -> Config:
    return choose(_problem(key), Device.of(device), backend, split_k).config


@functools.lru_cache(maxsize=4096)
def _check_triton(config: Config, key: tuple[Any, ...], device: torch.device) -> None:
    objection = triton_objection(config, _problem(key), Device.of(device))
    if objection is not None:
        raise ValueError(f"config must be legal for its operands: {objection}; got {config}")


def _problem(key: tuple[Any, ...]) -> Problem:
    m, n, k, *rest, device_type = key
    a_dtype, b_dtype, out_dtype, bias_dtype, a_layout, b_layout, activation, precision, invariant, static_b = rest
    return Problem(
        m,
        n,
        k,
        a_dtype,
        b_dtype,
        out_dtype,
        bias_dtype=bias_dtype,
        a_layout=a_layout,
        b_layout=b_layout,
        activation=activation,
        precision=precision,
        batch_invariant=invariant,
        static_b=static_b,
        device_type=device_type,
    )
