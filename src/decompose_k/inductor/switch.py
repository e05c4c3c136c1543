"""Turning the graph pass on and off, and asking what it did."""

from __future__ import annotations

from decompose_k.inductor.decide import WHERE, WINS
from decompose_k.inductor.graph_pass import DecomposeKPass
from decompose_k.inductor.report import Report
from decompose_k.inductor.slots import Installed, active_passes, install, last_pass, uninstall_all


def enable(where: str = WINS, *, static_weights: bool = False) -> Installed:
    """Let `torch.compile` use Decompose-K: models compiled from now on have their products rewritten where it pays.

    out = activation(alpha * (a @ b) + beta * bias), as one operator: `mm`, `addmm` and linear layers with the bias,
    scale, activation and conversion that follow. M may be dynamic; training and inference, autocast and CUDA graphs
    need nothing more. What was compiled before stays as it is, and what is compiled now stays rewritten after
    `disable()`; `torch.compiler.reset()` forgets both. Another library's pass in the same slot of torch's config
    (`joint_custom_pre_pass`) runs first.

    Args:
        where: `wins`, where `plan` expects Decompose-K to be faster, or `everywhere` it means the same, for tests.
        static_weights: promise that nothing shortly before in the stream writes parameters and buffers of a model that
            is compiled for inference; their loads then start before earlier kernels have finished. It says nothing
            about graphs for training, or that write such a buffer themselves.

    Returns:
        A handle with `disable()` and `report()`, which is a context manager too.

    Raises:
        TypeError, ValueError: an unknown `where`, or `static_weights` that is no bool.

    >>> with enable():
    ...     is_enabled()
    True
    >>> is_enabled()
    False
    """
    if where not in WHERE:
        raise ValueError(f"where must be one of {', '.join(WHERE)}; got {where!r}")
    if not isinstance(static_weights, bool):
        raise TypeError(f"static_weights must be True or False; got {static_weights!r}")
    return install(DecomposeKPass(where, static_weights=static_weights))


def disable() -> None:
    """Undo every `enable()` and `autotune(...)` in force: torch's config slot has what others put there alone.

    >>> disable()
    """
    uninstall_all()


def is_enabled() -> bool:
    """Whether models compiled now are rewritten.

    >>> is_enabled()
    False
    """
    return any(isinstance(entry, DecomposeKPass) for entry in active_passes())


def report() -> Report:
    """What was rewritten since the last `enable()` and what was not, and why; printing it is for reading.

    >>> with enable():
    ...     print(report())
    0 of 0 products rewritten
    """
    found = last_pass(DecomposeKPass)
    return Report() if found is None else Report(tuple(found.decisions))
