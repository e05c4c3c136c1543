"""Check every variant of a case against fp64, then time those that are right, side by side, into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decompose_k.bench.check import Checked, check, make_inputs
from decompose_k.bench.rows import Row
from decompose_k.bench.search import best_of_choices
from decompose_k.bench.variants import DEFAULT_VARIANTS, variants_of
from decompose_k.dtypes import dtype_name
from decompose_k.timing import Timing, make_input_sets, time_variants

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case
    from decompose_k.bench.machine import Ceilings, Machine


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases of one run share."""

    device: torch.device
    machine: Machine
    ceilings: Ceilings
    repetitions: int = 30
    seconds: float | None = None
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    search: bool = False

    def measure(self, case: Case) -> tuple[list[Row], list[Checked]]:
        """Rows of the variants that are right, and the checks of those that are not, which are not timed."""
        generator = torch.Generator(self.device).manual_seed(0)
        input_sets = make_input_sets(lambda: make_inputs(case, self.device, generator), case.bytes, self.device)
        chosen = variants_of(case, self.device, self.variants)
        if self.search:
            chosen = tuple(best_of_choices(case, variant, input_sets, self.device) for variant in chosen)
        checks = check(case, chosen, *input_sets[0])
        right = [checked for checked in checks if checked.passed]
        failures = [checked for checked in checks if not checked.passed]
        if not right:
            return [], failures
        timings = time_variants(
            {checked.variant.name: checked.variant.call for checked in right},
            input_sets,
            self.device,
            bytes_per_set=case.bytes,
            repetitions=self.repetitions,
            seconds=self.seconds,
        )
        rows = [self._row(checked, timings[checked.variant.name]) for checked in right]
        return rows, failures

    def _row(self, checked: Checked, timing: Timing) -> Row:
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
        )
