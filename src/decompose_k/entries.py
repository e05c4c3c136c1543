"""What is remembered of a tuned problem: the config that won and the timing of everything it was measured against."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from decompose_k.config import Config
from decompose_k.problem import Problem
from decompose_k.timing import Timing

MM = Config("mm")


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to compute a problem and its timing; `config` is None for torch as one would write it by hand."""

    label: str
    timing: Timing
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The tuned choice for a bucketed problem, what was measured (fastest first) and when."""

    problem: Problem
    config: Config
    timings: tuple[Measured, ...]
    date: str

    @property
    def key(self) -> str:
        """The key that the entry is remembered under."""
        return key_of(self.problem)

    @property
    def method(self) -> str:
        """How the timings were taken, in the timer's words."""
        return self.timings[0].timing.method

    @property
    def chosen_us(self) -> float:
        """Median of the config that won."""
        return self.microseconds_of(self.config) or math.nan

    @property
    def torch_us(self) -> float | None:
        """Median of torch as one would write it by hand; None where it was not measured."""
        return next((measured.timing.p50_us for measured in self.timings if measured.config is None), None)

    @property
    def speedup(self) -> float | None:
        """Median of torch over that of the choice; None where torch was not measured."""
        return None if self.torch_us is None else self.torch_us / self.chosen_us

    def microseconds_of(self, config: Config) -> float | None:
        """Median of a config; None where it was not measured."""
        return next((measured.timing.p50_us for measured in self.timings if measured.config == config), None)

    def shortened(self, most_timings: int) -> Entry:
        """The entry with its fastest timings alone, at least the winner's, and torch's by hand."""
        fastest = sorted(self.timings, key=lambda measured: measured.timing.p50_us)[: max(1, most_timings)]
        wanted = [one for one in self.timings if one in fastest or one.config in (None, self.config)]
        return replace(self, timings=tuple(wanted))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` restores an equal entry.

        A timing names its config by the fields in which it differs from the one that won.
        """
        return {
            "problem": self.problem.to_json(),
            "config": self.config.to_json(),
            "date": self.date,
            "method": self.method,
            "timings": [self._timing_to_json(measured) for measured in self.timings],
        }

    def _timing_to_json(self, measured: Measured) -> dict[str, Any]:
        values = asdict(measured.timing)
        del values["method"]
        chosen, changes = self.config.to_json(), None
        if measured.config is not None:
            other = measured.config.to_json()
            changes = {name: value for name, value in other.items() if value != chosen[name]}
        return {"label": measured.label, "changes": changes, **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        """The entry that `to_json` described; raises ValueError, TypeError or KeyError for anything else."""
        config = Config.from_json(values["config"])
        method = values["method"]
        timings = tuple(_timing_from_json(timing, config, method) for timing in values["timings"])
        entry = cls(Problem.from_json(values["problem"]), config, timings, values["date"])
        if not isinstance(entry.date, str) or not isinstance(method, str):
            raise TypeError(f"date and method must be text; got {entry.date!r} and {method!r}")
        if entry.problem != entry.problem.bucketed():
            raise ValueError(f"problem must be a bucketed one; got m={entry.problem.m}")
        if entry.microseconds_of(config) is None:
            raise ValueError("timings must hold the config that won; it is not among them")
        return entry


def key_of(problem: Problem) -> str:
    """Every field of the bucketed problem that is not None or False: all that a choice depends on, the device apart.

    >>> key_of(Problem.make(33, 256, 7168, static_b=True))  # doctest: +NORMALIZE_WHITESPACE
    'm=64 n=256 k=7168 a_dtype=bf16 b_dtype=bf16 out_dtype=bf16 a_layout=row b_layout=row static_b=True
    device_type=cuda'
    """
    fields = problem.bucketed().to_json().items()
    return " ".join(f"{name}={value}" for name, value in fields if value is not None and value is not False)


def _timing_from_json(values: dict[str, Any], chosen: Config, method: str) -> Measured:
    values = dict(values)
    label, changes = values.pop("label"), values.pop("changes")
    timing = Timing(**values, method=method)
    medians = (timing.p20_us, timing.p50_us, timing.p80_us)
    if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in medians):
        raise ValueError(f"timings must be finite and > 0; got {medians}")
    if not isinstance(label, str) or not isinstance(timing.repetitions, int):
        raise TypeError(f"label must be text and repetitions an integer; got {label!r} and {timing.repetitions!r}")
    return Measured(label, timing, None if changes is None else replace(chosen, **changes))
