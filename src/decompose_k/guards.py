"""A repeated call recognised in one question to torch instead of forty.

`call_key` gathers all that a call's way depends on, which costs the host 4.5 us, a third of a whole torch.mm. The
guards by which torch's compiler recognises its inputs compare type, dtype, device, sizes, strides, requires_grad and
dispatch keys (with them autocast, transforms, tracing, modes and inference mode) of all operands in 0.2 us. What they
do not see is asked here: modes that compilers look through, recordings, tangents, whether gradients are recorded,
torch's settings of fp32 products, the current device, and where the operands lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from decompose_k.execute import cpu_precision, default_precision
from decompose_k.record import RECORDINGS

if TYPE_CHECKING:
    from decompose_k.execute import Shortcut
    from decompose_k.reference import Product

# (a, b, bias) -> result, or None where the call is not alike.
Guarded = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], "torch.Tensor | None"]

# Private: where a release lacks them, or they take other arguments, every call goes by its whole key.
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
# A torch without CUDA has no such function, and no tensor that would get as far as to ask.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_forward_ad: Any = forward_ad


def guard(
    shortcut: Shortcut,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    m: int,
    shape: tuple[int, ...],
    *,
    direct: Product | None = None,
    by_address: bool,
    settings: tuple[str | None, str | None],
) -> Guarded | None:
    """The shortcut for operands alike in all but their data and address; None where torch has no such guards.

    `m` is the number of rows of `a`, and `shape` that of the result, of which the shortcut may give the rows alone.
    `direct` gives the result itself, of the tensors alone; it is called instead where nothing else is to be asked. A
    shortcut that goes `by_address` needs operands on the current device, in memory aligned to 16 bytes. `settings` are
    torch's of fp32 products, for CUDA and for CPUs, that it was made under; None are those that it does not depend on.
    """
    tensors = (a, b) if bias is None else (a, b, bias)
    try:
        is_alike: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not is_alike(*tensors):
            return None
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    needs_gradient = any(tensor.requires_grad for tensor in tensors)
    if direct is not None and not by_address and settings == (None, None):
        return _directly(direct, is_alike, needs_gradient=needs_gradient)
    index = a.get_device() if by_address else None
    return _by_shortcut(shortcut, is_alike, m, shape, index, settings, needs_gradient=needs_gradient)


def _by_shortcut(
    shortcut: Shortcut,
    is_alike: Callable[..., bool],
    m: int,
    shape: tuple[int, ...],
    index: int | None,
    settings: tuple[str | None, str | None],
    *,
    needs_gradient: bool,
) -> Guarded:
    """The way to any other function, for operands on the device of this index where that counts."""
    cuda_setting, cpu_setting = settings
    rank = len(shape)

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        if not (is_alike(a, b) if bias is None else is_alike(a, b, bias)):
            return None
        if RECORDINGS.active or _dispatch_modes() or _forward_ad._current_level >= 0:
            return None
        if needs_gradient and _is_grad_enabled():
            return None
        if index is not None and not _are_reachable(a, b, bias, index):
            return None
        if cuda_setting is not None and default_precision() != cuda_setting:
            return None
        if cpu_setting is not None and cpu_precision() != cpu_setting:
            return None
        result = shortcut(a, b, bias, m)
        return result if rank == 2 or result is None or result.dim() == rank else result.view(shape)

    return call


def _directly(direct: Product, is_alike: Callable[..., bool], *, needs_gradient: bool) -> Guarded:
    """The way to torch's own function, whose 15 us on the host leave the least room beside them."""

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        if (
            not (is_alike(a, b) if bias is None else is_alike(a, b, bias))
            or RECORDINGS.active
            or _dispatch_modes()
            or _forward_ad._current_level >= 0
            or (needs_gradient and _is_grad_enabled())
        ):
            return None
        return direct(a, b) if bias is None else direct(a, b, bias)

    return call


def is_folded(x: torch.Tensor) -> bool:
    """Whether torch's own linear layer multiplies x [M, K] or [B, T, K] as its rows, with the bits of that.

    Of three dimensions it does where the strides are those of rows; contiguous x may have odd ones where a size is 1.
    """
    return x.dim() == 2 or (x.dim() == 3 and x.stride() == (x.shape[1] * x.shape[2], x.shape[2], 1))


def _are_reachable(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, index: int) -> bool:
    """Whether each has memory, aligned to 16 bytes, and the device of this index is the current one."""
    first, second, third = a.data_ptr(), b.data_ptr(), 16 if bias is None else bias.data_ptr()
    is_aligned = not (first | second | third) & 15 and first and second and third
    return bool(is_aligned) and (index < 0 or current_device() == index)
