"""Before the first step: what the run is going to do, and whether its own forward pass is right.

The plan is arithmetic on the config. The checks are the doctor's, made of the trainer's own parts: its feature source
gives the texts, its forward drafts the blocks, its loss gives the metrics. One that fails stops the run unless the
config names it under ``preflight.allow``.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import checks
from dflash.batch import Text, Vocabulary, ranks_of
from dflash.checkpoints import DrafterCheckpoint
from dflash.checks.verdict import verdict
from dflash.config import DrafterConfig, require_mask_not_eos
from dflash.errors import DFlashError, NotValidError
from dflash.hidden_states import TargetFacts
from dflash.masks import layer_rules
from dflash.metric_replay import METRICS, TrainedBatch, soft_labels
from dflash.metrics import Round, judge
from dflash.naive import HEAD_ROWS, draft_logits
from dflash.recipes import Recipe, TrainedRule
from dflash.report import Check
from dflash.target import Target, TargetMismatchError, require_layers
from dflash.training import forward_checks
from dflash.training.batch import Features, FeatureSource, Sample
from dflash.training.blocks import Blocks, blocks_at, documents, draw_blocks
from dflash.training.head_loss import head_loss
from dflash.training.objective import TrainingModel, block_embeddings, with_noise
from dflash.training.plan import Plan
from dflash.training.recording import as_texts, picked

BLOCKS = 16
"""Blocks of each row that are looked at."""
NAIVE_BLOCKS = 16
PREFLIGHT = "preflight.json"
LOGIT_LIMIT = 1e-3


class PreflightError(NotValidError):
    """A check of the run failed, and its config does not allow that."""


class UnknownCheckError(DFlashError):
    """``preflight.allow`` names a check that there is not."""


def require_fit(config: DrafterConfig, facts: TargetFacts, *, source: str) -> None:
    """:class:`TargetMismatchError` unless a drafter of this ``config`` can be trained for the target.

    Its sizes, its vocabulary and its mask must be the target's, and none of its taps the last block, whose output is
    normed in one engine and raw in another.
    """
    facts.require_fit(config, source=source)
    if config.vocab_size != facts.vocab_size:
        raise TargetMismatchError(
            f"{source}: vocab_size is {config.vocab_size}, the target {facts.path} has {facts.vocab_size} rows; the "
            f"drafter drafts through the target's own head, so write the target's number"
        )
    require_layers(config.target_layer_ids, facts.num_layers, path=facts.path)
    require_mask_not_eos(config, frozenset(facts.eos_token_ids), source=f"eos_token_id of the target {facts.path}")


def stated_recipe(recipe: Recipe, config: DrafterConfig) -> dict[str, Any]:
    """``recipe`` as a manifest states it: with what each layer of the drafter sees."""
    rules = tuple(TrainedRule(causal=rule.causal, window=rule.window) for rule in layer_rules(config))
    return recipe.model_copy(update={"layer_rules": rules}).model_dump()


def preflight_checks(
    *,
    model: TrainingModel,
    vocabulary: Vocabulary,
    target: Target | None,
    facts: TargetFacts,
    source: FeatureSource,
    rows: Sequence[Sequence[Sample]],
    recipe: Recipe,
    max_length: int,
    noise: float,
    chunk_tokens: int,
    seed: int,
) -> list[Check]:
    """Every check of the run about to start, on ``rows``, its first micro-batch.

    ``model`` is not wrapped yet. ``target`` is None where its taps come from files and it is not loaded; then what
    only it can tell is not verified.
    """
    trial = Trial(model, vocabulary, target, facts, source, rows, recipe, max_length, noise, chunk_tokens, seed)
    return [check(trial) for check in CHECKS.values()]


def require(found: Sequence[Check], allow: Sequence[str]) -> None:
    """Raise :class:`PreflightError` that names each failed check which is not among ``allow``.

    :class:`UnknownCheckError` where ``allow`` has a name that no check goes by.
    """
    names = [check.name for check in found]
    if unknown := [name for name in allow if name not in names]:
        raise UnknownCheckError(f"preflight.allow: {', '.join(unknown)} is no check; there are {', '.join(names)}")
    failed = [check for check in found if check.status == "fail" and check.name not in allow]
    if failed:
        told = "; ".join(f"{check.name}: {check.explanation}" for check in failed)
        raise PreflightError(
            f"the run would not be valid, so it was not started: {told} (to run it all the same, put "
            f"{', '.join(check.name for check in failed)} under preflight.allow)"
        )


def write_preflight(output: Path, planned: Plan, found: Sequence[Check]) -> None:
    """Keep plan and checks beside the run's checkpoints, what failed and was allowed among them."""
    content = {
        "plan": planned.model_dump(mode="json"),
        "checks": [check.model_dump(mode="json") for check in found],
    }
    output.mkdir(parents=True, exist_ok=True)
    partial = output / f".{PREFLIGHT}.partial"
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(output / PREFLIGHT)


