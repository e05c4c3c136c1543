"""Write the tables and plots of README.md and results/README.md from the rows: `make readme`.

`python results/summarize.py` needs decompose_k installed with its command line; with `--check` it only compares, names
what does not match the rows, and exits 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decompose_k import store
from decompose_k.bench.plots import make_plots
from decompose_k.bench.plots.base import Plot
from decompose_k.bench.report import standalone_svg
from decompose_k.bench.rows import Row, read_jsonl
from decompose_k.bench.suites import CROSSOVER
from decompose_k.bench.summary import FASTEST, duels, times
from decompose_k.bench.variant import GENERATION_2, TORCH
from decompose_k.bench.versus import WAYS, Versus, versus
from decompose_k.config import Config
from decompose_k.entries import Entry, key_of
from decompose_k.heuristics import candidates
from decompose_k.problem import Problem

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent
PLOTS = RESULTS / "plots"
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->"
# Records from before the study, each a file of rows with a title of its own.
TITLES = {
    "tuned-seed-bf16": "bf16, fused ReLU, M = N in 16..64, K in 8192..32768",
    "tuned-seed-fp32": "fp32 as accurate as torch's or better",
    "tuned-router": "MoE routers [M, 7168] x 256 and [M, 2880] x 128, bf16 in, fp32 out, M in 1..64",
    "tuned-mixed": "bf16 x fp32 weight: router [M, 3072] x 256, mHC [M, 28672] x 24, M in 1, 16, 64",
}
# What was remembered and what the heuristic would have taken, over the whole corpus; what calls cost the host; models.
CHOICES, HOST, MODELS = "choices", "host-time", "models"
# What the rows of the older files are compared with.
AGAINST = {TORCH: "torch", GENERATION_2: "our kernels without dependent launch"}
# A run of the study is kept under such names in the folder of its machine.
STUDY = "study*.jsonl"
# Of which suites the README shows plots, the study's before the older record's, and how many losses are named.
HEADLINE_SUITES = ("epilogue-bf16", CROSSOVER)
OLDER_HEADLINE = "tuned-seed-bf16"
MOST_NAMED = 5


def machines() -> list[Path]:
    """The folders of records, one a machine."""
    return sorted(folder for folder in RESULTS.iterdir() if any(folder.glob("*.jsonl")))


def study_rows(folder: Path) -> list[Row]:
    """The rows of every run of the study on a machine."""
    return [row for file in sorted(folder.glob(STUDY)) for row in read_jsonl(file)]


def records_of(name: str) -> list[dict[str, Any]]:
    """The records of a file that are no rows of the bench."""
    return [json.loads(line) for line in (RESULTS / "h200" / f"{name}.jsonl").read_text().splitlines()]


def older_table() -> str:
    """One line for each older file of rows, way to call and alternative: the least, mean and greatest speed-up."""
    lines = [
        "| H200 | launch | against | shapes | min | geometric mean | max |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        rows = read_jsonl(RESULTS / "h200" / f"{name}.jsonl")
        for way, launch in WAYS.items():
            for alternative, against in AGAINST.items():
                ratios = [duel.speedup for duel in duels(rows, alternative, way)]
                if ratios:
                    lines.append(f"| {title} | {launch} | {against} | {spread(ratios)} |")
    for title, ratios in tuned_ratios().items():
        lines.append(f"| {title} | default | torch | {spread(ratios)} |")
    note = (
        "Rows: [results/h200](results/h200). Operands come from device memory. The kernels without dependent launch ran"
        " with the best of their configs; the fp16 lines are from the timings of tuning. Every row names its commit."
    )
    return "\n".join([*lines, "", note, ""])


def spread(ratios: list[float]) -> str:
    """Cells of a table: how many, the least, the geometric mean, the greatest."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{len(ratios)} | {min(ratios):.2f} | {mean:.2f} | {max(ratios):.2f}"


