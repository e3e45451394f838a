"""Options that several commands share, and how what a file says is shown."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dflash.errors import one_line


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


CheckpointArgument = Annotated[Path, typer.Argument(help="a checkpoint file or directory")]
TargetOption = Annotated[Path, typer.Option(help="directory of the target", exists=True, file_okay=False)]
CheckpointOption = Annotated[Path, typer.Option(help="the drafter to measure")]
DrafterConfigOption = Annotated[
    Path | None, typer.Option(help="config.json of a checkpoint that carries none", dir_okay=False)
]
ReferenceOption = Annotated[Path | None, typer.Option(help="a released drafter of the same target")]
PromptsOption = Annotated[Path | None, typer.Option(help="JSON lines; the shipped coding10 by default")]
ServerOption = Annotated[str | None, typer.Option(help="URL of a server that writes the reference completions")]
ThinkingOption = Annotated[Switch | None, typer.Option(help="required when prompts are chats")]
TrainingDataOption = Annotated[
    Path | None, typer.Option(help="training texts or their 13-grams; prompts found there are left out")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: bfloat16 on CUDA, float32 on the CPU")]
KernelOption = Annotated[Kernel, typer.Option(help="linear attention; auto: fla where a GPU is, else torch")]
CacheOption = Annotated[
    Path | None, typer.Option(help="directory that keeps completions and hidden states for the next checkpoint")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


def thinking_asked(switch: Switch | None) -> bool | None:
    """What the option says of thinking, None where it was not given."""
    return None if switch is None else switch is Switch.on


def text(value: object) -> str:
    """What a file says, without line ends, terminal controls or markup in effect; nothing is a dash."""
    shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return escape(one_line("–" if value is None else shown))
