"""Config of a directory in the layout of the ``speculators`` library, read into and written from a drafter's config.

The transformer's sizes are nested, taps count one higher (id L+1 is the output of block L), and causality is one flag
for all sliding layers. Read against speculators 0.9 (``models/dflash/config.py``, ``attention.py``) and the reader of
vLLM 0.32 (``transformers_utils/configs/speculators/algos.py``), which do not agree in everything; where they do not,
this is an error or a note. Imports no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, DrafterConfig

# Neutral values; any other means a model that is not computed here.
_ONLY_AS: dict[str, tuple[Any, ...]] = {
    "sample_from_anchor": (False,),
    "projector_type": ("dflash",),
    "shift_label": (False, None),
}
WINDOW_NOTE = (
    "speculators trains its sliding layers on a window that is fixed at the anchor (context from anchor - W on); "
    "engines serve one that moves with the slot and counts it (W - 1 tokens back), and so it is computed here"
)
MIXED_NOTE = (
    "vLLM up to 0.32 reads sliding_window_non_causal as the rule of every layer, so it would serve the full layers of "
    "this drafter causal; serve the z-lab export with vLLM"
)


def read_speculators(
    raw: Mapping[str, Any], *, source: str, given: Mapping[str, Any]
) -> tuple[DrafterConfig, tuple[str, ...]]:
    """The drafter's config, and what a reader of the result should know.

    ``given`` supplies ``num_target_layers``, which this layout has no key for: our own exports add it, else the
    verifier's ``config.json`` says it where the verifier is a directory that is here.
    """
    _refuse_other_models(raw, source)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{source}: transformer_layer_config is {layer!r}, expected the drafter's sizes")
    _require_own_vocabulary(raw, layer, source)
    taps = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise ConfigError(f"{source}: aux_hidden_state_layer_ids is {taps!r}, expected a list of the taps")
    if 0 in taps:
        raise ConfigError(
            f"{source}: aux_hidden_state_layer_ids names 0, the embedding's output; only outputs of blocks are tapped "
            f"here (id L+1 is the output of block L)"
        )
    target_layers = raw.get("num_target_layers") or given.get("num_target_layers") or _verifier_layers(raw)
    if target_layers is None:
        raise ConfigError(
            f"{source}: missing num_target_layers, and the verifier {_verifier(raw)!r} is no directory here; this "
            f"layout does not say how many layers the target has: give --drafter-config FILE with num_target_layers, "
            f"or --reference DIR"
        )
    for name, value in (("block_size", raw.get("block_size")), ("num_target_layers", target_layers)):
        if layer.get(name) not in (None, value):
            raise ConfigError(
                f"{source}: {name} is {value} but transformer_layer_config.{name} is {layer[name]}; keep the right one"
            )
    causal, notes = _sliding_causal(raw, layer, source)
    sizes = {name: value for name, value in layer.items() if name not in ("is_causal", "dflash_config", "model_type")}
    config = DrafterConfig.from_dict(
        sizes
        | {
            "block_size": raw.get("block_size"),
            "num_target_layers": target_layers,
            "dflash_config": {
                "mask_token_id": raw.get("mask_token_id"),
                "target_layer_ids": [tap - 1 for tap in taps],
            },
        }
        | ({} if causal else {"is_causal": False}),
        source=f"{source} (as z-lab's: aux ids less 1)",
    )
    return config, notes


def write_speculators(
    config: DrafterConfig, *, dtype: str, verifier: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config.json`` for the library and for vLLM, and notes on who would read it otherwise.

    :class:`ConfigError` for a drafter whose full layers are causal or whose sliding layers differ: the layout has one
    flag for the sliding layers and none for the full ones.
    """
    sliding = {
        causal for causal, kind in zip(config.causal, config.layer_types, strict=True) if kind == "sliding_attention"
    }
    full = {causal for causal, kind in zip(config.causal, config.layer_types, strict=True) if kind == "full_attention"}
    if True in full or len(sliding) > 1:
        raise ConfigError(
            f"causal {list(config.causal)} with layer_types {list(config.layer_types)} cannot be expressed in "
            f"speculators' layout: its full layers are bidirectional in a block, its sliding layers share one flag"
        )
    notes: list[str] = []
    if sliding == {True} and full:
        notes.append(MIXED_NOTE)
    if verifier is None:
        notes.append("no verifier is named: serve it as the speculative model of a target, or give --verifier")
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": _architectures(verifier)},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            **config.body(),
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": False,
        },
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        # Full layers are bidirectional whatever it says, but vLLM takes it for them too.
        "sliding_window_non_causal": sliding != {True},
        "sample_from_anchor": False,
        "num_target_layers": config.num_target_layers,
        "dtype": dtype,
    }, tuple(notes)


def _refuse_other_models(raw: Mapping[str, Any], source: str) -> None:
    kind = raw.get("speculators_model_type")
    if kind != "dflash":
        raise ConfigError(f"{source}: speculators_model_type is {kind!r}, only 'dflash' drafters can be computed here")
    for name, neutral in _ONLY_AS.items():
        if name in raw and raw[name] not in neutral:
            raise ConfigError(f"{source}: {name} is {raw[name]!r}, this drafter is computed only with {neutral[0]!r}")


def _require_own_vocabulary(raw: Mapping[str, Any], layer: Mapping[str, Any], source: str) -> None:
    reduced, whole = raw.get("draft_vocab_size"), layer.get("vocab_size")
    if reduced != whole:
        raise ConfigError(
            f"{source}: draft_vocab_size is {reduced} and the target's vocab_size {whole}; a reduced vocabulary has a "
            f"head of its own (lm_head, d2t, t2d), and only drafters that use the target's head are computed here"
        )
    width = raw.get("target_hidden_size")
    if width not in (None, layer.get("hidden_size")):
        raise ConfigError(
            f"{source}: target_hidden_size is {width} and hidden_size {layer.get('hidden_size')}; a drafter uses the "
            f"target's embedding and head, so both must be equal"
        )


def _sliding_causal(raw: Mapping[str, Any], layer: Mapping[str, Any], source: str) -> tuple[bool, tuple[str, ...]]:
    """Whether sliding layers are causal in a block, and notes; True changes nothing where no layer slides."""
    if layer.get("is_causal") is not None:
        raise ConfigError(
            f"{source}: transformer_layer_config.is_causal is {layer['is_causal']!r}: vLLM takes it for every layer, "
            f"speculators knows only sliding_window_non_causal; leave it out"
        )
    types = layer.get("layer_types")
    if not isinstance(types, list) or "sliding_attention" not in types:
        return True, ()
    bidirectional = raw.get("sliding_window_non_causal")
    if not isinstance(bidirectional, bool):
        raise ConfigError(
            f"{source}: sliding_window_non_causal is not stated and there are sliding layers: speculators takes it as "
            f"false (causal), vLLM as true; state how the drafter was trained"
        )
    mixed = not bidirectional and "full_attention" in types
    return not bidirectional, (WINDOW_NOTE, *((MIXED_NOTE,) if mixed else ()))


def _verifier(raw: Mapping[str, Any]) -> Any:
    section: Any = raw.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        section = section.get(key) if isinstance(section, Mapping) else None
    return section


def _verifier_layers(raw: Mapping[str, Any]) -> int | None:
    config = _config_of(_verifier(raw))
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    return layers if isinstance(layers, int) else None


def _architectures(verifier: str | None) -> list[str]:
    named = _config_of(verifier).get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _config_of(verifier: Any) -> Mapping[str, Any]:
    """``config.json`` of a verifier that is a directory on this machine, empty for a name."""
    try:
        config = json.loads((Path(verifier) / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
