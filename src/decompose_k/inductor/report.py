"""What the graph pass did with each product it saw, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One product of a compiled graph.

    `operator` is torch's name of it, `operands` its shapes and dtypes, `place` the line of the model that asked for it
    (empty where the compiler does not say). `fused` lists what went into the operator with it, in order; `reason` says
    why it was rewritten or left, and `ended` what stopped the fusion there.
    """

    operator: str
    operands: str
    place: str
    rewritten: bool
    reason: str
    fused: tuple[str, ...] = ()
    ended: str = ""

    def __str__(self) -> str:
        mark = "rewritten" if self.rewritten else "left     "
        fused = f" + {' + '.join(self.fused)}" if self.fused else ""
        lines = [f"{mark} {self.operator} {self.operands}{fused}{f'  ({self.place})' if self.place else ''}"]
        lines.append(f"          because {self.reason}" + (f"; not further: {self.ended}" if self.ended else ""))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """Every decision since `enable()`, in the order in which the graphs were compiled.

    A graph that torch took from its cache was decided when it was first compiled and is not in the list.
    """

    decisions: tuple[Decision, ...] = ()

    @property
    def rewritten(self) -> tuple[Decision, ...]:
        """The products that became one operator."""
        return tuple(decision for decision in self.decisions if decision.rewritten)

    @property
    def left(self) -> tuple[Decision, ...]:
        """The products that were left to the compiler."""
        return tuple(decision for decision in self.decisions if not decision.rewritten)

    def __str__(self) -> str:
        head = f"{len(self.rewritten)} of {len(self.decisions)} products rewritten"
        return "\n".join([head, *map(str, self.decisions)])
