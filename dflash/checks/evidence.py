"""What the checks of a measurement look at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dflash.batch import Text, Vocabulary
from dflash.checkpoints import DrafterCheckpoint
from dflash.config import DrafterConfig
from dflash.drafter import Drafter
from dflash.errors import DFlashError
from dflash.hidden_states import CachedTaps, LoadedTaps, TapSource
from dflash.metric_replay import TrainedBatch, read_replay
from dflash.metrics import Round
from dflash.probe import Probe, read_probe
from dflash.recipes import Recipe
from dflash.target import Target

NEED_TARGET = ("tap-source", "clean-targets")
"""Checks that only a target loaded whole can make; their results can be remembered with its cached taps."""

Recorded = TypeVar("Recorded")


@dataclass(frozen=True)
class Evidence:
    """A measurement, as it was made.

    ``texts`` carry the drafter's own taps, as they were replayed; ``shortfalls`` [S] a text say how far the target's
    best logit after each position is above that of the token that follows (None: not computed). ``completions_by`` is
    "target" or the server's URL. ``overlapping`` are the ids of prompts found in the training data, None where no
    training data was given.
    """

    checkpoint: DrafterCheckpoint
    reference: DrafterCheckpoint | None
    drafter: Drafter
    vocabulary: Vocabulary
    taps: TapSource
    texts: list[Text]
    shortfalls: list[Tensor] | None
    completions_by: str
    retokenized: int
    rounds: list[Round]
    random_rounds: list[Round]
    dtype: torch.dtype
    seed: int
    overlapping: list[str] | None = None

    @property
    def config(self) -> DrafterConfig:
        """The drafter's."""
        return self.checkpoint.config

    @property
    def exact(self) -> bool:
        """Whether two ways to compute the same thing agree to rounding of float32."""
        return self.dtype == torch.float32

    @property
    def loaded_target(self) -> Target | None:
        """The whole target, where the taps came from one that is loaded."""
        source: TapSource | None = self.taps.opened if isinstance(self.taps, CachedTaps) else self.taps
        return source.target if isinstance(source, LoadedTaps) else None

    def raw_vocabulary(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The target's embedding as a function of ids, and its head [V, H], for :mod:`dflash.naive`."""
        if isinstance(self.vocabulary, Target):
            weights = self.vocabulary.model.state_dict()
            return weights["model.embed_tokens.weight"].__getitem__, weights["lm_head.weight"]
        head: Tensor = self.vocabulary.head  # type: ignore[attr-defined]  # a vocabulary read from the shards
        return self.vocabulary.embed, head

    @cached_property
    def probe(self) -> Probe | str:
        """The checkpoint's probe, or why there is none to compare with."""
        return _recorded(self.checkpoint, "probe", "probe.safetensors", read_probe)

    @cached_property
    def trained_batch(self) -> TrainedBatch | str:
        """The checkpoint's recorded training batch, or why there is none to replay."""
        return _recorded(self.checkpoint, "metric_replay", "replay.safetensors", read_replay)


def stated_recipe(checkpoint: DrafterCheckpoint) -> Recipe | str:
    """The recipe in the checkpoint's manifest, or why there is none to compare with.

    Raises :class:`~dflash.recipes.RecipeError` on one that says nonsense.
    """
    said = (checkpoint.manifest or {}).get("recipe")
    if isinstance(said, Mapping):
        return Recipe.from_dict(said, source=str(checkpoint.path))
    told = said or checkpoint.training.get("recipe")
    what = f"says only {told!r}" if told else "says nothing about its recipe"
    return f"the checkpoint {what}; a manifest.json whose recipe names loss, gamma and block_size can be compared"


def recorded_token_ids(checkpoint: DrafterCheckpoint) -> set[int]:
    """Tokens of the checkpoint's probe and recorded batch: an embedding cut to the rows in use must hold them, too.

    Empty for a checkpoint without either, and for one that cannot be read, which its check will say.
    """
    ids: set[int] = set()
    probe = _recorded(checkpoint, "probe", "probe.safetensors", read_probe)
    batch = _recorded(checkpoint, "metric_replay", "replay.safetensors", read_replay)
    if not isinstance(probe, str):
        ids |= set(probe.ids)
    if not isinstance(batch, str):
        ids |= set(batch.ids.flatten().tolist())
    return ids


def _recorded(checkpoint: DrafterCheckpoint, field: str, name: str, read: Callable[[Path], Recorded]) -> Recorded | str:
    path: Path | None = getattr(checkpoint, field)
    if path is None:
        return f"the checkpoint carries no {name}; train with this project's trainer, which writes one beside it"
    try:
        return read(path)
    except DFlashError as error:
        return str(error)
