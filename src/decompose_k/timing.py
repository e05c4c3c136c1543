"""The one timer, for the tuner and for the benchmarks.

On a GPU ("graph-cold"): input sets that together exceed twice the L2 cache, one CUDA graph that calls the function once
on each in turn, median over replays divided by the number of calls. Every call reads its operands from device memory
and no host time is in the number. On a CPU ("rotating"): one call after another, each on the next input set.
Repetitions of all variants are interleaved, so that a drift of the machine hits all alike.

Beside that, for what a caller sees who uses no graph: `time_events` puts events around eager calls, which on a fast GPU
reads the host's time as much as the GPU's, and `time_host` takes the host's alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decompose_k.device import Device

GRAPH_COLD = "graph-cold"
GRAPH_WARM = "graph-warm"
STREAM_COLD = "stream-cold"
EVENT = "event"
HOST = "host"
CPU_ROTATING = "cpu-rotating"

MAX_SETS = 1024
MIN_REPETITIONS = 3
WARM_UPS = 2
# A replay must outlast the host's launch of the next one, or the gap between them would be counted.
MIN_GRAPH_CALLS = 200
MAX_GRAPH_BYTES = 4 << 30
# Programs can share multiprocessors otherwise in another graph (see kernels.residency): several are pooled.
GRAPHS = 2
# Larger than the last-level cache of most CPUs, small enough to fill in a moment.
CPU_CACHE_BYTES = 32 << 20
MAX_CPU_SETS = 64
# Few enough that the launch queue never fills, which would make the host wait for the GPU.
HOST_CALLS = 20

Inputs = tuple[Any, ...]
Call = Callable[..., object]
Clock = Callable[[], float]
# What is entered while something is timed.
Turn = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median, 20th and 80th percentile, over `repetitions` samples."""

    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    method: str

    @classmethod
    def of(cls, samples_us: Sequence[float], method: str) -> Timing:
        """The percentiles of samples; raises ValueError where there are none."""
        if not samples_us:
            raise ValueError("samples_us must hold at least one sample; got none")
        ordered = sorted(samples_us)
        p20, p50, p80 = (_quantile(ordered, fraction) for fraction in (0.2, 0.5, 0.8))
        return cls(p20, p50, p80, len(ordered), method)


def count_sets(bytes_per_set: int, cache_bytes: int, memory_bytes: int, max_sets: int = MAX_SETS) -> int:
    """How many input sets make each call read from memory: together more than twice the cache, within the memory."""
    bytes_per_set = max(bytes_per_set, 1)
    wanted = 2 * cache_bytes // bytes_per_set + 1
    affordable = memory_bytes // bytes_per_set
    return max(1, min(max(wanted, 2), affordable, max_sets))


def make_input_sets(make: Callable[[], Inputs], bytes_per_set: int, device: torch.device | str) -> list[Inputs]:
    """As many results of `make()` as `count_sets` asks for on this device; at most a quarter of its free memory."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count = count_sets(bytes_per_set, Device.of(device).l2_bytes, free // 4)
    else:
        count = count_sets(bytes_per_set, CPU_CACHE_BYTES, 2 << 30, MAX_CPU_SETS)
    return [make() for _ in range(count)]


def time_variants(
    variants: Mapping[str, Call],
    input_sets: Sequence[Inputs],
    device: torch.device | str,
    *,
    bytes_per_set: int = 0,
    repetitions: int = 30,
    seconds: float | None = None,
    graph_calls: int = MIN_GRAPH_CALLS,
    graphs: int = GRAPHS,
    alone: Turn = contextlib.nullcontext,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Time `variant(*inputs)` for every variant, side by side.

    `input_sets` are used in turn; `repetitions` samples are taken of each variant, or fewer (but at least 3) once
    `seconds` have passed on `clock`. `bytes_per_set` says how much memory one set has, from which a GPU timing knows
    whether it was cold; on a GPU `graphs` graphs of at least `graph_calls` calls are captured. Within `alone()` is all
    that is timed, and not the capturing. Raises ValueError for no variants, no inputs or no repetitions.
    """
    if not variants:
        raise ValueError("variants must name at least one callable; got none")
    if not input_sets:
        raise ValueError("input_sets must hold at least one set; got none")
    if repetitions < 1:
        raise ValueError(f"repetitions must be >= 1; got {repetitions}")
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_graphs(
                variants, input_sets, device, bytes_per_set, repetitions, seconds, graph_calls, graphs, alone, clock
            )
    with alone():
        return _time_calls(variants, input_sets, repetitions, seconds, clock)


