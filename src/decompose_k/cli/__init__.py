"""The command line `decompose-k`: demo and bench, tune, cache and explain, inspect, verify and info."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import typer

from decompose_k.cli.checking import info, verify
from decompose_k.cli.choosing import explain, tune
from decompose_k.cli.common import UserError
from decompose_k.cli.compiling import inspect
from decompose_k.cli.measuring import bench, demo
from decompose_k.cli.remembered import cache

if TYPE_CHECKING:
    from collections.abc import Sequence

WRONG_USE = 2

app = typer.Typer(
    name="decompose-k",
    help="Matrix products with a small output and a long K: see them work, measure and tune them, ask how they run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (demo, tune, explain, inspect, verify, info):
    app.command()(_command)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")

# What typer raises for an option it does not know or cannot read; its own classes differ between its versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits 0 on success, 1 where a check failed or nothing came out, 2 for wrong use."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code = app(args=arguments, standalone_mode=False)
    except _UsageError as error:
        _fail(error.format_message() if hasattr(error, "format_message") else str(error))
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _show_warning(message: Warning | str, category: type[Warning], *_where: object) -> None:
    # What a library has to say to its programmers is not for who types a command.
    if not issubclass(category, (DeprecationWarning, FutureWarning)):
        typer.echo(f"decompose-k: {' '.join(str(message).split())}", err=True)


def _fail(message: str) -> None:
    typer.echo(f"decompose-k: {' '.join(message.split())}", err=True)
    sys.exit(WRONG_USE)
