"""The two rounds of a search, with a timer that knows how fast each config is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import decompose_k as dk
from decompose_k.entries import Measured
from decompose_k.search import FINALISTS, neighbours_of, search, steadiest
from decompose_k.timing import GRAPHS
from stub_devices import timing

PAIRS = [dk.Config("pair", split_k=split) for split in range(1, 9)]
MM = dk.Config("mm")


class Bench:
    """Calls are configs; `speeds` says how long each takes, `wrong` which gives a wrong result."""

    def __init__(self, speeds, wrong=()):
        self.speeds, self.wrong = speeds, wrong
        self.rounds, self.asked = [], []

    def objection(self, call):
        self.asked.append(call)
        return "wrong" if call in self.wrong else None

    def time(self, calls, repetitions, graphs):
        self.rounds.append((list(calls.values()), repetitions, graphs))
        assert set(self.asked) >= {call for call in calls.values() if isinstance(call, dk.Config)}
        return {name: timing(self.speeds(call)) for name, call in calls.items()}

    def search(self, configs, **options):
        return search(configs, lambda config: config, self.objection, self.time, **options)


def by_split(call):
    return 10.0 + call.split_k


def test_all_are_timed_quickly_and_the_finalists_again_side_by_side():
    bench = Bench(lambda call: 5.0 if call == "by hand" else by_split(call))
    found = bench.search([*PAIRS, MM], beside={"torch": "by hand"}, repetitions=7)
    (quick, *_), (final, repetitions, graphs) = bench.rounds
    assert quick == [*PAIRS, MM]
    assert bench.rounds[0][1:] == (3, 1)
    assert (repetitions, graphs) == (7, GRAPHS)
    assert final[:FINALISTS] == [PAIRS[0], MM, *PAIRS[1:3]]
    assert final[-1] == "by hand"
    # What is measured beside cannot win, however fast it is.
    assert [found.finalists[0].label, found.finalists[0].config] == ["torch", None]
    assert found.config == PAIRS[0]


def test_torch_s_own_kernel_is_always_a_finalist():
    """In the quick round it is the slowest, and side by side the fastest."""
    bench = Bench(lambda call: (9.0 if len(bench.rounds) > 1 else 99.0) if call == MM else by_split(call))
    found = bench.search([*PAIRS, MM], neighbours=lambda config: [])
    assert bench.rounds[1][0] == [*PAIRS[:FINALISTS], MM]
    assert found.config == MM


def test_neighbours_of_the_best_are_tried():
    near = replace(PAIRS[1], reduce_block=64)
    bench = Bench(lambda call: 1.0 if call == near else by_split(call))
    found = bench.search(PAIRS)
    assert set(bench.rounds[1][0]) == {*PAIRS[:4], *neighbours_of(PAIRS[0]), *neighbours_of(PAIRS[1])}
    assert found.config == near
    assert bench.search(PAIRS, neighbours=lambda config: []).config == PAIRS[0]


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("operands", ["", "a", "ab"], ids=lambda operands: operands or "none")
def test_neighbours_of_a_pair_that_waits_first_prefetch_something_else(operands, blocks):
    pair = replace(PAIRS[0], launch="wait_first", prefetch=operands, prefetch_blocks=blocks if operands else 0)
    near = neighbours_of(pair)
    fetched = {(other.prefetch, other.prefetch_blocks) for other in near}
    assert fetched >= {("a", 1), ("b", 2), ("ab", 4), ("ab", 0), ("", 0)} - {(pair.prefetch, pair.prefetch_blocks)}
    assert pair not in near
    assert len(set(near)) == len(near)
    assert all(other.prefetch or not other.prefetch_blocks for other in near)
    static = replace(pair, launch="static_b", prefetch="a")
    assert {other.prefetch for other in neighbours_of(static)} == {"a"}


@pytest.mark.parametrize(("stages", "fewer"), [(1, set()), (4, set()), (5, {4}), (8, {4, 5, 6})], ids=str)
def test_neighbours_of_a_deep_pipeline_have_fewer_stages(stages, fewer):
    near = neighbours_of(replace(PAIRS[0], num_stages=stages))
    assert {other.num_stages for other in near} - {stages} == fewer


def test_neighbours_are_the_sizes_beside_and_pairs_with_a_flat_reducer_alone():
    assert [near.reduce_block for near in neighbours_of(PAIRS[0])] == [16, 64]
    assert [near.reduce_block for near in neighbours_of(replace(PAIRS[0], reduce_block=4))] == [8]
    assert neighbours_of(replace(PAIRS[0], reducer="tile")) == neighbours_of(MM) == ()


def test_what_is_wrong_is_never_timed_nor_chosen():
    bench = Bench(by_split, wrong=(PAIRS[0], neighbours_of(PAIRS[1])[0]))
    found = bench.search(PAIRS)
    timed = [call for calls, _, _ in bench.rounds for call in calls]
    assert not set(bench.wrong) & set(timed)
    assert found.config == PAIRS[1]
    assert found.dropped == (f"{PAIRS[0]}: wrong", f"{neighbours_of(PAIRS[1])[0]}: wrong")


def test_every_timing_is_kept_once():
    found = Bench(by_split).search([*PAIRS, MM])
    configs = [measured.config for measured in (*found.finalists, *found.others)]
    assert len(configs) == len(set(configs))
    assert set(configs) >= {*PAIRS, MM}
    assert len(found.others) == len(PAIRS) + 1 - FINALISTS


@pytest.mark.parametrize("given", [[], [PAIRS[0]], [PAIRS[0], PAIRS[0]]], ids=["none", "one", "one twice"])
def test_few_candidates_need_no_quick_round(given):
    bench = Bench(by_split)
    found = bench.search(given, neighbours=lambda config: [])
    assert found.config == (PAIRS[0] if given else None)
    assert len(bench.rounds) == len(set(given))


def test_where_all_are_wrong_nothing_is_chosen():
    bench = Bench(lambda call: 1.0, wrong=PAIRS)
    assert bench.search(PAIRS, beside={"torch": "by hand"}).config is None
    assert len(bench.search(PAIRS).dropped) == len(PAIRS)


STATIC = dk.Config("pair", split_k=8, launch="static_b", reserve_kib=108)
ALONE = replace(STATIC, reserve_kib=144)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, STATIC),
        ({ALONE: 10.2}, ALONE),
        ({ALONE: 10.3}, STATIC),
        ({replace(ALONE, launch="wait_first"): 10.1}, STATIC),
        ({dk.Config("dot"): 10.1, ALONE: 10.15}, ALONE),
        ({replace(STATIC, split_k=4): 10.1}, STATIC),
        ({replace(STATIC, reserve_kib=0): 10.0}, STATIC),
    ],
    ids=["alone", "near", "too_slow", "another_launch", "another_kernel", "no_steadier", "less_steady"],
)
@pytest.mark.parametrize("order", [1, -1], ids=["fastest_first", "fastest_last"])
def test_a_steadier_config_next_to_the_fastest_is_taken(others, expected, order):
    measured = [Measured("fastest", timing(10.0), STATIC), *(Measured("", timing(us), c) for c, us in others.items())]
    assert steadiest([Measured("torch.mm", timing(5.0)), *measured][::order]) == expected


def test_without_a_static_weight_the_fastest_is_taken():
    fast, near = (replace(STATIC, launch="wait_first", reserve_kib=reserve) for reserve in (108, 144))
    assert steadiest([Measured("", timing(10.0), fast), Measured("", timing(10.1), near)]) == fast


def test_nothing_measured_leaves_nothing_to_take():
    assert steadiest([Measured("torch.mm", timing(5.0))]) is None
