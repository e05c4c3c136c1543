"""Give each variant its best config by measuring its candidates, so that every generation shows what it can do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decompose_k.accuracy import Judge
from decompose_k.bench.variants import variants_of
from decompose_k.compiling import Work, compile_ahead
from decompose_k.search import QUICK_REPETITIONS, SEARCH_CALLS, reducers_beside, search
from decompose_k.timing import Timing, time_variants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from decompose_k.bench.cases import Case
    from decompose_k.bench.variant import Variant
    from decompose_k.problem import Problem
    from decompose_k.reference import Product


def best_of_choices(
    case: Case,
    variant: Variant,
    input_sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> Variant:
    """The variant with the fastest of its choices that is right; itself where it has none to choose from."""
    if len(variant.choices) < 2 or variant.build is None:
        return variant
    judge = Judge.of(case.problem(device.type), input_sets)

    def time(calls: Mapping[str, Product], repetitions: int, graphs: int) -> dict[str, Timing]:
        return time_variants(
            calls,
            input_sets,
            device,
            bytes_per_set=case.bytes,
            repetitions=repetitions,
            graph_calls=SEARCH_CALLS,
            graphs=graphs,
        )

    best = search(variant.choices, variant.build, judge.objection, time, neighbours=reducers_beside).config
    return variant if best is None else variant.with_config(best)


def best_of_options(
    case: Case,
    variant: Variant,
    input_sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> Variant:
    """The variant with the fastest of its options; itself where it has none."""
    if not variant.options:
        return variant
    timings = time_variants(
        variant.options,
        input_sets,
        device,
        bytes_per_set=case.bytes,
        repetitions=QUICK_REPETITIONS,
        graph_calls=SEARCH_CALLS,
        graphs=1,
    )
    return variant.with_option(min(timings, key=lambda name: timings[name].p50_us))


def compile_choices(
    cases: Sequence[Case], names: Callable[[Case], Sequence[str]], device: torch.device, jobs: int
) -> None:
    """Compile every Triton kernel that a search will try, in `jobs` processes; `names` tells a case's variants."""
    work: list[Work] = []
    for case in cases:
        for variant in variants_of(case, device, names(case)):
            problem = _problem(case, variant, device)
            work += [(problem, config) for config in variant.choices if config.backend == "triton"]
    compile_ahead(work, device, jobs)


def _problem(case: Case, variant: Variant, device: torch.device) -> Problem:
    problem = case.problem(device.type, static_b=variant.static_b)
    return problem if variant.fused else replace(problem, activation=None)
