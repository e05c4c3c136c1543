"""The command line `decompose-k`: demo, bench, verify, explain, inspect and info."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from decompose_k._version import __version__
from decompose_k.bench import console as view
from decompose_k.bench.cases import CUSTOM, Case, custom_case, demo_cases, demo_checks, suite_cases, with_dtype
from decompose_k.bench.demo import run_checks, run_demo
from decompose_k.bench.machine import device_name, machine_facts
from decompose_k.bench.report import write_report
from decompose_k.bench.rows import Row, read_jsonl
from decompose_k.bench.run import Outcome, Settings, open_folder, run_cases
from decompose_k.bench.summary import duels
from decompose_k.bench.variants import DEFAULT_VARIANTS, VARIANTS
from decompose_k.dtypes import FLOATS, dtype_from_name, dtype_name
from decompose_k.epilogue import ACTIVATIONS
from decompose_k.plan import explain as explain_problem
from decompose_k.problem import Problem
from decompose_k.shapes import ALL, OPERAND_LAYOUTS, SUITES, parse_size
from decompose_k.verify import verify as verify_contract

DEVICES = ("auto", "cpu", "cuda")
WRONG_USE = 2

app = typer.Typer(
    name="decompose-k",
    help="Matrix products with a small output and a long K: see them work, measure them, ask how they would run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What typer raises for an option it does not know or cannot read; its own classes differ between its versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda (with an index: cuda:1).")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for rows, plots and report.")]


class UserError(Exception):
    """A wrong argument: its message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits 0 on success, 1 where a check failed, 2 for wrong use."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except _UsageError as error:
        _fail(error.format_message() if hasattr(error, "format_message") else str(error))
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def demo(
    device: DeviceOption = "auto",
    output: OutputOption = Path("decompose-k-demo"),
    budget: Annotated[str, typer.Option(help="Time for measuring, such as 90s or 3m.")] = "2m",
) -> None:
    """See Decompose-K at work on this machine: checked, measured against torch.mm, plotted, reported."""
    console = Console()
    with _user_errors():
        where, seconds = parse_device(device), parse_duration(budget)
        open_folder(output, overwrite=True)
    console.print(
        f"[bold]Decompose-K {__version__}[/] on {device_name(where)}, torch {torch.__version__}", highlight=False
    )
    with _progress(console, len(demo_checks())) as announce:
        checks = run_checks(where, announce)
    console.print("\n[bold]Correct?[/] Each variant against an fp64 truth; allowed is twice torch's own error.")
    view.show_checks(console, checks)
    wrong = [checked for checked in checks if not checked.passed]
    with _progress(console, len(demo_cases()) + 1) as announce:
        outcome = run_demo(where, output, seconds, announce)
    outcome.failures += [failure for failure in wrong if str(failure) not in map(str, outcome.failures)]
    _finish(console, output, outcome)


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help=f"Suites, repeated or comma-separated: {', '.join((*SUITES, ALL))}."),
    ] = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="Explicit shape MxNxK, repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of both operands (bf16 for --shape).")] = None,
    b_dtype: Annotated[str | None, typer.Option(help="Dtype of b, for --shape.")] = None,
    out_dtype: Annotated[str | None, typer.Option(help="Dtype of the result, for --shape.")] = None,
    layout: Annotated[str, typer.Option(help="NN, NT, TN or TT, for --shape.")] = "NN",
    activation: Annotated[str | None, typer.Option(help="none or an activation; by default the suite's own.")] = None,
    rows_of_a: Annotated[str | None, typer.Option("--m", help="Only cases with these M, such as 1,16,64.")] = None,
    model: Annotated[str | None, typer.Option(help="Only cases whose name contains this text.")] = None,
    variants: Annotated[
        str | None, typer.Option(help=f"Comma-separated: {', '.join(VARIANTS)}; torch is always measured.")
    ] = None,
    device: DeviceOption = "auto",
    repetitions: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 30,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop sampling a case after so long.")] = None,
    budget: Annotated[str | None, typer.Option(help="Time for everything, such as 8m.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for rows, plots and report [decompose-k-bench].")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the rows in the output folder.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="On a GPU: give every variant the best of its configs, by measuring them.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile the candidates of a search.")] = 4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the rows in the output folder anew.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: make plots and report from this rows.jsonl.")
    ] = None,
) -> None:
    """Measure suites or shapes into rows.jsonl and rows.csv, then make plots and report from the rows."""
    console = Console()
    if source is not None:
        with _user_errors():
            rows = read_jsonl(source)
            folder = source.parent if output is None else output
            folder.mkdir(parents=True, exist_ok=True)
        _finish(console, folder, Outcome(rows=list(rows)))
        return
    with _user_errors():
        where = parse_device(device)
        cases = _narrowed(_cases(suites, shapes, dtype, b_dtype, out_dtype, layout, activation), rows_of_a, model)
        chosen = Settings(
            repetitions,
            seconds,
            None if budget is None else parse_duration(budget),
            _variants(variants),
            search,
            jobs,
        )
        folder = Path("decompose-k-bench") if output is None else output
        done = open_folder(folder, resume=resume, overwrite=overwrite)
    with _progress(console, len(cases) + 1) as announce:
        outcome = run_cases(cases, where, folder, chosen, announce=announce, done=done)
    _finish(console, folder, outcome)


