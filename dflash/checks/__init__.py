"""Checks of a measurement: each returns what it measured, the limit, and a sentence on what it means.

A number is believed only when none of them fails; one that lacks what it needs is ``skipped`` and reads "not verified".
docs/checks.md has a section for each, with the fault it is there to find and what it measures with and without it.
"""

from collections.abc import Callable

from dflash.checks.drafter import causality, fc_shape, max_position, slot_profile, taps_as_reference
from dflash.checks.evidence import NEED_TARGET, Evidence, recorded_token_ids
from dflash.checks.forward import context_strictly_before_anchor, gqa, independent_forward, position_ids
from dflash.checks.target import (
    hidden_state_fingerprint,
    kernel,
    reference_agreement,
    tap_source,
    tap_statistics,
    target_class,
)
from dflash.checks.training import clean_targets, prompt_overlap, recipe, training_metric_replay
from dflash.report import Check

__all__ = [
    "CHECKS",
    "NEED_TARGET",
    "Evidence",
    "all_checks",
    "causality",
    "clean_targets",
    "context_strictly_before_anchor",
    "fc_shape",
    "gqa",
    "hidden_state_fingerprint",
    "independent_forward",
    "kernel",
    "max_position",
    "position_ids",
    "prompt_overlap",
    "recipe",
    "recorded_token_ids",
    "reference_agreement",
    "slot_profile",
    "tap_source",
    "tap_statistics",
    "taps_as_reference",
    "target_class",
    "training_metric_replay",
]


CHECKS: dict[str, Callable[[Evidence], Check]] = {
    "target-class": lambda e: target_class(e.taps.facts),
    "tap-source": lambda e: tap_source(e.loaded_target, e.config.target_layer_ids, e.texts),
    "tap-statistics": lambda e: tap_statistics(e.drafter, e.texts, e.probe),
    "kernel": lambda e: kernel(e.checkpoint, e.taps.facts),
    "hidden-state-fingerprint": lambda e: hidden_state_fingerprint(e.taps, e.drafter, e.vocabulary, e.probe),
    "reference-agreement": lambda e: reference_agreement(
        e.texts, e.shortfalls, exact=e.exact, completions_by=e.completions_by, retokenized=e.retokenized
    ),
    "fc-shape": lambda e: fc_shape(e.checkpoint),
    "taps-as-reference": lambda e: taps_as_reference(e.config, e.reference.config if e.reference else None),
    "causality": lambda e: causality(e.checkpoint, e.reference.config if e.reference else None),
    "max-position": lambda e: max_position(e.config, e.texts),
    "slot-profile": lambda e: slot_profile(e.random_rounds),
    "context-strictly-before-anchor": lambda e: context_strictly_before_anchor(
        e.drafter, e.vocabulary, e.texts, e.rounds, seed=e.seed
    ),
    "position-ids": lambda e: position_ids(e.checkpoint, *e.raw_vocabulary(), e.texts, e.rounds, seed=e.seed),
    "gqa": lambda e: gqa(e.checkpoint, *e.raw_vocabulary(), e.texts, e.rounds, seed=e.seed),
    "independent-forward": lambda e: independent_forward(
        e.checkpoint, *e.raw_vocabulary(), e.texts, e.rounds, exact=e.exact, seed=e.seed
    ),
    "recipe": lambda e: recipe(e.checkpoint, e.trained_batch),
    "clean-targets": lambda e: clean_targets(e.loaded_target, e.vocabulary, e.trained_batch),
    "training-metric-replay": lambda e: training_metric_replay(
        e.drafter, e.vocabulary, e.loaded_target, e.trained_batch
    ),
    "prompt-overlap": lambda e: prompt_overlap(e.overlapping, len(e.texts)),
}
"""Each check by its name, the target's first."""


def all_checks(evidence: Evidence) -> list[Check]:
    """Every check; those that lack what they need are in the list as "not verified"."""
    return [check(evidence) for check in CHECKS.values()]
