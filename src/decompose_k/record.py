"""Recording the problems that a program meets, so that they can be tuned."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from decompose_k.problem import Problem

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = 1


class Recording(Sequence[Problem]):
    """Distinct bucketed problems, in the order in which they were first met: a sequence to tune, to save, to load."""

    def __init__(self) -> None:
        self._problems: dict[Problem, None] = {}

    def add(self, problem: Problem) -> None:
        """Note a problem; its bucket is kept once. One with nothing to multiply needs no choice."""
        if 0 not in (problem.m, problem.n, problem.k):
            self._problems.setdefault(problem.bucketed())

    def save(self, path: Path | str | os.PathLike[str]) -> None:
        """Write the problems into a JSON file, which `load` and `decompose-k tune --from` read."""
        lines = ",\n".join(f"  {json.dumps(problem.to_json())}" for problem in tuple(self._problems))
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - any path-like
            file.write(f'{{"format": {FORMAT}, "problems": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: Path | str | os.PathLike[str]) -> Recording:
        """The problems in a file that `save` wrote; raises ValueError for any other file, and OSError."""
        recording = cls()
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123 - any path-like
                values = json.load(file)
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, not {FORMAT}")
            for fields in values["problems"]:
                recording.add(Problem.from_json(fields))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} must hold problems as a recording saves them; {said}") from error
        return recording

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        return tuple(self._problems)[index]

    def __len__(self) -> int:
        return len(self._problems)

    def __repr__(self) -> str:
        return f"Recording({list(self._problems)})"


class _Recordings:
    """The recordings that are under way; `active` is what a call looks at."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: tuple[Recording, ...] = ()

    def add(self, problem: Problem) -> None:
        with self.lock:
            for recording in self.active:
                recording.add(problem)


# One for the process, not one for each thread: torch runs the backward pass on a GPU in threads of its own.
RECORDINGS = _Recordings()


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collect the problems that a program meets, bucketed and distinct, in the order of first meeting.

    Every product whose config is chosen is seen, in whichever thread of the process it runs: direct calls, gradients,
    compiled code. A product with an explicit `config=` is not, nor the replay of a CUDA graph, which makes no choice.

    Raises:
        Nothing of its own.

    >>> import torch
    >>> from decompose_k.api import matmul
    >>> with record() as problems:
    ...     for m in (3, 4, 5):
    ...         out = matmul(torch.ones(m, 64), torch.ones(64, 2))
    >>> [(problem.m, problem.n, problem.k) for problem in problems]
    [(4, 2, 64), (8, 2, 64)]
    """
    recording = Recording()
    with RECORDINGS.lock:
        RECORDINGS.active = (*RECORDINGS.active, recording)
    try:
        yield recording
    finally:
        with RECORDINGS.lock:
            RECORDINGS.active = tuple(other for other in RECORDINGS.active if other is not recording)
