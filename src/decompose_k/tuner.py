"""Tuning: measure the candidates of problems on this machine and remember the winners."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from decompose_k import cache
from decompose_k.accuracy import Judge, Operands, brief, make_operands, own_product, torch_product
from decompose_k.compiling import NO_TIME, Work, code_of, compile_ahead
from decompose_k.config import Config
from decompose_k.device import Device, free_bytes
from decompose_k.entries import Entry, Measured
from decompose_k.heuristics import MOST_CANDIDATES, candidates
from decompose_k.legality import is_legal, k_blocks
from decompose_k.plan import describe, natural_split_k
from decompose_k.problem import Problem
from decompose_k.search import FINAL_REPETITIONS, SEARCH_CALLS, neighbours_of, search
from decompose_k.timing import Timing, make_input_sets, time_variants

if TYPE_CHECKING:
    from collections.abc import Mapping

    from decompose_k.reference import Product

MEASURED, REMEMBERED, LEFT_OUT = "measured", "remembered", "left out"

# Of so many of the best pairs, the earlier generations are measured too: no dependent launch, and the tile reducer.
_GENERATIONS_OF = 1
# Candidates whose neighbours are compiled ahead: the finalists are likely to be among them.
_LIKELY_FINALISTS = 4
# Chunk lengths of the torch engine's split form that are tried, beside the one that is planned untuned.
_SPLIT_CHUNKS = (1024, 2048, 4096, 8192, 16384, 65536)
_MOST_SPLITS = 256
# Of the budget: compiling may take half, and of a problem's share each of two rounds may sample for a third.
_COMPILING_SHARE = 0.5
_ROUND_SHARE = 1 / 3
# Two sets of operands, widened copies, the truth in fp64, and room for everything else.
_MEMORY_SHARE = 6

# A year.
_MOST_SECONDS = 366 * 86400
# A worker holds a GPU context of some hundred MB.
_MOST_JOBS = 16

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning did with a (bucketed) problem.

    `status` is `measured`, `remembered` from an earlier time, or `left out`; `entry` is what is remembered now, None
    where it was left out; `notes` say why, or which candidates were dropped and why.
    """

    problem: Problem
    status: str
    entry: Entry | None = None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Config | None:
        """The config that won; None where the problem was left out."""
        return None if self.entry is None else self.entry.config

    @property
    def timings(self) -> tuple[Measured, ...]:
        """Everything that was measured, finalists first."""
        return () if self.entry is None else self.entry.timings


def tune(
    problems: Problem | Iterable[Problem],
    *,
    device: torch.device | str | None = None,
    budget: float | None = None,
    jobs: int | None = None,
    repetitions: int = FINAL_REPETITIONS,
    most_candidates: int = MOST_CANDIDATES,
    progress: Callable[[str], None] | None = None,
    save: bool = True,
    force: bool = False,
    group: Any = None,
) -> tuple[Tuned, ...]:
    """Measure the candidates of each problem and remember the fastest, or one as fast that is steadier, for `matmul`.

    A candidate is timed only if its error against fp64 is within what torch's own allows. The candidates are what is
    remembered already, the heuristic's, torch's own kernel, the split form in torch and our earlier generations; all
    are measured quickly, the finalists again, side by side, and with them what prefetches or reduces otherwise than the
    best, or has fewer stages. On a GPU operands come from device memory and no host time is counted. What is remembered
    holds for all problems of the same bucket of M, and with `batch_invariant` for every M.

    Where torch.distributed is initialised the call is collective: the first rank measures, every rank of the group
    uses what it found, and only the first one writes files. The group's time-out must be longer than the tuning takes.

    Args:
        problems: one or several; equal buckets are tuned once.
        device: where; by default the current device of the problems' type.
        budget: seconds for everything. What is done when they end is kept, the rest is left out.
        jobs: processes that compile; by default one for each core, 16 at the most.
        repetitions: samples of each finalist.
        most_candidates: how many of the heuristic's ranking are measured, besides what is remembered, torch's kernels
            and our earlier generations. With 12 of 30 the best was missed by 3 % in one problem of ten.
        progress: called with what is about to be done, once for each problem and once before compiling.
        save: write the user's cache; else the choices last as long as the process.
        force: measure again what is remembered already.
        group: a torch.distributed process group; None is the default one.

    Returns:
        One result for each bucketed problem, in the order in which they first came.

    Raises:
        TypeError, ValueError: a wrong argument.
        RuntimeError: on the other ranks, where the first one failed.

    >>> problem = Problem.make(4, 4, 4096, torch.float32, device_type="cpu")
    >>> result, = tune([problem], save=False)
    >>> result.status, result.config.backend
    ('measured', 'torch')
    """
    wanted = _buckets(problems)
    _check_arguments(budget, jobs, repetitions, most_candidates, progress, save, force)
    place = place_of(wanted, device)
    run = _Run(
        place,
        Device.of(place),
        min(_MOST_JOBS, os.cpu_count() or 1) if jobs is None else jobs,
        repetitions,
        most_candidates,
        progress or _say_nothing,
        save,
        None if budget is None else time.monotonic() + budget,
    )
    if _is_shared(group):
        return _tune_on_first_rank(run, wanted, force, group)
    return run.tune(wanted, force)


