"""The search for the fastest config: a quick round over all candidates, then the finalists side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decompose_k.config import PREFETCHES
from decompose_k.entries import Measured
from decompose_k.timing import GRAPHS

if TYPE_CHECKING:
    from decompose_k.config import Config
    from decompose_k.reference import Product
    from decompose_k.timing import Timing

# Enough calls a graph for a median to 1 %, few enough that thirty candidates take half a second.
SEARCH_CALLS = 64
QUICK_REPETITIONS = 3
FINAL_REPETITIONS = 9
FINALISTS = 4
# Of the best finalists, neighbours are tried that the heuristic does not rank.
NEIGHBOURED = 2
# Of so much of its time a steadier config may cost more than the fastest.
STEADY_MARGIN = 1.02
LEAST_REDUCE_BLOCK = 4
PREFETCH_BLOCKS = (0, 1, 2, 4)
FEWER_STAGES = (4, 5, 6)

# Times calls by label, side by side: time(calls, repetitions, graphs).
Time = Callable[[Mapping[str, "Product"], int, int], Mapping[str, "Timing"]]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search measured, the finalists first and each round by its medians, and why others were dropped."""

    finalists: tuple[Measured, ...]
    others: tuple[Measured, ...]
    dropped: tuple[str, ...]

    @property
    def config(self) -> Config | None:
        """The fastest config, or a steadier one next to it; None where all were dropped."""
        return steadiest(self.finalists)


def steadiest(measured: Sequence[Measured]) -> Config | None:
    """The fastest config; with a static weight, one as close as 2 % that leaves no room for a further program.

    Whether programs gather where there is room depends on what else runs, and on the M within the bucket: 40 x 128 x
    2880 took 12 % longer than 64 x 128 x 2880 with a config that was 1.8 % faster there.
    """
    configs = [(one.config, one.timing.p50_us) for one in measured if one.config is not None]
    if not configs:
        return None
    fastest, least = min(configs, key=lambda one: one[1])
    if fastest.launch != "static_b":
        return fastest
    near = [
        config
        for config, microseconds in configs
        if microseconds <= STEADY_MARGIN * least and (config.kernel, config.launch) == (fastest.kernel, fastest.launch)
    ]
    return max(near, key=lambda config: (config.reserve_kib, config == fastest))


def search(
    configs: Sequence[Config],
    build: Callable[[Config], Product],
    objection: Callable[[Product], str | None],
    time: Time,
    *,
    neighbours: Callable[[Config], Sequence[Config]] | None = None,
    beside: Mapping[str, Product] | None = None,
    repetitions: int = FINAL_REPETITIONS,
) -> Found:
    """Measure configs in two rounds and find the fastest.

    Args:
        configs: the candidates.
        build: the call that a config stands for.
        objection: why a call's result is not to be used, None where it is right; asked before a call is timed.
        time: the timer.
        neighbours: what is tried besides a config that came out well; by default `neighbours_of`.
        beside: further calls by label, timed with the finalists for comparison, which cannot win.
        repetitions: samples of each finalist.
    """
    dropped: list[str] = []

    def right(candidates: Sequence[Config]) -> dict[Config, Product]:
        calls = {}
        for config in dict.fromkeys(candidates):
            call = build(config)
            reason = objection(call)
            if reason is None:
                calls[config] = call
            else:
                dropped.append(f"{config}: {reason}")
        return calls

    calls = right(configs)
    quick = _timed(calls, time, QUICK_REPETITIONS, 1) if len(calls) > 1 else []
    ranked = [measured.config for measured in quick if measured.config is not None] or list(calls)
    # Torch's own kernel is always one: the quick round is too rough to have a slower config remembered in its place.
    finalists = {config: calls[config] for config in ranked if _is_finalist(config, ranked)}
    near = [other for config in ranked[:NEIGHBOURED] for other in (neighbours or neighbours_of)(config)]
    finalists |= right([config for config in near if config not in calls])
    final = _timed(finalists, time, repetitions, GRAPHS, beside or {})
    others = tuple(measured for measured in quick if measured.config not in finalists)
    return Found(tuple(final), others, tuple(dropped))


def _is_finalist(config: Config, ranked: Sequence[Config]) -> bool:
    return config.kernel == "mm" or config in ranked[:FINALISTS]


def neighbours_of(config: Config) -> tuple[Config, ...]:
    """A pair that reduces half or twice the outputs a program, has fewer stages, or prefetches something else."""
    others = list(reducers_beside(config))
    if config.kernel == "pair":
        others += [replace(config, num_stages=stages) for stages in FEWER_STAGES if stages < config.num_stages]
    if config.kernel == "pair" and config.reducer == "flat" and config.launch == "wait_first":
        fetched = [("", 0), *itertools.product(PREFETCHES[1:], PREFETCH_BLOCKS)]
        others += [replace(config, prefetch=operands, prefetch_blocks=blocks) for operands, blocks in fetched]
    return tuple(other for other in others if other != config)


def reducers_beside(config: Config) -> tuple[Config, ...]:
    """A pair with half and with twice the outputs a reducer program."""
    if config.kernel != "pair" or config.reducer != "flat":
        return ()
    sizes = (config.reduce_block // 2, config.reduce_block * 2)
    return tuple(replace(config, reduce_block=size) for size in sizes if size >= LEAST_REDUCE_BLOCK)


def _timed(
    calls: Mapping[Config, Product],
    time: Time,
    repetitions: int,
    graphs: int,
    beside: Mapping[str, Product] | None = None,
) -> list[Measured]:
    """Timings of configs and of what is measured beside them, fastest first."""
    # Configs may share a text, in which not every field is named: the timer knows them by number.
    numbered = {str(number): config for number, config in enumerate(calls)}
    named = {number: calls[config] for number, config in numbered.items()} | dict(beside or {})
    if not named:
        return []
    timings = time(named, repetitions, graphs)
    measured = [Measured(str(numbered.get(name, name)), timing, numbered.get(name)) for name, timing in timings.items()]
    return sorted(measured, key=lambda one: one.timing.p50_us)
