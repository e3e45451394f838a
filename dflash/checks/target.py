"""Checks of the target and its hidden states: the right class, the right layers, the numbers the trainer saw."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.batch import Batch, Text, Vocabulary
from dflash.checkpoints import DrafterCheckpoint
from dflash.checks.verdict import Status, skipped, verdict
from dflash.drafter import Drafter
from dflash.hidden_states import TapSource, TargetFacts
from dflash.probe import Probe, relative_errors
from dflash.report import Check
from dflash.target import Target

PROBE_TOKENS = 64
PROBE_TEXTS = 4
PROBE_BLOCKS = 16
TAP_LIMIT = 1e-3
BFLOAT16_TAP_LIMIT = 0.03
ROUNDING_TIMES = 5.0
SMALLEST_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-12}
STATISTIC_RATIO = 1.5
NEAR_TIE = 0.25
EXACT_NEAR_TIE = 1e-3
AGREEMENT = 0.98
LEAST_AGREEMENT = 0.95
MOST_NEAR_TIES = 0.03


def target_class(facts: TargetFacts) -> Check:
    """The target is a causal-LM class with all of its blocks at ``model.layers``.

    Missing, unexpected and misshaped weights are refused when it is loaded, so none is left to count here.
    """
    right = facts.class_name.endswith("ForCausalLM") and facts.blocks == facts.num_layers
    return verdict(
        "target-class",
        right,
        f"{facts.class_name}, {facts.tensors} tensors, {facts.blocks} blocks",
        f"…ForCausalLM with {facts.num_layers} blocks at model.layers",
        "every weight of the checkpoint found its place in the causal-LM class and none is missing"
        if right
        else "hooks by path would read other states than the drafter was trained on; load the causal-LM class",
    )


def tap_source(target: Target | None, layer_ids: Sequence[int], texts: Sequence[Text]) -> Check:
    """The taps of ``texts``, as the drafter gets them, are ``hidden_states[L + 1]`` of their own tokens.

    Looked at in the first tokens of a few texts, each in a pass of its own without hooks, so that a hook on another
    layer, columns in another order and rows of another position or text all show. Measured is the largest error of a
    tap: the mean over positions of its distance relative to the state. The limit leaves room for bfloat16, in which
    passes of different shapes round differently.
    """
    if target is None:
        return skipped(
            "tap-source",
            TAP_LIMIT,
            "the target was not loaded whole (its taps were cached or streamed); measure once without --cache and "
            "--offload",
        )
    limit = TAP_LIMIT if target.dtype == torch.float32 else BFLOAT16_TAP_LIMIT
    worst, at = 0.0, ""
    for text in texts[:: -(-len(texts) // PROBE_TEXTS)]:
        ids = torch.tensor([text.tokens[:PROBE_TOKENS]], device=target.device)
        given = torch.split(text.taps[: ids.shape[1]].to(target.device).float(), target.hidden_size, dim=-1)
        with torch.inference_mode():
            output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        for layer, tap in zip(layer_ids, given, strict=True):
            state = output.hidden_states[layer + 1][0].float()
            size = state.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)  # a padding token may have no state
            error = _or_infinite(float(((tap - state).norm(dim=-1) / size).mean()))
            if error > worst:
                worst, at = error, f"tap {layer} of prompt {text.id} is not hidden_states[{layer + 1}] of its tokens"
    passed = worst <= limit
    return verdict(
        "tap-source",
        passed,
        worst,
        limit,
        "the tapped states are hidden_states[L + 1] of the same tokens"
        if passed
        else f"{at}: look for a hook on another layer or before its output, and for columns or rows mixed up",
    )


def tap_statistics(drafter: Drafter, texts: Sequence[Text], probe: Probe | str) -> Check:
    """Mean, std and RMS of each tap, and of the context after fc + norm, are of the size they had in training.

    Each is the median over positions of the statistic over channels, so that the first token's huge states do not
    count. Texts differ, so the limit is wide: RMS and std within a factor of 1.5 of the probe's, the mean within half
    an RMS. Measured is the largest of those, as a factor.
    """
    name = "tap-statistics"
    layers = list(drafter.config.target_layer_ids)
    if isinstance(probe, str):
        return skipped(name, STATISTIC_RATIO, probe)
    if missing := _missing(probe, layers):
        return skipped(name, STATISTIC_RATIO, missing)
    expected = _statistics(drafter, [_columns(probe, layers)])
    found = _statistics(drafter, [text.taps for text in texts])
    worst, at = 1.0, ""
    for place, ours, theirs in zip([*map(str, layers), "fc + norm"], found, expected, strict=True):
        ratios = {"std": ours[1] / theirs[1], "RMS": ours[2] / theirs[2]}
        factors = {label: max(ratio, 1 / ratio) if ratio > 0 else float("inf") for label, ratio in ratios.items()}
        factors["mean"] = 1 + abs(ours[0] - theirs[0]) / theirs[2]
        for label, factor in factors.items():
            if _or_infinite(factor) > worst:
                worst, at = _or_infinite(factor), f"{label} of {'tap ' if place.isdigit() else ''}{place}"
    return verdict(
        name,
        worst <= STATISTIC_RATIO,
        worst,
        STATISTIC_RATIO,
        f"the states are of the size they had in training; most off is the {at or 'first tap'}"
        if worst <= STATISTIC_RATIO
        else f"the {at} is not of the size it had in training: look for another layer, a norm too many or too few, a "
        f"scaled embedding, or another fc",
    )


def kernel(checkpoint: DrafterCheckpoint, facts: TargetFacts) -> Check:
    """Linear attention is computed by the kernel that the drafter was trained with."""
    here = facts.kernel
    if here == "none":
        return verdict("kernel", True, here, here, "the target has no linear attention")
    trained = checkpoint.training.get("kernel")
    if not isinstance(trained, str):
        return skipped(
            "kernel",
            here,
            "the checkpoint does not say which kernel it was trained with; write kernel into its metrics",
        )
    return verdict(
        "kernel",
        here == trained,
        here,
        trained,
        "linear attention is computed as in training"
        if here == trained
        else f"the drafter was trained on states of the {trained} kernel and measured on those of {here}, which the "
        f"residual stream carries into every later tap; give --kernel {trained}",
    )


def hidden_state_fingerprint(source: TapSource, drafter: Drafter, vocabulary: Vocabulary, probe: Probe | str) -> Check:
    """The probe's text, tapped here, gives the states the trainer saw, to five times their honest rounding.

    Measured is the relative error of the tap that is worst against its limit: ‖ours - probe‖ / ‖probe‖ over positions.
    Its limit is five times the difference that the writer saw between one pass and token by token, and never less than
    five times 2⁻¹² in bfloat16 or 1e-6 in float32. The explanation says how many draft tokens change with the states.
    """
    name = "hidden-state-fingerprint"
    layers = list(drafter.config.target_layer_ids)
    if isinstance(probe, str):
        return skipped(name, None, probe)
    if missing := _missing(probe, layers):
        return skipped(name, None, missing)
    [tapped] = source.tap([probe.ids], layers)
    ours, theirs = tapped.taps.cpu(), _columns(probe, layers)
    if ours.dtype != theirs.dtype:
        return skipped(
            name,
            None,
            f"the probe is in {_dtype(theirs.dtype)}, these states are in {_dtype(ours.dtype)}, whose rounding is "
            f"another; give --dtype {_dtype(theirs.dtype)}",
        )
    smallest = SMALLEST_ROUNDING.get(ours.dtype, 0.0)
    rounding = dict(zip(probe.layer_ids, probe.rounding, strict=True))
    limits = [ROUNDING_TIMES * max(rounding[layer], smallest) for layer in layers]
    errors = relative_errors(ours, theirs, len(layers))
    worst = max(range(len(layers)), key=lambda place: _or_infinite(errors[place]) / limits[place])
    passed = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    changed, drafted = _changed_drafts(drafter, vocabulary, probe.ids, ours, theirs)
    said = f"{changed} of {drafted} draft tokens change with the states"
    if passed:
        explanation = f"the probe's states are the trainer's, most off is tap {layers[worst]}; {said}"
    else:
        another = source.facts.fingerprint != probe.target_fingerprint
        explanation = (
            f"tap {layers[worst]} of the probe is not what the trainer saw: {said}; look for another kernel (trained "
            f"with {probe.kernel}, here {source.facts.kernel}), dtype or version of the target"
            + ("; the target's files are not those of the training" if another else "")
        )
    return verdict(name, passed, errors[worst], limits[worst], explanation)


def reference_agreement(
    texts: Sequence[Text],
    shortfalls: Sequence[Tensor] | None,
    *,
    exact: bool,
    completions_by: str,
    retokenized: int,
) -> Check:
    """Completion tokens are the loaded target's argmax there, near-ties apart.

    ``shortfalls`` [S] a text: the best logit after a position minus that of the token that follows. A near-tie is a
    shortfall up to 0.25 (1e-3 in float32 when the target wrote the completions itself, by another pass of the same
    weights). Measured is the share of tokens that are argmax or near-tie: under 98 % is a warning, under 95 % fails.
    More near-ties than 3 % are a warning, too: rounding alone makes fewer, a quantised model more.
    """
    name = "reference-agreement"
    if shortfalls is None:
        return skipped(name, AGREEMENT, "the taps were streamed, so there are no logits; measure without --offload")
    tie = EXACT_NEAR_TIE if exact and completions_by == "target" else NEAR_TIE
    best = near = total = 0
    shares: dict[str, float] = {}
    for text, shortfall in zip(texts, shortfalls, strict=True):
        own = shortfall[text.prompt_length - 1 : len(text.tokens) - 1]
        best += int((own <= 0).sum())
        near += int(((own > 0) & (own <= tie)).sum())
        total += len(own)
        if len(own):
            shares[text.id] = float((own <= tie).float().mean())
    if not total:
        return skipped(name, AGREEMENT, "the completions are empty")
    share = (best + near) / total
    agrees = share >= AGREEMENT and near <= MOST_NEAR_TIES * total
    status: Status = "pass" if agrees else "warn" if share >= LEAST_AGREEMENT else "fail"
    worst = min(shares, key=shares.__getitem__)
    counted = f"{best} of {total} completion tokens are the target's argmax and {near} are near-ties (up to {tie:g})"
    if retokenized:
        counted += f"; {retokenized} completions came as text and were tokenised again"
    blame = (
        f"; worst is prompt {worst} with {shares[worst]:.1%}: another, quantised or fine-tuned model is served, it "
        f"samples, or it thinks where the prompts do not; serve the target that is loaded here, with its chat template"
        if completions_by != "target"
        else f"; worst is prompt {worst} with {shares[worst]:.1%}: the target's decoding and its single pass differ; "
        f"look for another kernel or dtype in one of them, or measure again with an empty --cache"
    )
    return verdict(name, status, share, AGREEMENT, counted if status == "pass" else counted + blame)


def _missing(probe: Probe, layers: Sequence[int]) -> str | None:
    absent = [layer for layer in layers if layer not in probe.layer_ids]
    return f"the probe has no tap {absent[0]}; write it with the drafter's own taps" if absent else None


def _columns(probe: Probe, layers: Sequence[int]) -> Tensor:
    parts = dict(zip(probe.layer_ids, probe.taps.chunk(len(probe.layer_ids), dim=-1), strict=True))
    return torch.cat([parts[layer] for layer in layers], dim=-1)


@torch.inference_mode()
def _statistics(drafter: Drafter, texts: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """(mean, std, RMS) of each tap and of the context; over channels, then the median over all positions."""
    weight = drafter.fc.weight
    gathered: list[list[Tensor]] = [[] for _ in range(len(drafter.config.target_layer_ids) + 1)]
    for taps in texts:
        context = drafter.project_context(taps.to(weight)).cpu()
        for place, part in enumerate([*taps.cpu().chunk(len(gathered) - 1, dim=-1), context]):
            wide = part.float()
            rows = (wide.mean(-1), wide.std(-1), wide.square().mean(-1).sqrt())
            gathered[place].append(torch.stack(rows, dim=-1))
    medians = (torch.cat(rows).median(dim=0).values.tolist() for rows in gathered)
    return [(mean, std, rms) for mean, std, rms in medians]


def _changed_drafts(
    drafter: Drafter, vocabulary: Vocabulary, ids: Sequence[int], ours: Tensor, theirs: Tensor
) -> tuple[int, int]:
    """Draft tokens of blocks along the probe that differ between the two, and how many there are."""
    size = drafter.config.block_size
    anchors = list(range(1, len(ids) - 1, size))[:PROBE_BLOCKS]
    drafts = [
        Batch.of(drafter, vocabulary, [Text("probe", list(ids), 1, taps)]).draft([anchors]).drafted
        for taps in (ours, theirs)
    ]
    return int((drafts[0] != drafts[1]).sum()), drafts[0].size


def _or_infinite(error: float) -> float:
    """NaN compares with nothing, and is the worst there is."""
    return error if error == error else float("inf")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