@dataclass(frozen=True)
class Draft:
    """A block of the trainer's forward: ``hidden`` [B-1, H] float32 at ``anchor`` of ``text``."""

    text: Text
    anchor: int
    hidden: Tensor


@dataclass(frozen=True)
class Trial:
    """The first micro-batch through the trainer's own parts, each made once and when a check asks for it."""

    model: TrainingModel
    vocabulary: Vocabulary
    target: Target | None
    facts: TargetFacts
    source: FeatureSource
    rows: Sequence[Sequence[Sample]]
    recipe: Recipe
    max_length: int
    noise: float
    chunk_tokens: int
    seed: int

    @property
    def config(self) -> DrafterConfig:
        """The drafter's."""
        return self.model.drafter.config

    @cached_property
    def features(self) -> Features:
        """Of the rows, after noise was made of them as a step does: it must leave no trace here."""
        features = self.source.features(self.rows)
        with_noise(features.taps, features, self.noise or 1.0, self.seed, 0)
        return features

    @cached_property
    def blocks(self) -> Blocks:
        """A few blocks of each row, drawn as a step draws them, of documents that a replay would hold."""
        drawn = draw_blocks(self.features, self.config, num_anchors=BLOCKS, seed=self.seed, epoch=0)
        anchors = torch.full_like(drawn.anchors, -1)
        for one in picked(self.features, drawn):
            own = drawn.anchors[one.row][one.blocks.to(anchors.device)]
            at = int((anchors[one.row] >= 0).sum())
            anchors[one.row, at : at + len(own)] = own
        return blocks_at(self.features, self.config, anchors)

    @cached_property
    def step(self) -> forward_checks.Pass:
        """The pass of a step."""
        embeddings = block_embeddings(self.vocabulary, self.blocks, self.features.ids, self.config)
        return forward_checks.Pass(self.model, self.features, self.blocks, embeddings)

    @cached_property
    def checkpoint(self) -> DrafterCheckpoint:
        """The drafter as it would be saved now, for checks that read one."""
        return DrafterCheckpoint(
            path=Path("the run's drafter"),
            format="step",
            step=0,
            config=self.config,
            config_source="config.json beside",
            raw_config=self.config.to_dict(),
            weights={name: weight.detach() for name, weight in self.model.drafter.state_dict().items()},
            sha256="",
            training={"kernel": self.facts.kernel},
            manifest={"recipe": stated_recipe(self.recipe, self.config)},
        )

    @cached_property
    def texts(self) -> list[Text]:
        """The documents that have blocks, with the states that the trainer trains on."""
        found = []
        for row, span, sample in documents(self.features):
            tokens = self.features.ids[row, span].tolist()
            own = self.blocks.anchors[row]
            if bool(((own >= span.start) & (own < span.stop)).any()):
                found.append(Text(f"sample {sample}", tokens, 1, self.features.taps[row, span]))
        return found

    @cached_property
    def drafts(self) -> list[Draft]:
        """The trainer's blocks in float32, from the masters: rounding must not hide a wrong mask or position."""
        exact = TrainingModel(self.model.drafter, compute_dtype=torch.float32, attention="dense")
        with torch.no_grad():
            hidden = exact(self.features.taps, self.blocks, self.features.starts, self.step.embeddings)
        texts = {text.id: text for text in self.texts}
        return [
            Draft(texts[f"sample {sample}"], at - span.start, hidden[row, place])
            for row, span, sample in documents(self.features)
            for place, at in enumerate(self.blocks.anchors[row].tolist())
            if span.start <= at < span.stop
        ]

    @cached_property
    def rounds(self) -> list[Round]:
        """The drafts as the doctor's checks take them."""
        return [self._round(draft) for draft in self.drafts]

    def logits(self, draft: Draft) -> Tensor:
        """[B-1, V] float32; a head of 248 320 rows is never copied to float32 whole."""
        _, head = self.raw_vocabulary
        return torch.cat([draft.hidden @ rows.float().T for rows in torch.split(head, HEAD_ROWS)], dim=1)

    def _round(self, draft: Draft) -> Round:
        logits = self.logits(draft)
        following = draft.text.tokens[draft.anchor + 1 : draft.anchor + 2 + len(logits)]
        right = (following + len(logits) * [0])[: len(logits)]  # slots behind the end have ranks that nobody reads
        ranks = ranks_of(torch.tensor(right, device=logits.device), logits)
        return judge(draft.text.id, draft.anchor, logits.argmax(dim=1).tolist(), ranks.tolist(), following)

    @cached_property
    def raw_vocabulary(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The target's embedding as a function of ids, and its head [V, H]."""
        if isinstance(self.vocabulary, Target):
            return self.vocabulary.embed, self.vocabulary.model.get_submodule("lm_head").get_parameter("weight")
        head: Tensor = self.vocabulary.head  # type: ignore[attr-defined]  # a vocabulary read from the shards
        return self.vocabulary.embed, head

    @cached_property
    def batch(self) -> tuple[TrainedBatch, Tensor | None]:
        """The blocks as a checkpoint would record them, with the labels and the metrics that a step gives them."""
        batch, teacher = as_texts(self.features, self.blocks, recipe=self.recipe, facts=self.facts, soft=None)
        batch = replace(batch, dtype=str(self.model.compute_dtype).removeprefix("torch."))
        if teacher is not None and self.recipe.soft_labels:
            soft = soft_labels(self.vocabulary, batch, teacher, vocab_size=self.config.vocab_size)
            batch = replace(batch, soft=soft)
        with torch.no_grad():
            hidden = self.step.hidden(self.features.taps, self.step.embeddings)
            sums = head_loss(
                hidden,
                self.blocks,
                self.recipe,
                self.vocabulary,
                teacher=self.features.hidden if self.recipe.soft_labels else None,
                chunk_tokens=self.chunk_tokens,
            )
        figures = (
            sums.numerator / sums.weight,
            sums.correct.sum() / sums.scored.sum(),
            sums.streak1 / sums.blocks,
            sums.streak8 / sums.blocks,
        )
        metrics = {name: float(figure) for name, figure in zip(METRICS, figures, strict=True)}
        return replace(batch, metrics=metrics), teacher

    @property
    def has_blocks(self) -> bool:
        """Whether any row has a valid anchor."""
        return bool((self.blocks.anchors >= 0).any())


def _of_blocks(name: str, check: Callable[[Trial], Check]) -> Callable[[Trial], Check]:
    return lambda trial: check(trial) if trial.has_blocks else forward_checks.not_verified(name)


def _forward(check: Callable[..., Check]) -> Callable[[Trial], Check]:
    """A check of drafted blocks against variants of the plain forward pass."""
    return lambda trial: check(trial.checkpoint, *trial.raw_vocabulary, trial.texts, trial.rounds, seed=trial.seed)


def _independent_forward(trial: Trial) -> Check:
    """The logits of the trainer's blocks are those of :mod:`dflash.naive`, to rounding of float32.

    The doctor compares tokens; a drafter that has not learnt yet drafts the same ones whatever it sees, so logits are
    compared here. Measured is the largest difference relative to a block's largest logit.
    """
    embed, head = trial.raw_vocabulary
    worst, at = 0.0, ""
    drafts = trial.drafts
    chosen = torch.randperm(len(drafts), generator=torch.Generator().manual_seed(trial.seed))[:NAIVE_BLOCKS]
    for draft in (drafts[place] for place in sorted(chosen.tolist())):
        text, checkpoint = draft.text, trial.checkpoint
        with torch.no_grad():
            expected = draft_logits(
                checkpoint.weights, checkpoint.raw_config, embed, head, text.taps, text.tokens, draft.anchor
            )
            error = float((trial.logits(draft) - expected).abs().max() / expected.abs().max())
        if not error <= worst:
            worst, at = error, f"anchor {draft.anchor} of {text.id}"
    passed = worst <= LOGIT_LIMIT
    return verdict(
        "independent-forward",
        passed,
        worst,
        LOGIT_LIMIT,
        f"the logits of {len(chosen)} blocks are what the plain forward pass makes of the same weights"
        if passed
        else f"the trainer's forward is not the plain one, most at {at}: look for the context's reach, position ids, "
        f"K/V heads or a norm; the checks beside this one may say which",
    )


def _kernel(trial: Trial) -> Check:
    """Engines serve hybrid targets with fla's kernels; bfloat16 states of the torch fallback drift from those."""
    name, here = "kernel", trial.facts.kernel
    if here == "torch" and trial.facts.dtype == "bfloat16":
        return verdict(
            name,
            "warn",
            here,
            "fla",
            "linear attention is computed by torch in bfloat16, and engines serve with fla's kernels, whose states "
            "differ; set target.kernel: fla where there is a GPU, and measure with the kernel that was trained with",
        )
    return verdict(name, True, here, here, "linear attention, if any, is computed by the kernel that is recorded")


def _metric_replay(trial: Trial) -> Check:
    batch, _ = trial.batch
    saved = deepcopy(trial.model.drafter).to(trial.model.compute_dtype)
    return checks.training_metric_replay(saved, trial.vocabulary, trial.target, batch)


def _tap_source(trial: Trial) -> Check:
    return checks.tap_source(trial.target, trial.config.target_layer_ids, trial.texts)


CHECKS: dict[str, Callable[[Trial], Check]] = {
    "target-class": lambda trial: checks.target_class(trial.facts),
    "kernel": _kernel,
    "fc-shape": lambda trial: checks.fc_shape(trial.checkpoint),
    "taps-as-reference": lambda trial: checks.taps_as_reference(trial.config, None),
    "recipe": lambda trial: checks.recipe(trial.checkpoint),
    "max-position": lambda trial: checks.max_position(
        trial.config, [Text("of data.max_length", trial.max_length * [0], 1, torch.empty(0))]
    ),
    "tap-source": _of_blocks("tap-source", _tap_source),
    "clean-targets": _of_blocks(
        "clean-targets", lambda trial: checks.clean_targets(trial.target, trial.vocabulary, trial.batch[0])
    ),
    forward_checks.CONTEXT: _of_blocks(
        forward_checks.CONTEXT,
        lambda trial: forward_checks.context_strictly_before_anchor(trial.step, seed=trial.seed),
    ),
    forward_checks.APART: _of_blocks(
        forward_checks.APART, lambda trial: forward_checks.blocks_apart(trial.step, seed=trial.seed)
    ),
    "position-ids": _of_blocks("position-ids", _forward(checks.position_ids)),
    "gqa": _of_blocks("gqa", _forward(checks.gqa)),
    "independent-forward": _of_blocks("independent-forward", _independent_forward),
    "training-metric-replay": _of_blocks("training-metric-replay", _metric_replay),
}
"""Each check by its name."""
