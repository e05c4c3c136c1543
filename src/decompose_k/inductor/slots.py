"""Our passes in torch's one config slot for the joint graph, which others use too."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch._inductor.custom_graph_pass import CustomGraphPass

from decompose_k.inductor.report import Decision, Report

if TYPE_CHECKING:
    from torch.fx import Graph

# torch has one config for the process, and so is there one record of what was put there: passes in force, and the last
# one that was.
_passes: list[SlotPass] = []


class SlotPass(CustomGraphPass):
    """A pass of ours, after the passes that were in its place before it.

    `previous` is what the slot held: nothing, another library's pass, or a sequence of them. `decisions` grows by one
    entry for each product seen.
    """

    def __init__(self) -> None:
        self.previous: tuple[Any, ...] = ()
        self.is_active = True
        self.decisions: list[Decision] = []

    @abc.abstractmethod
    def rewrite(self, graph: Graph) -> list[Decision]:
        """Change a graph in place; what was decided about each product."""

    @abc.abstractmethod
    def key(self) -> str:
        """What tells this pass from others: code, settings and whatever else its decisions depend on."""

    def __call__(self, graph: Graph) -> None:
        """Run the earlier passes, then this one."""
        for earlier in self.previous:
            earlier(graph)
        if self.is_active:
            self.decisions += self.rewrite(graph)

    def uuid(self) -> Any:
        """What torch keys cached graphs by; None, which turns its caches off, where an earlier pass has none."""
        earlier = [entry.uuid() if isinstance(entry, CustomGraphPass) else None for entry in self.previous]
        if any(not uuid for uuid in earlier):
            return None
        return ("decompose_k", self.key() if self.is_active else "off", *earlier)


class Installed:
    """A pass in its slot: leaving this as a context, or `disable()`, takes it out again."""

    def __init__(self, graph_pass: SlotPass, before: Any) -> None:
        self._pass = graph_pass
        self._before = before

    def disable(self) -> None:
        """Put back what the slot held before; what others put there since stays."""
        self._pass.is_active = False
        slot = get_slot()
        _set_slot(_settled(self._before if slot is self._pass else slot))

    def report(self) -> Report:
        """What this pass rewrote and what not, and why."""
        return Report(tuple(self._pass.decisions))

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def install(graph_pass: SlotPass) -> Installed:
    """Put a pass into the slot, behind what is there; of two passes of one kind the newer does the work."""
    before = get_slot()
    graph_pass.previous = tuple(_others(before, type(graph_pass)))
    _passes[:] = [entry for entry in _passes if entry.is_active] + [graph_pass]
    _set_slot(graph_pass)
    return Installed(graph_pass, before)


def uninstall_all() -> None:
    """Leave in the slot what others put there, and nothing of ours."""
    for graph_pass in _passes:
        graph_pass.is_active = False
    _set_slot(_settled(get_slot()))


def last_pass(kind: type[SlotPass]) -> SlotPass | None:
    """The pass of a kind that is in force, or the last one that was."""
    return next((entry for entry in reversed(_passes) if isinstance(entry, kind)), None)


def active_passes() -> tuple[SlotPass, ...]:
    """Our passes that the slot runs."""
    found: list[SlotPass] = []
    waiting = list(passes_in(get_slot()))
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, SlotPass):
            waiting += entry.previous
            found += [entry] if entry.is_active else []
    return tuple(found)


def passes_in(slot: Any) -> tuple[Any, ...]:
    """The passes that a slot holds: none, one, or, in newer torch, several."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, (list, tuple)) else (slot,)


def _others(slot: Any, kind: type[SlotPass]) -> list[Any]:
    """Passes in a slot in their order, those of one kind replaced by what they run first."""
    found: list[Any] = []
    for entry in passes_in(slot):
        found += _others(entry.previous, kind) if isinstance(entry, kind) else [entry]
    return found


def _settled(slot: Any) -> Any:
    """What a slot holds once those of our passes that were turned off are taken out of it."""
    if isinstance(slot, (list, tuple)):
        entries = [entry for held in slot for entry in passes_in(_settled(held))]
        return type(slot)(entries)
    if not isinstance(slot, SlotPass):
        return slot
    entries = [entry for held in slot.previous for entry in passes_in(_settled(held))]
    if slot.is_active:
        slot.previous = tuple(entries)
        return slot
    return None if not entries else entries[0] if len(entries) == 1 else entries


def get_slot() -> Any:
    """What the slot holds now."""
    from torch._inductor import config

    return config.joint_custom_pre_pass


def _set_slot(value: Any) -> None:
    from torch._inductor import config

    config.joint_custom_pre_pass = value
