"""What differs between the layouts a drafter comes in: config fields and tensor names. Imports no torch.

z-lab's layout is the common one: every reader ends in it and every writer starts from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash.assistant import read_assistant, write_assistant
from dflash.checkpoint_layout import Format
from dflash.config import ConfigError, DrafterConfig, default_tap_ids
from dflash.speculators import read_speculators, write_speculators

ExportFormat = Literal["zlab", "speculators", "transformers"]

_WRAPPERS = ("module.", "_orig_mod.", "draft_model.")
# Their name → ours; names that are not here are the same.
_RENAMED: dict[str, dict[str, str]] = {
    "torchspec": {
        "context_proj.weight": "fc.weight",
        "context_norm.weight": "hidden_norm.weight",
        "final_norm.weight": "norm.weight",
    },
    "transformers": {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
}
# Copies of the target's own tensors and identity maps of its vocabulary; the target's are used.
_OF_THE_TARGET: dict[str, frozenset[str]] = {
    "torchspec": frozenset({"embed_tokens.weight"}),
    "speculators": frozenset(
        {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d"}
    ),
}


@dataclass(frozen=True)
class ReadConfig:
    """A drafter's config out of any layout. ``raw`` is it in z-lab's layout, as :mod:`dflash.naive` reads it."""

    config: DrafterConfig
    raw: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_config(
    format: Format, raw: Mapping[str, Any], *, source: str, given: Mapping[str, Any], fc_width: int | None = None
) -> ReadConfig:
    """The config of a checkpoint in ``format``. ``given`` are z-lab fields from elsewhere for what a layout lacks.

    ``fc_width`` is the number of columns of the fusing projection, for a layout that may leave the taps to a rule.
    Raises :class:`ConfigError` with ``source``.
    """
    if format == "speculators":
        config, notes = read_speculators(raw, source=source, given=given)
        return ReadConfig(config, config.to_dict(), notes)
    if format == "transformers":
        config = read_assistant(raw, source=source, given=given)
        return ReadConfig(config, config.to_dict())
    if format == "torchspec":
        return _read_torchspec(raw, source, fc_width)
    config = DrafterConfig.from_dict(raw, source=source)
    nested = raw.get("dflash_config") or {}
    # The plain reading that the naive forward has of its own knows z-lab's places only.
    plain = not nested.get("use_swa") and all(name in nested for name in ("mask_token_id", "target_layer_ids"))
    return ReadConfig(config, dict(raw) if plain else config.to_dict())


def unwrapped(name: str) -> str:
    """The name of a tensor without what DDP, ``torch.compile`` and a trainer's own module put before it."""
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def our_name(format: Format, name: str) -> str | None:
    """z-lab's name of a tensor, None for one that is the target's own."""
    if name in _OF_THE_TARGET.get(format, ()):
        return None
    return _RENAMED.get(format, {}).get(name, name)


def write_config(
    format: ExportFormat, config: DrafterConfig, *, dtype: str, verifier: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config.json`` in ``format`` and what its user should know; :class:`ConfigError` if it cannot be expressed."""
    if format == "speculators":
        return write_speculators(config, dtype=dtype, verifier=verifier)
    if format == "transformers":
        return write_assistant(config, dtype=dtype), ()
    return config.to_dict() | {"tie_word_embeddings": False, "dtype": dtype}, ()


def their_name(format: ExportFormat, name: str) -> str:
    """The name in ``format`` of the tensor that z-lab calls ``name``."""
    theirs = {ours: theirs for theirs, ours in _RENAMED.get(format, {}).items()}
    return theirs.get(name, name)


def _read_torchspec(raw: Mapping[str, Any], source: str, fc_width: int | None) -> ReadConfig:
    """z-lab's fields; taps that the config leaves open are TorchSpec's own rule for as many as ``fc`` takes."""
    for name in ("markov_rank", "enable_confidence_head"):
        if raw.get(name):
            raise ConfigError(f"{source}: {name} is {raw[name]!r}; a drafter with that head is not DFlash-1")
    section = raw.get("dflash_config") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: dflash_config is {section!r}, expected an object")
    nested = dict(section)
    completed: dict[str, Any] = dict(raw) | {"dflash_config": nested}
    if raw.get("target_num_hidden_layers") is not None:
        completed["num_target_layers"] = raw["target_num_hidden_layers"]
    notes: tuple[str, ...] = ()
    layers, hidden = completed.get("num_target_layers"), raw.get("hidden_size")
    stated = raw.get("target_layer_ids") is not None or nested.get("target_layer_ids") is not None
    if not stated and fc_width and isinstance(layers, int) and isinstance(hidden, int) and hidden > 0:
        taps = default_tap_ids(layers, fc_width // hidden)
        nested["target_layer_ids"] = list(taps)
        notes = (
            f"target_layer_ids is not stated; taps {', '.join(map(str, taps))} follow from TorchSpec's rule for "
            f"{len(taps)} of {layers} layers",
        )
    config = DrafterConfig.from_dict(completed, source=source)
    return ReadConfig(config, config.to_dict(), notes)
