"""Plots made from rows: maps of speed-ups, time against K, speed-ups by case or by M, the roofline, the host's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib

from decompose_k.bench.plots.base import Group, Plot
from decompose_k.bench.plots.curves import latency_curves
from decompose_k.bench.plots.dots import speedup_by_m, speedup_dots
from decompose_k.bench.plots.host import host_times
from decompose_k.bench.plots.maps import crossover_map, speedup_grid
from decompose_k.bench.plots.roofline import roofline
from decompose_k.bench.plots.style import STYLE
from decompose_k.bench.suites import CROSSOVER
from decompose_k.bench.summary import Duel, duels, group_cases, tallies
from decompose_k.bench.versus import decomposed_duels

if TYPE_CHECKING:
    from decompose_k.bench.rows import Row

_MAX_DOTS = 26


def make_plots(rows: Sequence[Row], *, details: bool = True) -> list[Plot]:
    """Every plot that the rows have data for; those that show a part of another one only with `details`."""
    all_duels = duels(rows)
    crossover = [duel for duel in decomposed_duels(rows) if duel.ours.suite == CROSSOVER]
    plots: list[Plot] = []
    with matplotlib.rc_context(STYLE):
        for group in _groups(rows, [duel for duel in all_duels if duel.ours.suite != CROSSOVER]):
            if _is_grid(group.duels):
                plots += [speedup_grid(group, _square(group.duels)), *latency_curves(group, details=details)]
            elif len(group.duels) <= _MAX_DOTS:
                plots.append(speedup_dots(group))
            else:
                plots.append(speedup_by_m(group))
        if crossover:
            plots.append(crossover_map(crossover))
        if all_duels:
            plots.append(roofline(all_duels))
        of_host = host_times(rows)
        if of_host is not None:
            plots.append(of_host)
    return plots


def _groups(rows: Sequence[Row], all_duels: Sequence[Duel]) -> list[Group]:
    """A suite's dtypes apart where they form grids, which show one thing each; else together."""
    cases = {case[0].case: tuple(case) for case in group_cases(rows)}
    groups: list[Group] = []
    suites: dict[str, list[Duel]] = {}
    for tally in tallies(all_duels):
        if _is_grid(tally.duels):
            members = tuple(cases[duel.ours.case] for duel in tally.duels)
            groups.append(Group(f"{tally.suite}, {tally.dtypes}", tally.duels, members))
        else:
            suites.setdefault(tally.suite, []).extend(tally.duels)
    return groups + [Group(name, tuple(members)) for name, members in suites.items()]


def _square(some: Sequence[Duel]) -> list[Duel]:
    return [duel for duel in some if duel.ours.m == duel.ours.n]


def _is_grid(some: Sequence[Duel]) -> bool:
    """Whether these are mostly square outputs that fill most of a grid of sizes and depths."""
    square = _square(some)
    sizes = {duel.ours.m for duel in square}
    depths = {duel.ours.k for duel in square}
    is_full = 4 * len(square) >= 3 * len(sizes) * len(depths)
    return len(sizes) > 1 and len(depths) > 1 and is_full and 2 * len(square) > len(some)