@app.command()
def verify(
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes.")] = False,
) -> None:
    """Check the library's contract on this machine; exits 1 with a list where it is broken."""
    console = Console()
    with _user_errors():
        where = parse_device(device)
    with _progress(console, None) as announce:
        checks = verify_contract(where, quick=quick, progress=announce)
    failed = [check for check in checks if not check.passed]
    for check in checks:
        mark = "[cyan]ok[/]   " if check.passed else "[bold red]FAIL[/] "
        console.print(f"{mark} {check.name}: {check.detail}", highlight=False)
    console.print(
        f"{len(checks) - len(failed)} of {len(checks)} checks passed on {device_name(where)}", highlight=False
    )
    if failed:
        typer.echo("failed: " + "; ".join(check.name for check in failed), err=True)
        raise typer.Exit(1)


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what would run for out[M, N] = a[M, K] @ b[K, N], and why."""
    with _user_errors():
        where = parse_device(device)
        a_layout, b_layout = _layouts(layout)
        problem = Problem.make(
            m,
            n,
            k,
            dtype_from_name(dtype),
            b_dtype=_dtype(b_dtype),
            out_dtype=_dtype(out_dtype),
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


@app.command()
def inspect(
    m: Annotated[int, typer.Argument(metavar="M", help="Rows of a.")],
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of b.")],
    k: Annotated[int, typer.Argument(metavar="K", help="The reduced dimension.")],
    dtype: Annotated[str, typer.Option(help="Dtype of all tensors.")] = "bf16",
    activation: Annotated[str | None, typer.Option(help=f"{', '.join(ACTIVATIONS)}.")] = None,
    layout: Annotated[str, typer.Option(help="NN, or NT for a linear layer's weight.")] = "NT",
    mode: Annotated[str, typer.Option(help="Mode of torch.compile.")] = "default",
    dynamic_m: Annotated[bool, typer.Option("--dynamic-m", help="Compile for any M.")] = False,
    device: DeviceOption = "auto",
    output: OutputOption = Path("decompose-k-inspect"),
) -> None:
    """Say what torch.compile does with a product by itself and with Decompose-K enabled, and save both programs."""
    from decompose_k.inductor import inspect_product

    with _user_errors():
        options: dict[str, Any] = {"activation": activation, "layout": layout, "mode": mode, "dynamic_m": dynamic_m}
        found = inspect_product(m, n, k, dtype_from_name(dtype), device=parse_device(device), **options)
        typer.echo(f"{found}\ncode     {', '.join(map(str, found.save(output)))}")


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show versions, devices, the backends found and where choices are kept."""
    with _user_errors():
        facts = machine_facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")