def tuned_ratios() -> dict[str, list[float]]:
    """Speed-ups over torch by hand on the fp16 grid, with and without ReLU, from the timings of tuning.

    These are of buckets: M = 48 was measured as 64.
    """
    document = store.read(RESULTS / "h200" / "tuned" / "nvidia-h200.fp16-fp16.json")
    found: dict[str, list[float]] = {"fp16, fused ReLU, the same grid": [], "fp16, the same grid": []}
    for entry in map(Entry.from_json, document.entries.values() if document else ()):
        problem = entry.problem
        if entry.torch_us is not None and problem.k >= 8192 and problem.b_layout == "row" and not problem.static_b:
            title = "fp16, fused ReLU, the same grid" if problem.activation == "relu" else "fp16, the same grid"
            found[title].append(entry.torch_us / entry.chosen_us)
    return found


def models_table() -> str:
    """Whole models compiled plainly and with the pass, end to end."""
    records = records_of(MODELS)
    sizes = sorted({record["m"] for record in records})
    lines = [
        f"| compiled, then with `dk.inductor.enable()`, us | {' | '.join(f'M = {m}' for m in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for model in dict.fromkeys(record["model"] for record in records):
        mine = [record for record in records if record["model"] == model and record["mode"] == "default"]
        found = {(record["variant"], record["m"]): record["p50_us"] for record in mine}
        cells = [f"{found['compiled', m]:.1f}, {found['decompose-k', m]:.1f}" for m in sizes]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def choices_table() -> str:
    """What a call gets from the shipped choices, and from the heuristic alone, over the corpus."""
    records = records_of(CHOICES)
    lines = [
        f"| H200, {len(records)} problems of the corpus, M in 1..1024 | min | median | geometric mean | max |",
        "|---|---|---|---|---|",
    ]
    kinds = {"shipped choices, over torch": ("torch_us", "chosen_us"), "untuned, over torch": ("torch_us", "first_us")}
    for title, (theirs, ours) in kinds.items():
        ratios = sorted(record[theirs] / record[ours] for record in records)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        numbers = (ratios[0], ratios[len(ratios) // 2], mean, ratios[-1])
        lines.append(f"| {title} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    then = sorted(record["first_us"] / min(record["first_us"], record["chosen_us"]) for record in records)
    now = sorted(first_against_best(records))
    note = (
        f"The heuristic's first choice of then took {then[len(then) // 2] - 1:.0%} longer than the best found (median),"
        f" and at most a quarter longer in {share_within_a_quarter(then)} of the problems. It was refitted to these and"
        f" the timings of tuning since: of today's first choices {len(now)} have been measured, which take"
        f" {now[len(now) // 2] - 1:.0%} longer (median), at most a quarter longer in {share_within_a_quarter(now)}, and"
        f" {now[-1] - 1:.0%} at the worst."
    )
    return "\n".join([*lines, "", note, ""])


def share_within_a_quarter(ratios: list[float]) -> str:
    """How many of the ratios are at most 1.25."""
    return f"{sum(ratio <= 1.25 for ratio in ratios) / len(ratios):.0%}"


def first_against_best(records: list[dict[str, Any]]) -> Iterator[float]:
    """The time of today's first choice over the best that was measured, for each problem where both are on record."""
    documents = [store.read(path) for path in sorted((RESULTS / "h200" / "tuned").glob("*.json"))]
    device = next(document.header.device for document in documents if document is not None)
    tuned = {key: raw for document in documents if document is not None for key, raw in document.entries.items()}
    for record in records:
        problem = Problem.from_json(record["problem"])
        entry = Entry.from_json(tuned[key]) if (key := key_of(problem)) in tuned else None
        measured = {one.config: one.timing.p50_us for one in (entry.timings if entry else ()) if one.config is not None}
        for name in ("first", "chosen"):
            measured.setdefault(Config.from_json(record[name]), record[f"{name}_us"])
        first = candidates(problem, device)[0]
        if first in measured:
            yield measured[first] / min(measured.values())


def host_table() -> str:
    """Host time of an eager call beside torch's, in microseconds."""
    records = records_of(HOST)
    calls = list(dict.fromkeys(record["call"] for record in records))
    found: dict[tuple[object, ...], dict[str, str]] = {}
    for record in records:
        shape = (record["m"], record["n"], record["k"], record["dtype"])
        text = f"{record['ours_us']:.1f} / {record['torch_us']:.1f}"
        found.setdefault(shape, {})[record["call"]] = text
    lines = [
        f"| host time of an eager call, ours / torch's, us | {' | '.join(calls)} |",
        "|---" * (len(calls) + 1) + "|",
    ]
    for (m, n, k, dtype), texts in found.items():
        lines.append(f"| {m} x {n} x {k} {dtype} | {' | '.join(texts.get(call, '') for call in calls)} |")
    return "\n".join([*lines, ""])


def study_table(found: list[Versus], *, with_losses: bool) -> str:
    """One line for each suite, way to call and alternative; the worst losses by name, where they are wanted."""
    headings = ["suite", "dtypes", "launch", "against", "cases", "wins", "ties", "losses", "min", "median", "max"]
    headings += ["lost"] if with_losses else []
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for one in found:
        tally = one.tally
        counts = [len(tally.duels), *(tally.count(verdict) for verdict in ("win", "tie", "loss"))]
        ratios = (tally.speedups[0], tally.median, tally.speedups[-1])
        cells = [tally.suite, tally.dtypes, one.way, one.title, *map(str, counts), *map(times, ratios)]
        lines.append(f"| {' | '.join([*cells, *([losses(one)] if with_losses else [])])} |")
    return "\n".join([*lines, ""])


def losses(one: Versus) -> str:
    """The worst losses by name, and how many more there are."""
    lost = one.tally.losses
    named = [f"{duel.title} {times(duel.speedup)}" for duel in lost[:MOST_NAMED]]
    more = [f"{len(lost) - MOST_NAMED} more"] if len(lost) > MOST_NAMED else []
    return "; ".join([*named, *more]) or "none"


def plots() -> dict[Path, Plot]:
    """The plots that the README shows, by their files."""
    found: dict[Path, Plot] = {}
    for folder in machines():
        rows = [row for row in study_rows(folder) if row.suite in HEADLINE_SUITES]
        older = folder / f"{OLDER_HEADLINE}.jsonl"
        if not rows and older.exists():
            rows = [row for row in read_jsonl(older) if row.status == "definition"]
        for plot in make_plots(rows, details=False):
            found[PLOTS / f"{folder.name}-{plot.name}.svg"] = plot
    return found


def readme_part(files: dict[Path, Plot]) -> str:
    """What the README says of the records: the study in short, the older records, and plots."""
    parts = []
    for folder in machines():
        rows = study_rows(folder)
        if rows:
            short = [one for one in versus(rows) if one.alternative in (TORCH, FASTEST)]
            parts.append(f"The study on {rows[0].device}, graph-cold medians, ours over the alternative:\n")
            parts.append(study_table(short, with_losses=False))
            parts.append("Against every alternative, losses by name: [results/README.md](results/README.md).\n")
    parts += [older_table(), choices_table(), models_table(), host_table()]
    images = [f"![{plot.title}]({path.relative_to(ROOT).as_posix()})\n" for path, plot in files.items()]
    return "\n".join([*parts, *images])


def results_part() -> str:
    """What results/README.md says of the study: every suite against every alternative."""
    parts = []
    for folder in machines():
        rows = study_rows(folder)
        if rows:
            parts.append(f"## The study on {rows[0].device}\n\n{study_table(versus(rows), with_losses=True)}")
    return "\n".join(parts) or "No run of the whole study is on record yet.\n"


def replaced(text: str, part: str) -> str:
    """A document with the part between its marks replaced; raises ValueError where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a document must have the marks {BEGIN.strip()} and {END}")
    return before + BEGIN + part + END + after


def wanted() -> dict[Path, str]:
    """Every file that is made from the records, and what it should hold."""
    shown = plots()
    documents = {ROOT / "README.md": readme_part(shown), RESULTS / "README.md": results_part()}
    files = {path: standalone_svg(plot.svg) for path, plot in shown.items()}
    return files | {path: replaced(path.read_text(encoding="utf-8"), part) for path, part in documents.items()}


def main() -> int:
    """Write what the records give, or with `--check` say what does not match them."""
    files = wanted()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in PLOTS.glob("*.svg") if path not in files]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not what the records give: run `make readme`\n")
        return int(bool(stale))
    PLOTS.mkdir(exist_ok=True)
    for path in stale:
        if path in files:
            path.write_text(files[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
