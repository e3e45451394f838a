"""``dflash data features``: the target's states of a run's samples, written once, read at every epoch of training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Column, Table

from dflash.cli_options import JsonOption, text
from dflash.command_line import leaves
from dflash.errors import UsageError
from dflash.json_text import json_text
from dflash.training.run_config import RunConfig

if TYPE_CHECKING:
    from dflash.training.distributed import Ranks
    from dflash.training.features import Written

PHASES = 3


class FeaturesDone(BaseModel):
    """What the command did. ``shards`` of ``total`` are in ``directory``, ``already`` of them before it began."""

    directory: str
    samples: int
    tokens: int
    bytes: int
    layer_ids: list[int]
    last_hidden_states: bool
    dtype: str
    kernel: str
    shards: int
    total: int
    already: int


@leaves("what was written is kept; the same command goes on with the rest")
def features(
    config: Annotated[Path, typer.Option(help="the training run's YAML; features.directory is where they go")],
    directory: Annotated[Path | None, typer.Option(help="write there instead")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the target's states for offline training; goes on where an earlier run of it stopped.

    Several at once share the work: start one for each GPU, or under torchrun.
    """
    run = RunConfig.read(config)
    where = directory or run.features.directory
    if where is None:
        raise UsageError(f"{config}: features.mode is online, which keeps nothing; set offline and features.directory")
    from dflash.training.distributed import Ranks

    with Ranks.joined(run.target.device) as ranks:
        written = _written(run, where, ranks)
        ranks.any(False)  # all are done
        if ranks.main:
            _show(_done(where, written), as_json)


def _written(run: RunConfig, directory: Path, ranks: "Ranks") -> "Written":
    import torch

    from dflash.config import DrafterConfig, read_config_file
    from dflash.hidden_states import LoadedTaps
    from dflash.target import Target
    from dflash.training.features import write_features
    from dflash.training.preflight import require_fit
    from dflash.training.samples import load_samples
    from dflash.training.voice import Voice

    source, voice = str(run.drafter.config), Voice(PHASES, heard=ranks.main)
    drafter = DrafterConfig.from_dict(read_config_file(run.drafter.config), source=source)
    soft = run.objective.recipe(drafter.block_size).soft_labels
    with voice.phase("target", f"loading the target {run.target.path}"):
        dtype: torch.dtype = getattr(torch, run.target.dtype)
        target = Target.load(run.target.path, device=ranks.device, dtype=dtype, kernel=run.target.kernel)
    require_fit(drafter, LoadedTaps(target).facts, source=source)
    cache = run.data.cache or run.output / "samples"
    with voice.phase("data", "reading the data") as progress:
        samples = ranks.in_turn(
            lambda: load_samples(
                run.data, target.tokenizer, cache=cache, vocab_size=target.vocab_size, progress=progress
            )
        )
    for line in samples.counts.lines():
        voice.say(f"      {line}")
    with voice.phase("features", f"writing the target's states to {directory}") as progress:
        return write_features(directory, target, samples, drafter.target_layer_ids, soft=soft, progress=progress)


def _done(directory: Path, written: "Written") -> FeaturesDone:
    index = written.index
    return FeaturesDone(
        directory=str(directory),
        samples=index.samples,
        tokens=index.tokens,
        bytes=index.tokens * index.token_bytes,
        layer_ids=list(index.layer_ids),
        last_hidden_states=index.soft,
        dtype=index.dtype,
        kernel=index.kernel,
        shards=len(index.shards) - len(written.missing()),
        total=len(index.shards),
        already=written.already,
    )


def _show(done: FeaturesDone, as_json: bool) -> None:
    if as_json:
        print(json_text(done, indent=1))
        return
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    taps = ", ".join(map(str, done.layer_ids))
    facts.add_row("directory", text(done.directory))
    facts.add_row("samples", f"{done.samples}, {done.tokens} tokens")
    facts.add_row("states", f"taps {taps}{', last hidden states' if done.last_hidden_states else ''} in {done.dtype}")
    facts.add_row("kernel", done.kernel)
    facts.add_row("shards", f"{done.shards} of {done.total}, {done.already} of them were there")
    if done.shards < done.total:
        facts.add_row("note", "the rest is in the hands of other processes; run the command again if they have ended")
    Console(highlight=False).print(facts)