def parse_device(text: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:1` names; raises ValueError where it is not there."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = text.partition(":")
    if kind not in DEVICES[1:] or (index and (kind == "cpu" or not index.isdigit())):
        raise ValueError(f"device must be one of {', '.join(DEVICES)} or cuda:INDEX; got {text!r}")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {text!r} is not there: torch {torch.__version__} finds no CUDA GPU")
        if index and int(index) >= torch.cuda.device_count():
            raise ValueError(f"device {text!r} is not there: this machine has {torch.cuda.device_count()} GPUs")
    return torch.device(text)


def parse_duration(text: str) -> float:
    """Seconds of a text such as `90`, `90s`, `1.5m` or `1h`; raises ValueError for anything else."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"budget must be a time > 0 such as 90s or 3m; got {text!r}")
    return seconds


def _cases(
    suites: list[str] | None,
    shapes: list[str] | None,
    dtype: str | None,
    b_dtype: str | None,
    out_dtype: str | None,
    layout: str,
    activation: str | None,
) -> list[Case]:
    if not suites and not shapes:
        raise ValueError("bench needs at least one --suite or --shape, or --from with rows to report")
    _layouts(layout)
    if activation is not None and activation not in (*ACTIVATIONS, "none"):
        raise ValueError(f"activation must be one of none, {', '.join(ACTIVATIONS)}; got {activation!r}")
    names = [name for text in suites or () for name in text.split(",")]
    cases = list(suite_cases(names))
    if dtype is not None:
        cases = [with_dtype(case, _float_dtype("dtype", dtype)) for case in cases]
    for text in shapes or ():
        size = parse_size(text)
        if 0 in size:
            raise ValueError(f"shape must have sizes of at least 1 to be measured; got {text!r}")
        a = _float_dtype("dtype", dtype or "bf16")
        b = None if b_dtype is None else _float_dtype("b-dtype", b_dtype)
        out = None if out_dtype is None else _float_dtype("out-dtype", out_dtype)
        cases.append(custom_case(size, a, b_dtype=b, out_dtype=out, layout=layout))
    if activation is not None:
        chosen = None if activation == "none" else activation
        cases = [Case(case.shape, chosen) for case in cases]
    return list(dict.fromkeys(cases))


def _narrowed(cases: list[Case], rows_of_a: str | None, model: str | None) -> list[Case]:
    if rows_of_a is not None:
        try:
            wanted = {int(text) for text in rows_of_a.split(",")}
        except ValueError:
            raise ValueError(f"m must be integers such as 1,16,64; got {rows_of_a!r}") from None
        cases = [case for case in cases if case.shape.suite == CUSTOM or case.shape.m in wanted]
    if model is not None:
        cases = [case for case in cases if model.lower() in case.shape.name.lower()]
    if not cases:
        raise ValueError(f"no case is left by m={rows_of_a!r} and model={model!r}")
    return cases


def _variants(text: str | None) -> tuple[str, ...]:
    if text is None:
        return DEFAULT_VARIANTS
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}; got {', '.join(map(repr, unknown))}")
    return names


def _layouts(layout: str) -> tuple[str, str]:
    if layout not in OPERAND_LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(OPERAND_LAYOUTS)}; got {layout!r}")
    return OPERAND_LAYOUTS[layout]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else dtype_from_name(name)


def _float_dtype(argument: str, name: str) -> torch.dtype:
    dtype = dtype_from_name(name)
    if dtype not in FLOATS:
        raise ValueError(f"{argument} must be one of {', '.join(map(dtype_name, FLOATS))} for bench; got {name!r}")
    return dtype


def _finish(console: Console, folder: Path, outcome: Outcome) -> None:
    rows: list[Row] = outcome.rows
    if rows:
        with _user_errors():
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


@contextlib.contextmanager
def _progress(console: Console, total: int | None) -> Iterator[Callable[[str], None]]:
    with view.progress_bar(console) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def announce(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=1 if started else 0)
            started = True

        yield announce


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{name}{error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _fail(message: str) -> None:
    typer.echo(f"decompose-k: {' '.join(message.split())}", err=True)
    sys.exit(WRONG_USE)
