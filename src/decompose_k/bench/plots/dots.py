"""Speed-ups of real shapes: a dot each, or by M where they are many."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from decompose_k.bench.plots.base import HALF_WIDTH, Group, Plot, new_figure
from decompose_k.bench.plots.style import FAINT, INK, OURS, TORCH, draw_even_line, set_speedup_axis, svg_of
from decompose_k.bench.summary import Duel, times

if TYPE_CHECKING:
    from collections.abc import Sequence


def speedup_dots(group: Group) -> Plot:
    """The speed-up of each case over torch."""
    members = list(reversed(group.duels))
    figure, axes = new_figure(HALF_WIDTH, 0.27 * len(members) + 0.9)
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


def speedup_by_m(group: Group) -> Plot:
    """The speed-ups over torch at each M."""
    figure, axes = new_figure(HALF_WIDTH, 3.4)
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
