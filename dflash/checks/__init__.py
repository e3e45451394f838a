"""Checks of a measurement: each returns what it measured, the limit, and a sentence on what it means.

A number is believed only when none of them fails; one that lacks what it needs is ``skipped`` and reads "not verified".
docs/checks.md has a section for each, with the fault it is there to find and what it measures with and without it.
"""

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


def all_checks(evidence: Evidence) -> list[Check]:
    """Every check that a measurement's evidence allows, those of the target first, the others as "not verified"."""
    checkpoint, facts = evidence.checkpoint, evidence.taps.facts
    reference = evidence.reference.config if evidence.reference else None
    probe, batch = evidence.probe(), evidence.trained_batch()
    walked = (checkpoint, *evidence.raw_vocabulary(), evidence.texts, evidence.rounds)
    exact = evidence.exact
    return [
        target_class(facts),
        tap_source(evidence.loaded_target, checkpoint.config.target_layer_ids, evidence.texts),
        tap_statistics(evidence.drafter, evidence.texts, probe),
        kernel(checkpoint, facts),
        hidden_state_fingerprint(evidence.taps, evidence.drafter, evidence.vocabulary, probe),
        reference_agreement(
            evidence.texts,
            evidence.shortfalls,
            exact=exact,
            completions_by=evidence.completions_by,
            retokenized=evidence.retokenized,
        ),
        fc_shape(checkpoint),
        taps_as_reference(checkpoint.config, reference),
        causality(checkpoint, reference),
        max_position(checkpoint.config, evidence.texts),
        slot_profile(evidence.random_rounds),
        context_strictly_before_anchor(
            evidence.drafter, evidence.vocabulary, evidence.texts, evidence.rounds, seed=evidence.seed
        ),
        position_ids(*walked, seed=evidence.seed),
        gqa(*walked, seed=evidence.seed),
        independent_forward(*walked, exact=exact, seed=evidence.seed),
        recipe(checkpoint),
        clean_targets(evidence.loaded_target, evidence.vocabulary, batch),
        training_metric_replay(evidence.drafter, evidence.vocabulary, evidence.loaded_target, batch),
        prompt_overlap(evidence.overlapping, len(evidence.texts)),
    ]
