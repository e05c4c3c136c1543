"""What all plots share: colours, the scale of speed-ups, and SVG whose ink follows the page's colours."""

from __future__ import annotations

import io
import math
import re
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from decompose_k.bench import variant as names
from decompose_k.bench.summary import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's blue and vermilion: told apart by the colour-blind, and in grey by lightness.
OURS = "#0071b2"
TORCH = "#d55e00"
# The page replaces all four by its own colours, so that one file serves a light and a dark page.
INK, FAINT = "#0a0b0c", "#9a9b9c"
_PAGE_COLOURS = {
    OURS: "var(--ours, #0072b2)",
    TORCH: "var(--torch, #d55e00)",
    INK: "var(--ink, #1c2430)",
    FAINT: "var(--faint, #8a93a0)",
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "decompose-k",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
SPEEDUP_COLOURS = LinearSegmentedColormap.from_list(
    "speedup", ["#c85500", "#f7d9c4", "#f1f1ef", "#bcdcf0", "#0070b0", "#00446b"]
)
# The most wanted first: a later one is left out where it would stand too near.
_SPEEDUP_TICKS = (1, 0.5, 2, 10, 0.1, 5, 0.2, 20, 50, 100, 0.05, 0.02, 0.7, 1.5, 3, 0.3, 0.8, 1.2, 0.9, 1.1)


# Ours in blues, the older the fainter; alternatives in warm colours; floors in grey. Dashes and marks tell them apart
# in grey too.
_LINES: dict[str, tuple[str, str, Any]] = {
    names.TORCH: (TORCH, "o", "-"),
    names.TORCH_CAST: (TORCH, "v", (0, (1, 1.5))),
    names.COMPILED_SPLIT: ("#b07a00", "P", (0, (5, 1.5))),
    names.COMPILED: ("#cc5f9b", "^", "-"),
    names.COMPILED_MAX: ("#cc5f9b", "v", (0, (1, 1.5))),
    names.COMPILED_MAX_NO_GRAPHS: ("#cc5f9b", "D", (0, (5, 1.5))),
    names.CUSTOM_OP: ("#2a9d5f", "<", (0, (5, 1.5))),
    names.CUSTOM_OP_FUSED: ("#2a9d5f", ">", "-"),
    names.AUTO: (OURS, "s", "-"),
    names.STATIC: (OURS, "*", (0, (5, 1.5))),
    names.SPLIT: ("#7a6fd0", "h", (0, (1, 1.5))),
    names.UNFUSED: (OURS, "x", (0, (1, 1.5))),
    names.GENERATION_3: ("#3f93cc", "s", (0, (3, 1, 1, 1))),
    names.GENERATION_2: ("#6fb1dd", "d", "-"),
    names.GENERATION_2_UNFUSED: ("#6fb1dd", "x", (0, (1, 1.5))),
    names.GENERATION_1: ("#93bcd6", "p", "-"),
    names.GENERATION_1_UNFUSED: ("#93bcd6", "x", (0, (1, 1.5))),
    names.FLOOR_PLAIN: (FAINT, "", "-"),
    names.FLOOR_WAIT_FIRST: (FAINT, "", (0, (3, 1, 1, 1))),
    names.FLOOR_STATIC: (FAINT, "", (0, (1, 1.5))),
}


def line_style(variant: str) -> dict[str, Any]:
    """How a variant's curve is drawn, the same in every plot."""
    colour, marker, dashes = _LINES[variant]
    is_main = variant in (names.TORCH, names.AUTO)
    return {
        "color": colour,
        "marker": marker,
        "linestyle": dashes,
        "markersize": 4.5 if is_main else 3.5,
        "linewidth": 2.0 if is_main else 1.1,
    }


def draw_even_line(axes: Axes, *, vertical: bool = True) -> None:
    """The line where both are equally fast."""
    draw = axes.axvline if vertical else axes.axhline
    draw(1, color=INK, linewidth=1, alpha=0.7, zorder=0)


def set_speedup_axis(
    axis: Axis,
    set_scale: Callable[[str], object],
    set_limits: Callable[[float, float], object],
    speedups: Sequence[float],
    room: float,
) -> None:
    """Scale an axis to speed-ups: logarithmic, 1 always on it, `room` of its span free beyond the outermost mark."""
    span = math.log(max(1.0, *speedups) / min(1.0, *speedups)) + 0.2
    low = min(1.0, *speedups) * math.exp(-span * (room if min(speedups) < 1 else 0.05))
    high = max(1.0, *speedups) * math.exp(span * (room if max(speedups) > 1 else 0.05))
    set_scale("log")
    set_limits(low, high)
    ticks: list[float] = []
    for tick in _SPEEDUP_TICKS:
        apart = all(abs(math.log(tick / other)) > 0.16 * math.log(high / low) for other in ticks)
        if low <= tick <= high and apart:
            ticks.append(tick)
    axis.set_ticks(ticks, [f"{tick:g}×" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def duration_ticks() -> FuncFormatter:
    """Ticks in microseconds shown as durations."""
    return FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", duration(value)) if value > 0 else "0")


def svg_of(figure: Figure) -> str:
    """A figure as SVG text to be put into a page; the same figure gives the same text."""
    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return svg
