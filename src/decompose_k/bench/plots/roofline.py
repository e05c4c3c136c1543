"""Every case's time against the least that memory and multipliers of the device allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import NullLocator

from decompose_k.bench.plots.base import HALF_WIDTH, Plot, new_figure
from decompose_k.bench.plots.style import FAINT, OURS, TORCH, duration_ticks, svg_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.summary import Duel


def roofline(all_duels: Sequence[Duel]) -> Plot:
    """Measured times over the times under the measured ceilings."""
    figure, axes = new_figure(HALF_WIDTH, 4.0)
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
