"""Checks of the drafter's own shape: what it reads, what its layers may see, and whether its slots stand right."""

from collections.abc import Sequence

import numpy as np

from dflash.batch import Text
from dflash.checkpoints import DrafterCheckpoint
from dflash.checks.evidence import stated_recipe
from dflash.checks.verdict import Status, skipped, verdict
from dflash.config import DrafterConfig, default_tap_ids
from dflash.masks import LayerRule, layer_rules
from dflash.metrics import Round, accuracy_by_position, right_slots
from dflash.recipes import RecipeError
from dflash.report import Check

SLOT_LIMIT = 4.0
FEWEST_BLOCKS = 16
_EVERY_TAP = ": train with exactly those, in the config, in the training code and in fc"


def fc_shape(checkpoint: DrafterCheckpoint) -> Check:
    """``fc`` takes exactly taps × hidden columns."""
    config = checkpoint.config
    columns = checkpoint.weights["fc.weight"].shape[1]
    right = columns == config.tap_width
    return verdict(
        "fc-shape",
        right,
        columns,
        config.tap_width,
        f"fc.weight takes {columns} columns; {len(config.target_layer_ids)} taps of {config.hidden_size} make "
        f"{config.tap_width}"
        + ("" if right else ": train with every tap, or mend target_layer_ids if the config names too many or too few"),
    )


def taps_as_reference(config: DrafterConfig, reference: DrafterConfig | None) -> Check:
    """The drafter taps the layers that the reference drafter taps; without one, those of z-lab's rule.

    Drafter and training code can agree on too few taps, so that every shape fits and only τ suffers.
    """
    taps, layers = config.target_layer_ids, config.num_target_layers
    rule = default_tap_ids(layers, len(taps))

    def check(status: Status | bool, limit: tuple[int, ...], explanation: str) -> Check:
        return verdict("taps-as-reference", status, _listed(taps), _listed(limit), explanation)

    if reference is not None:
        theirs = reference.target_layer_ids
        if taps == theirs:
            return check(True, theirs, "the drafter reads the same target layers as the reference drafter")
        return check(False, theirs, f"{_difference(taps, theirs)} compared with the reference drafter{_EVERY_TAP}")
    if taps == rule:
        return check(True, rule, f"the taps follow round(1 + i(N-4)/(n-1)) for {len(taps)} taps of {layers} layers")
    wider = default_tap_ids(layers, len(taps) + 1)
    if set(taps) < set(wider):
        return check(
            False, wider, f"{_difference(taps, wider)} compared with the rule for {len(wider)} taps{_EVERY_TAP}"
        )
    return check("warn", rule, "the taps follow no known rule; compare them with a released drafter by --reference")


def causality(checkpoint: DrafterCheckpoint, reference: DrafterConfig | None) -> Check:
    """In-block causality and window of each layer are those of the training, else those of the reference drafter.

    The manifest's ``recipe.layer_rules`` says the former (:class:`dflash.recipes.TrainedRule`). Against it a difference
    fails; against the reference drafter, which may have been trained otherwise, it is a warning.
    """
    ours = _rules(layer_rules(checkpoint.config))
    trained = _trained_rules(checkpoint)
    if trained is None and reference is None:
        return skipped(
            "causality", ours, "neither the checkpoint's manifest nor a --reference says how its layers were trained"
        )
    theirs = trained if reference is None else trained or _rules(layer_rules(reference))
    where = "the reference drafter" if trained is None else "training, as the manifest has it"
    if ours == theirs:
        return verdict("causality", True, ours, theirs, f"every layer sees what it sees in {where}")
    return verdict(
        "causality",
        "warn" if trained is None else "fail",
        ours,
        theirs,
        f"the layers do not see what they see in {where}; a layer trained on one mask and run on another drafts worse "
        f"the longer the text: compare is_causal, layer_types and sliding_window in both configs",
    )


def max_position(config: DrafterConfig, texts: Sequence[Text]) -> Check:
    """The longest text, and the last block that reaches over its end, have positions within the drafter's.

    Engines clamp rotary embedding at ``max_position_embeddings``, so a text beyond it would be served with other
    figures than are measured here.
    """
    longest = max(len(text.tokens) for text in texts)
    needed, limit = longest + config.block_size - 2, config.max_position_embeddings
    if needed <= limit:
        return verdict("max-position", True, needed, limit, "every block lies within the drafter's positions")
    over = "the text itself is" if longest > limit else "only the end of its last block is"
    return verdict(
        "max-position",
        "fail" if longest > limit else "warn",
        needed,
        limit,
        f"the longest text has {longest} tokens and {over} beyond the drafter's max_position_embeddings, where engines "
        f"clamp positions: take shorter texts, or mend the config if it was trained on longer ones",
    )


def slot_profile(random_rounds: Sequence[Round]) -> Check:
    """Slot 1, which has the known token next to it, is the slot that is right most often.

    Looked at in blocks at random anchors: on the walk slot 1 mostly stands behind a rejected token, where text is hard.
    Slot k beats slot 1 when, among the n blocks in which exactly one of the two is right, the lead of slot k exceeds
    4 √n (the sign test of paired observations): that is chance in 1 of 30 000 cases.
    """
    right = right_slots(random_rounds) if random_rounds else np.zeros((0, 0), dtype=bool)
    if len(right) < FEWEST_BLOCKS or right.shape[1] < 2:
        return skipped("slot-profile", SLOT_LIMIT, f"{len(right)} whole blocks are too few; use longer completions")
    ahead = right[:, 1:] & ~right[:, :1]
    behind = ~right[:, 1:] & right[:, :1]
    differing = ahead.sum(axis=0) + behind.sum(axis=0)
    lead = (ahead.sum(axis=0) - behind.sum(axis=0)) / np.sqrt(np.maximum(differing, 1))
    best = int(np.argmax(lead)) + 2
    accuracy = accuracy_by_position(random_rounds)
    measured = float(lead[best - 2])
    said = f"slot 1 is right in {accuracy[0]:.1%} of {len(right)} blocks, slot {best} in {accuracy[best - 1]:.1%}"
    failed = measured > SLOT_LIMIT
    return verdict(
        "slot-profile",
        not failed,
        round(measured, 3),
        SLOT_LIMIT,
        f"{said}: blocks are misaligned with the text; compare slot, position and label in training and here"
        if failed
        else said,
    )


def _trained_rules(checkpoint: DrafterCheckpoint) -> str | None:
    try:
        said = stated_recipe(checkpoint)
    except RecipeError:  # the recipe check says so
        return None
    if isinstance(said, str) or said.layer_rules is None:
        return None
    return _rules([LayerRule(rule.causal, rule.window) for rule in said.layer_rules])


def _rules(rules: Sequence[LayerRule]) -> str:
    return ", ".join(
        f"{'causal' if rule.causal else 'bidirectional'}{f' {rule.window}' if rule.window else ''}" for rule in rules
    )


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _difference(taps: Sequence[int], expected: Sequence[int]) -> str:
    missing = [tap for tap in expected if tap not in taps]
    extra = [tap for tap in taps if tap not in expected]
    parts = [f"tap {_listed(missing)} is missing"] if missing else []
    return " and ".join(parts + ([f"tap {_listed(extra)} is extra"] if extra else []))
