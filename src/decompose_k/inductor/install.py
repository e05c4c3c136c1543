"""Turning the graph pass on and off: it shares torch's config slot with whoever else uses it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from decompose_k.inductor.decide import WHERE, WINS
from decompose_k.inductor.graph_pass import DecomposeKPass, passes_in
from decompose_k.inductor.report import Report

# torch has one config for the process, and so is there one record of what was put there: the last entry is the pass in
# force, or the last one that was.
_passes: list[DecomposeKPass] = []


class Enabled:
    """What `enable` returns: leaving it as a context, or `disable()`, takes its pass out again."""

    def __init__(self, graph_pass: DecomposeKPass, before: Any) -> None:
        self._pass = graph_pass
        self._before = before

    def disable(self) -> None:
        """Put back what the config slot held before; what others put there since stays."""
        self._pass.is_active = False
        slot = _slot()
        _set_slot(_settled(self._before if slot is self._pass else slot))

    def report(self) -> Report:
        """What this pass rewrote and what not, and why."""
        return Report(tuple(self._pass.decisions))

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def enable(where: str = WINS) -> Enabled:
    """Let `torch.compile` use Decompose-K: models compiled from now on have their products rewritten where it pays.

    out = activation(alpha * (a @ b) + beta * bias), as one operator: `mm`, `addmm` and linear layers with the bias,
    scale, activation and conversion that follow. M may be dynamic; training and inference, autocast and CUDA graphs
    need nothing more. What was compiled before stays as it is, and what is compiled now stays rewritten after
    `disable()`; `torch.compiler.reset()` forgets both. Another library's pass in the same slot of torch's config
    (`joint_custom_pre_pass`) runs first.

    Args:
        where: `wins`, where `plan` expects Decompose-K to be faster, or `everywhere` it means the same, for tests.

    Returns:
        A handle with `disable()` and `report()`, which is a context manager too.

    Raises:
        ValueError: an unknown `where`.

    >>> with enable():
    ...     is_enabled()
    True
    >>> is_enabled()
    False
    """
    if where not in WHERE:
        raise ValueError(f"where must be one of {', '.join(WHERE)}; got {where!r}")
    before = _slot()
    # Of two passes of ours the newer one does the work; what others put there keeps running.
    others = [entry for entry in passes_in(before) if not isinstance(entry, DecomposeKPass)]
    ours = [entry for entry in passes_in(before) if isinstance(entry, DecomposeKPass)]
    for entry in ours:
        others = [*passes_in(entry.previous), *others]
    made = DecomposeKPass(where, tuple(others) or None)
    _passes[:] = [entry for entry in _passes if entry.is_active] + [made]
    _set_slot(made)
    return Enabled(made, before)


def disable() -> None:
    """Undo every `enable()`: the config slot has what others put there, and nothing of ours.

    >>> disable()
    """
    for graph_pass in _passes:
        graph_pass.is_active = False
    _set_slot(_settled(_slot()))


def is_enabled() -> bool:
    """Whether models compiled now are rewritten.

    >>> is_enabled()
    False
    """
    return any(isinstance(entry, DecomposeKPass) and entry.is_active for entry in passes_in(_slot()))


def report() -> Report:
    """What was rewritten since the last `enable()` and what was not, and why; printing it is for reading.

    >>> len(Report().decisions)
    0
    """
    return Report(tuple(_passes[-1].decisions)) if _passes else Report()


def _settled(slot: Any) -> Any:
    """What a config slot holds once those of our passes that were turned off are taken out of it."""
    if isinstance(slot, (list, tuple)):
        entries = [entry for held in slot for entry in passes_in(_settled(held))]
        return type(slot)(entries)
    if not isinstance(slot, DecomposeKPass) or slot.is_active:
        return slot
    entries = [entry for held in passes_in(slot.previous) for entry in passes_in(_settled(held))]
    return None if not entries else entries[0] if len(entries) == 1 else entries


def _slot() -> Any:
    from torch._inductor import config

    return config.joint_custom_pre_pass


def _set_slot(value: Any) -> None:
    from torch._inductor import config

    config.joint_custom_pre_pass = value
