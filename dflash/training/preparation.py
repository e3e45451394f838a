"""From a run's config to everything its steps need: target, data, features, drafter, held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dflash.batch import Vocabulary
from dflash.checkpoints import read_checkpoint
from dflash.config import DrafterConfig, read_config_file
from dflash.drafter import Drafter
from dflash.hidden_states import LoadedTaps, TargetFacts
from dflash.manifest import config_digest
from dflash.probe import Probe
from dflash.recipes import Recipe
from dflash.target import Target, load_tokenizer
from dflash.training.batch import FeatureSource
from dflash.training.distributed import Ranks
from dflash.training.features import OnlineFeatures, StoredFeatures
from dflash.training.objective import TrainingModel
from dflash.training.packing import first_fit
from dflash.training.preflight import require_fit
from dflash.training.randomness import generator
from dflash.training.recording import run_probe
from dflash.training.run_config import DrafterSection, RunConfig, RunConfigError
from dflash.training.samples import Samples, load_samples
from dflash.training.target_states import require_packable
from dflash.training.trackers import require_packages
from dflash.training.training_state import Identity
from dflash.training.validation import HeldOut
from dflash.training.voice import Voice
from dflash.vocabulary import SlicedVocabulary

PHASES = 3
"""What :func:`prepare` announces at most."""
INITIAL_STD = 0.02


@dataclass(frozen=True)
class Prepared:
    """What a run is made of. ``rows`` are the samples of each row; ``model`` is on the device and not wrapped yet.

    ``target`` is None where its states come from files. ``held_out`` and ``probe`` are rank 0's alone.
    """

    config: RunConfig
    ranks: Ranks
    drafter_config: DrafterConfig
    raw_config: dict[str, Any]
    recipe: Recipe
    identity: Identity
    facts: TargetFacts
    target: Target | None
    samples: Samples
    rows: Sequence[Sequence[int]]
    source: FeatureSource
    vocabulary: Vocabulary
    model: TrainingModel
    held_out: HeldOut | None
    probe: Probe | None

    @property
    def target_bytes(self) -> int:
        """Of the target's weights on this rank's device: embedding and head where its states come from files."""
        if self.target is not None:
            return sum(weight.nbytes for weight in self.target.model.state_dict().values())
        width: int = getattr(torch, self.config.drafter.dtype).itemsize
        return 2 * self.facts.vocab_size * self.facts.hidden_size * width


def prepare(config: RunConfig, ranks: Ranks, voice: Voice) -> Prepared:
    """Load, read and check all of ``config`` that can be checked without a step.

    Rank 0 does what is done once, tokenising and completing the held-out prompts; the others wait for it. What is
    cheap to tell is told before what takes long.
    """
    require_startable(config, ranks)
    raw = read_config_file(config.drafter.config)
    drafter_config = DrafterConfig.from_dict(raw, source=str(config.drafter.config))
    recipe = config.objective.recipe(drafter_config.block_size)
    target, facts = _target(config, drafter_config, ranks, voice)
    if config.features.packing and config.features.mode == "online":
        require_packable(facts.kernel, path=facts.path)
    samples = _samples(config, facts, ranks, voice)
    online = config.features.mode == "online"
    source = _source(config, target if online else None, facts, samples, drafter_config, recipe, ranks)
    held_out, probe = ranks.first(lambda: _truth(config, target, drafter_config, samples, voice)) or (None, None)
    if not online:
        target = None  # it has said what only it can say, and makes room
    identity = Identity(
        target=facts.fingerprint,
        data=samples.sha256,
        drafter=config_digest(drafter_config.model_dump(mode="json")),
        world=ranks.world,
        kernel=facts.kernel,
        prompts=ranks.share(None if held_out is None else held_out.identity),
    )
    return Prepared(
        config=config,
        ranks=ranks,
        drafter_config=drafter_config,
        raw_config=raw,
        recipe=recipe,
        identity=identity,
        facts=facts,
        target=target,
        samples=samples,
        rows=rows_of_run(samples, config),
        source=source,
        vocabulary=_vocabulary(config, target, facts, ranks),
        model=_model(config, drafter_config, raw, ranks),
        held_out=held_out,
        probe=probe,
    )


def require_startable(config: RunConfig, ranks: Ranks) -> None:
    """Refuse what no target is needed to tell of: files that are not there, a kernel without a backward pass, packages.

    Raises :class:`RunConfigError` that names the key, and what the tracking raises.
    """
    if config.parallel.attention == "flex" and ranks.device.type != "cuda":
        raise RunConfigError(
            f"parallel.attention is flex, and the device is {ranks.device.type}: flex attention trains on CUDA alone; "
            f"say auto or dense"
        )
    named = [("data.files", file) for file in config.data.files]
    named += [] if config.evaluation is None else [("evaluation.prompts", config.evaluation.prompts)]
    for key, file in named:
        if not file.is_file():
            raise RunConfigError(f"{key}: {file} is {'no file' if file.exists() else 'not there'}; give JSON lines")
    if config.drafter.init is not None and not config.drafter.init.exists():
        raise RunConfigError(f"drafter.init: {config.drafter.init} is not there; give a checkpoint, or leave it out")
    ranks.first(lambda: require_packages(config.tracking))


def rows_of_run(samples: Samples, config: RunConfig) -> list[list[int]]:
    """The samples of each row: one, or as many as fit. Made once, so that every epoch has as many steps."""
    if not config.features.packing:
        return [[index] for index in range(len(samples))]
    return first_fit(samples.lengths.tolist(), config.data.max_length)


def new_drafter(config: DrafterConfig, section: DrafterSection, raw: dict[str, Any], seed: int) -> Drafter:
    """A drafter in float32 on the CPU: ``section.init``'s weights, else random ones that follow from ``seed``.

    Raises :class:`RunConfigError` where ``init`` has other tensors than ``config``.
    """
    drafter = Drafter(config)
    if section.init is None:
        std, drawn = float(raw.get("initializer_range", INITIAL_STD)), generator(seed, "weights")
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=std, generator=drawn)
        return drafter
    checkpoint = read_checkpoint(section.init)
    wanted = config.tensor_shapes()
    for name, weight in checkpoint.weights.items():
        if tuple(weight.shape) != wanted.get(name):
            raise RunConfigError(
                f"drafter.init: {section.init} has {name} of shape {list(weight.shape)}, and drafter.config "
                f"{section.config} makes it {list(wanted.get(name, ()))}; give a checkpoint of this drafter"
            )
    if checkpoint.config.target_layer_ids != config.target_layer_ids:
        raise RunConfigError(
            f"drafter.init: {section.init} taps {list(checkpoint.config.target_layer_ids)}, and drafter.config "
            f"{section.config} {list(config.target_layer_ids)}; its fc was trained on the former"
        )
    drafter.load_state_dict({name: weight.float() for name, weight in checkpoint.weights.items()})
    return drafter


def _target(
    config: RunConfig, drafter_config: DrafterConfig, ranks: Ranks, voice: Voice
) -> tuple[Target | None, TargetFacts]:
    """The target on every rank, or on rank 0 alone where features come from files: it still tells what is true."""
    target: Target | None = None

    def load() -> tuple[Target, TargetFacts]:
        section = config.target
        with voice.phase("target", f"loading the target {section.path}"):
            loaded = Target.load(
                section.path, device=ranks.device, dtype=getattr(torch, section.dtype), kernel=section.kernel
            )
        found = LoadedTaps(loaded).facts
        require_fit(drafter_config, found, source=str(config.drafter.config))
        return loaded, found

    if config.features.mode == "online":
        return load()

    def only_facts() -> TargetFacts:
        nonlocal target
        target, found = load()
        return found

    facts = ranks.share(ranks.first(only_facts))
    assert facts is not None  # rank 0 has raised otherwise
    return target, facts


def _samples(config: RunConfig, facts: TargetFacts, ranks: Ranks, voice: Voice) -> Samples:
    """Tokenised by one process of each machine, read by all from the same files."""
    cache = config.data.cache or config.output / "samples"
    tokenizer = load_tokenizer(config.target.path)

    def load() -> Samples:
        with voice.phase("data", "reading the data") as progress:
            return load_samples(config.data, tokenizer, cache=cache, vocab_size=facts.vocab_size, progress=progress)

    samples = ranks.in_turn(load)
    for line in samples.counts.lines():
        voice.say(f"      {line}")
    return samples


def _truth(
    config: RunConfig, target: Target | None, drafter_config: DrafterConfig, samples: Samples, voice: Voice
) -> tuple[HeldOut | None, Probe]:
    """What only the target can tell: its completions of the held-out prompts, and its states on the probe."""
    assert target is not None
    layers = drafter_config.target_layer_ids
    probe = run_probe(target, samples, layers)
    if config.evaluation is None:
        return None, probe
    with voice.phase("held-out", f"completing the held-out prompts {config.evaluation.prompts}") as progress:
        held_out = HeldOut.prepare(
            config.evaluation,
            target,
            layers,
            thinking=config.data.thinking,
            directory=config.output / "held_out",
            progress=progress,
        )
    return held_out, probe


def _source(
    config: RunConfig,
    target: Target | None,
    facts: TargetFacts,
    samples: Samples,
    drafter_config: DrafterConfig,
    recipe: Recipe,
    ranks: Ranks,
) -> FeatureSource:
    layers, soft = drafter_config.target_layer_ids, recipe.soft_labels
    if target is not None:
        return OnlineFeatures(target, layers, soft=soft)
    assert config.features.directory is not None  # the config has seen to it
    return StoredFeatures.open(
        config.features.directory,
        samples,
        layers,
        soft=soft,
        device=ranks.device,
        dtype=getattr(torch, config.target.dtype),
        target=Path(config.target.path),
        kernel=facts.kernel,
    )


def _vocabulary(config: RunConfig, target: Target | None, facts: TargetFacts, ranks: Ranks) -> Vocabulary:
    """The target's embedding and head in the drafter's dtype: its own, or where that is another, read once more."""
    if target is not None and config.target.dtype == config.drafter.dtype:
        return target
    return SlicedVocabulary.open(
        config.target.path,
        range(facts.vocab_size),
        device=ranks.device,
        dtype=getattr(torch, config.drafter.dtype),
    )


def _model(config: RunConfig, drafter_config: DrafterConfig, raw: dict[str, Any], ranks: Ranks) -> TrainingModel:
    attention: Literal["dense", "flex"]
    if config.parallel.attention == "auto":
        attention = "flex" if ranks.device.type == "cuda" else "dense"
    else:
        attention = config.parallel.attention
    drafter = new_drafter(drafter_config, config.drafter, raw, config.seed).to(ranks.device)
    return TrainingModel(drafter, compute_dtype=getattr(torch, config.drafter.dtype), attention=attention)
