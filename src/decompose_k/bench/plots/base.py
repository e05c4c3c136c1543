"""A plot and the group of cases that it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from decompose_k.bench.rows import Row
    from decompose_k.bench.summary import Duel

# The width in inches of a plot that stands beside another, and of one that has the page to itself.
HALF_WIDTH, FULL_WIDTH = 5.4, 10.4


@dataclass(frozen=True, slots=True)
class Plot:
    """A named figure: its SVG text, and one sentence on how to read it; a `detail` is shown where it is asked for.

    One that `is_wide` has the page to itself, and is scrolled sideways on a phone.
    """

    name: str
    title: str
    caption: str
    svg: str
    is_detail: bool = False
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Duels that share a plot with all rows of their cases, and what they are called."""

    name: str
    duels: tuple[Duel, ...]
    cases: tuple[tuple[Row, ...], ...] = ()

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one set of axes, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
