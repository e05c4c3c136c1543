"""The way past everything for a call whose like has been seen: one look-up, then its compiled kernels.

A first call is checked, planned and compiled. What that led to is kept under a key of all it depended on, and the next
such call needs none of it. Only calls that nothing but the engine has to see may take this way: plain tensors on the
current GPU, no gradient recorded, no tracing, transform, autocast or dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from decompose_k.execute import default_precision

if TYPE_CHECKING:
    from decompose_k.arguments import Names
    from decompose_k.execute import Keep

# A serving process meets some tens of keys for each weight; beyond this the memory starts anew.
MOST_CALLS = 8192

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_forward_ad: Any = forward_ad
_is_compiling = torch.compiler.is_compiling
_transforms = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
# A torch without CUDA has no such function, and no tensor that would get as far as to ask.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

Key = tuple[Any, ...]
# (a, b, bias, m) -> result, or None where the shortcut cannot be taken at the moment.
Shortcut = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", int], "torch.Tensor | None"]


class Calls:
    """Shortcuts by key, bounded: `run` with the key of a call answers as the first such call did."""

    def __init__(self) -> None:
        self._shortcuts: dict[Key, Shortcut] = {}

    def __len__(self) -> int:
        return len(self._shortcuts)

    def run(self, key: Key, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The result by the shortcut of a like call; None where there is none, or it cannot be taken now."""
        try:
            shortcut = self._shortcuts.get(key)
        except TypeError:
            # An argument that cannot be hashed is a wrong one, and the checks will say which.
            return None
        return None if shortcut is None else shortcut(a, b, bias, a.shape[0])

    def keeper(self, key: Key, *, is_transposed: bool) -> Keep:
        """What `execute` hands a shortcut to; `is_transposed` where `run` will be given b's transpose."""

        def keep(shortcut: Callable[..., Any], by_address: bool) -> None:
            if len(self._shortcuts) >= MOST_CALLS:
                self._shortcuts.clear()
            if by_address:
                self._shortcuts[key] = shortcut
            elif is_transposed:
                self._shortcuts[key] = lambda a, b, bias, _: shortcut(a, b.t(), bias)
            else:
                self._shortcuts[key] = lambda a, b, bias, _: shortcut(a, b, bias)

        return keep

    def forget(self) -> None:
        """Drop every shortcut, after which the next calls are planned anew."""
        self._shortcuts.clear()


CALLS = Calls()


def call_key(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    alpha: Any,
    beta: Any,
    activation: Any,
    out_dtype: Any,
    precision: Any,
    batch_invariant: Any,
    static_b: Any,
    split_k: Any,
    backend: Any,
    config: Any,
    names: Names,
) -> Key | None:
    """All that the way of a call depends on; None where the call may not take the shortcut.

    M stands as its bucket, since the kernels take it as it comes. The arguments need not have been checked: wrong ones
    make a key under which nothing was ever kept. For that, True may not pass for 1, so the types count too.
    """
    if _is_compiling() or is_observed() or not is_plain(a) or not is_plain(b) or a.dim() != 2:
        return None
    index = a.get_device()
    m = a.shape[0]
    if index != _current_device() or m == 0 or alpha.__class__ is not float or beta.__class__ is not float:
        return None
    addresses = a.data_ptr() | b.data_ptr()
    addend: Any = None
    if bias is not None:
        if not is_plain(bias):
            return None
        addresses |= bias.data_ptr()
        # Rows of its own tie a bias to the exact M.
        addend = (bias.dtype, bias.shape, bias.stride(), bias.get_device(), None if bias.dim() < 2 else m)
    if addresses & 15 or needs_gradient(a, b, bias):
        return None
    if precision is None and (a.dtype is torch.float32 or b.dtype is torch.float32):
        precision = default_precision()
    return (
        names,
        index,
        (m - 1).bit_length(),
        a.shape[1],
        a.stride(),
        b.shape,
        b.stride(),
        b.get_device(),
        a.dtype,
        b.dtype,
        addend,
        alpha,
        beta,
        activation,
        out_dtype,
        precision,
        batch_invariant,
        batch_invariant.__class__,
        static_b,
        static_b.__class__,
        split_k,
        split_k.__class__,
        backend,
        config,
    )


def rows_in_place(x: Any, bias: Any) -> Any:
    """[..., K] as [rows, K] where that is but another view of a plain tensor and all rows share the bias; else x."""
    if _is_compiling() or is_observed() or not is_plain(x) or x.dim() < 3 or not x.is_contiguous():
        return x
    return x.view(-1, x.shape[-1]) if bias is None or (is_plain(bias) and bias.dim() < 2) else x


def is_plain(tensor: Any) -> bool:
    """Whether an argument is a tensor of torch's own class with memory on a GPU that holds its values as they are."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cuda
        and not tensor.is_neg()
        and not _is_batched(tensor)
        and tensor.data_ptr() != 0
    )


def is_observed() -> bool:
    """Whether something other than the engine has to see a call: a transform, a mode, autocast."""
    return (
        _transforms() is not None
        or _dispatch_modes() > 0
        or _forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cuda")
    )


def needs_gradient(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the result must know how it came about."""
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad))
