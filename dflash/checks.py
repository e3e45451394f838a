"""Checks of an evaluation: each returns what it measured, the limit, and a sentence on what it means.

A number is believed only when none of them fails. The tests of this project show each one failing on the fault it is
there to find.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash import naive
from dflash.checkpoints import DrafterCheckpoint
from dflash.config import DrafterConfig, default_tap_ids
from dflash.metrics import Round, accuracy_by_position, right_slots
from dflash.replay import Text
from dflash.report import Check
from dflash.target import Target

PROBE_TOKENS = 64
PROBE_TEXTS = 4
TAP_LIMIT = 1e-3
BFLOAT16_TAP_LIMIT = 0.03
SLOT_LIMIT = 4.0
FEWEST_BLOCKS = 16
NAIVE_BLOCKS = 32
TIE = 1e-4
BFLOAT16_TIE = 2**-7
BFLOAT16_SHARE = 0.99


def target_class(target: Target) -> Check:
    """The target is the causal-LM class with its blocks at ``model.layers``.

    Missing, unexpected and misshaped weights are refused when it is loaded, so none is left to count here.
    """
    module = type(target.model).__module__
    names = (name.split(".") for name in target.model.state_dict())
    blocks = len({name[2] for name in names if name[:2] == ["model", "layers"]})
    in_place = blocks == target.config.num_hidden_layers
    right = in_place and target.class_name.endswith("ForCausalLM") and module.startswith("transformers.")
    return Check(
        name="target-class",
        status="pass" if right else "fail",
        measured=f"{target.class_name}, {target.tensors} tensors, {blocks} blocks",
        limit="…ForCausalLM with its blocks at model.layers",
        explanation="every weight of the checkpoint found its place in the causal-LM class and none is missing"
        if right
        else "hooks by path would read other states than the drafter was trained on; load the causal-LM class",
    )


def tap_source(target: Target, layer_ids: Sequence[int], texts: Sequence[Text]) -> Check:
    """The taps of ``texts``, as the drafter gets them, are ``hidden_states[L + 1]`` of their own tokens.

    Looked at in the first tokens of a few texts, each in a pass of its own without hooks, so that a hook on another
    layer, columns in another order and rows of another position or text all show. Measured is the largest error of a
    tap: the mean over positions of its distance relative to the state. The limit leaves room for bfloat16, in which
    passes of different shapes round differently.
    """
    limit = TAP_LIMIT if target.dtype == torch.float32 else BFLOAT16_TAP_LIMIT
    worst, at = 0.0, ""
    for text in texts[:: -(-len(texts) // PROBE_TEXTS)]:
        ids = torch.tensor([text.tokens[:PROBE_TOKENS]], device=target.device)
        given = torch.split(text.taps[: ids.shape[1]].to(target.device).float(), target.hidden_size, dim=-1)
        with torch.inference_mode():
            output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        for layer, tap in zip(layer_ids, given, strict=True):
            state = output.hidden_states[layer + 1][0].float()
            error = float(((tap - state).norm(dim=-1) / state.norm(dim=-1)).mean())
            if not error <= worst:  # NaN is the worst
                worst, at = error, f"tap {layer} of prompt {text.id} is not hidden_states[{layer + 1}] of its tokens"
    passed = worst <= limit
    return Check(
        name="tap-source",
        status="pass" if passed else "fail",
        measured=worst,
        limit=limit,
        explanation="the tapped states are hidden_states[L + 1] of the same tokens"
        if passed
        else f"{at}: look for a hook on another layer or before its output, and for columns or rows mixed up",
    )


def taps_as_reference(config: DrafterConfig, reference: DrafterConfig | None) -> Check:
    """The drafter taps the layers that the reference drafter taps; without one, those of z-lab's rule.

    Drafter and training code can agree on too few taps, so that every shape fits and only τ suffers.
    """
    taps, layers = config.target_layer_ids, config.num_target_layers
    rule = default_tap_ids(layers, len(taps))

    def check(status: str, limit: tuple[int, ...], explanation: str) -> Check:
        return Check.model_validate(
            {
                "name": "taps-as-reference",
                "status": status,
                "measured": _listed(taps),
                "limit": _listed(limit),
                "explanation": explanation,
            }
        )

    if reference is not None:
        theirs = reference.target_layer_ids
        if taps == theirs:
            return check("pass", theirs, "the drafter reads the same target layers as the reference drafter")
        return check("fail", theirs, f"{_difference(taps, theirs)} compared with the reference drafter")
    if taps == rule:
        return check("pass", rule, f"the taps follow round(1 + i(N-4)/(n-1)) for {len(taps)} taps of {layers} layers")
    wider = default_tap_ids(layers, len(taps) + 1)
    if set(taps) < set(wider):
        return check("fail", wider, f"{_difference(taps, wider)} compared with the rule for {len(wider)} taps")
    return check("warn", rule, "the taps follow no known rule; compare them with a released drafter by --reference")


def fc_shape(checkpoint: DrafterCheckpoint) -> Check:
    """``fc`` takes exactly taps × hidden columns."""
    config = checkpoint.config
    columns = checkpoint.weights["fc.weight"].shape[1]
    return Check(
        name="fc-shape",
        status="pass" if columns == config.tap_width else "fail",
        measured=columns,
        limit=config.tap_width,
        explanation=f"fc.weight takes {columns} columns; {len(config.target_layer_ids)} taps of {config.hidden_size} "
        f"make {config.tap_width}",
    )


def slot_profile(random_rounds: Sequence[Round]) -> Check:
    """Slot 1, which has the known token next to it, is the slot that is right most often.

    Looked at in blocks at random anchors: on the walk slot 1 mostly stands behind a rejected token, where text is hard.
    Slot k beats slot 1 when, among the n blocks in which exactly one of the two is right, the lead of slot k exceeds
    4 √n (the sign test of paired observations): that is chance in 1 of 30 000 cases.
    """
    right = right_slots(random_rounds) if random_rounds else np.zeros((0, 0), dtype=bool)
    if len(right) < FEWEST_BLOCKS or right.shape[1] < 2:
        return _skipped("slot-profile", SLOT_LIMIT, f"{len(right)} whole blocks are too few; use longer completions")
    ahead = right[:, 1:] & ~right[:, :1]
    behind = ~right[:, 1:] & right[:, :1]
    differing = ahead.sum(axis=0) + behind.sum(axis=0)
    lead = (ahead.sum(axis=0) - behind.sum(axis=0)) / np.sqrt(np.maximum(differing, 1))
    best = int(np.argmax(lead)) + 2
    accuracy = accuracy_by_position(random_rounds)
    measured = float(lead[best - 2])
    said = f"slot 1 is right in {accuracy[0]:.1%} of {len(right)} blocks, slot {best} in {accuracy[best - 1]:.1%}"
    failed = measured > SLOT_LIMIT
    return Check(
        name="slot-profile",
        status="fail" if failed else "pass",
        measured=round(measured, 3),
        limit=SLOT_LIMIT,
        explanation=f"{said}: blocks are misaligned with the text; compare slot, position and label in training and "
        f"here"
        if failed
        else said,
    )


def independent_forward(
    checkpoint: DrafterCheckpoint,
    embed: Tensor,
    head: Tensor,
    texts: Sequence[Text],
    rounds: Sequence[Round],
    *,
    exact: bool,
    seed: int,
) -> Check:
    """32 random blocks of the walk, drafted again by :mod:`dflash.naive` from the raw weights and config.

    ``embed`` and ``head`` are the target's own [V, H] matrices. ``exact`` (float32): every token equal, up to ties,
    whose logits differ by less than 1e-4. Otherwise (bfloat16): at least 99 % of the tokens, where a tie is two steps
    of bfloat16 at the size of the slot's largest logit; without that a clean but half-trained drafter, whose logits
    are flat, differs in 1.6 % of its tokens.
    """
    drawn = np.random.default_rng(seed).permutation(len(rounds))[:NAIVE_BLOCKS]
    by_id = {text.id: text for text in texts}
    weights = {name: tensor.to(head.device) for name, tensor in checkpoint.weights.items()}
    equal = total = 0
    example = ""
    for one in (rounds[place] for place in sorted(drawn)):
        text = by_id[one.prompt]
        taps = text.taps[: one.anchor].to(head.device)
        with torch.inference_mode():
            logits = naive.draft_logits(weights, checkpoint.raw_config, embed, head, taps, text.tokens, one.anchor)
        drafted = torch.tensor(one.drafted, device=logits.device)
        behind = logits.max(dim=1).values - logits.gather(1, drafted[:, None])[:, 0]
        same = behind < TIE if exact else behind <= BFLOAT16_TIE * logits.abs().max(dim=1).values
        equal += int(same.sum())
        total += len(one.drafted)
        if not same.all() and not example:
            slot = int(same.logical_not().nonzero()[0])
            token = int(logits[slot].argmax())
            example = (
                f"; first in prompt {one.prompt}, anchor {one.anchor}, slot {slot + 1}: {one.drafted[slot]} here, "
                f"{token} there"
            )
    share, limit = equal / total, 1.0 if exact else BFLOAT16_SHARE
    return Check(
        name="independent-forward",
        status="pass" if share >= limit else "fail",
        measured=share,
        limit=limit,
        explanation=f"{equal} of {total} tokens of {len(drawn)} blocks are what the plain forward pass drafts from the "
        f"same weights{example}",
    )


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _difference(taps: Sequence[int], expected: Sequence[int]) -> str:
    missing = [tap for tap in expected if tap not in taps]
    extra = [tap for tap in taps if tap not in expected]
    parts = [f"tap {_listed(missing)} is missing"] if missing else []
    return " and ".join(parts + ([f"tap {_listed(extra)} is extra"] if extra else []))


def _skipped(name: str, limit: float, explanation: str) -> Check:
    return Check(name=name, status="skipped", measured=None, limit=limit, explanation=f"not verified: {explanation}")
