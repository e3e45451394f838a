"""``dflash evaluate``: the acceptance length of a checkpoint."""

from enum import StrEnum
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
from dflash.command_line import leaves
from dflash.errors import NotValidError, UsageError
from dflash.failure import told


class Mode(StrEnum):
    replay = "replay"
    decode = "decode"
    served = "served"


class Sampler(StrEnum):
    rejection = "rejection"
    target_match = "target-match"


@leaves("no report was written; hidden states in --cache are kept, and the same command goes on from there")
def evaluate(
    target: TargetOption,
    checkpoint: CheckpointOption,
    output: Annotated[Path, typer.Option(help="directory for the report; made here, must not exist or be empty")],
    prompts: PromptsOption = None,
    drafter_config: DrafterConfigOption = None,
    reference: ReferenceOption = None,
    server: ServerOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="replay walks completions already written; decode has the target verify each block; served reads the "
            "running server's own counts"
        ),
    ] = Mode.replay,
    temperature: Annotated[float, typer.Option(min=0.0, help="of --mode decode; 0 is greedy")] = 0.0,
    sampler: Annotated[
        Sampler, typer.Option(help="with a temperature: sampled drafts and rejection, or greedy drafts and matching")
    ] = Sampler.rejection,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens of each completion")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on behind the end of sequence")] = False,
    thinking: ThinkingOption = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="take the first N prompts")] = None,
    max_blocks: Annotated[int | None, typer.Option(min=1, help="rounds of each prompt")] = None,
    training_data: TrainingDataOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    kernel: KernelOption = Kernel.auto,
    offload: Annotated[
        bool, typer.Option("--offload", help="stream the target's layers from its files, for a device it does not fit")
    ] = False,
    offload_if_needed: Annotated[
        bool, typer.Option("--offload-if-needed", help="stream the layers when the target does not fit in what is free")
    ] = False,
    cache: CacheOption = None,
    reserve_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="the machine is others' too: take turns on the GPU, leave so much of its free memory, and wait while "
            "the model of --server is slowed down",
        ),
    ] = None,
    gpu_locks: Annotated[
        Path | None, typer.Option(help="where turns are taken, with --reserve-gib; the same for all evaluations")
    ] = None,
    gpu_wait: Annotated[float, typer.Option(min=0.0, help="seconds to wait for a turn")] = 12 * 3600.0,
    failure: Annotated[
        Path | None,
        typer.Option(help="write state and sentence of a failure there, as JSON, for the program that asked"),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots", help="the charts of report.html as PNG and SVG, too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the acceptance length of a checkpoint; exit code 3 when a check says it must not be believed."""
    from transformers.utils.logging import disable_progress_bar

    from dflash.evaluate import PHASES
    from dflash.evaluate import evaluate as measure
    from dflash.gpu_share import Share
    from dflash.progress import Phases
    from dflash.prompts import default_prompts
    from dflash.request import Request

    if gpu_locks is not None and reserve_gib is None:
        raise UsageError("--gpu-locks says where turns are taken; say with --reserve-gib how much memory is left")
    if offload and offload_if_needed:
        raise UsageError("--offload streams the layers, --offload-if-needed only when it must; give one of them")
    request = Request(
        target=target,
        checkpoint=checkpoint,
        prompts=prompts or default_prompts(),
        output=output,
        drafter_config=drafter_config,
        reference=reference,
        server=server,
        mode=mode.value,
        temperature=temperature,
        sampler=sampler.value,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        thinking=thinking_asked(thinking),
        num_prompts=num_prompts,
        max_blocks=max_blocks,
        training_data=training_data,
        device=device,
        dtype=dtype.value,
        kernel=kernel.value,
        offload=True if offload else "auto" if offload_if_needed else False,
        cache=cache,
        share=None if reserve_gib is None else Share(reserve_gib, gpu_locks, gpu_wait),
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the phases show progress; a second bar would tear theirs
    with told(failure):
        report = measure(request, Phases(PHASES[request.mode] + (request.share is not None)), plots=plots)
    print(report.metrics.model_dump_json(indent=1) if as_json else report.headline())
    if not report.valid:
        raise typer.Exit(NotValidError.exit_code)
