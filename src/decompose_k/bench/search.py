"""Give each variant its best config by measuring its candidates, so that every generation shows what it can do."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.bench.check import check, make_inputs
from decompose_k.bench.variants import TORCH, Variant, variants_of
from decompose_k.config import Config
from decompose_k.timing import time_variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.cases import Case

# Enough calls a graph for a median to 1 %, few enough that thirty candidates take half a second.
_SEARCH_CALLS = 64
_FINALISTS = 4


def best_of_choices(
    case: Case,
    variant: Variant,
    input_sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> Variant:
    """The variant with the fastest of its choices that is right; itself where it has none to choose from."""
    if len(variant.choices) < 2:
        return variant
    torch_variant = variants_of(case, device, (TORCH,))[0]
    attempts = [variant.with_config(config) for config in variant.choices]
    checks = check(case, [torch_variant, *attempts], *input_sets[0])[1:]
    right = [checked.variant for checked in checks if checked.passed]
    if not right:
        return variant
    finalists = _fastest(right, input_sets, device, case.bytes, 3, 1)[:_FINALISTS]
    finalists += [neighbour for variant in finalists[:2] for neighbour in _with_other_reducers(variant)]
    return _fastest(finalists, input_sets, device, case.bytes, 9, 3)[0]


def _with_other_reducers(variant: Variant) -> list[Variant]:
    """The variant with half and with twice the outputs a reducer program."""
    config = variant.config
    if config is None or config.kernel != "pair":
        return []
    sizes = (config.reduce_block // 2, config.reduce_block * 2)
    return [variant.with_config(replace(config, reduce_block=size)) for size in sizes if size >= 4]


def _fastest(
    variants: Sequence[Variant],
    input_sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    bytes_per_set: int,
    repetitions: int,
    graphs: int,
) -> list[Variant]:
    calls = {str(index): variant.call for index, variant in enumerate(variants)}
    timings = time_variants(
        calls,
        input_sets,
        device,
        bytes_per_set=bytes_per_set,
        repetitions=repetitions,
        graph_calls=_SEARCH_CALLS,
        graphs=graphs,
    )
    order = sorted(calls, key=lambda name: timings[name].p50_us)
    return [variants[int(name)] for name in order]


def compile_ahead(cases: Sequence[Case], names: Sequence[str], device: torch.device, jobs: int) -> None:
    """Compile every Triton kernel that a search will try, in `jobs` processes that fill Triton's cache on disk.

    One process compiles about one kernel a second; a search over the seed grid meets some hundreds.
    """
    work: dict[tuple[Any, ...], tuple[Case, str, Config]] = {}
    for case in cases:
        for variant in variants_of(case, device, names):
            for config in variant.choices:
                if config.backend == "triton":
                    work.setdefault(
                        (_code_key(case), variant.name, _without_split(config)), (case, variant.name, config)
                    )
    items = list(work.values())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for _ in pool.map(_compile, [(str(device), items[start::jobs]) for start in range(jobs)]):
            pass


def _code_key(case: Case) -> tuple[Any, ...]:
    """What of a case decides the code that Triton makes: dtypes, layout, and which sizes are 1 or divisible by 16."""
    shape = case.shape
    sizes = tuple((size == 1, size % 16 == 0) for size in (shape.m, shape.n, shape.k))
    small = shape.m if shape.m <= 2 else 0
    return (shape.a_dtype, shape.b_dtype, shape.out_dtype, shape.layout, case.activation, sizes, small)


def _without_split(config: Config) -> tuple[Config, bool]:
    """A config without what is only an argument of the kernels; the size of the reducer's block is part of the code."""
    return replace(config, split_k=1 << max(0, config.split_k - 1).bit_length(), group_m=8), config.split_k > 1


def _compile(work: tuple[str, list[tuple[Case, str, Config]]]) -> None:
    device = torch.device(work[0])
    for case, name, config in work[1]:
        variant = next(variant for variant in variants_of(case, device, (name,)) if variant.name == name)
        a, b = make_inputs(case, device, torch.Generator(device).manual_seed(0))
        variant.with_config(config).call(a, b)
    torch.cuda.synchronize(device)
