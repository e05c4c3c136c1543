"""The report: one self-contained HTML file made from rows alone, with findings, plots and sortable tables."""

from __future__ import annotations

import html
import importlib.resources
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.bench.plots import Plot, make_plots
from decompose_k.bench.rows import CSV_NAME, Row, write_csv
from decompose_k.bench.summary import (
    Duel,
    Tally,
    distinct,
    duels,
    duration,
    findings,
    group_cases,
    per_second,
    tallies,
    times,
)
from decompose_k.config import Config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

REPORT_NAME = "report.html"
PLOT_FOLDER = "plots"

_DARK_SVG_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { svg { --ink: #e8eaee; --faint: #8b94a3;"
    " --ours: #4fb0e6; --torch: #f58a45; } }</style>"
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, whether it holds numbers, and what the heading means."""

    heading: str
    is_number: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: what is shown, what it is sorted by, and its class."""

    text: str
    key: float | str
    css: str = ""


def write_report(folder: Path, rows: Sequence[Row], notes: Sequence[str] = ()) -> Path:
    """Write rows.csv, plots/*.svg and report.html for rows into a folder; returns the report's path."""
    plots = make_plots(rows)
    write_csv(folder / CSV_NAME, rows)
    plot_folder = folder / PLOT_FOLDER
    plot_folder.mkdir(exist_ok=True)
    for plot in plots:
        (plot_folder / f"{plot.name}.svg").write_text(_standalone(plot.svg), encoding="utf-8")
    path = folder / REPORT_NAME
    path.write_text(report_html(rows, plots, notes), encoding="utf-8")
    return path


def report_html(rows: Sequence[Row], plots: Sequence[Plot], notes: Sequence[str] = ()) -> str:
    """The whole page as text."""
    all_duels = duels(rows)
    device = ", ".join(distinct(rows, lambda row: row.device))
    sections = [
        _header(rows, device),
        _section("What was found", _headline(all_duels) + _list(findings(rows)) + _notes(notes)),
        _section("By suite", _table("suites", *_suite_table(tallies(all_duels)))) if all_duels else "",
        _section("Plots", f'<div class="plots">{"".join(map(_figure, plots))}</div>') if plots else "",
        _section("Every case", _table("cases", *_case_table(all_duels))) if all_duels else "",
        _section("Every variant", _table("variants", *_variant_table(rows))),
        _section("How it was measured", _method(rows)),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>decompose-k on {html.escape(device)}</title>
<style>
{_asset("report.css")}
</style>
</head>
<body>
<main>
{"".join(sections)}
</main>
<script>
{_asset("report.js")}
</script>
</body>
</html>
"""


def _header(rows: Sequence[Row], device: str) -> str:
    facts = {
        "device": device,
        "torch": ", ".join(distinct(rows, lambda row: row.torch)),
        "Triton": ", ".join(distinct(rows, lambda row: row.triton)) or "not installed",
        "decompose-k": ", ".join(distinct(rows, lambda row: row.version)),
        "commit": ", ".join(distinct(rows, lambda row: row.commit)) or "not in a checkout",
        "measured": _span(sorted(row.date for row in rows)),
        "measured ceilings": _ceiling(rows),
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items())
    return f"""<header>
<h1>Decompose-K, measured</h1>
<p class="lead">out[M, N] = A[M, K] · B[K, N] with a small output and a long K. Decompose-K cuts K into chunks, computes
the partial products in parallel and sums them in a fixed order.</p>
<dl class="facts">{items}</dl>
</header>
"""


def _headline(all_duels: Sequence[Duel]) -> str:
    if not all_duels:
        return ""
    counts = {verdict: sum(duel.verdict == verdict for duel in all_duels) for verdict in ("win", "tie", "loss")}
    speedups = sorted(duel.speedup for duel in all_duels)
    tiles = [
        (str(counts["win"]), f"wins of {len(all_duels)} over torch.mm", "win"),
        (str(counts["tie"]), "ties, within the noise", ""),
        (str(counts["loss"]), "losses", "loss" if counts["loss"] else ""),
        (times(speedups[len(speedups) // 2]), f"median speed-up ({times(speedups[0])} to {times(speedups[-1])})", ""),
    ]
    body = "".join(f'<div class="tile {css}"><b>{value}</b><span>{text}</span></div>' for value, text, css in tiles)
    return f'<div class="tiles">{body}</div>'


def _suite_table(all_tallies: Sequence[Tally]) -> tuple[list[Column], list[list[Cell]]]:
    columns = [
        Column("suite"),
        Column("dtypes"),
        Column("cases", True),
        Column("wins", True),
        Column("ties", True, "within 3 %, or ranges p20 to p80 overlap"),
        Column("losses", True),
        Column("min", True),
        Column("median", True),
        Column("max", True),
        Column("lost cases"),
    ]
    lines = []
    for tally in all_tallies:
        counts = [tally.count(verdict) for verdict in ("win", "tie", "loss")]
        ratios = (tally.speedups[0], tally.median, tally.speedups[-1])
        lost = "; ".join(f"{duel.title} {times(duel.speedup)}" for duel in tally.losses) or "none"
        lines.append(
            [
                _text(tally.suite),
                _text(tally.dtypes),
                Cell(str(len(tally.duels)), len(tally.duels)),
                *(Cell(str(count), count) for count in counts),
                *(Cell(times(ratio), ratio) for ratio in ratios),
                Cell(lost, len(tally.losses), "wide"),
            ]
        )
    return columns, lines


def _case_table(all_duels: Sequence[Duel]) -> tuple[list[Column], list[list[Cell]]]:
    columns = [
        Column("suite"),
        Column("name"),
        *(Column(name, True) for name in ("M", "N", "K")),
        Column("dtypes"),
        Column("torch", True, "median of torch.mm in these dtypes, activation included"),
        Column("Decompose-K", True, "median of the fastest of ours"),
        Column("speed-up", True),
        Column("verdict"),
        Column("× roofline", True, "our median over the least time under the measured ceilings"),
        Column("fastest of ours"),
        Column("config"),
    ]
    lines = []
    for duel in all_duels:
        row = duel.ours
        lines.append(
            [
                _text(row.suite),
                _text(row.name + (" (unverified)" if row.status == "unverified" else "")),
                *(Cell(str(size), size) for size in (row.m, row.n, row.k)),
                _text(row.dtypes),
                _time(duel.baseline),
                _time(row),
                Cell(times(duel.speedup), duel.speedup, "strong"),
                Cell(duel.verdict, duel.verdict, duel.verdict),
                Cell(times(row.p50_us / row.roofline_us), row.p50_us / row.roofline_us),
                _text(row.label),
                _text(_config(row)),
            ]
        )
    return columns, lines


def _variant_table(rows: Sequence[Row]) -> tuple[list[Column], list[list[Cell]]]:
    columns = [
        Column("suite"),
        Column("name"),
        Column("M×N×K"),
        Column("dtypes"),
        Column("layout", hint="NT: b stored as [N, K]; TN: a stored as [K, M]"),
        Column("activation"),
        Column("variant"),
        *(Column(name, True) for name in ("p20", "p50", "p80")),
        Column("error", True, "relative Frobenius error against fp64"),
        Column("torch's error", True, "the same of torch's own op in these dtypes"),
        Column("config"),
    ]
    lines = [
        [
            _text(row.suite),
            _text(row.name),
            Cell(row.size, row.m * row.n * row.k),
            _text(row.dtypes),
            _text(row.layout),
            _text(row.activation or "none"),
            _text(row.label),
            *(Cell(duration(value), value) for value in (row.p20_us, row.p50_us, row.p80_us)),
            Cell(f"{row.error:.1e}", row.error),
            Cell(f"{row.torch_error:.1e}", row.torch_error),
            _text(_config(row)),
        ]
        for case in group_cases(rows)
        for row in case
    ]
    return columns, lines


def _table(name: str, columns: Sequence[Column], lines: Sequence[Sequence[Cell]]) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if column.is_number else ""}'
        f"{f' title={json.dumps(html.escape(column.hint))}' if column.hint else ''}>"
        f'<button type="button">{html.escape(column.heading)}</button></th>'
        for column in columns
    )
    body = "".join(f"<tr>{''.join(map(_cell, columns, line))}</tr>\n" for line in lines)
    search = (
        f'<input type="search" data-table="{name}" placeholder="filter, such as router" aria-label="filter the table">'
        if len(lines) > 8
        else ""
    )
    return (
        f'{search}<div class="scroll" tabindex="0"><table id="{name}" class="sortable">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _cell(column: Column, cell: Cell) -> str:
    classes = " ".join(name for name in ("number" if column.is_number else "", cell.css) if name)
    css = f' class="{classes}"' if classes else ""
    return f'<td{css} data-key="{html.escape(str(cell.key))}">{html.escape(cell.text)}</td>'


def _method(rows: Sequence[Row]) -> str:
    explained = {
        "graph-cold": "graph-cold: input sets that together exceed twice the L2 cache, one CUDA graph that calls the"
        " function once on each in turn, time of a replay divided by the calls. Operands come from device memory and no"
        " host time is counted.",
        "graph-warm": "graph-warm: one CUDA graph over input sets that fit the L2 cache, where operands may stay.",
        "cpu-rotating": "cpu-rotating: one call after another, each on another input set, host time included.",
    }
    methods = distinct(rows, lambda row: row.timing)
    counts = sorted(row.repetitions for row in rows)
    texts = [explained.get(method, method) for method in methods]
    texts += [
        f"{counts[0]} to {counts[-1]} samples of each variant, the variants interleaved; p50 is the median.",
        "Every variant was checked against fp64 before it was timed: its error may be at most twice torch's own in the"
        " same dtypes, or what one rounding of the result costs where that is more.",
        "A tie is a difference of at most 3 %, or overlapping ranges from the 20th to the 80th percentile.",
        "The roofline is the longer of moving every operand once at the measured bandwidth, and computing at the rate"
        " that a large square torch.mm reached.",
    ]
    return _list(texts)


def _figure(plot: Plot) -> str:
    return (
        f'<figure id="{plot.name}"><figcaption><b>{html.escape(plot.title)}</b>'
        f"<span>{html.escape(plot.caption)}</span></figcaption>{plot.svg}</figure>"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>\n"


def _notes(notes: Sequence[str]) -> str:
    return f"<h3>Left out</h3>{_list(notes)}" if notes else ""


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def _text(text: str) -> Cell:
    return Cell(text, text)


def _time(row: Row) -> Cell:
    return Cell(duration(row.p50_us), row.p50_us)


def _config(row: Row) -> str:
    return "" if row.config is None else str(Config.from_json(row.config))


def _ceiling(rows: Sequence[Row]) -> str:
    rates: dict[str, float] = {}
    for row in rows:
        rates[row.a_dtype] = max(rates.get(row.a_dtype, 0.0), row.rate)
    bandwidth = max(row.bandwidth for row in rows)
    products = ", ".join(f"{name} {per_second(rate, 'flop')}" for name, rate in rates.items())
    return f"memory {per_second(bandwidth, 'B')}; large torch.mm {products}"


def _span(dates: Sequence[str]) -> str:
    first, last = (date.replace("T", " ")[:16] for date in (dates[0], dates[-1]))
    return f"{first} UTC" if first == last else f"{first} to {last} UTC"


def _standalone(svg: str) -> str:
    end = svg.index(">") + 1
    return svg[:end] + _DARK_SVG_STYLE + svg[end:]


def _asset(name: str) -> str:
    folder = importlib.resources.files("decompose_k.bench").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8").strip()