@dataclass(frozen=True, slots=True)
class _Run:
    """What all problems of one call share."""

    place: torch.device
    device: Device
    jobs: int
    repetitions: int
    most_candidates: int
    progress: Callable[[str], None]
    save: bool
    deadline: float | None
    clock: Clock = time.monotonic

    def tune(self, problems: Sequence[Problem], force: bool) -> tuple[Tuned, ...]:
        results = {problem: None if force else _remembered(problem, self.device) for problem in problems}
        todo = [problem for problem, result in results.items() if result is None]
        # Once for all: what is found of one problem is not to be a candidate of the next, which was not compiled.
        found = {problem: candidates_of(problem, self.device, self.most_candidates) for problem in todo}
        failures = self._compile(found)
        for place, problem in enumerate(todo):
            left = self._seconds_left()
            if left is not None and left <= 0:
                results[problem] = _left_out(problem, "the time budget was used up")
                continue
            self.progress(describe(problem))
            results[problem] = self._measure(
                problem, found[problem], failures, None if left is None else left / (len(todo) - place)
            )
        return tuple(result for result in results.values() if result is not None)

    def _compile(self, found: Mapping[Problem, Sequence[Config]]) -> Mapping[Any, str]:
        work = work_of(found, self.device)
        left = self._seconds_left()
        if not work or (left is not None and left <= 0):
            return {}
        self.progress(f"compiling up to {len(work)} candidates in {self.jobs} processes")
        return compile_ahead(work, self.place, self.jobs, seconds=None if left is None else _COMPILING_SHARE * left)

    def _measure(
        self, problem: Problem, found: Sequence[Config], failures: Mapping[Any, str], seconds: float | None
    ) -> Tuned:
        if not problem.is_float:
            return _left_out(problem, "only real floating dtypes are tuned; others run on torch's own kernel")
        if problem.bytes * _MEMORY_SHARE > free_bytes(self.place):
            return _left_out(problem, f"its operands of {problem.bytes / 1e9:.1f} GB leave too little memory")
        reasons = {config: failures.get(code_of(problem, config)) for config in found if config.backend == "triton"}
        dropped = tuple(f"{config}: {reason}" for config, reason in reasons.items() if reason is not None)
        if reasons and all(reason == NO_TIME for reason in reasons.values()):
            return _left_out(problem, "the time budget left none of its kernels compiled")
        usable = [config for config in found if reasons.get(config) is None]
        try:
            entry, notes = self._search(problem, usable, failures, seconds)
        except RuntimeError as error:
            # Out of memory, or a device that fails: the other problems may be luckier.
            return _left_out(problem, brief(error))
        if entry is None:
            return replace(_left_out(problem, "no candidate was right"), notes=(*dropped, *notes))
        cache.remember([entry], self.device, save=self.save)
        return Tuned(problem, MEASURED, entry, (*dropped, *notes))

    def _search(
        self, problem: Problem, configs: Sequence[Config], failures: Mapping[Any, str], seconds: float | None
    ) -> tuple[Entry | None, tuple[str, ...]]:
        generator = torch.Generator(self.place).manual_seed(0)
        input_sets: list[Operands] = make_input_sets(
            lambda: make_operands(problem, self.place, generator), problem.bytes, self.place
        )
        judge = Judge.of(problem, input_sets)

        def timer(calls: Mapping[str, Product], repetitions: int, graphs: int) -> dict[str, Timing]:
            return time_variants(
                calls,
                input_sets,
                self.place,
                bytes_per_set=problem.bytes,
                repetitions=repetitions,
                seconds=None if seconds is None else _ROUND_SHARE * seconds,
                graph_calls=SEARCH_CALLS,
                graphs=graphs,
            )

        def compiled_neighbours(config: Config) -> list[Config]:
            return [
                near for near in _neighbours(config, problem, self.device) if code_of(problem, near) not in failures
            ]

        found = search(
            configs,
            lambda config: own_product(problem, config),
            judge.objection,
            timer,
            neighbours=compiled_neighbours,
            beside=dict([torch_product(problem)]),
            repetitions=self.repetitions,
        )
        if found.config is None:
            return None, found.dropped
        timings = tuple(replace(one, timing=_rounded(one.timing)) for one in (*found.finalists, *found.others))
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return Entry(problem, found.config, timings, now), found.dropped

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.clock()


