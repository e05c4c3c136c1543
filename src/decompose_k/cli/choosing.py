"""Choosing: the commands `tune` and `explain`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from decompose_k import cache
from decompose_k.bench.cases import Case
from decompose_k.bench.console import bare_table
from decompose_k.bench.summary import duration, times
from decompose_k.cli.common import (
    AUTO,
    ActivationOption,
    BDtypeOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    OutDtypeOption,
    RowsOption,
    ShapeOption,
    SuiteOption,
    named_cases,
    narrowed,
    parse_device,
    parse_dtype,
    parse_duration,
    parse_layout,
    progress,
    user_errors,
)
from decompose_k.device import Device
from decompose_k.dtypes import dtype_from_name, dtype_name
from decompose_k.entries import Entry
from decompose_k.epilogue import ACTIVATIONS
from decompose_k.explain import explain as explain_problem
from decompose_k.heuristics import MOST_CANDIDATES
from decompose_k.problem import HIGHEST, Problem
from decompose_k.record import Recording
from decompose_k.search import FINAL_REPETITIONS
from decompose_k.shapes import ALL, OPERAND_LAYOUTS
from decompose_k.tuner import LEFT_OUT, MEASURED, REMEMBERED, Tuned
from decompose_k.tuner import tune as tune_problems

_LAYOUT_NAMES = {layouts: name for name, layouts in OPERAND_LAYOUTS.items()}
_MOST_NOTES = 20


def tune(
    suites: SuiteOption = None,
    shapes: ShapeOption = None,
    model: Annotated[
        str | None, typer.Option(help="Cases whose name contains this text, such as DeepSeek-V3; of all suites.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="The problems in a file that a recording saved.")
    ] = None,
    dtype: DtypeOption = None,
    b_dtype: BDtypeOption = None,
    out_dtype: OutDtypeOption = None,
    layout: LayoutOption = "NN",
    bias: Annotated[str | None, typer.Option(help="Dtype of a bias; none by default.")] = None,
    activation: ActivationOption = None,
    precision: Annotated[str | None, typer.Option(help="highest, ieee, tf32x3 or tf32, for fp32 operands.")] = None,
    rows_of_a: RowsOption = None,
    static_weight: Annotated[
        bool | None,
        typer.Option(
            "--static-weight/--no-static-weight",
            help="Promise that nothing in the stream writes b, or do not; by default both for inference weights.",
        ),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Rows' bits independent of M; one choice for all M.")
    ] = False,
    device: DeviceOption = AUTO,
    budget: Annotated[str | None, typer.Option(help="Time for everything, such as 8m.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile; by default as many as cores, up to 16.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Samples of each finalist.")] = FINAL_REPETITIONS,
    most_candidates: Annotated[
        int, typer.Option("--candidates", min=1, help="How many of the heuristic's ranking are measured.")
    ] = MOST_CANDIDATES,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is remembered.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be tuned.")] = False,
) -> None:
    """Measure the candidates of problems on this machine and remember the fastest of each."""
    console = Console()
    with user_errors():
        if source is not None:
            if suites or shapes or model:
                raise ValueError("from must be alone: it names the problems, as suite, shape and model do")
            problems, where = _recorded(source, device)
        else:
            if not suites and not shapes and not model:
                raise ValueError("tune needs a --model, --suite, --shape or --from")
            where = parse_device(device)
            named = suites if suites or shapes else [ALL]
            cases = named_cases(named, shapes, dtype, b_dtype, out_dtype, layout, activation)
            problems = [
                _problem(case, where, static_b, parse_dtype(bias), batch_invariant, precision)
                for case in narrowed(cases, rows_of_a, model)
                for static_b in _promises(static_weight, case.static_weight)
            ]
        problems = list(dict.fromkeys(problem.bucketed() for problem in problems))
        seconds = None if budget is None else parse_duration(budget)
        facts = Device.of(where)
        if dry_run:
            _show_plan(console, problems, facts, force)
            return
        with progress(console, len(problems) + 1) as announce:
            results = tune_problems(
                problems,
                device=where,
                budget=seconds,
                jobs=jobs,
                repetitions=repetitions,
                most_candidates=most_candidates,
                progress=announce,
                force=force,
            )
    _show_results(console, results)
    folder = cache.directory()
    console.print(f"Remembered for {facts.name} in {folder}", highlight=False, soft_wrap=True)
    if all(result.status == LEFT_OUT for result in results):
        typer.echo("nothing was tuned", err=True)
        raise typer.Exit(1)


def explain(
    m: Annotated[int, typer.Argument(metavar="M", help="Rows of a.")],
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of b.")],
    k: Annotated[int, typer.Argument(metavar="K", help="The reduced dimension.")],
    dtype: Annotated[str, typer.Option(help="Dtype of a, and of b.")] = "bf16",
    b_dtype: Annotated[str | None, typer.Option(help="Dtype of b.")] = None,
    out_dtype: Annotated[str | None, typer.Option(help="Dtype of the result.")] = None,
    layout: Annotated[str, typer.Option(help="NN, NT (nn.Linear weight), TN or TT.")] = "NN",
    activation: Annotated[str | None, typer.Option(help=f"{', '.join(ACTIVATIONS)}.")] = None,
    precision: Annotated[str | None, typer.Option(help="highest, ieee, tf32x3 or tf32, for fp32 operands.")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="Rows' bits independent of M.")] = False,
    static_b: Annotated[bool, typer.Option("--static-b", help="Nothing in the stream writes b.")] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say what would run for out[M, N] = a[M, K] @ b[K, N], and why."""
    with user_errors():
        where = parse_device(device)
        a_layout, b_layout = parse_layout(layout)
        problem = Problem.make(
            m,
            n,
            k,
            dtype_from_name(dtype),
            b_dtype=parse_dtype(b_dtype),
            out_dtype=parse_dtype(out_dtype),
            a_layout=a_layout,
            b_layout=b_layout,
            activation=activation,
            precision=precision,
            batch_invariant=batch_invariant,
            static_b=static_b,
            device_type=where.type,
        )
        explanation = explain_problem(problem, where)
    typer.echo(json.dumps(explanation.to_json(), indent=2) if as_json else str(explanation))


