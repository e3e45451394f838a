"""An evaluation from files to a report, in five phases that are announced and timed."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from dflash import checks, completions
from dflash.checkpoints import DrafterCheckpoint, build_drafter, read_checkpoint
from dflash.config import DrafterConfig
from dflash.errors import DFlashError, UsageError
from dflash.metrics import Round, by_prompt, compare, summarize
from dflash.progress import Phases
from dflash.prompts import PromptSet, has_chats, read_prompts, tokenize
from dflash.render import to_markdown
from dflash.replay import Replay, Text, replay
from dflash.report import Check, CheckpointInfo, PromptResult, Report, Settings, TargetInfo, TrainingInfo
from dflash.target import Target, TargetMismatchError, load_tokenizer

SEED = 20260206
PASS_TOKENS = 1 << 14
"""Padded tokens in one pass of the target for hidden states."""
FINGERPRINT_BYTES = 1 << 16


class OutputError(DFlashError):
    """The report cannot be written where it was asked for."""


@dataclass(frozen=True)
class Request:
    """What to measure. ``device`` and ``dtype`` "auto": CUDA in bfloat16 where it is there, else the CPU in float32.

    ``max_blocks`` bounds the rounds of each prompt.
    """

    target: Path
    checkpoint: Path
    prompts: Path
    output: Path
    drafter_config: Path | None = None
    reference: Path | None = None
    server: str | None = None
    max_new_tokens: int = 256
    ignore_eos: bool = False
    thinking: bool | None = None
    num_prompts: int | None = None
    max_blocks: int | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernel: Literal["auto", "fla", "torch"] = "auto"


@dataclass(frozen=True)
class Inputs:
    """Everything read before the target works: prompts as token ids, the checkpoint, the reference drafter."""

    prompt_set: PromptSet
    tokenizer: Any
    prompts: list[list[int]]
    checkpoint: DrafterCheckpoint
    reference: DrafterCheckpoint | None

    @property
    def layer_ids(self) -> list[int]:
        """The taps of both drafters, ascending."""
        drafters = [self.checkpoint] + ([self.reference] if self.reference else [])
        return sorted({layer for drafter in drafters for layer in drafter.config.target_layer_ids})


def evaluate(request: Request, phases: Phases) -> Report:
    """Measure, and write ``report.json``, ``rounds.jsonl`` and ``report.md`` into ``request.output``.

    The directory appears complete or not at all. A failed check is in the report, not an exception.
    """
    with _temporary_sibling(request.output) as (directory, final):
        report, rounds = measure(request, phases)
        try:
            _write(directory, report, rounds)
            directory.rename(final)
        except OSError as error:
            raise OutputError(
                f"--output {request.output} could not be written ({error.strerror}); nothing was left there"
            ) from error
    return report


def measure(request: Request, phases: Phases) -> tuple[Report, list[Round]]:
    """The report and the rounds of the walk behind it; writes nothing."""
    device = _device(request.device)
    dtype = _dtype(request.dtype, device)
    target: Target | None = None

    with phases.phase("tokenizer", "tokenizer"):
        inputs = _read(request)
        server = completions.connect(request.server) if request.server else None

    with phases.phase("reference_completions", "reference completions") as progress:
        if server is None:
            target = _load_target(request, inputs, device, dtype)
            written = _generate(target, inputs.prompts, request, progress)
        else:
            written = completions.complete(
                server,
                inputs.prompts,
                max_new_tokens=request.max_new_tokens,
                ignore_eos=request.ignore_eos,
                progress=progress,
            )

    with phases.phase("hidden_states", "target and hidden states") as progress:
        target = target or _load_target(request, inputs, device, dtype)
        _require_tokens(request, target, written)
        if not request.ignore_eos:
            written = [completions.until_end(ids, target.eos_token_ids) for ids in written]
        texts, agreement = _tap(target, inputs, written, progress)
        found = [checks.target_class(target)]

    with phases.phase("drafter", "drafter"):
        drafter = build_drafter(inputs.checkpoint, device=device, dtype=dtype)
        reference = build_drafter(inputs.reference, device=device, dtype=dtype) if inputs.reference else None
        reference_config = inputs.reference.config if inputs.reference else None
        found += [
            *_config_source(inputs.checkpoint),
            checks.fc_shape(inputs.checkpoint),
            checks.taps_as_reference(inputs.checkpoint.config, reference_config),
        ]

    with phases.phase("blocks", "blocks") as progress:
        own_texts = _columns(texts, inputs.layer_ids, drafter.config, target.hidden_size)
        found.append(checks.tap_source(target, drafter.config.target_layer_ids, own_texts))
        ours = replay(drafter, target, own_texts, max_blocks=request.max_blocks, seed=SEED, progress=progress)
        metrics = summarize(ours.walk, ours.random, seed=SEED)
        theirs: Replay | None = None
        if reference is not None:
            reference_texts = _columns(texts, inputs.layer_ids, reference.config, target.hidden_size)
            theirs = replay(
                reference, target, reference_texts, max_blocks=request.max_blocks, seed=SEED, progress=progress
            )
        target_weights = target.model.state_dict()
        found += [
            checks.slot_profile(ours.random),
            checks.independent_forward(
                inputs.checkpoint,
                target_weights["model.embed_tokens.weight"],
                target_weights["lm_head.weight"],
                own_texts,
                ours.walk,
                exact=dtype == torch.float32,
                seed=SEED,
            ),
        ]

    failed = [check.name for check in found if check.status == "fail"]
    report = Report(
        created=datetime.now(UTC),
        valid=not failed,
        invalid_because=failed,
        checkpoint=_describe(inputs.checkpoint),
        training=_training(inputs.checkpoint),
        target=TargetInfo.model_validate(
            {
                "path": str(request.target),
                "class": target.class_name,
                "tensors": target.tensors,
                "kernel": target.kernel,
                "dtype": str(dtype).removeprefix("torch."),
                "fingerprint": fingerprint(request.target),
            }
        ),
        reference=_describe(inputs.reference) if inputs.reference else None,
        settings=_settings(request, inputs, device, agreement),
        versions=_versions(),
        metrics=metrics,
        reference_metrics=summarize(theirs.walk, theirs.random, seed=SEED) if theirs else None,
        comparison=compare(ours.walk, theirs.walk, seed=SEED) if theirs else None,
        prompts=_prompt_results(texts, ours.walk, inputs.tokenizer),
        checks=found,
        timings=phases.timings,
    )
    return report, ours.walk


def fingerprint(directory: Path) -> str:
    """sha256 over ``config.json`` and the name, size, first and last 64 KiB of each weight file of a target.

    It tells two models apart without reading fifty gigabytes; it is no proof against one made to collide.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _read(request: Request) -> Inputs:
    """All files but the target's weights, so that a wrong one is named before the target has worked for it."""
    prompt_set = read_prompts(request.prompts, limit=request.num_prompts)
    tokenizer = load_tokenizer(str(request.target))
    prompts = tokenize(prompt_set.prompts, tokenizer, thinking=request.thinking)
    checkpoint = read_checkpoint(request.checkpoint, drafter_config=request.drafter_config, reference=request.reference)
    reference = read_checkpoint(request.reference) if request.reference else None
    return Inputs(prompt_set, tokenizer, prompts, checkpoint, reference)


