"""Two runs compared: what counts as a change, what as noise, and what as a regression."""

from __future__ import annotations

import pytest

from decompose_k.bench.compare import FASTER, SAME, SLOWER, compare, read_rows
from decompose_k.bench.rows import append_jsonl
from rows_for_tests import pair, row


def ours(p50_us, spread=0.01, **changes):
    return row(p50_us, spread, **{"variant": "auto", "ours": True, **changes})


@pytest.mark.parametrize(
    ("before", "after", "spread", "verdict"),
    [
        (10, 5, 0.01, FASTER),
        (5, 10, 0.01, SLOWER),
        (10, 10.2, 0.0, SAME),
        (10, 11, 0.2, SAME),
        (10, 10.5, 0.001, SLOWER),
    ],
)
def test_a_verdict_needs_more_than_the_noise(before, after, spread, verdict):
    (change,) = compare([ours(before, spread)], [ours(after, spread)]).changes
    assert change.verdict == verdict
    assert change.ratio == before / after


@pytest.mark.parametrize("noisy", ["before", "after"])
def test_the_noise_of_either_run_counts(noisy):
    noises = {"before": None, "after": None, noisy: 0.2}
    before, after = (ours(time, noise=noises[name]) for time, name in ((10, "before"), (11.5, "after")))
    assert compare([before], [after]).changes[0].verdict == SAME
    assert compare([ours(10)], [ours(11.5)]).changes[0].verdict == SLOWER


def test_what_the_baselines_drift_by_is_no_regression():
    sizes = range(16, 96, 16)
    before = [found for m in sizes for found in pair(10, 5, spread=0.01, m=m)]
    slower_machine = [found for m in sizes for found in pair(11, 5.5, spread=0.01, m=m)]
    comparison = compare(before, slower_machine)
    assert comparison.drift == pytest.approx(0.1)
    assert comparison.regressions == ()
    slower_code = [found for m in sizes for found in pair(11, 6.5, spread=0.01, m=m)]
    assert len(compare(before, slower_code).regressions) == len(sizes)


def test_one_odd_baseline_does_not_hide_a_regression():
    before = [found for m in range(1, 11) for found in pair(10, 5, spread=0.01, m=m)]
    after = [found for m in range(1, 11) for found in pair(20 if m == 1 else 10, 6, spread=0.01, m=m)]
    assert len(compare(before, after).regressions) == 10


def test_a_baseline_of_another_torch_says_nothing_of_the_machine():
    assert compare([row(10)], [row(12, torch="2.12.0")]).drift is None


def test_a_slower_baseline_is_no_regression_and_the_worst_of_ours_comes_first():
    before = [row(10, 0.0), ours(5, m=1), ours(5, m=2)]
    after = [row(20, 0.0, torch="2.12.0"), ours(6, m=1), ours(8, m=2)]
    comparison = compare(before, after)
    assert [change.after.m for change in comparison.regressions] == [2, 1]
    assert comparison.count(SLOWER) == 3


def test_rows_of_one_run_alone_are_told_apart():
    comparison = compare([ours(5), ours(5, m=1)], [ours(5), ours(5, m=2)])
    assert [found.m for found in comparison.gone] == [1]
    assert [found.m for found in comparison.new] == [2]


@pytest.mark.parametrize(
    "change",
    [{"device": "other"}, {"k": 7}, {"variant": "split"}, {"timing": "stream-cold"}, {"static_b": True}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_the_same_is_not_compared(change):
    with pytest.raises(ValueError, match="in common"):
        compare([ours(5)], [ours(5, **change)])


def test_rows_are_read_from_a_file_or_a_folder(tmp_path):
    append_jsonl(tmp_path / "rows.jsonl", pair(10, 5))
    assert read_rows(tmp_path) == read_rows(tmp_path / "rows.jsonl") == tuple(pair(10, 5))
