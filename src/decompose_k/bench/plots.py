"""Plots made from rows: speed-up grids, time against K, speed-ups by case or by M, and the roofline."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from decompose_k.bench.style import (
    FAINT,
    INK,
    OURS,
    SPEEDUP_COLOURS,
    STYLE,
    TORCH,
    draw_even_line,
    duration_ticks,
    set_speedup_axis,
    svg_of,
)
from decompose_k.bench.summary import Duel, duels, tallies, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from decompose_k.bench.rows import Row

_MAX_DOTS = 26


@dataclass(frozen=True, slots=True)
class Plot:
    """A named figure: its SVG text, and one sentence on how to read it."""

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Group:
    """Duels that share a plot, and what they are called."""

    name: str
    duels: tuple[Duel, ...]

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def make_plots(rows: Sequence[Row]) -> list[Plot]:
    """Every plot that the rows have data for."""
    all_duels = duels(rows)
    plots = []
    with matplotlib.rc_context(STYLE):
        for group in _groups(all_duels):
            square = [duel for duel in group.duels if duel.ours.m == duel.ours.n]
            if _is_grid(square):
                plots += [_speedup_grid(group, square), _latency_curves(group, square)]
            elif len(group.duels) <= _MAX_DOTS:
                plots.append(_speedup_dots(group))
            else:
                plots.append(_speedup_by_m(group))
        if all_duels:
            plots.append(_roofline(all_duels))
    return plots


def _groups(all_duels: Sequence[Duel]) -> list[Group]:
    """A suite's dtypes apart where they form grids, which show one thing each; else together."""
    groups: list[Group] = []
    suites: dict[str, list[Duel]] = {}
    for tally in tallies(all_duels):
        if _is_grid([duel for duel in tally.duels if duel.ours.m == duel.ours.n]):
            groups.append(Group(f"{tally.suite}, {tally.dtypes}", tally.duels))
        else:
            suites.setdefault(tally.suite, []).extend(tally.duels)
    return groups + [Group(name, tuple(members)) for name, members in suites.items()]


def _is_grid(square: Sequence[Duel]) -> bool:
    sizes = {duel.ours.m for duel in square}
    depths = {duel.ours.k for duel in square}
    return len(sizes) > 1 and len(depths) > 1 and 2 * len(square) > len(sizes) * len(depths)


def _speedup_grid(group: Group, square: Sequence[Duel]) -> Plot:
    sizes = sorted({duel.ours.m for duel in square})
    depths = sorted({duel.ours.k for duel in square})
    figure, axes = _figure(5.4, 0.62 * len(sizes) + 1.1)
    extent = max(math.log2(1.5), *(abs(math.log2(duel.speedup)) for duel in square))
    norm = TwoSlopeNorm(0.0, -extent, extent)
    for duel in square:
        column, line = depths.index(duel.ours.k), sizes.index(duel.ours.m)
        colour = SPEEDUP_COLOURS(norm(math.log2(duel.speedup)))
        axes.add_patch(
            matplotlib.patches.Rectangle((column - 0.47, line - 0.45), 0.94, 0.9, facecolor=colour, linewidth=0)
        )
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.55
        ink = "#ffffff" if dark else "#101418"
        axes.text(column, line, times(duel.speedup), ha="center", va="center", color=ink, weight="bold")
    axes.set_xlim(-0.5, len(depths) - 0.5)
    axes.set_ylim(-0.5, len(sizes) - 0.5)
    axes.set_xticks(range(len(depths)), [f"{depth / 1024:g}k" for depth in depths])
    axes.set_yticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("K (k = 1024)")
    axes.set_ylabel("M = N")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return Plot(
        f"speedup-grid-{group.slug}",
        f"Speed-up over torch.mm: {group.name}",
        "Ratio of medians, the fastest of ours against torch. Blue: Decompose-K is faster; orange: torch is.",
        svg_of(figure),
    )


