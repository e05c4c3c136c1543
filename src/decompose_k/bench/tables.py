"""The tables of a report: ours against each alternative, what is left to the read floor, every case, every variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from decompose_k.bench.page import Cell, Column, Table, text_cell
from decompose_k.bench.summary import FASTEST, Duel, duels, duration, group_cases, times, variant_of
from decompose_k.bench.variant import STATIC, TITLES
from decompose_k.bench.versus import Headroom, Versus
from decompose_k.config import Config

if TYPE_CHECKING:
    from decompose_k.bench.rows import Row

_MOST_NAMED = 12
_RATIOS = tuple(Column(name, True) for name in ("min", "median", "max"))
# Columns that not every run has: heading, what it means, and the row's value.
_FURTHER: tuple[tuple[Column, Callable[[Row], float | None]], ...] = (
    (Column("warm", True, "all operands in the cache"), lambda row: row.warm_us),
    (Column("weight cold", True, "a in the cache, b in memory: what decoding sees"), lambda row: row.weight_cold_us),
    (Column("event", True, "one eager call by the events around it"), lambda row: row.event_us),
    (Column("host", True, "the host's time for an eager call"), lambda row: row.host_us),
)


def versus_table(found: Sequence[Versus]) -> Table:
    """Wins, ties, losses and ratios of each suite against each alternative, the losses named."""
    columns = (
        Column("suite"),
        Column("dtypes"),
        Column("ours", hint="default, or with the promise of a static weight"),
        Column("against"),
        Column("cases", True),
        Column("wins", True),
        Column("ties", True, "within the noise of the run, at least 3 %, or ranges p20 to p80 overlap"),
        Column("losses", True),
        *_RATIOS,
        Column("lost cases"),
    )
    return Table("suites", columns, tuple(map(_versus_line, found)))


def headroom_table(found: Sequence[Headroom]) -> Table:
    """How many times the read floor's time ours takes."""
    columns = (Column("suite"), Column("dtypes"), Column("ours"), Column("cases", True), *_RATIOS)
    lines = tuple(
        (
            text_cell(one.suite),
            text_cell(one.dtypes),
            text_cell(one.way),
            Cell(str(len(one.ratios)), len(one.ratios)),
            *_range(one.ratios),
        )
        for one in found
    )
    return Table("floors", columns, lines)


def case_table(rows: Sequence[Row]) -> Table:
    """Every case: torch, the fastest alternative, ours, and ours with a static weight."""
    columns = (
        Column("suite"),
        Column("name"),
        *(Column(name, True) for name in ("M", "N", "K")),
        Column("dtypes"),
        Column("torch", True, "median of torch.mm in these dtypes, activation included"),
        Column("Decompose-K", True, "median of the fastest of ours that needs no promise"),
        Column("speed-up", True),
        Column("verdict"),
        Column("fastest alternative", True),
        Column("which"),
        Column("ours over it", True, "its median over ours"),
        Column("static weight", True, "median of ours with the promise that nothing writes b"),
        Column("× roofline", True, "our median over the least time under the measured ceilings"),
        Column("fastest of ours"),
        Column("config"),
    )
    by_case = {case[0].case: case for case in group_cases(rows)}
    rivals = {duel.ours.case: duel for duel in duels(rows, FASTEST)}
    lines = tuple(
        _case_line(duel, rivals[duel.ours.case].baseline, variant_of(by_case[duel.ours.case], STATIC))
        for duel in duels(rows)
    )
    return Table("cases", columns, lines)


def variant_table(rows: Sequence[Row]) -> Table:
    """Every row, with the further columns that the run measured."""
    further = [(column, of) for column, of in _FURTHER if any(of(row) is not None for row in rows)]
    columns = (
        Column("suite"),
        Column("name"),
        Column("M×N×K"),
        Column("dtypes"),
        Column("layout", hint="NT: b stored as [N, K]; TN: a stored as [K, M]"),
        Column("activation"),
        Column("variant"),
        *(Column(name, True) for name in ("p20", "p50", "p80")),
        *(column for column, _ in further),
        Column("error", True, "relative Frobenius error against fp64"),
        Column("torch's error", True, "the same of torch's own op in these dtypes"),
        Column("timing"),
        Column("config or choice"),
    )
    lines = tuple(
        (
            text_cell(row.suite),
            text_cell(row.name),
            Cell(row.size, row.m * row.n * row.k),
            text_cell(row.dtypes),
            text_cell(row.layout),
            text_cell(row.activation or "none"),
            text_cell(row.label),
            *(_time(value) for value in (row.p20_us, row.p50_us, row.p80_us)),
            *(_time(of(row)) for _, of in further),
            Cell(f"{row.error:.1e}", row.error),
            Cell(f"{row.torch_error:.1e}", row.torch_error),
            text_cell(row.timing),
            text_cell(_config(row) or row.chosen or ""),
        )
        for case in group_cases(rows)
        for row in case
    )
    return Table("variants", columns, lines)


def _versus_line(one: Versus) -> tuple[Cell, ...]:
    tally = one.tally
    losses = tally.losses
    named = "; ".join(f"{duel.title} {times(duel.speedup)}" for duel in losses[:_MOST_NAMED])
    more = f"; and {len(losses) - _MOST_NAMED} more, below" if len(losses) > _MOST_NAMED else ""
    counts = [len(tally.duels), *(tally.count(verdict) for verdict in ("win", "tie", "loss"))]
    return (
        text_cell(tally.suite),
        text_cell(tally.dtypes),
        text_cell(one.way),
        text_cell(one.title),
        *(Cell(str(count), count) for count in counts),
        *_range(tally.speedups),
        Cell(f"{named}{more}" or "none", len(losses), "wide"),
    )


def _case_line(duel: Duel, rival: Row, static: Row | None) -> tuple[Cell, ...]:
    row = duel.ours
    over_rival = rival.p50_us / row.p50_us
    return (
        text_cell(row.suite),
        text_cell(row.name + (" (unverified)" if row.status == "unverified" else "")),
        *(Cell(str(size), size) for size in (row.m, row.n, row.k)),
        text_cell(row.dtypes),
        _time(duel.baseline.p50_us),
        _time(row.p50_us),
        Cell(times(duel.speedup), duel.speedup, "strong"),
        text_cell(duel.verdict, duel.verdict),
        _time(rival.p50_us),
        text_cell(TITLES.get(rival.variant, rival.label)),
        Cell(times(over_rival), over_rival),
        _time(None if static is None else static.p50_us),
        Cell(times(row.p50_us / row.roofline_us), row.p50_us / row.roofline_us),
        text_cell(row.label),
        text_cell(_config(row)),
    )


def _range(ratios: Sequence[float]) -> tuple[Cell, ...]:
    middle = ratios[len(ratios) // 2] if len(ratios) % 2 else sum(ratios[len(ratios) // 2 - 1 :][:2]) / 2
    return tuple(Cell(times(ratio), ratio) for ratio in (ratios[0], middle, ratios[-1]))


def _time(microseconds: float | None) -> Cell:
    # Infinity sorts what was not measured to the end.
    return Cell("", "Infinity") if microseconds is None else Cell(duration(microseconds), microseconds)


def _config(row: Row) -> str:
    return "" if row.config is None else str(Config.from_json(row.config))
