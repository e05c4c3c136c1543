"""What the commands share: devices, durations and shapes as they are written, progress, and errors for users."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console

from decompose_k.bench.cases import Case, custom_case, with_dtype, with_rows
from decompose_k.bench.console import progress_bar
from decompose_k.bench.suites import SUITE_NAMES, suite_cases
from decompose_k.dtypes import FLOATS, dtype_from_name, dtype_name
from decompose_k.epilogue import ACTIVATIONS
from decompose_k.shapes import OPERAND_LAYOUTS, parse_size

AUTO = "auto"
DEVICES = (AUTO, "cpu", "cuda")

DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda (with an index: cuda:1).")]
SuiteOption = Annotated[
    list[str] | None,
    typer.Option("--suite", help=f"Suites, repeated or comma-separated: {', '.join(SUITE_NAMES)}."),
]
ShapeOption = Annotated[list[str] | None, typer.Option("--shape", help="Explicit shape MxNxK, repeated.")]
DtypeOption = Annotated[str | None, typer.Option(help="Dtype of both operands (bf16 for --shape).")]
BDtypeOption = Annotated[str | None, typer.Option(help="Dtype of b, for --shape.")]
OutDtypeOption = Annotated[str | None, typer.Option(help="Dtype of the result, for --shape.")]
LayoutOption = Annotated[str, typer.Option(help="NN, NT (nn.Linear weight), TN or TT, for --shape.")]
ActivationOption = Annotated[str | None, typer.Option(help="none or an activation; by default the suite's own.")]
RowsOption = Annotated[
    str | None,
    typer.Option("--m", help="Values of M, such as 1,3,48: any where M is a batch, else only cases that have them."),
]
ModelOption = Annotated[str | None, typer.Option(help="Only cases whose name contains this text.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


class UserError(Exception):
    """A wrong argument: its message is one line for the user."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can cause into a UserError."""
    try:
        yield
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{name}{error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def progress(console: Console, total: int | None) -> Iterator[Callable[[str], None]]:
    """A progress bar, moved by a call with what is done next."""
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def announce(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=1 if started else 0)
            started = True

        yield announce


def parse_device(text: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:1` names; raises ValueError where it is not there."""
    if text == AUTO:
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


def parse_part(text: str) -> tuple[int, int]:
    """(I, N) of a text I/N with 1 <= I <= N; raises ValueError for anything else."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"part must be I/N with 1 <= I <= N, such as 1/2; got {text!r}")
    return int(index), int(count)


def parse_layout(layout: str) -> tuple[str, str]:
    """The layouts of a and b that BLAS's two letters name; raises ValueError for others."""
    if layout not in OPERAND_LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(OPERAND_LAYOUTS)}; got {layout!r}")
    return OPERAND_LAYOUTS[layout]


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by its name; None for None."""
    return None if name is None else dtype_from_name(name)


def named_cases(
    suites: list[str] | None,
    shapes: list[str] | None,
    dtype: str | None,
    b_dtype: str | None,
    out_dtype: str | None,
    layout: str,
    activation: str | None,
    static_weight: bool = False,
) -> list[Case]:
    """The cases that suites and shapes name; raises ValueError for what is none."""
    parse_layout(layout)
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
        cases.append(custom_case(size, a, b_dtype=b, out_dtype=out, layout=layout, static_weight=static_weight))
    if activation is not None:
        chosen = None if activation == "none" else activation
        cases = [replace(case, activation=chosen) for case in cases]
    return list(dict.fromkeys(cases))


def narrowed(cases: list[Case], rows_of_a: str | None, model: str | None) -> list[Case]:
    """The cases with this text in their name, at these M; raises ValueError where none is left."""
    if model is not None:
        cases = [case for case in cases if model.lower() in case.shape.name.lower()]
    if rows_of_a is not None:
        cases = list(with_rows(cases, _parse_rows(rows_of_a)))
    if not cases:
        raise ValueError(f"no case is left by m={rows_of_a!r} and model={model!r}")
    return cases


def _parse_rows(text: str) -> list[int]:
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise ValueError(f"m must be integers >= 1 such as 1,16,64; got {text!r}")
    return rows


def _float_dtype(argument: str, name: str) -> torch.dtype:
    dtype = dtype_from_name(name)
    if dtype not in FLOATS:
        raise ValueError(f"{argument} must be one of {', '.join(map(dtype_name, FLOATS))} to be measured; got {name!r}")
    return dtype
