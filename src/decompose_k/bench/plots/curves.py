"""Time against K at each M = N, of every variant: in ms and as a speed-up over torch eager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from decompose_k.bench.plots.base import FULL_WIDTH, Group, Plot
from decompose_k.bench.plots.style import FAINT, draw_even_line, line_style, svg_of
from decompose_k.bench.variant import (
    AUTO,
    COMPILED,
    COMPILED_MAX_NO_GRAPHS,
    COMPILED_SPLIT,
    CUSTOM_OP,
    CUSTOM_OP_FUSED,
    FLOOR_WAIT_FIRST,
    GENERATION_2,
    STATIC,
    TITLES,
    TORCH,
    TORCH_CAST,
    VARIANTS,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from decompose_k.bench.rows import Row

# Their percentiles are drawn too; of all variants they would hide each other.
_WITH_BAND = (TORCH, AUTO)
# Where all sizes stand together, twenty lines each could not be told apart.
_TOGETHER = (
    TORCH,
    TORCH_CAST,
    COMPILED_SPLIT,
    COMPILED,
    COMPILED_MAX_NO_GRAPHS,
    CUSTOM_OP,
    CUSTOM_OP_FUSED,
    AUTO,
    STATIC,
    GENERATION_2,
    FLOOR_WAIT_FIRST,
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One variant at one M = N: its rows in the order of K, and torch's beside them."""

    variant: str
    rows: tuple[Row, ...]
    torch: tuple[Row, ...]

    @property
    def depths(self) -> list[int]:
        """Every K."""
        return [row.k for row in self.rows]

    @property
    def milliseconds(self) -> list[float]:
        """Medians."""
        return [row.p50_us / 1e3 for row in self.rows]

    @property
    def speedups(self) -> list[float]:
        """Ratios of medians over torch."""
        return [torch.p50_us / row.p50_us for row, torch in zip(self.rows, self.torch, strict=True)]


def latency_curves(group: Group, *, details: bool = True) -> list[Plot]:
    """One plot of all sizes together, and with `details` one of each."""
    sizes = sorted({case[0].m for case in group.cases if case[0].m == case[0].n})
    curves = {size: _curves([case for case in group.cases if case[0].m == case[0].n == size]) for size in sizes}
    caption = "Medians; bands of torch and ours from the 20th to the 80th percentile. Dashed: the measured roofline."
    together = curves if len(sizes) == 1 else {size: _chosen(some) for size, some in curves.items()}
    overall = Plot(
        f"latency-{group.slug}",
        f"Time against K: {group.name}",
        caption,
        _draw(together, panel_height=1.9),
        is_wide=True,
    )
    if not details or len(sizes) == 1:
        return [overall]
    return [overall] + [
        Plot(
            f"latency-{group.slug}-{size}",
            f"Time against K at M = N = {size}: {group.name}",
            caption,
            _draw({size: curves[size]}, panel_height=3.4),
            is_detail=True,
            is_wide=True,
        )
        for size in sizes
    ]


def _chosen(curves: Sequence[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.variant in _TOGETHER]


def _curves(cases: Sequence[Sequence[Row]]) -> list[Curve]:
    ordered = sorted(cases, key=lambda case: case[0].k)
    found = []
    for variant in VARIANTS:
        pairs = []
        for case in ordered:
            by_name = {row.variant: row for row in case}
            if variant in by_name and TORCH in by_name:
                pairs.append((by_name[variant], by_name[TORCH]))
        if pairs:
            rows, torch = zip(*pairs, strict=True)
            found.append(Curve(variant, rows, torch))
    return found


def _draw(curves: dict[int, list[Curve]], panel_height: float) -> str:
    names = list(dict.fromkeys(curve.variant for some in curves.values() for curve in some))
    legend_height = 0.24 * -(-len(names) // 4) + 0.2
    height = panel_height * len(curves) + legend_height + 0.4
    figure = Figure(figsize=(FULL_WIDTH, height), layout="constrained")
    grid = figure.subplots(len(curves), 2, sharex=True, squeeze=False)
    depths = sorted({depth for some in curves.values() for curve in some for depth in curve.depths})
    for (in_ms, as_speedup), (size, some) in zip(grid, curves.items(), strict=True):
        _draw_times(in_ms, some)
        _draw_speedups(as_speedup, some)
        for axes, said in ((in_ms, "time per call, ms"), (as_speedup, "speed-up over torch eager")):
            axes.set_title(f"M = N = {size}: {said}", fontsize=10, loc="left")
            axes.grid(visible=True)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda depth, _: f"{depth / 1024:g}k"))
            axes.set_xticks(depths[:: -(-len(depths) // 4)])
    for axes in grid[-1]:
        axes.set_xlabel("K (k = 1024)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    for axes in (row[0] for row in grid[1:]):
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return svg_of(figure)


def _draw_times(axes: Axes, curves: Sequence[Curve]) -> None:
    for curve in curves:
        style = line_style(curve.variant)
        axes.plot(curve.depths, curve.milliseconds, label=TITLES[curve.variant], **style)
        if curve.variant in _WITH_BAND:
            low, high = ([getattr(row, name) / 1e3 for row in curve.rows] for name in ("p20_us", "p80_us"))
            axes.fill_between(curve.depths, low, high, color=style["color"], alpha=0.18, linewidth=0)
    longest = max(curves, key=lambda curve: len(curve.rows))
    roofline = [row.roofline_us / 1e3 for row in longest.rows]
    axes.plot(longest.depths, roofline, color=FAINT, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_speedups(axes: Axes, curves: Sequence[Curve]) -> None:
    draw_even_line(axes, vertical=False)
    for curve in curves:
        if curve.variant != TORCH:
            axes.plot(curve.depths, curve.speedups, **line_style(curve.variant))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_ylim(bottom=0)
