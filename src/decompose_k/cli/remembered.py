"""The command `cache`: what is remembered, listed, shown, removed, exported and imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decompose_k import cache as choices
from decompose_k.bench.console import bare_table
from decompose_k.bench.summary import duration
from decompose_k.cli.choosing import entry_row, entry_table
from decompose_k.cli.common import AUTO, DeviceOption, JsonOption, UserError, parse_device, user_errors
from decompose_k.device import Device

cache = typer.Typer(help="What tuning has remembered.", no_args_is_help=True)


@cache.command("list")
def list_files(device: DeviceOption = AUTO) -> None:
    """List the files of remembered choices, the user's and the package's, and whether they count here."""
    console = Console()
    with user_errors():
        facts = Device.of(parse_device(device))
    files = choices.files(facts)
    shown = bare_table("entries", left=("file", "device", "torch", "triton", "kernels", "counts here"))
    for file in files:
        made = ("", "", "", "")
        if file.header is not None:
            header = file.header
            made = (header.device.name, header.torch, header.triton or "none", header.kernel)
        shown.add_row(file.path.name, *made, file.problem or "yes", str(len(file.entries)))
    console.print(shown)
    console.print(f"{len(files)} files; the user's are in {choices.directory()}", highlight=False, soft_wrap=True)


@cache.command()
def show(
    text: Annotated[str, typer.Argument(help="Only problems whose key contains this text, such as n=256.")] = "",
    timings: Annotated[bool, typer.Option("--timings", help="Everything that was measured.")] = False,
    device: DeviceOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Show the user's choices for a device."""
    console = Console()
    with user_errors():
        facts = Device.of(parse_device(device))
    entries = [entry for entry in choices.user_entries(facts) if text in entry.key]
    if as_json:
        typer.echo(json.dumps({entry.key: entry.to_json() for entry in entries}, indent=2))
        return
    shown = entry_table()
    for entry in entries:
        shown.add_row(*entry_row(entry.problem, entry))
        for measured in entry.timings if timings else ():
            shown.add_row("", "", "", f"  {measured.label}", duration(measured.timing.p50_us), "", "")
    console.print(shown)
    console.print(f"{len(entries)} choices for {facts.name}", highlight=False)


@cache.command()
def clear(
    everything: Annotated[bool, typer.Option("--all", help="Of every device, not of this one alone.")] = False,
    device: DeviceOption = AUTO,
) -> None:
    """Remove the user's files of remembered choices."""
    with user_errors():
        removed = choices.clear(None if everything else Device.of(parse_device(device)))
    for path in removed:
        typer.echo(f"removed {path}")
    typer.echo(f"{len(removed)} files removed")


@cache.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    device: DeviceOption = AUTO,
    most_timings: Annotated[
        int | None,
        typer.Option("--timings", min=1, help="Of each choice only the fastest so many timings, and torch's."),
    ] = None,
) -> None:
    """Write the user's choices for a device into a folder, as files that `import` reads and a package can ship."""
    with user_errors():
        facts = Device.of(parse_device(device))
        written = choices.export(folder, facts, most_timings=most_timings)
    if not written:
        raise UserError(f"nothing is remembered for {facts.name}")
    for path in written:
        typer.echo(f"wrote {path}")


@cache.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(help="Exported files.")],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Also what other versions of torch or Triton measured.")
    ] = False,
) -> None:
    """Add the choices in exported files to the user's, each for the device that its file names."""
    for path in files:
        with user_errors():
            entries = choices.install(path, adopt=adopt)
        typer.echo(f"{path}: {len(entries)} choices")
