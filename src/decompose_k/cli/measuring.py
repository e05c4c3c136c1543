"""Seeing and measuring: the commands `demo` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from decompose_k._version import __version__
from decompose_k.bench import console as view
from decompose_k.bench.cases import demo_cases, demo_checks
from decompose_k.bench.columns import COLUMNS
from decompose_k.bench.compare import compare, read_rows
from decompose_k.bench.demo import run_checks, run_demo
from decompose_k.bench.report import write_report
from decompose_k.bench.rows import JSONL_NAME, Row, append_jsonl
from decompose_k.bench.run import Outcome, Settings, open_folder, run_cases
from decompose_k.bench.suites import part_of
from decompose_k.bench.summary import duels
from decompose_k.bench.variant import VARIANTS
from decompose_k.cli.common import (
    ActivationOption,
    BDtypeOption,
    DeviceOption,
    DtypeOption,
    LayoutOption,
    ModelOption,
    OutDtypeOption,
    RowsOption,
    ShapeOption,
    SuiteOption,
    UserError,
    named_cases,
    narrowed,
    parse_device,
    parse_duration,
    parse_part,
    progress,
    user_errors,
)
from decompose_k.device import Device
from decompose_k.shapes import ALL

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for rows, plots and report.")]


def demo(
    device: DeviceOption = "auto",
    output: OutputOption = Path("decompose-k-demo"),
    budget: Annotated[str, typer.Option(help="Time for measuring, such as 90s or 3m.")] = "2m",
) -> None:
    """See Decompose-K at work on this machine: checked, measured against torch.mm, plotted, reported."""
    console = Console()
    with user_errors():
        where, seconds = parse_device(device), parse_duration(budget)
        open_folder(output, overwrite=True)
    console.print(
        f"[bold]Decompose-K {__version__}[/] on {Device.of(where).name}, torch {torch.__version__}", highlight=False
    )
    with progress(console, len(demo_checks())) as announce:
        checks = run_checks(where, announce)
    console.print("\n[bold]Correct?[/] Each variant against an fp64 truth; allowed is twice torch's own error.")
    view.show_checks(console, checks)
    wrong = [checked for checked in checks if not checked.passed]
    with progress(console, len(demo_cases()) + 1) as announce:
        outcome = run_demo(where, output, seconds, announce)
    outcome.failures += [str(failure) for failure in wrong if str(failure) not in outcome.failures]
    _finish(console, output, outcome)


bench = typer.Typer(
    help="Measure suites or shapes into rows, plots and a report; `bench compare A B` compares two runs.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@bench.callback()
def measure(
    context: typer.Context,
    suites: SuiteOption = None,
    shapes: ShapeOption = None,
    dtype: DtypeOption = None,
    b_dtype: BDtypeOption = None,
    out_dtype: OutDtypeOption = None,
    layout: LayoutOption = "NN",
    activation: ActivationOption = None,
    rows_of_a: RowsOption = None,
    model: ModelOption = None,
    static_weight: Annotated[
        bool, typer.Option("--static-weight", help="For --shape: also with the promise that nothing writes b.")
    ] = False,
    variants: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated, or all: {', '.join(VARIANTS)}; by default the suite's own; torch is always one."
        ),
    ] = None,
    columns: Annotated[
        str, typer.Option(help=f"Further times of each variant, comma-separated, all or none: {', '.join(COLUMNS)}.")
    ] = "all",
    device: DeviceOption = "auto",
    repetitions: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 30,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop sampling a case after so long.")] = None,
    budget: Annotated[str | None, typer.Option(help="Time for everything, such as 8m.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for rows, plots and report, by default decompose-k-bench."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the rows in the output folder.")] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="On a GPU: give every variant that was not tuned the best of its configs, by measuring."
        ),
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="On a GPU: processes that compile, of which one at a time is timed, alone.")
    ] = 4,
    part: Annotated[
        str,
        typer.Option(help="I/N: the Ith of N parts of the cases, for several GPUs; their rows together are the run."),
    ] = "1/1",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the rows in the output folder anew.")] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: plots and report from these rows, a file or folder; repeated."),
    ] = None,
) -> None:
    """Measure suites or shapes into rows.jsonl and rows.csv, then make plots and report from the rows.

    `bench compare A B` compares two runs.
    """
    if context.invoked_subcommand is not None:
        return
    console = Console()
    if sources:
        with user_errors():
            rows = [row for source in sources for row in read_rows(source)]
            folder = _folder_of_report(sources, output)
        if len(sources) > 1:
            (folder / JSONL_NAME).unlink(missing_ok=True)
            append_jsonl(folder / JSONL_NAME, rows)
        _finish(console, folder, Outcome(rows=rows))
        return
    with user_errors():
        where = parse_device(device)
        if not suites and not shapes and not model:
            raise ValueError("bench needs a --suite, --shape or --model, or --from with rows to report")
        named = suites if suites or shapes else [ALL]
        cases = named_cases(named, shapes, dtype, b_dtype, out_dtype, layout, activation, static_weight)
        cases = list(part_of(narrowed(cases, rows_of_a, model), *parse_part(part)))
        if not cases:
            raise ValueError(f"part {part} has no case: there are fewer cases than parts")
        chosen = Settings(
            repetitions,
            seconds,
            None if budget is None else parse_duration(budget),
            None if variants is None else _chosen("variants", variants, VARIANTS),
            search,
            jobs,
            () if columns == "none" else _chosen("columns", columns, COLUMNS),
        )
        folder = Path("decompose-k-bench") if output is None else output
        done = open_folder(folder, resume=resume, overwrite=overwrite)
    with progress(console, len(cases) + 1) as announce:
        outcome = run_cases(cases, where, folder, chosen, announce=announce, done=done)
    _finish(console, folder, outcome)


@bench.command("compare")
def compare_runs(
    before: Annotated[Path, typer.Argument(help="Rows of the earlier run: a file, or the folder of a bench.")],
    after: Annotated[Path, typer.Argument(help="Rows of the later run.")],
    only_changes: Annotated[bool, typer.Option("--only-changes", help="Leave out what is the same.")] = False,
) -> None:
    """Compare two runs row by row, taking their noise into account; exits 1 if anything of ours became slower."""
    console = Console()
    with user_errors():
        comparison = compare(read_rows(before), read_rows(after))
    view.show_comparison(console, comparison, only_changes=only_changes)
    if comparison.regressions:
        typer.echo(f"{len(comparison.regressions)} of ours became slower", err=True)
        raise typer.Exit(1)


def _folder_of_report(sources: list[Path], output: Path | None) -> Path:
    """Where the report of rows goes: beside them, if they are one file or folder."""
    if output is None and len(sources) > 1:
        raise ValueError(
            "bench --from needs an --output folder where it is repeated: none of the runs is to be changed"
        )
    source = sources[0]
    folder = output or (source if source.is_dir() else source.parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _chosen(argument: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = allowed if text == ALL else tuple(text.split(","))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(f"{argument} must be among {', '.join(allowed)}; got {', '.join(map(repr, unknown))}")
    return names


def _finish(console: Console, folder: Path, outcome: Outcome) -> None:
    rows: list[Row] = outcome.rows
    if rows:
        with user_errors():
            report = write_report(folder, rows, outcome.notes)
        console.print("\n[bold]Measured[/] (medians; the fastest of ours, its variant in brackets)")
        view.show_cases(console, rows)
        console.print()
        view.show_suites(console, duels(rows))
        console.print()
        view.show_findings(console, rows, outcome.notes)
        console.print(f"\nReport: {report}\nRows:   {folder}", highlight=False, soft_wrap=True)
    if outcome.failures:
        typer.echo(f"{len(outcome.failures)} variants are wrong:", err=True)
        for failure in outcome.failures:
            typer.echo(f"  {failure}", err=True)
        raise typer.Exit(1)
    if not rows:
        raise UserError("nothing was measured: " + "; ".join(outcome.notes))