def _time_calls(
    variants: Mapping[str, Call],
    input_sets: Sequence[Inputs],
    repetitions: int,
    seconds: float | None,
    clock: Clock,
) -> dict[str, Timing]:
    for call in variants.values():
        call(*input_sets[0])
    turns = itertools.cycle(input_sets)

    def sample(name: str, _: int) -> float:
        inputs = next(turns)
        start = clock()
        variants[name](*inputs)
        return (clock() - start) * 1e6

    return _interleaved(variants, sample, CPU_ROTATING, repetitions, seconds, clock)


def _time_graphs(
    variants: Mapping[str, Call],
    input_sets: Sequence[Inputs],
    device: torch.device,
    bytes_per_set: int,
    repetitions: int,
    seconds: float | None,
    graph_calls: int,
    graphs: int,
    alone: Turn,
    clock: Clock,
) -> dict[str, Timing]:
    total = bytes_per_set * len(input_sets)
    method = GRAPH_COLD if total > 2 * Device.of(device).l2_bytes else GRAPH_WARM
    calls = len(input_sets) * graph_cycles(len(input_sets), bytes_per_set, graph_calls)
    captured = {name: [_capture(call, input_sets, calls) for _ in range(graphs)] for name, call in variants.items()}

    def sample(name: str, repetition: int) -> float:
        return _replay_seconds(captured[name][repetition % graphs]) / calls * 1e6

    with alone():
        for graph in (graph for several in captured.values() for graph in several):
            for _ in range(WARM_UPS):
                graph.replay()
        torch.cuda.synchronize(device)
        return _interleaved(variants, sample, method, repetitions, seconds, clock)


def time_events(
    variants: Mapping[str, Call],
    input_sets: Sequence[Inputs],
    device: torch.device | str,
    *,
    calls: int = 1,
    repetitions: int = 30,
    seconds: float | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Time eager calls on a GPU by the events around them: `calls` at a time, each on the next input set.

    Where the host needs longer to launch than the GPU to run, this is the host's time. With many calls at a time
    (`stream-cold`) it is what a stream of eager calls takes.
    """
    device = torch.device(device)
    turns = itertools.cycle(input_sets)

    def sample(name: str, _: int) -> float:
        inputs = [next(turns) for _ in range(calls)]
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for one in inputs:
            variants[name](*one)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    with torch.cuda.device(device):
        _warm_up(variants, input_sets)
        return _interleaved(variants, sample, EVENT if calls == 1 else STREAM_COLD, repetitions, seconds, clock)


def time_host(
    variants: Mapping[str, Call],
    input_sets: Sequence[Inputs],
    device: torch.device | str,
    *,
    repetitions: int = 30,
    seconds: float | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Time what the host spends on an eager call to a GPU: a few calls in a row, without waiting for any of them."""
    device = torch.device(device)

    def sample(name: str, _: int) -> float:
        torch.cuda.synchronize()
        start = clock()
        for index in range(HOST_CALLS):
            variants[name](*input_sets[index % len(input_sets)])
        return (clock() - start) * 1e6 / HOST_CALLS

    with torch.cuda.device(device):
        _warm_up(variants, input_sets)
        return _interleaved(variants, sample, HOST, repetitions, seconds, clock)


def _warm_up(variants: Mapping[str, Call], input_sets: Sequence[Inputs]) -> None:
    for call in variants.values():
        for _ in range(WARM_UPS):
            call(*input_sets[0])


def _interleaved(
    variants: Mapping[str, Call],
    sample: Callable[[str, int], float],
    method: str,
    repetitions: int,
    seconds: float | None,
    clock: Clock,
) -> dict[str, Timing]:
    """Samples of all variants in turns, each turn begun by another; fewer once `seconds` have passed."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    deadline = None if seconds is None else clock() + seconds
    for repetition in range(repetitions):
        if repetition >= MIN_REPETITIONS and deadline is not None and clock() > deadline:
            break
        for name in _rotated(tuple(variants), repetition):
            samples[name].append(sample(name, repetition))
    return {name: Timing.of(values, method) for name, values in samples.items()}


def graph_cycles(sets: int, bytes_per_set: int, calls: int = MIN_GRAPH_CALLS) -> int:
    """How often one graph goes through all input sets: enough calls to hide the host, not more bytes than needed."""
    wanted = math.ceil(calls / sets)
    affordable = MAX_GRAPH_BYTES // max(1, sets * bytes_per_set)
    return max(1, min(wanted, affordable))


def _capture(call: Call, input_sets: Sequence[Inputs], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call(*input_sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(*input_sets[index % len(input_sets)])
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    # The untimed replay keeps the GPU busy while the host queues the timed one, so no launch gap is counted.
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _rotated(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    start = turn % len(names)
    return names[start:] + names[:start]


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
