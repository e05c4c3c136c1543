"""The way past everything for a call whose like has been seen: one look-up, then its compiled kernels.

A first call is checked, planned and compiled. What that led to is kept under a key of all it depended on, and the next
such call needs none of it; where the sizes are those of an earlier call it does not even need the key (see `guards`).
Only calls that nothing but the engine has to see may take this way: plain tensors on a CPU or the current GPU, no
gradient recorded, no tracing, transform, autocast or dispatch mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from decompose_k.arguments import LINEAR, Names
from decompose_k.execute import Shortcuts, cpu_precision, default_precision
from decompose_k.forgetting import register
from decompose_k.guards import current_device, guard, is_folded
from decompose_k.record import RECORDINGS

if TYPE_CHECKING:
    from decompose_k.execute import Keep
    from decompose_k.guards import Guarded
    from decompose_k.reference import Product

# A serving process meets some tens of keys for each weight; beyond this the memory starts anew.
MOST_CALLS = 8192
# Of operands of one shape; that many kinds may alternate before their calls go by key. To make one takes 3 us.
MOST_GUARDS = 8

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_forward_ad: Any = forward_ad
is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
# One question instead of one for each kind of device.
_has_autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)

Key = tuple[Any, ...]
# What a key of operands raises: no tensors, or nested ones, or an argument that cannot be hashed.
NO_KEY = (AttributeError, TypeError, RuntimeError)


class Calls:
    """What first calls led to, bounded: further calls get their results by a key of everything, or by guards.

    `guarded` holds what guards watch over, by a brief key: of the shape of a, numel of b, whether there is no bias, and
    all arguments that are no tensors. What else differs the guards see.
    """

    def __init__(self) -> None:
        self.guarded: dict[Key, Guarded] = {}
        self._shortcuts: dict[Key, Shortcuts] = {}
        self._made: Counter[Key] = Counter()
        self._generation = 0

    def __len__(self) -> int:
        return len(self._shortcuts)

    def by_key(self, key: Key, a: Any, b: Any, bias: Any, brief: Key) -> torch.Tensor | None:
        """The result of a call with a key that was kept; None without one, or where it cannot be had at the moment."""
        generation = self._generation
        shortcuts = self.find(key)
        if shortcuts is None:
            return None
        is_linear = key[0] is LINEAR
        shortcut = shortcuts.for_linear if is_linear else shortcuts.for_matmul
        m = a.numel() // b.shape[1] if is_linear else a.shape[0]
        result = shortcut(a, b, bias, m)
        if result is None:
            return None
        shape = (*a.shape[:-1], b.shape[0] if is_linear else b.shape[1])
        # Operands of one shape that differ otherwise take turns here, and to make a guard takes as long as a key.
        if self._made[brief] < MOST_GUARDS:
            # Also where torch refuses to make one, as for the same tensor twice.
            self._count(brief)
            guarded = guard(
                shortcut,
                a,
                b,
                bias,
                m,
                shape,
                direct=_direct(shortcuts, a, bias, is_linear=is_linear),
                by_address=shortcuts.by_address,
                settings=settings_in(key),
            )
            if guarded is not None:
                self._keep(self.guarded, brief, guarded, generation)
        return result if result.dim() == len(shape) else result.view(shape)

    def _count(self, brief: Key) -> None:
        if len(self._made) >= MOST_CALLS:
            self._made.clear()
        self._made[brief] += 1

    def _keep(self, kept: dict[Key, Any], key: Key, value: Any, generation: int) -> None:
        """Keep what was made in a generation, unless another thread had choices forgotten since, or does so now."""
        if len(kept) >= MOST_CALLS:
            kept.clear()
        kept[key] = value
        if generation != self._generation:
            kept.pop(key, None)

    def find(self, key: Key) -> Shortcuts | None:
        """The shortcuts of a like call, if there was one."""
        try:
            return self._shortcuts.get(key)
        except TypeError:
            # An argument that cannot be hashed is a wrong one, and the checks will say which.
            return None

    def keeper(self, key: Key) -> Keep:
        """What `execute` hands shortcuts to; nothing is kept of a choice that was to be forgotten meanwhile."""
        generation = self._generation

        def keep(shortcuts: Shortcuts) -> None:
            self._keep(self._shortcuts, key, shortcuts, generation)

        return keep

    def cache_clear(self) -> None:
        """Drop every shortcut, after which the next calls are planned anew."""
        self._generation += 1
        self._shortcuts.clear()
        self.guarded.clear()
        self._made.clear()


def _direct(shortcuts: Shortcuts, a: torch.Tensor, bias: torch.Tensor | None, *, is_linear: bool) -> Product | None:
    if is_linear:
        return shortcuts.direct_linear if is_folded(a) else None
    return shortcuts.direct_matmul if bias is None else None


CALLS = register(Calls())


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
        or _transforms() is not None
        or RECORDINGS.active != ()
        or _dispatch_modes() > 0
        or _is_included(_PRE_DISPATCH)
        or _forward_ad._current_level >= 0
        or _is_tracing() is not None
        or _has_autocast()
    ):
        return None
    index, a_dtype, b_dtype = a.get_device(), a.dtype, b.dtype
    # What fp32 products of a CPU may be rounded to is a setting of its own, and fp32 copies of halves obey it too.
    cpu_setting = None
    if a.is_cuda:
        if index != current_device():
            return None
    elif a.is_cpu:
        cpu_setting = cpu_precision()
    else:
        return None
    try:
        a_address, b_address = a.data_ptr(), b.data_ptr()
        bias_address = 16 if bias is None else bias.data_ptr()
        a_shape, b_shape = a.shape, b.shape
    except RuntimeError:
        # torch.autograd.grad(..., is_grads_batched=True) sends tensors without storage, and nested ones have no shape.
        return None
    if alpha == 0.0:
        # Its sign counts, and equal keys do not tell.
        return None
    if not (a_address and b_address and bias_address) or (a_address | b_address | bias_address) & 15:
        return None
    if b.get_device() != index or a.is_neg() or b.is_neg():
        return None
    if a.dim() == 2:
        m, k = a_shape
        a_strides = a.stride()
    elif names is LINEAR and a.dim() > 2 and a.is_contiguous():
        k = a_shape[-1]
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
        addend = (bias.dtype, bias.shape, bias.stride(), None if bias.dim() < 2 else a_shape)
    if _is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return None
    cuda_setting = None
    if precision is None and (a_dtype is torch.float32 or b_dtype is torch.float32):
        cuda_setting = default_precision()
    return (
        names,
        index,
        (m - 1).bit_length(),
        # Where a lies in columns, M is their distance, and the register estimates look at its alignment.
        None if a_strides[1] == 1 else m % 16 == 0,
        k,
        a_strides,
        b_shape,
        b.stride(),
        a_dtype,
        b_dtype,
        addend,
        alpha,
        beta,
        activation,
        out_dtype,
        precision,
        batch_invariant,
        static_b,
        split_k,
        split_k.__class__,
        backend,
        config,
        cuda_setting,
        cpu_setting,
    )


def settings_in(key: Key) -> tuple[str | None, str | None]:
    """Torch's settings of fp32 products that a key was made under, for CUDA and for CPUs; None where one has no say."""
    cuda_setting, cpu_setting = key[-2:]
    return cuda_setting, cpu_setting