def candidates_of(problem: Problem, device: Device, most: int = MOST_CANDIDATES) -> tuple[Config, ...]:
    """What tuning measures for a bucketed problem: what is remembered, also with another epilogue, the heuristic's
    candidates, torch's kernels and earlier generations."""
    known = (*cache.remembered(problem, device), *cache.remembered_kin(problem, device))
    found = [*(remembered.entry.config for remembered in known), *candidates(problem, device)[:most]]
    pairs = [config for config in found if config.kernel == "pair"][:_GENERATIONS_OF]
    for pair in pairs:
        plain = replace(pair, launch="plain", prefetch="", prefetch_blocks=0, reserve_kib=0)
        found += [plain, replace(plain, reducer="tile")]
    legal = [config for config in found if is_legal(config, problem, device) is None]
    return tuple(dict.fromkeys([*legal, Config("mm"), *_split_forms(problem, device)]))


def work_of(candidates_by_problem: Mapping[Problem, Sequence[Config]], device: Device) -> list[Work]:
    """The Triton configs that tuning problems will meet, the likeliest winners of all problems first."""
    ranked: list[tuple[int, Work]] = []
    for problem, configs in candidates_by_problem.items():
        found = [config for config in configs if config.backend == "triton"]
        ranked += [(rank, (problem, config)) for rank, config in enumerate(found)]
        near = (other for config in found[:_LIKELY_FINALISTS] for other in _neighbours(config, problem, device))
        ranked += [(_LIKELY_FINALISTS, (problem, neighbour)) for neighbour in near]
    return [work for _, work in sorted(ranked, key=lambda one: one[0])]


def _neighbours(config: Config, problem: Problem, device: Device) -> list[Config]:
    blocks = k_blocks(config, problem)
    # So many blocks are all of them, which has a name of its own.
    return [
        near
        for near in neighbours_of(config)
        if near.prefetch_blocks < blocks and is_legal(near, problem, device) is None
    ]


