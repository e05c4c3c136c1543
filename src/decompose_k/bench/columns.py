"""Further times of a case's variants, each a column of its own beside the headline: warm, part warm, eager, host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.device import Device
from decompose_k.timing import make_input_sets, time_events, time_host, time_variants

if TYPE_CHECKING:
    import torch

    from decompose_k.bench.cases import Case
    from decompose_k.bench.variant import Product, Variant
    from decompose_k.timing import Timing, Turn

WARM, WEIGHT_COLD, EVENT, HOST = "warm", "weight_cold", "event", "host"
COLUMNS_OF_THE_GPU, COLUMNS_OF_THE_HOST = (WARM, WEIGHT_COLD), (EVENT, HOST)
COLUMNS = (*COLUMNS_OF_THE_GPU, *COLUMNS_OF_THE_HOST)

# Two graphs: a median of columns needs less care than the headline's.
_GRAPHS = 2

InputSets = Sequence[tuple["torch.Tensor", "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a column is measured: samples of each variant, and seconds after which no more are taken."""

    repetitions: int
    seconds: float | None = None


def measure_columns(
    case: Case,
    variants: Sequence[Variant],
    input_sets: InputSets,
    device: torch.device,
    names: Sequence[str],
    effort: Effort,
    alone: Turn = nullcontext,
) -> dict[str, dict[str, float]]:
    """Medians in microseconds of the named columns, of each variant that has them: {"warm": {"auto": 2.1, ...}, ...}.

    `warm` finds all operands in the cache, `weight_cold` a alone, as a decoder does whose weights come from memory;
    `event` is a single eager call by the events around it, `host` the host's share. The last two are a GPU's. Each is
    timed within `alone()`.
    """
    in_graphs = {variant.name: variant.call for variant in variants if variant.capturable}
    products = {variant.name: variant.call for variant in variants if not variant.is_floor}
    found: dict[str, dict[str, float]] = {}
    for name in COLUMNS:
        calls = products if name in (EVENT, HOST) else in_graphs
        if name in names and calls:
            timings = _MEASURES[name](case, calls, input_sets, device, effort, alone)
            found[name] = {variant: timing.p50_us for variant, timing in timings.items()}
    return found


Calls = Mapping[str, "Product"]


def _warm(
    case: Case, calls: Calls, input_sets: InputSets, device: torch.device, effort: Effort, alone: Turn
) -> Mapping[str, Timing]:
    if device.type == "cuda" and case.bytes > Device.of(device).l2_bytes // 2:
        return {}
    return time_variants(
        calls,
        input_sets[:1],
        device,
        bytes_per_set=case.bytes,
        repetitions=effort.repetitions,
        seconds=effort.seconds,
        graphs=_GRAPHS,
        alone=alone,
    )


def _weight_cold(
    case: Case, calls: Calls, input_sets: InputSets, device: torch.device, effort: Effort, alone: Turn
) -> Mapping[str, Timing]:
    if case.shape.is_gram:
        return {}
    a, b = input_sets[0]
    bytes_of_b = b.numel() * b.itemsize
    return time_variants(
        calls,
        make_input_sets(lambda: (a, b.clone()), bytes_of_b, device),
        device,
        bytes_per_set=bytes_of_b,
        repetitions=effort.repetitions,
        seconds=effort.seconds,
        graphs=_GRAPHS,
        alone=alone,
    )


def _event(
    case: Case, calls: Calls, input_sets: InputSets, device: torch.device, effort: Effort, alone: Turn
) -> Mapping[str, Timing]:
    del case
    if device.type != "cuda":
        return {}
    with alone():
        return time_events(calls, input_sets, device, repetitions=effort.repetitions, seconds=effort.seconds)


def _host(
    case: Case, calls: Calls, input_sets: InputSets, device: torch.device, effort: Effort, alone: Turn
) -> Mapping[str, Timing]:
    del case
    if device.type != "cuda":
        return {}
    with alone():
        return time_host(calls, input_sets, device, repetitions=effort.repetitions, seconds=effort.seconds)


_Measure = Callable[["Case", Calls, InputSets, "torch.device", Effort, "Turn"], Mapping[str, "Timing"]]
_MEASURES: dict[str, _Measure] = {WARM: _warm, WEIGHT_COLD: _weight_cold, EVENT: _event, HOST: _host}
