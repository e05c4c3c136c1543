"""Ours against each alternative: who is compared with whom, what is counted, and what is advised."""

from __future__ import annotations

import pytest

from decompose_k.bench.summary import FASTEST, duels, fastest_of_ours
from decompose_k.bench.tables import versus_table
from decompose_k.bench.variant import TITLES, VARIANTS
from decompose_k.bench.versus import decomposed_duels, guidance, headroom, versus
from rows_for_tests import pair, row


def case(**changes):
    """A case with torch at 10, ours at 5, and more variants by their times: case(compiled=8.0)."""
    times = {name.replace("_", "-"): changes.pop(name) for name in list(changes) if name.replace("_", "-") in VARIANTS}
    static = {"static": {"static_b": True, "ours": True}, "generation-2": {"ours": True}, "unfused": {"ours": True}}
    further = [row(time, 0.01, variant=name, **static.get(name, {}), **changes) for name, time in times.items()]
    return [*pair(10.0, 5.0, spread=0.01, **changes), *further]


def found(rows):
    return {(one.way, one.alternative): one for one in versus(rows)}


def test_both_ways_to_call_meet_every_alternative():
    rows = case(compiled=8.0, static=4.0, generation_2=6.0, unfused=7.0)
    table = found(rows)
    ratios = {key: one.tally.speedups for key, one in table.items()}
    assert ratios == {
        ("default", "torch"): (2.0,),
        ("static weight", "torch"): (2.5,),
        ("default", "compiled"): (1.6,),
        ("static weight", "compiled"): (2.0,),
        ("default", FASTEST): (1.6,),
        ("static weight", FASTEST): (2.0,),
        ("default", "unfused"): (1.4,),
        ("static weight", "unfused"): (1.75,),
        ("default", "generation-2"): (1.2,),
        ("static weight", "generation-2"): (1.5,),
    }


def test_a_single_alternative_has_no_line_of_the_fastest():
    assert set(found(case())) == {("default", "torch")}


def test_a_promise_never_counts_as_what_a_caller_gets_without_it():
    rows = case(static=1.0)
    assert fastest_of_ours(rows).variant == "auto"
    assert duels(rows)[0].speedup == 2.0


def test_an_alternative_with_the_host_s_time_in_it_is_marked_and_is_never_the_fastest():
    graphs = row(1.0, variant="compiled-max-autotune", timing="stream-cold")
    rows = [*case(compiled=8.0), graphs]
    assert duels(rows, FASTEST)[0].baseline.variant == "compiled"
    titles = [one.title for one in versus(rows)]
    assert "max-autotune (host time included)" in titles


def test_losses_are_named_and_counted():
    rows = [found for k in range(1, 21) for found in case(compiled=4.0, k=k, name=f"case {k}")]
    one = found(rows)["default", "compiled"]
    assert [one.tally.count(verdict) for verdict in ("win", "tie", "loss")] == [0, 0, 20]
    table = versus_table([one])
    assert "case 1 16x16x1 0.80×" in table.lines[0][-1].text
    assert "and 8 more, below" in table.lines[0][-1].text


@pytest.mark.parametrize(("noise", "verdict"), [(None, "win"), (0.1, "win"), (0.3, "tie")])
def test_the_noise_of_the_run_decides_what_is_a_tie(noise, verdict):
    rows = [row(10, 0.01, noise=noise), row(8, 0.01, variant="auto", ours=True, noise=noise)]
    assert duels(rows)[0].verdict == verdict


def test_what_is_left_to_the_floor_is_told_for_each_launch_mode():
    rows = case(static=4.0, floor_plain=3.0, floor_wait_first=2.5, floor_static=2.0)
    assert {one.way: one.ratios for one in headroom(rows)} == {"default": (2.0,), "static weight": (2.0,)}
    assert [one.ratios for one in headroom(case(floor_plain=4.0))] == [(1.25,)]
    assert headroom(case()) == []


def test_the_crossover_counts_only_what_cuts_k():
    chose_torch = row(9.0, 0.01, variant="auto", ours=True, config={"kernel": "mm"})
    cut = row(20.0, 0.01, variant="generation-3", ours=True, config={"kernel": "pair", "split_k": 8})
    assert decomposed_duels([row(10, 0.01), chose_torch, cut])[0].speedup == 0.5
    assert decomposed_duels([row(10, 0.01), chose_torch]) == []


def test_guidance_goes_by_the_fastest_alternative():
    rows = [*case(m=1), *case(m=64, compiled=4.0), *case(m=256, compiled=5.0)]
    (sentence,) = guidance(rows)
    assert sentence == (
        "seed (bf16): use Decompose-K at M = 1 (one case, 2.00×); no difference at M = 256 (one case, 1.00×);"
        " stay with torch at M = 64 (one case, 0.80×)."
    )


@pytest.mark.parametrize(
    ("ours_us", "spread", "said"),
    [(8.0, 0.02, "it wins at 2 of 2 sizes"), (8.0, 0.2, "(1.25×, but its times spread)"), (10.1, 0.2, "(0.99×)")],
    ids=["clear", "spread", "even"],
)
def test_a_reader_is_told_why_a_faster_size_does_not_count(ours_us, spread, said):
    rows = pair(10.0, 5.0, 0.02, suite="crossover", name="", m=1, k=4096)
    rows += pair(10.0, ours_us, spread, suite="crossover", name="", m=16, k=4096)
    (sentence,) = guidance(rows)
    assert said in sentence


def test_every_variant_has_a_title():
    assert set(TITLES) == set(VARIANTS)
    assert len(set(TITLES.values())) == len(TITLES)
