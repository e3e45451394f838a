"""A tiny pair measured the way an evaluation measures it, for checks to look at; every piece can be spoiled.

Nothing here is recorded: states come from the target and rounds from the replay, so that a fault planted in that code
shows in what the checks see.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.batch import Text
from dflash.checkpoints import DrafterCheckpoint, build_drafter, read_checkpoint
from dflash.checks import Evidence
from dflash.drafter import Drafter
from dflash.hidden_states import LoadedTaps
from dflash.metric_replay import TrainedBatch, batch_metrics, last_hidden, soft_labels, write_replay
from dflash.probe import make_probe, write_probe
from dflash.recipes import Recipe
from dflash.replay import Replay, replay
from dflash.target import Target, load_tokenizer
from tests.tiny import FIXTURES, PROMPTS, Pair

SEED = 0
NEW_TOKENS = 40
PROBE_TOKENS = 72


@dataclass(frozen=True)
class Bench:
    """A loaded target, a drafter's checkpoint, and texts that the target continued: token ids and prompt length."""

    target: Target
    checkpoint: DrafterCheckpoint
    written: list[tuple[list[int], int]]
    directory: Path
    reference: DrafterCheckpoint | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    memo: dict[tuple[int, int], tuple[list[Text], list[Tensor], Replay]] = field(default_factory=dict)
    """What was measured without a fault, by checkpoint's weights and texts; give a spoiled bench one of its own."""

    @classmethod
    def of(
        cls,
        target: Path,
        checkpoint: Path,
        prompts: Sequence[Sequence[int]],
        directory: Path,
        *,
        new_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> "Bench":
        loaded = Target.load(target, dtype=dtype, kernel="torch")
        completions = loaded.generate_greedy(prompts, new_tokens, ignore_eos=True)
        written = [([*prompt, *own], len(prompt)) for prompt, own in zip(prompts, completions, strict=True)]
        return cls(loaded, read_checkpoint(checkpoint), written, directory)

    @property
    def taps(self) -> LoadedTaps:
        return LoadedTaps(self.target)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.checkpoint.config.target_layer_ids

    @cached_property
    def drafter(self) -> Drafter:
        return build_drafter(self.checkpoint, device="cpu", dtype=self.target.dtype)

    def measured(self) -> tuple[list[Text], list[Tensor], Replay]:
        """Texts with the drafter's taps, shortfalls, and the replay over them."""
        key = id(self.checkpoint.weights), id(self.written)
        if key not in self.memo:
            tapped = self.taps.tap([tokens for tokens, _ in self.written], self.layer_ids)
            rows = zip(self.written, tapped, strict=True)
            texts = [Text(f"p{place}", tokens, start, one.taps) for place, ((tokens, start), one) in enumerate(rows)]
            walked = replay(self.drafter, self.target, texts, max_blocks=None, seed=SEED, progress=lambda *at: None)
            self.memo[key] = texts, [one.shortfall for one in tapped if one.shortfall is not None], walked
        return self.memo[key]

    def evidence(self) -> Evidence:
        """Everything a measurement hands to the checks."""
        texts, shortfalls, rounds = self.measured()
        evidence = Evidence(
            checkpoint=self.checkpoint,
            reference=self.reference,
            drafter=self.drafter,
            vocabulary=self.target,
            taps=self.taps,
            texts=texts,
            shortfalls=shortfalls,
            completions_by="target",
            retokenized=0,
            rounds=rounds.walk,
            random_rounds=rounds.random,
            dtype=self.target.dtype,
            seed=SEED,
        )
        return replace(evidence, **self.changes)

    def with_probe(self) -> "Bench":
        """The checkpoint with a probe of this target beside it, as a trainer writes it."""
        path = self.directory / f"probe-{self.kind}.safetensors"
        if not path.exists():
            ids = [token for tokens, _ in self.written for token in tokens][:PROBE_TOKENS]
            write_probe(path, make_probe(self.target, ids, self.layer_ids, fingerprint=self.taps.facts.fingerprint))
        return self.with_checkpoint(probe=path)

    def with_batch(self, recipe: Recipe) -> "Bench":
        """The checkpoint with a training batch beside it, labels and metrics made by the trainer's calls."""
        path = self.directory / f"replay-{self.kind}-{recipe.loss}.safetensors"
        if not path.exists():
            write_replay(path, self.batch(recipe))
        return self.with_checkpoint(metric_replay=path)

    @property
    def kind(self) -> str:
        return Path(self.target.path).name

    def batch(self, recipe: Recipe) -> TrainedBatch:
        length = max(len(tokens) for tokens, _ in self.written)
        ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in self.written])
        spans = [(start, len(tokens)) for tokens, start in self.written]
        own = torch.tensor([[start <= place < end for place in range(length)] for start, end in spans])
        anchors = torch.tensor([[*range(start, end - 1, 5)][:7] for start, end in spans])
        anchors[:, -1] = -1  # a filler block
        batch = TrainedBatch(
            ids=ids,
            loss_mask=own,
            anchors=anchors,
            taps=self.target.taps(ids, self.layer_ids).taps,
            metrics={},
            recipe=recipe,
            kernel=self.target.kernel,
            dtype=str(self.target.dtype).removeprefix("torch."),
            target_fingerprint="",
        )
        teacher = last_hidden(self.target, ids)
        soft = (
            soft_labels(self.target, batch, teacher, vocab_size=self.target.vocab_size) if recipe.soft_labels else None
        )
        return replace(batch, soft=soft, metrics=batch_metrics(self.drafter, self.target, batch, teacher))

    def with_checkpoint(self, **changes: Any) -> "Bench":
        """The same pair with something else said by, or beside, the checkpoint."""
        return replace(self, checkpoint=replace(self.checkpoint, **changes))


def tiny_bench(kind: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Bench:
    """The trained tiny pair of this kind on its three shortest prompts."""
    pair = Pair(FIXTURES / f"tiny-{kind}", FIXTURES / f"tiny-{kind}-dflash", PROMPTS)
    tokenizer = load_tokenizer(str(pair.target))
    texts = [json.loads(line)["prompt"] for line in pair.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer(text)["input_ids"] for text in sorted(texts, key=len)[:3]]
    return Bench.of(pair.target, pair.drafter, prompts, directory, new_tokens=NEW_TOKENS, dtype=dtype)
