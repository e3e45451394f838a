"""``dflash data``: what a drafter is trained on, made before the training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from dflash import cli_features
from dflash.cli_options import JsonOption, TargetOption, ThinkingOption, text, thinking_asked
from dflash.command_line import leaves
from dflash.json_text import json_text

if TYPE_CHECKING:
    from dflash.training.regenerate import Regenerated

app = typer.Typer(help="Make what a drafter is trained on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make what a drafter is trained on."""


@app.command()
@leaves("answers that were written are kept; the same command goes on with the others")
def regenerate(
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts or chats; answers at a chat's end are replaced")],
    server: Annotated[str, typer.Option(help="URL of a server that serves the target")],
    target: TargetOption,
    output: Annotated[Path, typer.Option(help="JSON lines to write, text and token ids; must not exist")],
    model: Annotated[str | None, typer.Option(help="the model to ask for, where the server has several")] = None,
    thinking: ThinkingOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens of each completion")] = 2048,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="with a temperature")] = 1.0,
    top_k: Annotated[int, typer.Option(help="with a temperature; −1 takes all tokens")] = -1,
    concurrency: Annotated[int, typer.Option(min=1, help="prompts under way at once")] = 64,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="take the first N prompts")] = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target answer a prompt file, behind a server; the same command again goes on where it ended."""
    from dflash.completions import Sampling
    from dflash.progress import Phases
    from dflash.training.regenerate import PHASES, Regeneration, require_sampling
    from dflash.training.regenerate import regenerate as write

    sampling = Sampling(temperature, top_p, top_k)
    require_sampling(sampling)
    asked = Regeneration(
        prompts=prompts,
        server=server,
        target=target,
        output=output,
        thinking=thinking_asked(thinking),
        model=model,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        concurrency=concurrency,
        num_prompts=num_prompts,
    )
    written = write(asked, Phases(PHASES))
    if as_json:
        print(json_text(written, indent=1))
    else:
        _show(written)


def _show(written: "Regenerated") -> None:
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    facts.add_row("written", text(written.path))
    facts.add_row("samples", f"{written.samples}, {written.ended} of them ended by the target itself")
    facts.add_row("tokens", str(written.tokens))
    if written.answers_replaced:
        facts.add_row("note", f"{written.answers_replaced} chats had answers at their end, which were dropped")
    if written.retokenized:
        facts.add_row(
            "note",
            f"{written.retokenized} completions came as text only; their ids are the tokenizer's reading of it, which "
            f"need not be what the target wrote",
        )
    Console(highlight=False).print(facts)


app.command()(cli_features.features)
