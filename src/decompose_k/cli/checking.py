"""Checking: the commands `verify` and `info`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from decompose_k.bench.machine import machine_facts
from decompose_k.cli.common import DeviceOption, JsonOption, parse_device, progress, user_errors
from decompose_k.device import Device
from decompose_k.verify import verify as verify_contract


def verify(
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes.")] = False,
) -> None:
    """Check the library's contract on this machine; exits 1 with a list where it is broken."""
    console = Console()
    with user_errors():
        where = parse_device(device)
    with progress(console, None) as announce:
        checks = verify_contract(where, quick=quick, progress=announce)
    failed = [check for check in checks if not check.passed]
    for check in checks:
        mark = "[cyan]ok[/]   " if check.passed else "[bold red]FAIL[/] "
        console.print(f"{mark} {check.name}: {check.detail}", highlight=False)
    console.print(
        f"{len(checks) - len(failed)} of {len(checks)} checks passed on {Device.of(where).name}", highlight=False
    )
    if failed:
        typer.echo("failed: " + "; ".join(check.name for check in failed), err=True)
        raise typer.Exit(1)


def info(as_json: JsonOption = False) -> None:
    """Show versions, devices, the backends found and where choices are kept."""
    with user_errors():
        facts = machine_facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")
