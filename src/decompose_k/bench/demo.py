"""The demonstration: a dozen shapes checked, the seed grid and real shapes measured, all within a few minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decompose_k.bench.cases import Case, demo_cases, demo_checks
from decompose_k.bench.check import Checked, check_case
from decompose_k.bench.run import Outcome, Settings, run_cases
from decompose_k.bench.variant import DEFAULT_VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

# What one call may cost where two cores do the work: beyond, a single shape would take the whole budget.
_CPU_MAX_BYTES = 600 << 20
_CPU_MAX_FLOPS = 2e10
_CPU_REPETITIONS = 15
_GPU_REPETITIONS = 30


def settings_for(device: torch.device, budget: float) -> Settings:
    """How the demonstration measures on a device within a budget in seconds."""
    settings = Settings(_GPU_REPETITIONS, budget=budget, variants=DEFAULT_VARIANTS, columns=())
    if device.type == "cuda":
        return settings
    return replace(settings, repetitions=_CPU_REPETITIONS, max_bytes=_CPU_MAX_BYTES, max_flops=_CPU_MAX_FLOPS)


def run_checks(
    device: torch.device, announce: Callable[[str], None], cases: Sequence[Case] | None = None
) -> list[Checked]:
    """Check every default variant of a dozen real shapes (or of `cases`) against fp64."""
    checks: list[Checked] = []
    for case in demo_checks() if cases is None else cases:
        announce(f"checking {case}")
        checks += check_case(case, device)
    return checks


def run_demo(
    device: torch.device,
    folder: Path,
    budget: float,
    announce: Callable[[str], None],
    cases: Sequence[Case] | None = None,
) -> Outcome:
    """Measure the demonstration's cases (or `cases`) within a budget in seconds."""
    chosen = demo_cases() if cases is None else cases
    return run_cases(chosen, device, folder, settings_for(device, budget), announce=announce)
