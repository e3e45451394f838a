"""``dflash export``: a checkpoint as a directory that engines load."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash.errors import one_line

if TYPE_CHECKING:
    from dflash.export import Export


class ExportFormat(StrEnum):
    zlab = "zlab"
    speculators = "speculators"
    transformers = "transformers"


class ExportDtype(StrEnum):
    """``auto`` keeps the checkpoint's."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint file or directory, in any layout that is read")],
    format: Annotated[ExportFormat, typer.Option(help="the layout to write")],
    output: Annotated[Path, typer.Option(help="directory to write; made here, must not exist or be empty")],
    drafter_config: Annotated[
        Path | None, typer.Option(help="config.json of a checkpoint that carries none", dir_okay=False)
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="a released drafter of the same target")] = None,
    dtype: Annotated[ExportDtype, typer.Option(help="of the tensors; auto: as they are")] = ExportDtype.auto,
    verifier: Annotated[
        str | None, typer.Option(help="the target's name or directory, which a speculators export states")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write a checkpoint as a directory for vLLM and SGLang (zlab), speculators or transformers."""
    from dflash.checkpoints import read_checkpoint
    from dflash.export import export as write

    drafter = read_checkpoint(checkpoint, drafter_config=drafter_config, reference=reference)
    written = write(drafter, format.value, output, dtype=dtype.value, verifier=verifier)
    if as_json:
        print(written.model_dump_json(indent=1))
    else:
        _show(written)


def _show(written: "Export") -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("written", escape(one_line(written.path)))
    facts.add_row("format", f"{written.format}, from {written.source_format}")
    facts.add_row("dtype", written.dtype)
    for file in written.files:
        facts.add_row(file.name, f"{file.size} bytes, sha256 {file.sha256}")
    for note in written.notes:
        facts.add_row("note", escape(one_line(note)))
    Console(highlight=False).print(facts)
