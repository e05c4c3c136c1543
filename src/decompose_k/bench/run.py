"""Measure a list of cases into a folder within a budget: rows are written as they come, then the report from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from decompose_k.bench.agenda import Agenda
from decompose_k.bench.cases import Case, LeftOut, affordable
from decompose_k.bench.columns import COLUMNS
from decompose_k.bench.compiled import fresh_timings
from decompose_k.bench.machine import Ceilings, Machine, measure_ceilings, rate_dtype
from decompose_k.bench.measure import Bench, Measured
from decompose_k.bench.rows import JSONL_NAME, Row, append_jsonl, mend_jsonl, read_jsonl
from decompose_k.bench.search import compile_choices
from decompose_k.bench.side_by_side import measure_here, measure_side_by_side, tuning_timer
from decompose_k.bench.suites import variants_for
from decompose_k.device import free_bytes
from decompose_k.dtypes import dtype_name

if TYPE_CHECKING:
    from pathlib import Path

    from decompose_k.timing import Clock

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a list of cases is measured: samples of each variant, seconds for a case's timing, seconds for everything.

    Without `variants`, a case has those that its suite is there to show. `search` gives each variant the best of its
    configs. On a GPU `jobs` processes compile, of which one at a time is timed; on a CPU they would disturb each other.
    `columns` are measured beside the headline.
    """

    repetitions: int = 30
    seconds: float | None = None
    budget: float | None = None
    variants: tuple[str, ...] | None = None
    search: bool = False
    jobs: int = 1
    columns: tuple[str, ...] = COLUMNS
    max_flops: float = float("inf")
    max_bytes: float = float("inf")


@dataclass(slots=True)
class Outcome:
    """What came out: rows, variants of ours that were wrong or raised, alternatives that did, cases not measured."""

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """One sentence for each case left out, each variant that was wrong or could not run."""
        wrong = [f"WRONG and not timed: {failure}" for failure in self.failures]
        missing = [f"not measured: {missing}" for missing in self.missing]
        return wrong + missing + [f"{left.case}: {left.reason}" for left in self.left_out]

    def add(self, found: Measured | LeftOut) -> None:
        """What came of one case."""
        if isinstance(found, LeftOut):
            self.left_out.append(found)
            return
        self.rows += found.rows
        self.failures += found.failures
        self.missing += found.missing


def open_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> list[Row]:
    """Make the output folder; returns the rows to resume from.

    Raises FileExistsError where it holds rows and neither `resume` nor `overwrite` says what to do with them, and
    OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JSONL_NAME
    if path.exists() and resume:
        mend_jsonl(path)
        return list(read_jsonl(path)) if path.stat().st_size else []
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists; resume it (--resume), overwrite it (--overwrite) or choose another output folder"
        )
    path.write_text("", encoding="utf-8")
    return []


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    folder: Path,
    settings: Settings,
    *,
    announce: Announce,
    done: Sequence[Row] = (),
    clock: Clock = time.monotonic,
) -> Outcome:
    """Measure each case that machine and budget can bear and that `done` lacks; `announce` hears each by name."""
    deadline = None if settings.budget is None else clock() + settings.budget
    machine = Machine.of(device)
    outcome = Outcome(rows=list(done))
    measured = {row.case for row in done}
    todo = [case for case in cases if _key(case, machine) not in measured]
    # Two sets of operands, the widened copies of a baseline, and room for everything else.
    limit = int(min(settings.max_bytes, free_bytes(device) // 6))
    todo, outcome.left_out = affordable(todo, max_bytes=limit, max_flops=settings.max_flops)
    if not todo:
        return outcome
    jobs = min(settings.jobs, len(todo)) if device.type == "cuda" and tuning_timer() is not None else 1
    announce("measuring the ceilings")
    bench = Bench(
        device,
        machine,
        _ceilings(todo, device),
        settings.repetitions,
        settings.seconds,
        settings.variants,
        settings.search and device.type == "cuda",
        settings.columns,
    )

    def names(case: Case) -> tuple[str, ...]:
        return settings.variants or variants_for(case.shape.suite)

    if bench.search:
        announce("compiling the candidates")
        compile_choices(todo, names, device, settings.jobs)
    # What is too large to be measured beside others is measured alone, after them.
    together = [case for case in todo if case.bytes <= limit // jobs] if jobs > 1 else []
    apart = [case for case in todo if case.bytes > limit // jobs]
    if len(together) < 2:
        together, apart = [], todo

    def finish(found: Measured | LeftOut) -> None:
        if isinstance(found, Measured):
            append_jsonl(folder / JSONL_NAME, found.rows)
        outcome.add(found)

    with fresh_timings() if device.type == "cuda" else nullcontext():
        if together:
            agenda = Agenda(together, deadline, clock, announce)
            measure_side_by_side(bench, agenda, jobs, finish)
            outcome.left_out += agenda.left_out
        agenda = Agenda(apart, deadline, clock, announce)
        measure_here(bench, agenda, finish)
        outcome.left_out += agenda.left_out
    return outcome


def _ceilings(cases: Sequence[Case], device: torch.device) -> Ceilings:
    return measure_ceilings(device, {rate_dtype(case.shape.a_dtype, case.shape.b_dtype) for case in cases})


def _key(case: Case, machine: Machine) -> tuple[object, ...]:
    shape = case.shape
    dtypes = (dtype_name(dtype) for dtype in (shape.a_dtype, shape.b_dtype, shape.out_dtype))
    sizes = (shape.suite, shape.name, shape.m, shape.n, shape.k)
    return (*sizes, *dtypes, shape.layout, case.activation, machine.device)
