"""Which case is measured next, and for how long, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.bench.cases import LeftOut

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case
    from decompose_k.timing import Clock

# Of a case's share of the budget; making operands and checking them against fp64 take the rest.
_TIMED_SHARE = 0.5
# The first cases compile what later ones share.
_LATEST = 8


@dataclass(frozen=True, slots=True)
class Task:
    """A case, for how many seconds it may be timed, and when it was begun."""

    case: Case
    seconds: float | None
    begun: float


class Agenda:
    """Cases in order, each handed out once, until there are none or the rest would likely end past the deadline.

    `announce` hears of each by name. What the time was too short for is in `left_out`.
    """

    def __init__(
        self, cases: Sequence[Case], deadline: float | None, clock: Clock, announce: Callable[[str], None]
    ) -> None:
        self.left_out: list[LeftOut] = []
        self._waiting = deque(cases)
        self._deadline = deadline
        self._clock = clock
        self._announce = announce
        self._spent: list[float] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self) -> Task | None:
        """The next case, begun now; None where nothing more is to be begun."""
        if not self._waiting:
            return None
        now = self._clock()
        left = None if self._deadline is None else self._deadline - now
        latest = self._spent[-_LATEST:]
        # Whoever stops the run from outside takes the rows of what is under way.
        if left is not None and left <= sum(latest) / max(1, len(latest)):
            self.left_out += [LeftOut(case, "the time budget was used up") for case in self._waiting]
            self._waiting.clear()
            return None
        share = None if left is None else _TIMED_SHARE * left / len(self._waiting)
        case = self._waiting.popleft()
        self._announce(str(case))
        return Task(case, share, now)

    def end(self, task: Task) -> None:
        """A task was measured, or left out."""
        self._spent.append(self._clock() - task.begun)

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Tasks that came to nothing are to be begun anew, before all others."""
        self._waiting.extendleft(task.case for task in reversed(tasks))
