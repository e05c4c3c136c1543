"""Check every variant of a case against fp64, then time those that are right, side by side, into rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from decompose_k.accuracy import brief
from decompose_k.bench.cases import LeftOut
from decompose_k.bench.check import Broken, Checked, call_first, check, make_inputs
from decompose_k.bench.columns import (
    COLUMNS,
    COLUMNS_OF_THE_GPU,
    COLUMNS_OF_THE_HOST,
    Effort,
    InputSets,
    measure_columns,
)
from decompose_k.bench.compiled import forget_compiled
from decompose_k.bench.rows import Row
from decompose_k.bench.search import best_of_choices, best_of_options
from decompose_k.bench.suites import variants_for
from decompose_k.bench.turns import ALONE, Turns
from decompose_k.bench.variant import TORCH
from decompose_k.bench.variants import variants_of
from decompose_k.dtypes import dtype_name
from decompose_k.timing import Timing, Turn, make_input_sets, time_events, time_variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.cases import Case
    from decompose_k.bench.machine import Ceilings, Machine
    from decompose_k.bench.variant import Variant

# Of a case's seconds; the further columns share the rest.
_HEADLINE_SHARE = 0.5
# Of the headline's samples, which are read to more digits.
_COLUMN_SHARE = 3
# Eager calls between two events where a variant cannot be part of our graph.
_STREAM_CALLS = 50
_AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a case: rows of the variants that are right, and a sentence for each other one.

    `failures` are of ours, wrong or raising; `missing` are alternatives that raise or are less exact than we allow.
    """

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[Row], broken: list[Broken], wrong: list[Checked]) -> Measured:
        """Rows, what raised, and what was wrong."""
        left_out: list[Broken | Checked] = [*broken, *wrong]
        ours = [str(one) for one in left_out if one.variant.ours]
        return cls(rows, ours, [str(one) for one in left_out if not one.variant.ours])


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases of one run share; without `variants`, a case has those that its suite is there to show."""

    device: torch.device
    machine: Machine
    ceilings: Ceilings
    repetitions: int = 30
    seconds: float | None = None
    variants: tuple[str, ...] | None = None
    search: bool = False
    columns: tuple[str, ...] = COLUMNS

    def measure_or_leave_out(
        self, case: Case, seconds: float | None = None, turns: Turns = ALONE
    ) -> Measured | LeftOut:
        """Measure a case, for at most `seconds` of timing; left out is one for which there is not enough memory."""
        limits = [limit for limit in (self.seconds, seconds) if limit is not None]
        try:
            return replace(self, seconds=min(limits, default=None)).measure(case, turns)
        except torch.OutOfMemoryError as error:
            return LeftOut(case, brief(error))

    def measure(self, case: Case, turns: Turns = ALONE) -> Measured:
        """Check and time every variant of a case."""
        forget_compiled()
        with turns.gpu():
            input_sets = self._input_sets(case)
        names = variants_for(case.shape.suite) if self.variants is None else self.variants
        chosen, broken = call_first(case, variants_of(case, self.device, names), *input_sets[0])
        if not chosen or chosen[0].name != TORCH:
            return Measured.of([], broken, [])
        return self._timed(case, chosen, broken, input_sets, turns)

    def _input_sets(self, case: Case) -> InputSets:
        generator = torch.Generator(self.device).manual_seed(0)
        input_sets = make_input_sets(lambda: make_inputs(case, self.device, generator), case.bytes, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return input_sets

    def _timed(
        self, case: Case, chosen: Sequence[Variant], broken: list[Broken], input_sets: InputSets, turns: Turns
    ) -> Measured:
        with turns.gpu():
            chosen = [self._at_its_best(case, variant, input_sets) for variant in chosen]
            checks = check(case, chosen, input_sets)
            right = [checked for checked in checks if checked.passed]
            wrong = [checked for checked in checks if not checked.passed]
            if not right:
                return Measured.of([], broken, wrong)
        variants = [checked.variant for checked in right]
        timings, noise = self._in_our_graphs(case, variants, input_sets, turns.gpu)
        columns = self._columns(case, variants, input_sets, COLUMNS_OF_THE_GPU, turns.gpu)
        with turns.machine():
            timings |= self._in_own_graphs(variants, input_sets)
            columns |= self._columns(case, variants, input_sets, COLUMNS_OF_THE_HOST, turns.gpu)
        rows = [
            self._row(
                checked,
                timings[checked.variant.name],
                noise,
                {f"{name}_us": found.get(checked.variant.name) for name, found in columns.items()},
            )
            for checked in right
        ]
        return Measured.of(rows, broken, wrong)

    def _at_its_best(self, case: Case, variant: Variant, input_sets: InputSets) -> Variant:
        variant = best_of_options(case, variant, input_sets, self.device)
        return best_of_choices(case, variant, input_sets, self.device) if self.search else variant

    def _in_our_graphs(
        self, case: Case, variants: Sequence[Variant], input_sets: InputSets, alone: Turn
    ) -> tuple[dict[str, Timing], float]:
        """Every variant's time, and by how much two timings of one of them differ: that of ours, if there is one."""
        calls = {variant.name: variant.call for variant in variants if variant.capturable}
        twice = next((variant for variant in variants if variant.ours and variant.capturable), variants[0])
        timings = time_variants(
            {**calls, _AGAIN: twice.call},
            input_sets,
            self.device,
            bytes_per_set=case.bytes,
            repetitions=self.repetitions,
            seconds=None if self.seconds is None else _HEADLINE_SHARE * self.seconds,
            alone=alone,
        )
        again, first = timings.pop(_AGAIN).p50_us, timings[twice.name].p50_us
        return timings, max(again, first) / min(again, first) - 1

    def _in_own_graphs(self, variants: Sequence[Variant], input_sets: InputSets) -> dict[str, Timing]:
        """The time of variants that bring a graph of their own, the host's launching of it included."""
        calls = {variant.name: variant.call for variant in variants if not variant.capturable}
        if not calls:
            return {}
        return time_events(
            calls,
            input_sets,
            self.device,
            calls=_STREAM_CALLS,
            repetitions=self.repetitions,
            seconds=self._column_seconds(),
        )

    def _columns(
        self, case: Case, variants: Sequence[Variant], input_sets: InputSets, names: Sequence[str], alone: Turn
    ) -> dict[str, dict[str, float]]:
        effort = Effort(max(3, self.repetitions // _COLUMN_SHARE), self._column_seconds())
        wanted = [name for name in self.columns if name in names]
        return measure_columns(case, variants, input_sets, self.device, wanted, effort, alone)

    def _column_seconds(self) -> float | None:
        if self.seconds is None:
            return None
        return (1 - _HEADLINE_SHARE) * self.seconds / (len(COLUMNS) + 1)

    def _row(self, checked: Checked, timing: Timing, noise: float, columns: dict[str, float | None]) -> Row:
        case, variant, machine = checked.case, checked.variant, self.machine
        shape = case.shape
        return Row(
            suite=shape.suite,
            name=shape.name,
            status=shape.status,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            a_dtype=dtype_name(shape.a_dtype),
            b_dtype=dtype_name(shape.b_dtype),
            out_dtype=dtype_name(shape.out_dtype),
            layout=shape.layout,
            activation=case.activation,
            static_b=variant.static_b,
            variant=variant.name,
            label=variant.label,
            ours=variant.ours,
            backend=variant.backend,
            config=None if variant.config is None else variant.config.to_json(),
            p20_us=timing.p20_us,
            p50_us=timing.p50_us,
            p80_us=timing.p80_us,
            repetitions=timing.repetitions,
            timing=timing.method,
            error=checked.error,
            torch_error=checked.torch_error,
            bytes=case.bytes,
            flops=case.flops,
            bandwidth=self.ceilings.bandwidth,
            rate=self.ceilings.rate(shape.a_dtype, shape.b_dtype),
            device=machine.device,
            device_type=machine.device_type,
            torch=machine.torch,
            triton=machine.triton,
            version=machine.version,
            commit=machine.commit,
            date=machine.date,
            noise=noise,
            chosen=None if variant.chosen is None else variant.chosen(),
            **columns,
        )
