"""The ``dflash`` command, for any machine that has the weights."""

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Column, Table

from dflash import cli_compare, cli_data, cli_doctor, cli_evaluate, cli_export, cli_report, cli_train
from dflash.cli_options import CheckpointArgument, DrafterConfigOption, JsonOption, ReferenceOption, text
from dflash.command_line import with_common_options
from dflash.errors import DFlashError, run_cli
from dflash.json_text import json_text

if TYPE_CHECKING:
    from dflash.inspect import Inspection

app = typer.Typer(help="Measure DFlash drafters.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """Measure DFlash drafters."""


@app.command()
def inspect(
    checkpoint: CheckpointArgument,
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Format, step, tensors and config of a checkpoint, and what is wrong with it; exit code 1 if anything is."""
    from dflash.inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint, drafter_config=drafter_config, reference=reference)
    if as_json:
        print(json_text(found, indent=1))
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(DFlashError.exit_code)


def _show(found: "Inspection") -> None:
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name in ("path", "format", "step", "parameters", "config_source"):
        facts.add_row(name, text(getattr(found, name)))
    for name, value in (found.config | found.training).items():
        facts.add_row(name, text(value))
    facts.add_row("notes", "\n".join(map(text, found.notes)) or "none")
    facts.add_row("problems", "\n".join(map(text, found.problems)) or "none")
    tensors = Table(Column("tensor", overflow="fold"), "shape", "dtype", box=None, padding=(0, 2, 0, 0))
    for tensor in found.tensors:
        tensors.add_row(text(tensor.name), "×".join(map(str, tensor.shape)), tensor.dtype)
    console = Console(highlight=False)
    console.print(tensors)
    console.print()
    console.print(facts)


app.command()(cli_evaluate.evaluate)
app.command()(cli_doctor.doctor)
app.command()(cli_compare.compare)
app.command()(cli_export.export)
app.command()(cli_train.train)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_report.app, name="report")


def main() -> None:
    """Entry point of the ``dflash`` command."""
    run_cli(with_common_options(app))
