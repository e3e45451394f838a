"""The ``dflash`` command, for any machine that has the weights."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash.errors import DFlashError, NotValidError, one_line, run_cli

if TYPE_CHECKING:
    from dflash.inspect import Inspection

app = typer.Typer(
    help="Measure DFlash drafters.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


class Mode(StrEnum):
    """How blocks are visited: replay walks completions that the target has already written."""

    replay = "replay"


class Switch(StrEnum):
    on = "on"
    off = "off"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Kernel(StrEnum):
    auto = "auto"
    fla = "fla"
    torch = "torch"


DrafterConfigOption = Annotated[
    Path | None, typer.Option(help="config.json of a checkpoint that carries none", dir_okay=False)
]
ReferenceOption = Annotated[Path | None, typer.Option(help="a released drafter of the same target, z-lab layout")]
JsonOption = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.callback()
def _group() -> None:
    """Measure DFlash drafters."""


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint file or directory")],
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Format, step, tensors and config of a checkpoint, and what is wrong with it; exit code 1 if anything is."""
    from dflash.inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint, drafter_config=drafter_config, reference=reference)
    if as_json:
        print(found.model_dump_json(indent=1))
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(DFlashError.exit_code)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Option(help="directory of the target", exists=True, file_okay=False)],
    checkpoint: Annotated[Path, typer.Option(help="the drafter to measure")],
    output: Annotated[Path, typer.Option(help="directory for the report; made here, must not exist or be empty")],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; the shipped coding10 by default")] = None,
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    server: Annotated[str | None, typer.Option(help="URL of a server that writes the reference completions")] = None,
    mode: Annotated[Mode, typer.Option(help="how blocks are visited")] = Mode.replay,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens of each completion")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on behind the end of sequence")] = False,
    thinking: Annotated[Switch | None, typer.Option(help="required when prompts are chats")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="take the first N prompts")] = None,
    max_blocks: Annotated[int | None, typer.Option(min=1, help="rounds of each prompt")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 on CUDA, float32 on the CPU")] = Dtype.auto,
    kernel: Annotated[Kernel, typer.Option(help="linear attention; auto: fla where it can run")] = Kernel.auto,
    as_json: JsonOption = False,
) -> None:
    """Measure the acceptance length of a checkpoint; exit code 3 when a check says it must not be believed."""
    from transformers.utils.logging import disable_progress_bar

    from dflash.evaluate import Request
    from dflash.evaluate import evaluate as measure
    from dflash.progress import Phases
    from dflash.prompts import default_prompts

    request = Request(
        target=target,
        checkpoint=checkpoint,
        prompts=prompts or default_prompts(),
        output=output,
        drafter_config=drafter_config,
        reference=reference,
        server=server,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        thinking=None if thinking is None else thinking is Switch.on,
        num_prompts=num_prompts,
        max_blocks=max_blocks,
        device=device,
        dtype=dtype.value,
        kernel=kernel.value,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the phases show progress; a second bar would tear theirs
    report = measure(request, Phases(5))
    print(report.metrics.model_dump_json(indent=1) if as_json else report.headline())
    if not report.valid:
        raise typer.Exit(NotValidError.exit_code)


def _show(found: "Inspection") -> None:
    facts = Table.grid(padding=(0, 2))
    for name in ("path", "format", "step", "parameters", "config_source"):
        facts.add_row(name, _text(getattr(found, name)))
    for name, value in (found.config | found.training).items():
        facts.add_row(name, _text(value))
    facts.add_row("problems", "\n".join(map(_text, found.problems)) or "none")
    tensors = Table("tensor", "shape", "dtype", box=None, padding=(0, 2, 0, 0))
    for tensor in found.tensors:
        tensors.add_row(_text(tensor.name), "×".join(map(str, tensor.shape)), tensor.dtype)
    console = Console(highlight=False)
    console.print(tensors)
    console.print()
    console.print(facts)


def _text(value: object) -> str:
    """What a file says, without line ends, terminal controls or markup in effect."""
    return escape(one_line(str(value)))


def main() -> None:
    """Entry point of the ``dflash`` command."""
    run_cli(app)
