"""The way past everything for a call whose like has been seen: one look-up, then its compiled kernels.

A first call is checked, planned and compiled. What that led to is kept under a key of all it depended on, and the next
such call needs none of it. Only calls that nothing but the engine has to see may take this way: plain tensors on a CPU
or the current GPU, no gradient recorded, no tracing, transform, autocast or dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from decompose_k.arguments import LINEAR
from decompose_k.cache import forgettable
from decompose_k.execute import Shortcut, cpu_precision, default_precision
from decompose_k.record import RECORDINGS

if TYPE_CHECKING:
    from decompose_k.arguments import Names
    from decompose_k.execute import Keep

# A serving process meets some tens of keys for each weight; beyond this the memory starts anew.
MOST_CALLS = 8192

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_forward_ad: Any = forward_ad
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
# One question instead of one for each kind of device.
_has_autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)
# A torch without CUDA has no such function, and no tensor that would get as far as to ask.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

Key = tuple[Any, ...]


class Calls:
    """Shortcuts by key, bounded: `find` gives for a call what the first such call led to."""

    def __init__(self) -> None:
        self._shortcuts: dict[Key, Shortcut] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._shortcuts)

    def find(self, key: Key) -> Shortcut | None:
        """The shortcut of a like call, if there was one."""
        try:
            return self._shortcuts.get(key)
        except TypeError:
            # An argument that cannot be hashed is a wrong one, and the checks will say which.
            return None

    def keeper(self, key: Key) -> Keep:
        """What `execute` hands a shortcut to; nothing is kept of a choice that was to be forgotten meanwhile."""
        generation = self._generation

        def keep(for_matmul: Shortcut, for_linear: Shortcut) -> None:
            if generation != self._generation:
                return
            if len(self._shortcuts) >= MOST_CALLS:
                self._shortcuts.clear()
            self._shortcuts[key] = for_linear if key[0] is LINEAR else for_matmul

        return keep

    def cache_clear(self) -> None:
        """Drop every shortcut, after which the next calls are planned anew."""
        self._generation += 1
        self._shortcuts.clear()


CALLS = forgettable(Calls())


# One long function: each function that it would call costs every eager product 0.1 us.
def call_key(  # noqa: C901
    a: Any,
    b: Any,
    bias: Any,
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

    M stands as its bucket, since the kernels take it as it comes; it is the number of rows, also where `a` has more
    dimensions. The arguments need not have been checked: wrong ones make a key under which nothing was ever kept. For
    that, True may not pass for 1, so the types count too.
    """
    if (
        type(a) not in PLAIN_TYPES
        or type(b) not in PLAIN_TYPES
        or (bias is not None and type(bias) not in PLAIN_TYPES)
        or alpha.__class__ is not float
        or beta.__class__ is not float
        or not (batch_invariant is False or batch_invariant is True)
        or not (static_b is False or static_b is True)
        # Something besides the engine has to see the call: a transform, mode, tracer, recording, or autocast.
        or _is_compiling()
        or _transforms() is not None
        or RECORDINGS.active != ()
        or _dispatch_modes() > 0
        or _forward_ad._current_level >= 0
        or _is_tracing() is not None
        or _has_autocast()
    ):
        return None
    index, a_dtype, b_dtype = a.get_device(), a.dtype, b.dtype
    # What fp32 products of a CPU may be rounded to is a setting of its own, and fp32 copies of halves obey it too.
    cpu_setting = None
    if a.is_cuda:
        if index != _current_device():
            return None
    elif a.is_cpu:
        cpu_setting = cpu_precision()
    else:
        return None
    try:
        a_address, b_address = a.data_ptr(), b.data_ptr()
        bias_address = 16 if bias is None else bias.data_ptr()
    except RuntimeError:
        # torch.autograd.grad(..., is_grads_batched=True) sends tensors without storage.
        return None
    if alpha == 0.0:
        # Its sign counts, and equal keys do not tell.
        return None
    if not (a_address and b_address and bias_address) or (a_address | b_address | bias_address) & 15:
        return None
    if b.get_device() != index or a.is_neg() or b.is_neg():
        return None
    if a.dim() == 2:
        m, k = a.shape
        a_strides = a.stride()
    elif names is LINEAR and a.dim() > 2 and a.is_contiguous():
        k = a.shape[-1]
        m, a_strides = a.numel() // k, (k, 1)
    else:
        return None
    addend: Any = None
    if bias is not None:
        if bias.get_device() != index or bias.is_neg() or (bias.dim() > 1 and a.dim() > 2):
            # With rows in several dimensions the kernels see another bias than the caller's.
            return None
        if _is_grad_enabled() and bias.requires_grad:
            return None
        # Rows of its own tie a bias to the exact shape.
        addend = (bias.dtype, bias.shape, bias.stride(), None if bias.dim() < 2 else a.shape)
    if _is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return None
    if precision is None and (a_dtype is torch.float32 or b_dtype is torch.float32):
        precision = default_precision()
    return (
        names,
        index,
        (m - 1).bit_length(),
        # Where a lies in columns, M is their distance, and the register estimates look at its alignment.
        None if a_strides[1] == 1 else m % 16 == 0,
        k,
        a_strides,
        b.shape,
        b.stride(),
        a_dtype,
        b_dtype,
        addend,
        alpha,
        beta,
        activation,
        out_dtype,
        precision,
        cpu_setting,
        batch_invariant,
        static_b,
        split_k,
        split_k.__class__,
        backend,
        config,
    )
