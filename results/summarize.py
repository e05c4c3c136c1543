"""Write the tables and plots of README.md and results/README.md from the rows: `make readme`.

`python results/summarize.py` needs decompose_k installed with its command line; with `--check` it only compares, names
what does not match the rows, and exits 1.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decompose_k import store
from decompose_k.bench.models import OURS, OURS_STATIC
from decompose_k.bench.plots import make_plots
from decompose_k.bench.plots.base import Plot
from decompose_k.bench.report import REPORT_NAME, in_order, report_html, standalone_svg
from decompose_k.bench.rows import Row, read_jsonl
from decompose_k.bench.suites import CROSSOVER, suite_cases
from decompose_k.bench.suites import STUDY as STUDY_NAME
from decompose_k.bench.summary import FASTEST, counts_in_words, duels, times
from decompose_k.bench.variant import AUTO, COMPILED, GENERATION_2, TORCH
from decompose_k.bench.versus import WAYS, Versus, versus
from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.dtypes import dtype_from_name
from decompose_k.entries import Entry, key_of
from decompose_k.heuristics import candidates
from decompose_k.problem import Problem
from decompose_k.shapes import OPERAND_LAYOUTS

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent
PLOTS = RESULTS / "plots"
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->"
# Records from before the study, each a file of rows with a title of its own.
TITLES = {
    "tuned-seed-bf16": "bf16, fused ReLU, M = N in 16..64, K in 8192..32768",
    "tuned-seed-fp16": "fp16, fused ReLU, the same grid",
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
    note = (
        "Operands come from device memory. The kernels without dependent launch ran"
        " with the best of their configs. Every row names its commit; `-dirty` is one with changes not yet committed."
    )
    return "\n".join([*lines, "", note, ""])


def spread(ratios: list[float]) -> str:
    """Cells of a table: how many, the least, the geometric mean, the greatest."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{len(ratios)} | {min(ratios):.2f} | {mean:.2f} | {max(ratios):.2f}"


