"""Config of transformers' own DFlash class, ``MuseGlimmerAssistantModel``, read into and written from a drafter's.

Read against transformers 5.24 (``models/muse_glimmer_assistant``): every layer is bidirectional in a block, and
``sliding_window`` does not count the query itself (|query - key| ≤ sliding_window), where engines and z-lab do (< W).
Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from dflash.config import ConfigError, DrafterConfig

MODEL_TYPE = "muse_glimmer_assistant"
_UNUSED_WINDOW = 2048
"""What the class wants as an integer where no layer slides: its own default."""


def read_assistant(raw: Mapping[str, Any], *, source: str, given: Mapping[str, Any]) -> DrafterConfig:
    """The drafter's config. ``given`` supplies ``num_target_layers`` and ``vocab_size``, which the class lacks."""
    types = raw.get("layer_types")
    if not isinstance(types, list):
        raise ConfigError(f"{source}: layer_types is {types!r}, expected a list with one entry a layer")
    window = raw.get("sliding_window")
    sizes = {name: raw.get(name) or given.get(name) for name in ("num_target_layers", "vocab_size")}
    if lacking := [name for name, value in sizes.items() if value is None]:
        raise ConfigError(
            f"{source}: missing {', '.join(lacking)}; transformers' assistant config has no key for it: give "
            f"--drafter-config FILE with it, or --reference DIR"
        )
    taken = {name: value for name, value in raw.items() if name not in ("sliding_window", "is_causal")}
    return DrafterConfig.from_dict(
        taken | sizes | {"sliding_window": window + 1 if type(window) is int else window, "is_causal": False},
        source=f"{source} (as z-lab's: sliding_window and 1 more)",
    )


def write_assistant(config: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """``config.json`` for ``MuseGlimmerAssistantModel.from_pretrained``.

    :class:`ConfigError` names the layers that are causal in a block: the class has no way to say so.
    """
    causal = [place for place, one in enumerate(config.causal) if one]
    if causal:
        raise ConfigError(
            f"layers {', '.join(map(str, causal))} are causal in a block, and transformers' class computes every layer "
            f"bidirectionally; export it as zlab or speculators"
        )
    window = config.sliding_window
    if window is not None and window < 3:
        raise ConfigError(f"sliding_window is {window}; transformers' cache needs at least 3")
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        **{name: value for name, value in config.body().items() if name not in ("attention_bias", "rope_scaling")},
        "sliding_window": _UNUSED_WINDOW if window is None else window - 1,
        "use_sliding_window": window is not None,
        "attention_dropout": 0,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "dtype": dtype,
    }
