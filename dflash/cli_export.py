"""``dflash export``: a checkpoint as a directory that engines load."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from dflash.cli_options import CheckpointArgument, DrafterConfigOption, Dtype, JsonOption, ReferenceOption, text
from dflash.command_line import leaves
from dflash.errors import UsageError
from dflash.json_text import json_text

if TYPE_CHECKING:
    from dflash.export import Export


class ExportFormat(StrEnum):
    zlab = "zlab"
    speculators = "speculators"
    transformers = "transformers"


@leaves("nothing half has its final name; the same command begins anew")
def export(
    checkpoint: CheckpointArgument,
    format: Annotated[ExportFormat, typer.Option(help="the layout to write")],
    output: Annotated[Path, typer.Option(help="directory to write; made here, must not exist or be empty")],
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    dtype: Annotated[Dtype, typer.Option(help="of the tensors; auto: as they are")] = Dtype.auto,
    verifier: Annotated[
        str | None, typer.Option(help="the target's name or directory, which a speculators export states")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a directory for vLLM and SGLang (zlab), speculators or transformers."""
    if verifier is not None and format != ExportFormat.speculators:
        raise UsageError(f"--verifier {verifier}: only --format speculators has a place for it")
    from dflash.checkpoints import read_checkpoint
    from dflash.export import export as write

    drafter = read_checkpoint(checkpoint, drafter_config=drafter_config, reference=reference)
    written = write(drafter, format.value, output, dtype=dtype.value, verifier=verifier)
    if as_json:
        print(json_text(written, indent=1))
    else:
        _show(written)


def _show(written: "Export") -> None:
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    facts.add_row("written", text(written.path))
    facts.add_row("format", f"{written.format}, from {written.source_format}")
    facts.add_row("dtype", written.dtype)
    for file in written.files:
        facts.add_row(file.name, f"{file.size} bytes, sha256 {file.sha256}")
    for note in written.notes:
        facts.add_row("note", text(note))
    Console(highlight=False).print(facts)
