"""What a caller sees who uses no CUDA graph: the host's time, and one eager call by the events around it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from decompose_k.bench.plots.base import HALF_WIDTH, Plot, new_figure
from decompose_k.bench.plots.style import FAINT, INK, OURS, svg_of
from decompose_k.bench.summary import duration
from decompose_k.bench.variant import TITLES, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.rows import Row


def host_times(rows: Sequence[Row]) -> Plot | None:
    """Medians over all cases of each variant; None where no host time was measured."""
    times = {
        name: [(row.host_us, row.event_us) for row in rows if row.variant == name and row.host_us is not None]
        for name in VARIANTS
    }
    named = [name for name in reversed(VARIANTS) if times[name]]
    if not named:
        return None
    figure, axes = new_figure(HALF_WIDTH, 0.27 * len(named) + 1.2)
    labels: list[str] = []
    for place, name in enumerate(named):
        host = statistics.median(host for host, _ in times[name] if host is not None)
        events = [event for _, event in times[name] if event is not None]
        axes.barh([place], [host], height=0.55, color=OURS if _is_ours(rows, name) else FAINT, alpha=0.85)
        labels.append(f"{TITLES[name]}, {duration(host)}")
        if events:
            axes.plot([statistics.median(events)], [place], color=INK, marker="|", markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(named)), labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("µs per eager call")
    axes.margins(x=0.05)
    return Plot(
        "host-time",
        "Host time of an eager call",
        "Bars: the host's time, medians over all cases. Strokes: one call by the events around it. A CUDA graph pays"
        " neither.",
        svg_of(figure),
    )


def _is_ours(rows: Sequence[Row], name: str) -> bool:
    return any(row.ours for row in rows if row.variant == name)
