"""``dflash train``: a drafter from a config, from where it was left if it was begun."""

from pathlib import Path
from typing import Annotated

import typer

from dflash.cli_options import JsonOption
from dflash.command_line import leaves
from dflash.json_text import json_text


@leaves("checkpoints that were saved are whole; the same command goes on from the newest")
def train(
    config: Annotated[Path, typer.Option(help="the run, as YAML", dir_okay=False)],
    as_json: JsonOption = False,
) -> None:
    """Train a drafter; the same command goes on from the last checkpoint, SIGTERM saves one and ends with code 0.

    On several GPUs: torchrun --nproc-per-node N -m dflash train --config FILE.
    """
    from dflash.training.run_config import RunConfig

    run = RunConfig.read(config)

    from transformers.utils.logging import disable_progress_bar

    from dflash.training.distributed import this_rank
    from dflash.training.trainer import train as train_run

    disable_progress_bar()  # type: ignore[no-untyped-call]  # the phases show progress; a second bar would tear theirs
    outcome = train_run(run)
    if this_rank() == 0:
        print(json_text(outcome, indent=1) if as_json else outcome.headline())
