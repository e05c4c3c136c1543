"""What the command line shows of rows: tables and findings for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from decompose_k.bench.compare import FASTER, SAME, SLOWER
from decompose_k.bench.summary import Duel, duels, duration, findings, tallies, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from decompose_k.bench.check import Checked
    from decompose_k.bench.compare import Comparison
    from decompose_k.bench.rows import Row

_WRAPPING = ("name", "variant", "chosen", "dtypes", "file", "device", "counts here")
_LEAST_WIDTH = 10
_CHANGE_STYLES = {FASTER: "bold cyan", SAME: "dim", SLOWER: "bold red"}
_VERDICT_STYLES = {"win": "bold cyan", "tie": "dim", "loss": "bold yellow"}


def progress_bar(console: Console) -> Progress:
    """A progress bar that names what is being done; it vanishes when done."""
    return Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )


def show_checks(console: Console, checks: Sequence[Checked]) -> None:
    """Each checked variant with its error beside torch's."""
    table = bare_table("error", "torch's error", "", left=("shape", "dtypes", "variant"))
    for checked in checks:
        shape = checked.case.shape
        verdict = "[cyan]ok[/]" if checked.passed else "[bold red]WRONG[/]"
        table.add_row(
            f"{shape.suite} {shape.m}x{shape.n}x{shape.k}",
            checked.dtypes,
            checked.variant.label,
            f"{checked.error:.1e}",
            f"{checked.torch_error:.1e}",
            verdict,
        )
    console.print(table)


def show_cases(console: Console, rows: Sequence[Row]) -> None:
    """Every case: torch against the fastest of ours."""
    table = bare_table("torch", "Decompose-K", "speed-up", "verdict", left=("suite", "name", "M×N×K", "dtypes"))
    for duel in duels(rows):
        row = duel.ours
        style = _VERDICT_STYLES[duel.verdict]
        table.add_row(
            row.suite,
            "" if row.name == row.size else row.name,
            row.size,
            row.dtypes,
            duration(duel.baseline.p50_us),
            f"{duration(row.p50_us)} ({row.variant})",
            f"[{style}]{times(duel.speedup)}[/]",
            f"[{style}]{duel.verdict}[/]",
        )
    console.print(table)


def show_suites(console: Console, all_duels: Sequence[Duel]) -> None:
    """Wins, ties, losses and the range of speed-ups by suite."""
    headings = ("cases", "wins", "ties", "losses", "min", "median", "max")
    table = bare_table(*headings, left=("suite", "dtypes"))
    for tally in tallies(all_duels):
        counts = [len(tally.duels), *(tally.count(verdict) for verdict in ("win", "tie", "loss"))]
        ratios = (tally.speedups[0], tally.median, tally.speedups[-1])
        table.add_row(tally.suite, tally.dtypes, *map(str, counts), *map(times, ratios))
    console.print(table)


def show_findings(console: Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """The findings in plain words, and what was left out."""
    console.print("[bold]What was found[/]")
    for sentence in findings(rows):
        _bullet(console, sentence)
    if notes:
        console.print("[bold]Left out[/]")
        for note in notes:
            _bullet(console, note)


def show_comparison(console: Console, comparison: Comparison, *, only_changes: bool = False) -> None:
    """Every row of two runs with its verdict, how many changed, and the noise that was allowed for."""
    headings = ("before", "after", "speed-up", "noise", "verdict")
    table = bare_table(*headings, left=("suite", "name", "M×N×K", "dtypes", "variant"))
    for change in comparison.changes:
        row, verdict = change.after, change.verdict
        if only_changes and verdict == SAME:
            continue
        style = _CHANGE_STYLES[verdict]
        table.add_row(
            row.suite,
            "" if row.name == row.size else row.name,
            row.size,
            row.dtypes,
            row.variant,
            duration(change.before.p50_us),
            duration(row.p50_us),
            f"[{style}]{times(change.ratio)}[/]",
            f"{100 * change.noise:.0f} %",
            f"[{style}]{verdict}[/]",
        )
    console.print(table)
    counts = ", ".join(f"{comparison.count(verdict)} {verdict}" for verdict in (FASTER, SAME, SLOWER))
    _bullet(
        console, f"{len(comparison.changes)} rows in both: {counts}; of ours slower: {len(comparison.regressions)}."
    )
    if comparison.drift is None:
        _bullet(console, "No baseline of the same torch and Triton is in both: a drift of the machine cannot be told.")
    else:
        _bullet(console, f"Between the runs most baselines differ by less than {100 * comparison.drift:.1f} %.")
    for said, rows in (("only before", comparison.gone), ("only after", comparison.new)):
        if rows:
            _bullet(console, f"{len(rows)} rows {said}: {', '.join(dict.fromkeys(row.suite for row in rows))}.")


def _bullet(console: Console, text: str) -> None:
    console.print(Padding(f"• {text}", (0, 0, 0, 2)), markup=False, highlight=False)


def bare_table(*right: str, left: Sequence[str]) -> Table:
    """A bare table with headings; the columns on the right hold numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in left:
        # Only words may wrap on a narrow terminal; a broken number cannot be read.
        wraps = heading in _WRAPPING
        table.add_column(heading, no_wrap=not wraps, min_width=_LEAST_WIDTH if wraps else None)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