def _load_target(request: Request, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Target:
    target = Target.load(request.target, device=device, dtype=dtype, kernel=request.kernel)
    for drafter in (inputs.checkpoint, inputs.reference):
        if drafter is not None:
            target.require_fit(drafter.config, source=str(drafter.path))
    return target


def _require_tokens(request: Request, target: Target, written: list[list[int]]) -> None:
    """:class:`TargetMismatchError` where a server wrote a token that the target has no row for."""
    rows = target.vocab_size
    strange = next((token for ids in written for token in ids if not 0 <= token < rows), None)
    if strange is not None:
        raise TargetMismatchError(
            f"server {request.server} wrote token {strange}, the target {request.target} has {rows} rows; "
            f"does it serve this model?"
        )


def _generate(
    target: Target, prompts: list[list[int]], request: Request, progress: Callable[[int, int], None]
) -> list[list[int]]:
    done, most = 0, len(prompts) * request.max_new_tokens

    def count(added: int) -> None:
        nonlocal done
        done += added
        progress(done, most)

    return target.generate_greedy(prompts, request.max_new_tokens, ignore_eos=request.ignore_eos, progress=count)


def _tap(
    target: Target, inputs: Inputs, written: list[list[int]], progress: Callable[[int, int], None]
) -> tuple[list[Text], float]:
    """Texts with their taps on the CPU, and the share of completion tokens that are the target's argmax there."""
    ids = [prompt + completion for prompt, completion in zip(inputs.prompts, written, strict=True)]
    texts: dict[int, Text] = {}
    agreeing = 0
    for group in _passes([len(tokens) for tokens in ids]):
        padded = torch.zeros(len(group), max(len(ids[place]) for place in group), dtype=torch.long)
        for row, place in enumerate(group):
            padded[row, : len(ids[place])] = torch.tensor(ids[place])
        result = target.taps(padded, inputs.layer_ids, argmax=True)
        assert result.argmax is not None
        taps, best, padded = result.taps.cpu(), result.argmax.cpu(), padded.cpu()
        for row, place in enumerate(group):
            start, end = len(inputs.prompts[place]), len(ids[place])
            agreeing += int((best[row, start - 1 : end - 1] == padded[row, start:end]).sum())
            texts[place] = Text(inputs.prompt_set.prompts[place].id, ids[place], start, taps[row, :end])
        progress(len(texts), len(ids))
    return [texts[place] for place in range(len(ids))], agreeing / sum(map(len, written))


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places by rising length, in groups of at most :data:`PASS_TOKENS` padded tokens."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda one: lengths[one]):
        if group and (len(group) + 1) * lengths[place] > PASS_TOKENS:
            yield group
            group = []
        group.append(place)
    yield group


def _columns(texts: list[Text], layer_ids: list[int], config: DrafterConfig, hidden_size: int) -> list[Text]:
    """The texts with the columns of this drafter's taps only."""
    if list(config.target_layer_ids) == layer_ids:
        return texts
    places = [layer_ids.index(layer) for layer in config.target_layer_ids]
    columns = torch.cat([torch.arange(place * hidden_size, (place + 1) * hidden_size) for place in places])
    return [replace(text, taps=text.taps[:, columns]) for text in texts]


def _config_source(checkpoint: DrafterCheckpoint) -> list[Check]:
    """A warning when the checkpoint came without a config and borrowed the reference drafter's."""
    if checkpoint.config_source != "reference":
        return []
    return [
        Check(
            name="config-source",
            status="warn",
            measured="reference",
            limit="key config, config.json beside it, or --drafter-config",
            explanation="the checkpoint has no config, so the reference drafter's was taken; taps, block size and "
            "windows may differ from training: give --drafter-config",
        )
    ]


def _describe(checkpoint: DrafterCheckpoint) -> CheckpointInfo:
    return CheckpointInfo(
        path=str(checkpoint.path),
        sha256=checkpoint.sha256,
        format=checkpoint.format,
        step=checkpoint.step,
        config_source=checkpoint.config_source,
    )


def _training(checkpoint: DrafterCheckpoint) -> TrainingInfo | None:
    """What the checkpoint says of its training; an entry of another type than the report's is left out."""
    said = dict(checkpoint.training)
    while said:
        try:
            return TrainingInfo.model_validate(said)
        except ValidationError as error:
            del said[str(error.errors()[0]["loc"][0])]
    return None


def _settings(request: Request, inputs: Inputs, device: torch.device, agreement: float) -> Settings:
    config = inputs.checkpoint.config
    return Settings(
        mode="replay",
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        thinking=request.thinking if has_chats(inputs.prompt_set.prompts) else None,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
        prompts=str(request.prompts),
        prompts_sha256=inputs.prompt_set.sha256,
        num_prompts=len(inputs.prompts),
        max_blocks=request.max_blocks,
        completions=request.server or "target",
        completion_agreement=agreement,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        seed=SEED,
    )


def _prompt_results(texts: Sequence[Text], rounds: Sequence[Round], tokenizer: Any) -> list[PromptResult]:
    totals = by_prompt(rounds)
    results = []
    for text in texts:
        advance, count = totals.get(text.id, (0, 0))
        completion = text.tokens[text.prompt_length :]
        results.append(
            PromptResult(
                id=text.id,
                text=tokenizer.decode(completion),
                tokens=len(completion),
                rounds=count,
                tau=advance / count if count else None,
                token_ids=completion,
            )
        )
    return results


def _versions() -> dict[str, str]:
    names = ("dflash-pipeline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "flash-linear-attention")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device: torch.device | None = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


@contextmanager
def _temporary_sibling(output: Path) -> Iterator[tuple[Path, Path]]:
    """An empty directory beside ``output``, removed at the end if it has not been renamed, and what to rename it to."""
    try:
        final = Path(os.path.realpath(output))  # a directory cannot be renamed to a link, nor to "."
        if final.exists() and (not final.is_dir() or any(final.iterdir()) or final.is_mount()):
            raise OutputError(
                f"--output {output} exists and is not an empty directory of its own; choose another or remove it"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as error:
        raise OutputError(f"--output {output} cannot be made ({error.strerror}); choose another") from None
    try:
        yield partial, final
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(directory: Path, report: Report, rounds: Sequence[Round]) -> None:
    (directory / "report.json").write_text(report.to_json(), encoding="utf-8")
    (directory / "report.md").write_text(to_markdown(report), encoding="utf-8")
    with (directory / "rounds.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(one.to_dict()) + "\n" for one in rounds)
    directory.chmod(0o755)
