"""The report: one self-contained HTML file made from rows alone, with findings, plots and sortable tables."""

from __future__ import annotations

import html
import importlib.resources
import statistics
from typing import TYPE_CHECKING

from decompose_k.bench.page import bullets, section
from decompose_k.bench.plots import make_plots
from decompose_k.bench.plots.base import Plot
from decompose_k.bench.rows import CSV_NAME, Row, write_csv
from decompose_k.bench.suites import DESCRIPTIONS
from decompose_k.bench.summary import Duel, distinct, duels, findings, per_second, times
from decompose_k.bench.tables import case_table, headroom_table, variant_table, versus_table
from decompose_k.bench.versus import guidance, headroom, versus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

REPORT_NAME = "report.html"
PLOT_FOLDER = "plots"

_DARK_SVG_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { svg { --ink: #e8eaee; --faint: #8b94a3;"
    " --ours: #4fb0e6; --torch: #f58a45; } }</style>"
)


def write_report(folder: Path, rows: Sequence[Row], notes: Sequence[str] = ()) -> Path:
    """Write rows.csv, plots/*.svg and report.html for rows into a folder; returns the report's path."""
    rows = in_order(rows)
    plots = make_plots(rows)
    write_csv(folder / CSV_NAME, rows)
    plot_folder = folder / PLOT_FOLDER
    plot_folder.mkdir(exist_ok=True)
    for plot in plots:
        (plot_folder / f"{plot.name}.svg").write_text(standalone_svg(plot.svg), encoding="utf-8")
    path = folder / REPORT_NAME
    path.write_text(report_html(rows, plots, notes), encoding="utf-8")
    return path


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by suite, shape and size, whatever the order in which a budget was spent; variants keep theirs."""
    suites = distinct(rows, lambda row: row.suite)
    return sorted(rows, key=lambda row: (suites.index(row.suite), row.name, row.m, row.n, row.k))


def report_html(rows: Sequence[Row], plots: Sequence[Plot], notes: Sequence[str] = ()) -> str:
    """The whole page as text."""
    all_duels = duels(rows)
    device = ", ".join(distinct(rows, lambda row: row.device))
    sections = [
        _header(rows, device),
        section("What was found", _headline(all_duels) + bullets(findings(rows)) + _notes(notes)),
        section("When to use it, and when not", _advice(rows)) if all_duels else "",
        section("Against each alternative", _comparison(rows)) if all_duels else "",
        section("Plots", _gallery(plots)) if plots else "",
        section("Every case", str(case_table(rows))) if all_duels else "",
        section("Every variant", str(variant_table(rows))),
        section("How it was measured", _method(rows)),
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


def _advice(rows: Sequence[Row]) -> str:
    what = [
        f"{suite}: {DESCRIPTIONS[suite]}" for suite in distinct(rows, lambda row: row.suite) if suite in DESCRIPTIONS
    ]
    return (
        "<p>By suite and by M, the rows of A, against the fastest alternative that was measured for each shape.</p>"
        f"{bullets(guidance(rows))}"
        "<p>Where results must equal <code>torch.mm</code> bit for bit, stay with torch: the two agree to rounding.</p>"
        f"<details><summary>What the suites are</summary>{bullets(what)}</details>"
    )


def _comparison(rows: Sequence[Row]) -> str:
    floors = headroom(rows)
    text = str(versus_table(versus(rows)))
    if floors:
        text += (
            "<h3>What is left to gain</h3><p>Our median over that of a kernel that only reads both operands, launched"
            " the same way, with the best of several grids. Of very few bytes another grid may read faster still:"
            f" there a ratio may be below 1.</p>{headroom_table(floors)}"
        )
    return text


def _gallery(plots: Sequence[Plot]) -> str:
    beside = "".join(_figure(plot) for plot in plots if not plot.is_detail and not plot.is_wide)
    alone = "".join(_figure(plot) for plot in plots if not plot.is_detail and plot.is_wide)
    details = "".join(_figure(plot) for plot in plots if plot.is_detail)
    folded = f"<details><summary>Each M = N by itself</summary>{details}</details>" if details else ""
    return f'<div class="plots">{beside}</div>{alone}{folded}'


def _method(rows: Sequence[Row]) -> str:
    explained = {
        "graph-cold": "graph-cold: input sets that together exceed twice the L2 cache, one CUDA graph that calls the"
        " function once on each in turn, time of a replay divided by the calls. Operands come from device memory and no"
        " host time is counted.",
        "graph-warm": "graph-warm: one CUDA graph over input sets that fit the L2 cache, where operands may stay.",
        "stream-cold": "stream-cold: eager calls one after another on such input sets, for what runs a CUDA graph of"
        " its own and cannot be part of ours; the host's time is in it where the host is slower than the GPU.",
        "cpu-rotating": "cpu-rotating: one call after another, each on another input set, host time included.",
    }
    methods = distinct(rows, lambda row: row.timing)
    counts = sorted(row.repetitions for row in rows)
    texts = [explained.get(method, method) for method in methods]
    texts += [
        f"{counts[0]} to {counts[-1]} samples of each variant, the variants interleaved; p50 is the median.",
        "Every variant was checked against fp64 before it was timed: its error may be at most twice torch's own in the"
        " same dtypes, or what one rounding of the result costs where that is more.",
        "A tie is a difference within the noise, or overlapping ranges from the 20th to the 80th percentile. The noise"
        f" is by how much two timings of one version differed in the same run, but at least 3 %{_noise(rows)}.",
        "Ours is what a caller gets without asking; static weight is ours with the promise that nothing shortly before"
        " in the stream writes b, which is true of weights at inference.",
        "The roofline is the longer of moving every operand once at the measured bandwidth, and computing at the rate"
        " that a large square torch.mm reached.",
    ]
    return bullets(texts)


def _noise(rows: Sequence[Row]) -> str:
    noises = [row.noise for row in rows if row.noise is not None]
    return f"; its median here was {100 * statistics.median(noises):.1f} %" if noises else ""


def _figure(plot: Plot) -> str:
    css = ' class="wide"' if plot.is_wide else ""
    return (
        f'<figure id="{plot.name}"{css}><figcaption><b>{html.escape(plot.title)}</b>'
        f"<span>{html.escape(plot.caption)}</span></figcaption><div>{plot.svg}</div></figure>"
    )


def _notes(notes: Sequence[str]) -> str:
    return f"<h3>Left out</h3>{bullets(notes)}" if notes else ""


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


def standalone_svg(svg: str) -> str:
    """A plot's SVG as a file of its own, in dark colours where the reader prefers them."""
    end = svg.index(">") + 1
    return svg[:end] + _DARK_SVG_STYLE + svg[end:]


def _asset(name: str) -> str:
    folder = importlib.resources.files("decompose_k.bench").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8").strip()
