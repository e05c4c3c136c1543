"""Compiling: the command `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decompose_k.cli.common import AUTO, DeviceOption, parse_device, user_errors
from decompose_k.dtypes import dtype_from_name
from decompose_k.epilogue import ACTIVATIONS


def inspect(
    m: Annotated[int, typer.Argument(metavar="M", help="Rows of a.")],
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of b.")],
    k: Annotated[int, typer.Argument(metavar="K", help="The reduced dimension.")],
    dtype: Annotated[str, typer.Option(help="Dtype of all tensors.")] = "bf16",
    activation: Annotated[str | None, typer.Option(help=f"{', '.join(ACTIVATIONS)}.")] = None,
    layout: Annotated[str, typer.Option(help="NN, or NT for a linear layer's weight.")] = "NT",
    mode: Annotated[str, typer.Option(help="Mode of torch.compile.")] = "default",
    dynamic_m: Annotated[bool, typer.Option("--dynamic-m", help="Compile for any M.")] = False,
    device: DeviceOption = AUTO,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the generated programs.")] = Path(
        "decompose-k-inspect"
    ),
) -> None:
    """Say what torch.compile does with a product by itself and with Decompose-K enabled, and save both programs."""
    from decompose_k.inductor import inspect_product

    with user_errors():
        found = inspect_product(
            m,
            n,
            k,
            dtype_from_name(dtype),
            activation=activation,
            layout=layout,
            mode=mode,
            dynamic_m=dynamic_m,
            device=parse_device(device),
        )
        typer.echo(f"{found}\ncode     {', '.join(map(str, found.save(output)))}")