def _split_forms(problem: Problem, device: Device) -> list[Config]:
    natural = natural_split_k(problem, device)
    if device.type == "cuda":
        return [Config("bmm_sum", split_k=natural)]
    splits = {natural, *(problem.k // chunk for chunk in _SPLIT_CHUNKS)}
    return [Config("bmm_sum", split_k=split) for split in sorted(splits) if 1 <= split <= min(problem.k, _MOST_SPLITS)]


def _remembered(problem: Problem, device: Device) -> Tuned | None:
    for found in cache.remembered(problem, device):
        if found.origin == cache.TUNED:
            return Tuned(problem, REMEMBERED, found.entry)
    return None


def _left_out(problem: Problem, note: str) -> Tuned:
    return Tuned(problem, LEFT_OUT, None, (note,))


def _tune_on_first_rank(run: _Run, problems: Sequence[Problem], force: bool, group: Any) -> tuple[Tuned, ...]:
    outcome: tuple[tuple[Tuned, ...], str | None] | None = None
    failure: Exception | None = None
    if torch.distributed.get_rank(group) == 0:
        try:
            outcome = (run.tune(problems, force), None)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            failure, outcome = error, ((), brief(error))
    results, said = cache.broadcast_from_first(outcome, group)
    if failure is not None:
        raise failure
    if said is not None:
        raise RuntimeError(f"tuning failed on the first rank: {said}")
    cache.synchronize(group, run.device)
    return tuple(results)


def _is_shared(group: Any) -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_rank(group) < 0:
            raise ValueError(f"group must be one that this rank belongs to; got {group!r}")
        return True
    if group is not None:
        raise ValueError(f"group must be None where torch.distributed is not initialised; got {group!r}")
    return False


def _buckets(problems: Any) -> tuple[Problem, ...]:
    given = (problems,) if isinstance(problems, Problem) else problems
    if not isinstance(given, Iterable):
        raise TypeError(f"problems must be a Problem or several; got {type(problems).__name__}")
    given = tuple(given)
    for problem in given:
        if not isinstance(problem, Problem):
            raise TypeError(f"problems must hold Problem values alone; got {type(problem).__name__}")
        if 0 in (problem.m, problem.n, problem.k):
            raise ValueError(f"problems must have sizes >= 1 to be measured; got {describe(problem)}")
    return tuple(dict.fromkeys(problem.bucketed() for problem in given))


def _check_arguments(
    budget: Any, jobs: Any, repetitions: Any, most_candidates: Any, progress: Any, save: Any, force: Any
) -> None:
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float))):
        raise TypeError(f"budget must be None or a number of seconds; got {budget!r}")
    if budget is not None and not 0 < budget <= _MOST_SECONDS:
        raise ValueError(f"budget must be > 0 and at most {_MOST_SECONDS:.0f} seconds; got {budget!r}")
    counts = {"jobs": 1 if jobs is None else jobs, "repetitions": repetitions, "most_candidates": most_candidates}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer; got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be >= 1; got {value}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be None or callable; got {progress!r}")
    for name, value in (("save", save), ("force", force)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def place_of(problems: Sequence[Problem], device: Any) -> torch.device:
    """The torch device to work on, by default the current one of the problems' type; raises where there is none."""
    if device is not None and not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a torch.device, a string or None; got {type(device).__name__}")
    kinds = sorted({problem.device_type for problem in problems})
    if device is None and len(kinds) > 1:
        raise ValueError(f"problems must be of one device_type; got {' and '.join(kinds)}")
    asked = device if device is not None else kinds[0] if kinds else "cpu"
    try:
        place = torch.device(asked)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must name a device of this machine; got {str(asked)!r}: {error}") from error
    if any(kind != place.type for kind in kinds) or place.type == "meta":
        raise ValueError(f"device must be of the problems' device_type {' and '.join(kinds)}; got {str(place)!r}")
    if place.type != "cuda":
        return place
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def _rounded(timing: Timing) -> Timing:
    """To a nanosecond, which no timing is exact to."""
    p20, p50, p80 = (max(0.001, round(value, 3)) for value in (timing.p20_us, timing.p50_us, timing.p80_us))
    return replace(timing, p20_us=p20, p50_us=p50, p80_us=p80)


def _say_nothing(text: str) -> None:
    del text