def entry_table() -> Table:
    """A table with a row for each choice."""
    return bare_table("time", "torch", "speed-up", left=("M×N×K", "dtypes", "", "chosen"))


def entry_row(problem: Problem, entry: Entry | None) -> tuple[str, ...]:
    """A problem and what was chosen for it, beside torch as one would write it by hand."""
    if entry is None:
        return (*problem_text(problem), LEFT_OUT, "", "", "")
    torch_time = "" if entry.torch_us is None else duration(entry.torch_us)
    speedup = "" if entry.speedup is None else times(entry.speedup)
    return (*problem_text(problem), str(entry.config), duration(entry.chosen_us), torch_time, speedup)


def problem_text(problem: Problem) -> tuple[str, str, str]:
    """A problem in three columns: sizes, dtypes and everything else."""
    names = [dtype_name(problem.a_dtype), dtype_name(problem.b_dtype), dtype_name(problem.out_dtype)]
    dtypes = names[0] if len(set(names)) == 1 else f"{names[0]} x {names[1]} -> {names[2]}"
    layouts = (problem.a_layout, problem.b_layout)
    rest = [
        _LAYOUT_NAMES.get(layouts, "/".join(layouts)),
        "" if problem.bias_dtype is None else f"bias {dtype_name(problem.bias_dtype)}",
        problem.activation or "",
        "" if problem.precision in (None, HIGHEST) else str(problem.precision),
        "static" if problem.static_b else "",
        "any M" if problem.batch_invariant else "",
    ]
    return f"{problem.m}x{problem.n}x{problem.k}", dtypes, " ".join(word for word in rest if word)


def _recorded(path: Path, device: str) -> tuple[list[Problem], torch.device]:
    problems = list(Recording.load(path))
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems, parse_device(problems[0].device_type if device == AUTO else device)


def _promises(static_weight: bool | None, is_weight: bool) -> tuple[bool, ...]:
    if static_weight is None:
        return (False, True) if is_weight else (False,)
    return (static_weight,)


def _problem(
    case: Case,
    device: torch.device,
    static_b: bool,
    bias: torch.dtype | None,
    batch_invariant: bool,
    precision: str | None,
) -> Problem:
    problem = case.problem(device.type, static_b=static_b)
    problem = replace(problem, bias_dtype=bias, batch_invariant=batch_invariant)
    return problem if precision is None else replace(problem, precision=precision)


def _show_plan(console: Console, problems: Sequence[Problem], device: Device, force: bool) -> None:
    shown = bare_table(left=("M×N×K", "dtypes", "", "status"))
    for problem in problems:
        known = any(found.origin == cache.TUNED for found in cache.remembered(problem, device))
        shown.add_row(*problem_text(problem), "remembered" if known and not force else "to be tuned")
    console.print(shown)
    console.print(f"{len(problems)} problems on {device.name}", highlight=False)


def _show_results(console: Console, results: Sequence[Tuned]) -> None:
    shown = entry_table()
    for result in results:
        shown.add_row(*entry_row(result.problem, result.entry))
    console.print(shown)
    counts = Counter(result.status for result in results)
    console.print(", ".join(f"{counts[status]} {status}" for status in (MEASURED, REMEMBERED, LEFT_OUT)))
    notes = [f"{problem_text(result.problem)[0]}: {note}" for result in results for note in result.notes]
    for note in notes[:_MOST_NOTES]:
        console.print(f"• {note}", markup=False, highlight=False)
    if len(notes) > _MOST_NOTES:
        console.print(f"• and {len(notes) - _MOST_NOTES} more such notes", markup=False, highlight=False)