def _latency_curves(group: Group, square: Sequence[Duel]) -> Plot:
    sizes = sorted({duel.ours.m for duel in square})
    columns = 2
    lines = math.ceil(len(sizes) / columns)
    figure = Figure(figsize=(5.4, 2.1 * lines + 0.3), layout=ConstrainedLayoutEngine(wspace=0.06))
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, size in zip(grid.flat, sizes, strict=False):
        members = sorted((duel for duel in square if duel.ours.m == size), key=lambda duel: duel.ours.k)
        depths = [duel.ours.k for duel in members]
        _band(axes, depths, [duel.baseline for duel in members], TORCH, "torch.mm", "o")
        _band(axes, depths, [duel.ours for duel in members], OURS, "Decompose-K", "s")
        roofline = [duel.ours.roofline_us for duel in members]
        axes.plot(depths, roofline, color=FAINT, linewidth=1.2, linestyle=(0, (4, 2)))
        if size == sizes[0]:
            axes.annotate(
                "roofline",
                (depths[-1], roofline[-1]),
                (0, -10),
                textcoords="offset points",
                ha="right",
                va="top",
                color=FAINT,
                fontsize=9,
            )
        axes.set_title(f"M = N = {size}", fontsize=10, loc="left")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(duration_ticks())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda depth, _: f"{depth / 1024:g}k"))
        axes.set_xticks(depths[:: max(1, len(depths) // 3)])
        axes.grid(visible=True)
    for axes in list(grid.flat)[len(sizes) :]:
        axes.set_visible(False)
    figure.supxlabel("K (k = 1024)", fontsize=10)
    figure.supylabel("time per call", fontsize=10)
    _label_lines(grid[0][0], square, sizes[0])
    return Plot(
        f"latency-{group.slug}",
        f"Time per call against K: {group.name}",
        "Medians; the band spans the 20th to the 80th percentile. Dashed: the least time under the measured ceilings.",
        svg_of(figure),
    )


def _label_lines(axes: Axes, square: Sequence[Duel], size: int) -> None:
    last = max((duel for duel in square if duel.ours.m == size), key=lambda duel: duel.ours.k)
    above = last.baseline.p50_us >= last.ours.p50_us
    for row, text, colour, is_above in (
        (last.baseline, "torch.mm", TORCH, above),
        (last.ours, "Decompose-K", OURS, not above),
    ):
        offset = (0, 7 if is_above else -9)
        axes.annotate(
            text,
            (row.k, row.p50_us),
            offset,
            textcoords="offset points",
            ha="right",
            va="bottom" if is_above else "top",
            color=colour,
            fontsize=9,
            weight="bold",
        )


def _band(axes: Axes, xs: Sequence[int], rows: Sequence[Row], colour: str, label: str, marker: str) -> None:
    axes.fill_between(
        xs, [row.p20_us for row in rows], [row.p80_us for row in rows], color=colour, alpha=0.2, linewidth=0
    )
    axes.plot(xs, [row.p50_us for row in rows], color=colour, marker=marker, markersize=3.5, linewidth=1.6, label=label)


def _speedup_dots(group: Group) -> Plot:
    members = list(reversed(group.duels))
    figure, axes = _figure(5.4, 0.27 * len(members) + 0.9)
    draw_even_line(axes)
    for place, duel in enumerate(members):
        colour = {"win": OURS, "loss": TORCH, "tie": FAINT}[duel.verdict]
        marker = {"win": "o", "loss": "X", "tie": "D"}[duel.verdict]
        axes.plot([1, duel.speedup], [place, place], color=colour, linewidth=1.4, alpha=0.6)
        axes.plot([duel.speedup], [place], color=colour, marker=marker, markersize=6, linestyle="none")
        axes.annotate(
            times(duel.speedup),
            (1, place),
            (2, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color=INK if duel.verdict == "tie" else colour,
            weight="bold",
            fontsize=9,
        )
    axes.set_yticks(range(len(members)), _labels(members), fontsize=9)
    axes.set_ylim(-0.7, len(members) - 0.3)
    set_speedup_axis(axes.xaxis, axes.set_xscale, axes.set_xlim, [duel.speedup for duel in members], room=0.06)
    axes.set_xlabel("speed-up over torch.mm (log scale)")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return Plot(
        f"speedup-{group.slug}",
        f"Speed-up over torch.mm: {group.name}",
        "Right of the line Decompose-K is faster. Circle: win, diamond: tie within the noise, cross: loss.",
        svg_of(figure),
    )


def _speedup_by_m(group: Group) -> Plot:
    figure, axes = _figure(5.4, 3.4)
    draw_even_line(axes, vertical=False)
    rows_of_a = sorted({duel.ours.m for duel in group.duels})
    for place, m in enumerate(rows_of_a):
        members = [duel.speedup for duel in group.duels if duel.ours.m == m]
        axes.plot(
            [place] * len(members),
            members,
            color=OURS,
            marker="o",
            markersize=4.5,
            alpha=0.35,
            linestyle="none",
            markeredgewidth=0,
        )
        axes.plot([place - 0.28, place + 0.28], [statistics.median(members)] * 2, color=OURS, linewidth=2.4)
    worst = min(group.duels, key=lambda duel: duel.speedup)
    best = max(group.duels, key=lambda duel: duel.speedup)
    for duel, offset, align in ((best, 7, "bottom"), (worst, -7, "top")):
        place = rows_of_a.index(duel.ours.m)
        side = "right" if place > len(rows_of_a) / 2 else "left"
        axes.annotate(
            f"{_short(duel)}: {times(duel.speedup)}",
            (place, duel.speedup),
            (0, offset),
            textcoords="offset points",
            ha=side,
            va=align,
            fontsize=9,
        )
    axes.set_xticks(range(len(rows_of_a)), [str(m) for m in rows_of_a])
    set_speedup_axis(axes.yaxis, axes.set_yscale, axes.set_ylim, [duel.speedup for duel in group.duels], room=0.12)
    axes.set_xlabel("M")
    axes.set_ylabel("speed-up over torch.mm (log scale)")
    axes.grid(visible=True, axis="y")
    return Plot(
        f"speedup-{group.slug}",
        f"Speed-up over torch.mm by M: {group.name}",
        "A dot a shape, the bar their median. Above the line Decompose-K is faster.",
        svg_of(figure),
    )


def _roofline(all_duels: Sequence[Duel]) -> Plot:
    figure, axes = _figure(5.4, 4.0)
    limits = [duel.ours.roofline_us for duel in all_duels]
    for rows, colour, marker, label in (
        ([duel.baseline for duel in all_duels], TORCH, "o", "torch.mm"),
        ([duel.ours for duel in all_duels], OURS, "s", "Decompose-K"),
    ):
        filled = colour if label != "torch.mm" else "none"
        axes.plot(
            limits,
            [row.p50_us for row in rows],
            color=colour,
            markerfacecolor=filled,
            marker=marker,
            markersize=4.5,
            linestyle="none",
            alpha=0.8,
            label=label,
        )
    low, high = min(limits) / 1.5, max(limits) * 1.5
    for factor in (1, 2, 4, 8):
        style = "-" if factor == 1 else (0, (1, 3))
        axes.plot(
            [low, high],
            [low * factor, high * factor],
            color=FAINT,
            linewidth=1.2 if factor == 1 else 0.9,
            linestyle=style,
            zorder=0,
        )
        text = "roofline" if factor == 1 else f"{factor}×"
        axes.annotate(
            text, (high, high * factor), (3, 0), textcoords="offset points", color=FAINT, fontsize=9, va="center"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(duration_ticks())
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("least time under the measured ceilings")
    axes.set_ylabel("measured time per call")
    axes.grid(visible=True)
    legend = axes.legend(frameon=False, loc="upper left", handletextpad=0.2, borderaxespad=0.2)
    for entry, colour in zip(legend.get_texts(), (TORCH, OURS), strict=True):
        entry.set_color(colour)
        entry.set_fontweight("bold")
    return Plot(
        "roofline",
        "Time against the roofline",
        "Every case twice. On the solid line a call would run as fast as memory and multipliers were seen to go.",
        svg_of(figure),
    )


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _labels(members: Sequence[Duel]) -> list[str]:
    """Name and size of each, and the dtypes where that does not tell them apart."""
    names = [_short(duel) for duel in members]
    return [
        name if names.count(name) == 1 else f"{name}  {duel.ours.dtypes}"
        for name, duel in zip(names, members, strict=True)
    ]


def _short(duel: Duel) -> str:
    row = duel.ours
    size = row.size.replace("x", "×")
    return size if row.name == row.size else f"{row.name.split(' (')[0]}  {size}"
