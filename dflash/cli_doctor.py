"""``dflash doctor``: whether a measurement of this checkpoint on this machine can be believed."""

from pathlib import Path
from typing import Annotated

import typer

from dflash.cli_options import (
    CacheOption,
    CheckpointOption,
    DeviceOption,
    DrafterConfigOption,
    Dtype,
    DtypeOption,
    JsonOption,
    Kernel,
    KernelOption,
    PromptsOption,
    ReferenceOption,
    ServerOption,
    TargetOption,
    ThinkingOption,
    TrainingDataOption,
    thinking_asked,
)
from dflash.command_line import NOTHING_CHANGED, leaves
from dflash.errors import NotValidError
from dflash.json_text import json_text


@leaves(NOTHING_CHANGED)
def doctor(
    target: TargetOption,
    checkpoint: CheckpointOption,
    prompts: PromptsOption = None,
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    server: ServerOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="take the first N prompts")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens of each completion")] = 64,
    thinking: ThinkingOption = None,
    training_data: TrainingDataOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    kernel: KernelOption = Kernel.auto,
    offload: Annotated[
        bool, typer.Option("--offload", help="stream the target's layers; what needs all of it is then not verified")
    ] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run every check of a checkpoint on a few short completions; exit code 3 when one of them fails."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from dflash.doctor import examine, to_table, verdict
    from dflash.prompts import default_prompts
    from dflash.request import Request

    request = Request(
        target=target,
        checkpoint=checkpoint,
        prompts=prompts or default_prompts(),
        output=Path(),
        drafter_config=drafter_config,
        reference=reference,
        server=server,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        thinking=thinking_asked(thinking),
        training_data=training_data,
        device=device,
        dtype=dtype.value,
        kernel=kernel.value,
        offload=offload,
        cache=cache,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the phases show progress; a second bar would tear theirs
    checks = examine(request)
    if as_json:
        print("[" + ",\n ".join(json_text(check) for check in checks) + "]")
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(to_table(checks))
        console.print()
        console.print(verdict(checks), markup=False)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(NotValidError.exit_code)
