"""Maps of speed-ups: the seed grid by K and M = N, and the crossover by M and N for each K."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from decompose_k.bench.plots.base import FULL_WIDTH, HALF_WIDTH, Group, Plot, new_figure
from decompose_k.bench.plots.style import INK, SPEEDUP_COLOURS, svg_of
from decompose_k.bench.summary import Duel, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


def speedup_grid(group: Group, square: Sequence[Duel]) -> Plot:
    """The speed-up over torch at each K and M = N."""
    sizes = {duel.ours.m for duel in square}
    figure, axes = new_figure(HALF_WIDTH, 0.62 * len(sizes) + 1.1)
    _draw_cells(axes, square, lambda duel: duel.ours.k, lambda duel: duel.ours.m, _norm(square))
    depths = sorted({duel.ours.k for duel in square})
    axes.set_xticks(range(len(depths)), [f"{depth / 1024:g}k" for depth in depths])
    axes.set_xlabel("K (k = 1024)")
    axes.set_ylabel("M = N")
    return Plot(
        f"speedup-grid-{group.slug}",
        f"Speed-up over torch.mm: {group.name}",
        "Ratio of medians, the fastest of ours against torch. Blue: Decompose-K is faster; orange: torch is.",
        svg_of(figure),
    )


def crossover_map(members: Sequence[Duel]) -> Plot:
    """Where Decompose-K wins: M and N for each K, with a line around the region."""
    depths = sorted({duel.ours.k for duel in members})
    columns = min(_COLUMNS, len(depths))
    lines = math.ceil(len(depths) / columns)
    height = 0.42 * len({duel.ours.m for duel in members}) + 0.75
    figure = Figure(figsize=(FULL_WIDTH, height * lines + 0.3), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    norm = _norm(members)
    for axes, depth in zip(grid.flat, depths, strict=False):
        here = [duel for duel in members if duel.ours.k == depth]
        _draw_cells(axes, here, lambda duel: duel.ours.n, lambda duel: duel.ours.m, norm)
        _draw_border(axes, here)
        axes.set_title(f"K = {depth}", fontsize=10, loc="left")
    for axes in list(grid.flat)[len(depths) :]:
        axes.set_visible(False)
    figure.supxlabel("N", fontsize=10)
    figure.supylabel("M", fontsize=10)
    return Plot(
        "crossover",
        "Where Decompose-K wins",
        "The fastest of ours that cuts K against the fastest alternative. The line runs around the wins; `auto` is to"
        " call torch outside of it.",
        svg_of(figure),
        is_wide=True,
    )


def _norm(members: Sequence[Duel]) -> TwoSlopeNorm:
    extent = max(math.log2(1.5), *(abs(math.log2(duel.speedup)) for duel in members))
    return TwoSlopeNorm(0.0, -extent, extent)


def _draw_cells(
    axes: Axes,
    members: Sequence[Duel],
    column_of: Callable[[Duel], int],
    line_of: Callable[[Duel], int],
    norm: TwoSlopeNorm,
) -> None:
    columns = sorted({column_of(duel) for duel in members})
    lines = sorted({line_of(duel) for duel in members})
    for duel in members:
        column, line = columns.index(column_of(duel)), lines.index(line_of(duel))
        colour = SPEEDUP_COLOURS(norm(math.log2(duel.speedup)))
        axes.add_patch(
            matplotlib.patches.Rectangle((column - 0.47, line - 0.45), 0.94, 0.9, facecolor=colour, linewidth=0)
        )
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.55
        ink = "#ffffff" if dark else "#101418"
        axes.text(column, line, times(duel.speedup), ha="center", va="center", color=ink, weight="bold")
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(lines) - 0.5)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(lines)), [str(line) for line in lines])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_border(axes: Axes, members: Sequence[Duel]) -> None:
    """A line between the cells of wins and the others."""
    columns = sorted({duel.ours.n for duel in members})
    lines = sorted({duel.ours.m for duel in members})
    won = {(columns.index(duel.ours.n), lines.index(duel.ours.m)) for duel in members if duel.verdict == "win"}
    for column in range(len(columns)):
        for line in range(len(lines)):
            is_won = (column, line) in won
            if column + 1 < len(columns) and is_won != ((column + 1, line) in won):
                axes.plot([column + 0.5] * 2, [line - 0.5, line + 0.5], color=INK, linewidth=2)
            if line + 1 < len(lines) and is_won != ((column, line + 1) in won):
                axes.plot([column - 0.5, column + 0.5], [line + 0.5] * 2, color=INK, linewidth=2)
