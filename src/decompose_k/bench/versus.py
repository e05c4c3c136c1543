"""Ours against each alternative, suite by suite, and what follows: where to use Decompose-K and where not."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.bench.suites import CROSSOVER
from decompose_k.bench.summary import FASTEST, Duel, Tally, duels, fastest_baseline, group_cases, tallies, times
from decompose_k.bench.variant import (
    AUTO,
    BASELINES,
    FLOOR_PLAIN,
    FLOOR_STATIC,
    FLOOR_WAIT_FIRST,
    GENERATION_1,
    GENERATION_1_UNFUSED,
    GENERATION_2,
    GENERATION_2_UNFUSED,
    SPLIT,
    STATIC,
    TITLES,
    UNFUSED,
)
from decompose_k.timing import STREAM_COLD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from decompose_k.bench.rows import Row

# The two ways to call us: without a promise, and with that of a static weight.
WAYS = {AUTO: "default", STATIC: "static weight"}
ALTERNATIVES = (
    *BASELINES,
    FASTEST,
    SPLIT,
    UNFUSED,
    GENERATION_2,
    GENERATION_2_UNFUSED,
    GENERATION_1,
    GENERATION_1_UNFUSED,
)
_FLOOR_OF = {AUTO: (FLOOR_WAIT_FIRST, FLOOR_PLAIN), STATIC: (FLOOR_STATIC,)}


@dataclass(frozen=True, slots=True)
class Versus:
    """One way to call us against one alternative, in one suite and set of dtypes."""

    way: str
    alternative: str
    tally: Tally

    @property
    def title(self) -> str:
        """The alternative as it is shown, and whether the host's time is in its numbers."""
        name = "the fastest of these" if self.alternative == FASTEST else TITLES[self.alternative]
        has_host = any(duel.baseline.timing == STREAM_COLD for duel in self.tally.duels)
        return f"{name} (host time included)" if has_host else name


@dataclass(frozen=True, slots=True)
class Headroom:
    """How far one way to call us is from the read floor: ratios of its median to the floor's, sorted."""

    suite: str
    dtypes: str
    way: str
    ratios: tuple[float, ...]


def versus(rows: Iterable[Row]) -> list[Versus]:
    """Each suite against each alternative that was measured in it."""
    rows = list(rows)
    suites = dict.fromkeys((row.suite, row.dtypes) for row in rows)
    found = [
        Versus(WAYS[way], alternative, tally)
        for alternative in ALTERNATIVES
        for way in WAYS
        for tally in tallies(duels(rows, alternative, way))
    ]
    order = list(suites)
    shown = [one for one in found if one.alternative != FASTEST or _has_several(one, found)]
    return sorted(shown, key=lambda one: order.index((one.tally.suite, one.tally.dtypes)))


def headroom(rows: Iterable[Row]) -> list[Headroom]:
    """What each suite leaves to gain: ours over the read floor of the same launch mode."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for case in group_cases(rows):
        by_name = {row.variant: row for row in case}
        for way, floors in _FLOOR_OF.items():
            floor = next((by_name[name] for name in floors if name in by_name), None)
            if floor is not None and way in by_name:
                row = by_name[way]
                ratios.setdefault((row.suite, row.dtypes, WAYS[way]), []).append(row.p50_us / floor.p50_us)
    return [Headroom(*key, tuple(sorted(values))) for key, values in ratios.items()]


def guidance(rows: Sequence[Row]) -> list[str]:
    """For a reader who must decide: by suite and M, and by K in the crossover, where it pays and where not.

    A shape pays where Decompose-K wins against the fastest alternative that was measured for it.
    """
    rivals = duels(rows, FASTEST)
    sentences = [_by_rows(tally) for tally in tallies(rivals) if tally.suite != CROSSOVER]
    crossover = [duel for duel in decomposed_duels(rows) if duel.ours.suite == CROSSOVER]
    depths = sorted({duel.ours.k for duel in crossover})
    return sentences + [_by_outputs(k, [duel for duel in crossover if duel.ours.k == k]) for k in depths]


def decomposed_duels(rows: Iterable[Row]) -> list[Duel]:
    """The fastest of ours that does cut K (not torch.mm, which `auto` may choose) against the fastest alternative."""
    found = []
    for case in group_cases(rows):
        cut = [row for row in case if row.ours and not row.static_b and (row.config or {}).get("kernel") != "mm"]
        rival = fastest_baseline(case)
        if cut and rival is not None:
            found.append(Duel(min(cut, key=lambda row: row.p50_us), rival))
    return found


def _has_several(one: Versus, found: Sequence[Versus]) -> bool:
    same = (one.way, one.tally.suite, one.tally.dtypes)
    names = {other.alternative for other in found if (other.way, other.tally.suite, other.tally.dtypes) == same} & set(
        BASELINES
    )
    return len(names) > 1


def _by_rows(tally: Tally) -> str:
    name = f"{tally.suite} ({tally.dtypes})"
    rows_of_a = sorted({duel.ours.m for duel in tally.duels})
    verdicts = {m: _majority([duel for duel in tally.duels if duel.ours.m == m]) for m in rows_of_a}
    parts = []
    for verdict, said in (("win", "use Decompose-K"), ("tie", "no difference"), ("loss", "stay with torch")):
        chosen = [m for m in rows_of_a if verdicts[m] == verdict]
        if chosen:
            ratios = sorted(duel.speedup for duel in tally.duels if duel.ours.m in chosen)
            parts.append(f"{said} at M = {', '.join(map(str, chosen))} ({_in_short(ratios)})")
    return f"{name}: {'; '.join(parts)}."


def _in_short(ratios: Sequence[float]) -> str:
    if len(ratios) == 1:
        return f"one case, {times(ratios[0])}"
    median = statistics.median(ratios)
    return f"{len(ratios)} cases, {times(ratios[0])} to {times(ratios[-1])}, median {times(median)}"


def _by_outputs(k: int, members: Sequence[Duel]) -> str:
    won = [duel for duel in members if duel.verdict == "win"]
    name = f"crossover, K = {k}"
    if not won:
        return f"{name}: it wins at none of {len(members)} sizes."
    others = [duel for duel in members if duel.verdict != "win"]
    most = max(won, key=_outputs)
    text = f"{name}: it wins at {len(won)} of {len(members)} sizes, up to M × N = {most.ours.m} × {most.ours.n}"
    if not others:
        return f"{text}."
    least = min(others, key=_outputs)
    overlaps = ", but its times spread" if least.verdict == "tie" and least.medians_differ else ""
    where = f"{least.ours.m} × {least.ours.n} ({times(least.speedup)}{overlaps})"
    return f"{text}; the smallest output where it does not is {where}."


def _outputs(duel: Duel) -> int:
    return duel.ours.m * duel.ours.n


def _majority(members: Sequence[Duel]) -> str:
    counts = {verdict: sum(duel.verdict == verdict for duel in members) for verdict in ("win", "tie", "loss")}
    if counts["win"] > len(members) / 2:
        return "win"
    return "loss" if counts["loss"] > counts["win"] else "tie"