def models_table() -> str:
    """Whole models compiled plainly, with the pass, and with the pass and static weights, end to end."""
    records = records_of(MODELS)
    sizes = sorted({record["m"] for record in records})
    lines = [
        "| us: compiled, with `dk.inductor.enable()`, and with static weights |"
        f" {' | '.join(f'M = {m}' for m in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for model in dict.fromkeys(record["model"] for record in records):
        mine = [record for record in records if record["model"] == model and record["mode"] == "default"]
        found = {(record["variant"], record["m"]): record["p50_us"] for record in mine}
        cells = [", ".join(f"{found[variant, m]:.1f}" for variant in (COMPILED, OURS, OURS_STATIC)) for m in sizes]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    text = (
        "Whole models, compiled, with their weights in memory: *skinny heads* is an MLP of width 4096 with a low-rank"
        " adapter and three heads of 1 to 64 outputs; *moe block* is a transformer block with attention, a router and"
        " 64 small experts, most of whose time is elsewhere.\n"
    )
    return "\n".join([*lines, "", text])


def choices_table() -> str:
    """What a call gets from the shipped choices, and from the heuristic alone, over the corpus."""
    records = records_of(CHOICES)
    own = [record for record in records if record["chosen"]["kernel"] != "mm"]
    same = [record for record in records if record["chosen"]["kernel"] == "mm"]
    kinds = {
        f"shipped choices, {len(own)} problems": (own, "chosen_us"),
        f"shipped choices that are torch's own kernel, {len(same)}": (same, "chosen_us"),
        f"untuned, all {len(records)}": (records, "first_us"),
    }
    lines = [
        "| H200, problems of the corpus, M in 1..1024, over torch | min | median | geometric mean | max |",
        "|---|---|---|---|---|",
    ]
    for title, (mine, ours) in kinds.items():
        ratios = sorted(record["torch_us"] / record[ours] for record in mine)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        numbers = (ratios[0], statistics.median(ratios), mean, ratios[-1])
        lines.append(f"| {title} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    first = untuned(records)
    device, entries = tuning()
    others = sum(not is_first(record, device) for record in records)
    steadiness = spreads(entries.values())
    since = (
        f" (Of {others} problems its first choice has changed since; they count with the old one.)" if others else ""
    )
    note = (
        "Where torch's own kernel is the choice, both call the same, and what differs is that kernel from one captured"
        " graph to the next. The heuristic's"
        f" first choice, untuned, takes {statistics.median(first) - 1:.0%} longer than the best (median), and"
        f" {max(first) - 1:.0%} longer at the worst.{since} Timings of {len(steadiness)} configs spread by"
        f" {statistics.median(steadiness):.1%} (20th to 80th percentile, median)."
    )
    return "\n".join([*lines, "", note, ""])


def untuned(records: list[dict[str, Any]]) -> list[float]:
    """How much longer the heuristic's first choice takes than the better of it and what is remembered."""
    return [record["first_us"] / min(record["first_us"], record["chosen_us"]) for record in records]


def choices_in_words() -> str:
    """What the choices of configs are worth, in two sentences."""
    records = records_of(CHOICES)
    ours = [record["torch_us"] / record["chosen_us"] for record in records if record["chosen"]["kernel"] != "mm"]
    first = untuned(records)
    return (
        f"Over {len(records)} problems of real models, M in 1..1024: where one of our kernels is the shipped choice"
        f" ({len(ours)}), it is {times(min(ours))} to {times(max(ours))} as fast as torch, median"
        f" {times(statistics.median(ours))}. Untuned, the first choice of the heuristic takes"
        f" {statistics.median(first) - 1:.0%} longer than the tuned one (median),"
        f" and {max(first) - 1:.0%} at the worst.\n"
    )


@functools.cache
def tuning() -> tuple[Device, dict[str, Entry]]:
    """The H200 that was tuned on, and what was measured there, by the keys of choices."""
    found = [store.read(path) for path in sorted((RESULTS / "h200" / "tuned").glob("*.json"))]
    documents = [document for document in found if document is not None]
    entries = {key: Entry.from_json(raw) for document in documents for key, raw in document.entries.items()}
    return documents[0].header.device, entries


def is_first(record: dict[str, Any], device: Device) -> bool:
    """Whether the heuristic's first choice on a device is still the one that was measured."""
    return candidates(Problem.from_json(record["problem"]), device)[0] == Config.from_json(record["first"])


def is_changed(row: Row) -> bool:
    """Whether what is remembered, or else the heuristic's first choice, is another config than a row's."""
    a_layout, b_layout = OPERAND_LAYOUTS[row.layout]
    a_dtype, b_dtype, out_dtype = map(dtype_from_name, (row.a_dtype, row.b_dtype, row.out_dtype))
    problem = Problem.make(
        row.m,
        row.n,
        row.k,
        a_dtype,
        b_dtype=b_dtype,
        out_dtype=out_dtype,
        a_layout=a_layout,
        b_layout=b_layout,
        activation=row.activation,
        device_type=row.device_type,
    ).bucketed()
    device, entries = tuning()
    entry = entries.get(key_of(problem))
    choice = candidates(problem, device)[0] if entry is None else entry.config
    return choice != Config.from_json(row.config or {})


def spreads(entries: Iterable[Entry]) -> list[float]:
    """How far the percentiles of each config's timings in tuning are apart, over the median, sorted."""
    timings = [one.timing for entry in entries for one in entry.timings if one.config is not None]
    return sorted((timing.p80_us - timing.p20_us) / timing.p50_us for timing in timings)


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


def wanted_cases() -> Counter[str]:
    """How many cases of each suite the study has."""
    return Counter(case.shape.suite for case in suite_cases([STUDY_NAME]))


def coverage(rows: list[Row]) -> str:
    """How much of the study the rows are, suite by suite where it is not all."""
    wanted = wanted_cases()
    measured = Counter(suite for suite, *_ in {row.case for row in rows})
    if measured == wanted:
        return f"All {wanted.total()} cases of the study are measured."
    parts = [f"{suite} {measured[suite]} of {count}" for suite, count in wanted.items() if measured[suite] < count]
    return (
        f"{measured.total()} of the study's {wanted.total()} cases are measured so far. Not"
        f" complete: {', '.join(parts)}."
    )


def study_table(found: list[Versus]) -> str:
    """One line for each suite, way to call and alternative, with the worst losses by name."""
    headings = [
        "suite",
        "dtypes",
        "launch",
        "against",
        "cases",
        "wins",
        "ties",
        "losses",
        "min",
        "median",
        "max",
        "lost",
    ]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for one in found:
        tally = one.tally
        counts = [len(tally.duels), *(tally.count(verdict) for verdict in ("win", "tie", "loss"))]
        ratios = (tally.speedups[0], tally.median, tally.speedups[-1])
        cells = [tally.suite, tally.dtypes, one.way, one.title, *map(str, counts), *map(times, ratios)]
        lines.append(f"| {' | '.join([*cells, losses(one)])} |")
    return "\n".join([*lines, ""])


def short_table(rows: list[Row]) -> str:
    """One line for each suite: ours over torch and over the fastest alternative of each case, both ways to call."""
    columns = [(alternative, way) for alternative in (TORCH, FASTEST) for way in WAYS]
    titles = [
        f"over {'torch' if alternative == TORCH else 'the fastest alternative'}, {WAYS[way]}"
        for alternative, way in columns
    ]
    lines = [
        f"| suite | cases | {' | '.join(titles)} | lost to the fastest, default |",
        "|---" * (len(columns) + 3) + "|",
    ]
    wanted = wanted_cases()
    for suite in dict.fromkeys(row.suite for row in rows):
        mine = [row for row in rows if row.suite == suite]
        found = [duels(mine, alternative, way) for alternative, way in columns]
        cells = [in_short([duel.speedup for duel in some]) for some in found]
        lost = sum(duel.verdict == "loss" for duel in found[2])
        lines.append(f"| {suite} | {len(found[0])} of {wanted[suite]} | {' | '.join(cells)} | {lost} |")
    return "\n".join([*lines, ""])


def in_short(speedups: list[float]) -> str:
    """The least, the median and the greatest."""
    if not speedups:
        return ""
    return " / ".join(map(times, (min(speedups), statistics.median(speedups), max(speedups))))


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
    """What the README says of the records: the study in short, models, host time, and plots."""
    parts = []
    for folder in machines():
        rows = study_rows(folder)
        if rows:
            parts += [in_words(rows), short_table(rows)]
            parts.append(
                "Times are a GPU's alone, as in a CUDA graph; operands come from device memory. Cells: min / median /"
                " max. The fastest alternative is the best of torch eager, `torch.compile` (default, max-autotune, of"
                " bmm + sum) and the custom-op flow. Each alternative, losses by name, and what the suites are:"
                f" [results/README.md](results/README.md) and [{REPORT_NAME}](results/{folder.name}/{REPORT_NAME}).\n"
            )
    parts += [choices_in_words(), models_table(), host_table()]
    images = [f"![{plot.title}]({path.relative_to(ROOT).as_posix()})\n" for path, plot in files.items()]
    return "\n".join([*parts, *images])


def in_words(rows: list[Row]) -> str:
    """The study in three sentences."""
    against_torch, against_all = duels(rows, TORCH, AUTO), duels(rows, FASTEST, AUTO)
    lost = [duel for duel in against_all if duel.verdict == "loss"]
    where = ", ".join(dict.fromkeys(duel.ours.suite for duel in lost)) or "nowhere"
    count, wanted = len(against_torch), wanted_cases().total()
    measured = f"the study's {count} cases"
    if count < wanted:
        measured = f"{count} of the study's {wanted} cases; the others are not measured yet"
    median = statistics.median(duel.speedup for duel in against_torch)
    median_of_all = statistics.median(duel.speedup for duel in against_all)
    others = sum(is_changed(row) for row in rows if row.variant == AUTO)
    since = f" In {others} of the cases another choice is made since their rows were measured." if others else ""
    return (
        f"On {rows[0].device}, Decompose-K is {times(median)} as fast as torch.mm and {times(median_of_all)} as fast as"
        f" the fastest alternative of each case (medians of {measured}; commits"
        f" {', '.join(dict.fromkeys(row.commit for row in rows if row.commit))}). It {counts_in_words(against_all)} of"
        f" them ({where}).{since}\n"
    )


def results_part() -> str:
    """What results/README.md says of the study: every suite against every alternative."""
    parts = []
    for folder in machines():
        rows = study_rows(folder)
        if rows:
            table = study_table(versus(rows))
            parts.append(f"## The study on {rows[0].device}\n\n{coverage(rows)}\n\n{table}")
    parts = parts or ["No run of the whole study is on record yet.\n"]
    return "\n".join([*parts, "## Tuned configs, and the choice of configs\n", older_table(), choices_table()])


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
    for folder in machines():
        if rows := in_order(study_rows(folder)):
            files[folder / REPORT_NAME] = report_html(rows, make_plots(rows), [coverage(rows)])
    return files | {path: replaced(path.read_text(encoding="utf-8"), part) for path, part in documents.items()}


def main() -> int:
    """Write what the records give, or with `--check` say what does not match them."""
    files = wanted()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in (*PLOTS.glob("*.svg"), *RESULTS.glob(f"*/{REPORT_NAME}")) if path not in files]
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
