"""Checks of the drafter's forward pass: what a block may see, where it stands, and the same drafts by other code."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash import naive
from dflash.batch import Batch, Text, Vocabulary
from dflash.checkpoints import DrafterCheckpoint
from dflash.checks.verdict import skipped, verdict
from dflash.drafter import Drafter
from dflash.metrics import Round
from dflash.report import Check

NAIVE_BLOCKS = 32
VARIANT_BLOCKS = 8
PERTURBED_BLOCKS = 8
TIE = 1e-4
BFLOAT16_TIE = 2**-6
BFLOAT16_SHARE = 0.99

Embed = Tensor | Callable[[Tensor], Tensor]


def context_strictly_before_anchor(
    drafter: Drafter, vocabulary: Vocabulary, texts: Sequence[Text], rounds: Sequence[Round], *, seed: int
) -> Check:
    """Blocks of the walk do not move by one bit when the states at the anchor and behind it are replaced.

    The replay itself drafts them (:class:`dflash.batch.Batch`), each between two later blocks of its text, once with
    the texts' states and once with noise from the anchor on. The gradient of a block's output with respect to the
    context there is exactly zero as well. And so that the check can fail at all, replacing the state just before the
    anchor must move the blocks. Measured is the largest change of a block's output relative to its size, or the
    gradient's share behind the anchor if that is more.
    """
    name, limit = "context-strictly-before-anchor", 0.0
    drawn = _drawn(rounds, PERTURBED_BLOCKS, seed)
    if not drawn:
        return skipped(name, limit, "no block was drafted")
    by_id = {text.id: text for text in texts}
    own = [by_id[one.prompt] for one in drawn]
    # The later blocks may move. Where the checked one moves with them, it sees them or their context.
    last = [len(text.tokens) - 1 for text in own]
    anchors = [
        [min(one.anchor + drafter.config.block_size, end), one.anchor, min(one.anchor + 1, end)]
        for one, end in zip(drawn, last, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    behind = [_noised(text, slice(at, None), generator) for text, [_, at, _] in zip(own, anchors, strict=True)]
    before = [
        _noised(text, slice(max(0, at - 1), at), generator) for text, [_, at, _] in zip(own, anchors, strict=True)
    ]
    with torch.inference_mode():
        clean = Batch.of(drafter, vocabulary, own)
        hidden = clean.hidden(anchors)[:, 1]
        moved = _largest_change(Batch.of(drafter, vocabulary, behind).hidden(anchors)[:, 1], hidden)
        control = _largest_change(Batch.of(drafter, vocabulary, before).hidden(anchors)[:, 1], hidden)
    gradient, leaking = _gradient_behind(clean, anchors, generator)
    measured = max(moved, leaking)
    if not measured <= limit:
        return verdict(
            name,
            False,
            measured,
            limit,
            f"a block sees states at its anchor or behind it: replacing those moved its output by {moved:.2g} of its "
            f"size, {leaking:.2g} of the gradient lies there; such a state knows the next token and does not exist "
            f"yet in serving: the mask must cut at key < anchor",
        )
    if not (control > 0 and gradient > 0):
        return verdict(
            name,
            False,
            control,
            "more than 0 before the anchor",
            "replacing the state just before the anchor changes nothing: the drafter does not read its context; look "
            "for a mask that hides it, or for states that never reach the drafter",
        )
    return verdict(
        name,
        True,
        measured,
        limit,
        f"{len(drawn)} blocks do not move when the states from the anchor on are replaced, and no gradient lies there; "
        f"the state just before it moves them by {control:.2g}",
    )


def position_ids(
    checkpoint: DrafterCheckpoint,
    embed: Embed,
    head: Tensor,
    texts: Sequence[Text],
    rounds: Sequence[Round],
    *,
    seed: int,
) -> Check:
    """Block position ids start at the anchor: moved by one against the context's, the plain forward explains less.

    8 blocks of the walk are computed by :mod:`dflash.naive` with the block's ids right, one early and one late; what
    was drafted must be nearest to the right ones.
    """
    variants = {f"anchor{shift:+d}": {"block_shift": shift} for shift in (0, -1, 1)}
    distances = _distances(checkpoint, embed, head, texts, _drawn(rounds, VARIANT_BLOCKS, seed), variants)
    return _nearest(
        "position-ids",
        "anchor+0",
        distances,
        right="the drafts are those of blocks whose position ids start at the anchor",
        wrong="the drafts are those of blocks whose position ids start at {}: look for an off-by-one where positions "
        "are made, with the context's ids unchanged",
    )


def gqa(
    checkpoint: DrafterCheckpoint,
    embed: Embed,
    head: Tensor,
    texts: Sequence[Text],
    rounds: Sequence[Round],
    *,
    seed: int,
) -> Check:
    """Each K/V head serves n_q / n_kv *consecutive* query heads, and is not handed round robin.

    As in :func:`position_ids`, with the K/V heads interleaved (right) and tiled.
    """
    config = checkpoint.config
    if config.num_key_value_heads in (1, config.num_attention_heads):
        heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} K/V heads"
        return verdict("gqa", True, "interleaved", "interleaved", f"{heads}: there is only one way to pair them")
    variants = {"interleaved": {}, "tiled": {"tiled": True}}
    distances = _distances(checkpoint, embed, head, texts, _drawn(rounds, VARIANT_BLOCKS, seed), variants)
    return _nearest(
        "gqa",
        "interleaved",
        distances,
        right="the drafts are those of K/V heads that each serve consecutive query heads",
        wrong="the drafts are those of {} K/V heads: expand them by repeat_interleave or enable_gqa, never by repeat",
    )


def independent_forward(
    checkpoint: DrafterCheckpoint,
    embed: Embed,
    head: Tensor,
    texts: Sequence[Text],
    rounds: Sequence[Round],
    *,
    exact: bool,
    seed: int,
) -> Check:
    """32 random blocks of the walk, drafted again by :mod:`dflash.naive` from the raw weights and config.

    ``embed`` is the target's own [V, H] matrix or gives its rows, ``head`` is its [V, H]. ``exact`` (float32): every
    token equal, up to ties, whose logits differ by less than 1e-4. Otherwise (bfloat16): at least 99 % of the tokens,
    where a tie is 2⁻⁶ of the slot's largest logit, the drift of a clean drafter's layers: with it clean drafters, half
    trained ones too, draft all the same tokens, without it 0.1 to 1.6 % are others.
    """
    limit = 1.0 if exact else BFLOAT16_SHARE
    drawn = _drawn(rounds, NAIVE_BLOCKS, seed)
    if not drawn:
        return skipped("independent-forward", limit, "no block was drafted")
    by_id = {text.id: text for text in texts}
    equal = total = 0
    example = ""
    for one in drawn:
        logits = _naive_logits(checkpoint, embed, head, by_id[one.prompt], one.anchor)
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
                f"{token} there; look at context-strictly-before-anchor, position-ids and gqa, which name the usual "
                f"reasons"
            )
    return verdict(
        "independent-forward",
        equal / total >= limit,
        equal / total,
        limit,
        f"{equal} of {total} tokens of {len(drawn)} blocks are what the plain forward pass drafts from the same "
        f"weights{example}",
    )


def _drawn(rounds: Sequence[Round], count: int, seed: int) -> list[Round]:
    return [rounds[place] for place in sorted(np.random.default_rng(seed).permutation(len(rounds))[:count])]


def _noised(text: Text, where: slice, generator: torch.Generator) -> Text:
    """``text`` with other states of the same size at these positions."""
    taps = text.taps.cpu().clone()
    part = taps[where].float()
    noise = torch.randn(part.shape, generator=generator) * part.square().mean().sqrt().nan_to_num(1.0)
    taps[where] = noise.to(taps.dtype)
    return replace(text, taps=taps)


def _largest_change(hidden: Tensor, expected: Tensor) -> float:
    return float((hidden - expected).float().abs().max() / expected.float().abs().max())


def _gradient_behind(batch: Batch, anchors: Sequence[Sequence[int]], generator: torch.Generator) -> tuple[float, float]:
    """Size of a block's gradient with respect to its context, and the share of it at the anchor and behind."""
    drafter = batch.drafter
    length = batch.context[0][0].shape[2]
    device = drafter.fc.weight.device
    context = torch.zeros(len(batch.texts), length, drafter.config.hidden_size, dtype=drafter.fc.weight.dtype)
    for row, text in enumerate(batch.texts):
        with torch.no_grad():
            context[row, : len(text.tokens)] = drafter.project_context(text.taps.to(drafter.fc.weight)).cpu()
    with torch.enable_grad():
        leaf = context.to(device).requires_grad_()
        kv = drafter.context_kv(leaf, torch.arange(length, device=device))
        hidden = replace(batch, context=kv).hidden(anchors)[:, 1]
        direction = torch.randn(hidden.shape, generator=generator).to(hidden)
        [gradient] = torch.autograd.grad((hidden * direction).float().sum(), leaf)
    size = gradient.float().abs()
    behind = torch.arange(length, device=device) >= torch.tensor(anchors, device=device)[:, 1:2]
    total = float(size.sum())
    return total, float((size * behind[..., None]).sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class _Distance:
    """Mean distance of the drafts from a variant's logits, and the share of them that are its argmax."""

    mean: float
    share: float


def _distances(
    checkpoint: DrafterCheckpoint,
    embed: Embed,
    head: Tensor,
    texts: Sequence[Text],
    rounds: Sequence[Round],
    variants: Mapping[str, dict[str, Any]],
) -> dict[str, _Distance]:
    """How far the rounds are from what each variant of the plain forward would have drafted.

    A slot's distance is how far the drafted token's logit lies below the best, in standard deviations of the logits,
    plus |ln| of the ratio of the ranks (counted from 1) that the text's own token had in the walk and has here. Ranks
    tell variants apart even where a good drafter drafts the same tokens by all of them.
    """
    by_id = {text.id: text for text in texts}
    found = {}
    for name, settings in variants.items():
        distance, agreeing, slots = 0.0, 0, 0
        for one in rounds:
            logits = _naive_logits(checkpoint, embed, head, by_id[one.prompt], one.anchor, **settings)
            for slot, (drafted, right, rank) in enumerate(zip(one.drafted, one.right, one.rank_of_right, strict=True)):
                row = logits[slot]
                distance += float((row.max() - row[drafted]) / row.std())
                agreeing += int(row.argmax() == drafted)
                slots += 1
                if right is not None and rank is not None:
                    distance += abs(math.log((1 + int((row > row[right]).sum())) / (1 + rank)))
        found[name] = _Distance(distance / max(slots, 1), agreeing / max(slots, 1))
    return found


def _nearest(name: str, expected: str, distances: Mapping[str, _Distance], *, right: str, wrong: str) -> Check:
    nearest = min(distances, key=lambda variant: distances[variant].mean)
    told = ", ".join(f"{variant}: {one.mean:.3g} ({one.share:.1%})" for variant, one in distances.items())
    said = f"distance (tokens alike) by variant: {told}"
    others = [one.mean for variant, one in distances.items() if variant != expected]
    if distances[expected].mean >= min(others) and nearest == expected:
        return skipped(name, expected, f"the blocks looked at are alike in every variant; take longer texts ({said})")
    if nearest == expected:
        return verdict(name, True, nearest, expected, f"{right}; {said}")
    return verdict(name, False, nearest, expected, f"{wrong.format(nearest)}; {said}")


def _naive_logits(
    checkpoint: DrafterCheckpoint, embed: Embed, head: Tensor, text: Text, anchor: int, **variant: Any
) -> Tensor:
    rows = embed(torch.tensor([text.tokens[anchor]])) if callable(embed) else embed
    taps = text.taps[:anchor].to(rows.device)  # a head that does not fit beside the drafter is on the CPU
    with torch.inference_mode():
        return naive.draft_logits(
            checkpoint.weights, checkpoint.raw_config, embed, head, taps, text.tokens, anchor, **variant
        )
