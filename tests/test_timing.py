"""The one timer, on a clock that the test moves: what is called, in which order, on which inputs, with what result."""

from __future__ import annotations

import itertools

import pytest
import torch

from decompose_k.timing import (
    CPU_ROTATING,
    MAX_SETS,
    MIN_REPETITIONS,
    Timing,
    count_sets,
    graph_cycles,
    make_input_sets,
    time_variants,
)

MIB = 1 << 20


class Clock:
    """Seconds that pass only when a call says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def timed_call(clock, seconds, log, name):
    def call(*inputs):
        log.append((name, inputs))
        clock.now += next(seconds) if hasattr(seconds, "__next__") else seconds

    return call


def test_percentiles_are_interpolated():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0], "method")
    assert (timing.p20_us, timing.p50_us, timing.p80_us) == (2.0, 3.5, 5.0)
    assert (timing.repetitions, timing.method) == (6, "method")


def test_one_sample_is_all_its_percentiles():
    timing = Timing.of([7.0], "method")
    assert timing.p20_us == timing.p50_us == timing.p80_us == 7.0


def test_no_sample_is_refused():
    with pytest.raises(ValueError, match="samples_us"):
        Timing.of([], "method")


def test_each_variant_gets_its_own_time_in_microseconds():
    clock, log = Clock(), []
    variants = {name: timed_call(clock, seconds, log, name) for name, seconds in (("slow", 2e-3), ("fast", 5e-4))}
    timings = time_variants(variants, [(1,), (2,)], "cpu", repetitions=5, clock=clock)
    assert timings["slow"].p50_us == pytest.approx(2000)
    assert timings["fast"].p50_us == pytest.approx(500)
    assert {timing.method for timing in timings.values()} == {CPU_ROTATING}
    assert {timing.repetitions for timing in timings.values()} == {5}


def test_variants_are_interleaved_and_take_turns_at_the_start():
    clock, log = Clock(), []
    variants = {name: timed_call(clock, 1e-3, log, name) for name in "abc"}
    time_variants(variants, [()], "cpu", repetitions=3, clock=clock)
    after_warm_up = "".join(name for name, _ in log[3:])
    assert after_warm_up == "abcbcacab"


def test_a_drift_of_the_machine_hits_all_variants_alike():
    clock, log = Clock(), []

    def slower_and_slower():
        seconds = 1e-3
        while True:
            yield seconds
            seconds *= 1.05

    drift = slower_and_slower()
    variants = {name: timed_call(clock, drift, log, name) for name in "ab"}
    timings = time_variants(variants, [()], "cpu", repetitions=40, clock=clock)
    assert timings["a"].p50_us == pytest.approx(timings["b"].p50_us, rel=0.06)


def test_no_call_sees_the_inputs_of_the_call_before():
    clock, log = Clock(), []
    variants = {name: timed_call(clock, 1e-3, log, name) for name in "ab"}
    time_variants(variants, [(1,), (2,), (3,)], "cpu", repetitions=6, clock=clock)
    used = [inputs for _, inputs in log[2:]]
    assert all(before != after for before, after in itertools.pairwise(used))
    assert {inputs for name, inputs in log if name == "a"} == {(1,), (2,), (3,)}


def test_seconds_end_the_sampling_but_not_before_the_least_count():
    clock, log = Clock(), []
    variants = {"slow": timed_call(clock, 1.0, log, "slow")}
    assert time_variants(variants, [()], "cpu", repetitions=50, seconds=0.5, clock=clock)["slow"].repetitions == (
        MIN_REPETITIONS
    )
    assert time_variants(variants, [()], "cpu", repetitions=50, seconds=9.5, clock=clock)["slow"].repetitions == 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (({}, [()], "cpu"), "variants"),
        (({"a": print}, [], "cpu"), "input_sets"),
    ],
    ids=["no-variants", "no-inputs"],
)
def test_nothing_to_time_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        time_variants(*arguments)


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match="repetitions must be >= 1; got 0"):
        time_variants({"a": print}, [()], "cpu", repetitions=0)


@pytest.mark.parametrize(
    ("bytes_per_set", "expected"),
    [
        pytest.param(MIB, 121, id="together-over-twice-the-cache"),
        pytest.param(500 * MIB, 2, id="two-where-one-would-do"),
        pytest.param(6000 * MIB, 1, id="one-where-memory-is-short"),
        pytest.param(20000 * MIB, 1, id="one-even-if-too-large"),
        pytest.param(16, MAX_SETS, id="capped"),
        pytest.param(0, MAX_SETS, id="nothing-to-read"),
    ],
)
def test_the_number_of_input_sets(bytes_per_set, expected):
    assert count_sets(bytes_per_set, cache_bytes=60 * MIB, memory_bytes=10000 * MIB) == expected


def test_input_sets_are_distinct_memory():
    sets = make_input_sets(lambda: (torch.zeros(1 << 20),), 4 * MIB, "cpu")
    assert len({inputs[0].data_ptr() for inputs in sets}) == len(sets) == 17


@pytest.mark.parametrize(
    ("sets", "bytes_per_set", "expected"),
    [
        pytest.param(240, MIB // 2, 1, id="enough-calls-already"),
        pytest.param(33, 4 * MIB, 7, id="more-rounds-for-few-sets"),
        pytest.param(2, 4096 * MIB, 1, id="few-calls-of-many-bytes"),
    ],
)
def test_the_rounds_of_a_graph(sets, bytes_per_set, expected):
    assert graph_cycles(sets, bytes_per_set) == expected


@pytest.mark.gpu
def test_a_graph_times_every_variant_cold():
    a, b = torch.ones(16, 4096, device="cuda"), torch.ones(4096, 16, device="cuda")
    bytes_per_set = 2 * a.numel() * a.itemsize
    sets = make_input_sets(lambda: (a.clone(), b.clone()), bytes_per_set, "cuda")
    timings = time_variants({"mm": torch.mm}, sets, "cuda", bytes_per_set=bytes_per_set, repetitions=5)
    assert timings["mm"].method == "graph-cold"
    assert 0 < timings["mm"].p20_us <= timings["mm"].p50_us <= timings["mm"].p80_us
