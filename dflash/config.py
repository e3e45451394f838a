"""A drafter's sizes and rules, read strictly from z-lab's ``config.json`` layout. Imports no torch.

Engines and trainers read the same field from different places, and a reader that takes whichever it finds first is
how a drafter gets served with another block size or window than it was trained with. Here a field that is stated twice
must agree with itself, and a field that would change the forward pass in a way this code does not compute is an error.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError, model_validator

from dflash.errors import DFlashError

LayerType = Literal["full_attention", "sliding_attention"]

# Neutral values of options this forward pass does not have; any other value means another model than DFlash-1.
_ONLY_AS = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (None, False),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1.0),
    "rope_scaling": (None,),
    "partial_rotary_factor": (None, 1.0),
}
_MOST_LAYERS = 1000
_KNOWN_IN_DFLASH_CONFIG = {
    "block_size", "mask_token_id", "mask_token", "target_layer_ids", "causal", "use_swa", "swa_window_size",
}  # fmt: skip
# Values that other writers put there for what is computed here anyway.
_NEUTRAL_IN_DFLASH_CONFIG = {"projector_type": ("dflash",), "attention_mode": ("gqa", "mha"), "output_multiplier": (1,)}
_KNOWN_IN_ROPE = {"rope_theta", "rope_type", "partial_rotary_factor"}


class ConfigError(DFlashError):
    """A drafter config lacks a field, contradicts itself, or describes a model this code does not compute."""


class DrafterConfig(BaseModel):
    """Sizes of a DFlash-1 drafter, its taps, and the attention rule of each of its layers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    block_size: int
    """B: the anchor and B-1 drafted slots."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Taps: zero-based target blocks whose *output* is read (``hidden_states[id + 1]``), ascending."""
    num_target_layers: PositiveInt
    layer_types: tuple[LayerType, ...]
    sliding_window: PositiveInt | None
    """W: a query sees keys at distance < W, itself included; on sliding layers only."""
    causal: tuple[bool, ...]
    """Per layer: whether a slot sees only the slots up to itself inside its block."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> list[str]:
        problems = []
        if self.block_size < 2:
            problems.append(f"block_size is {self.block_size}, a block needs the anchor and at least one slot")
        if self.block_size > self.max_position_embeddings:
            problems.append(
                f"block_size is {self.block_size}, over the max_position_embeddings of {self.max_position_embeddings}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} rows")
        problems += _tap_problems(self.target_layer_ids, self.num_target_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        for name in ("layer_types", "causal"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                problems.append(
                    f"{name} has {len(getattr(self, name))} entries for num_hidden_layers {self.num_hidden_layers}"
                )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            problems.append("layer_types has sliding_attention but sliding_window is not set")
        return problems

    @property
    def tap_width(self) -> int:
        """Width of the concatenated taps, K·H: what ``fc`` takes."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str) -> Self:
        """Read z-lab's layout. ``source`` names where it came from in every :class:`ConfigError`.

        ``block_size``, mask id and taps may stand at the top level or in ``dflash_config``, the RoPE base in
        ``rope_theta`` or ``rope_parameters``; where both are given they must agree.
        """
        nested, rope = _section(raw, "dflash_config", source), _section(raw, "rope_parameters", source)
        _refuse_other_models(raw, nested, rope, source)
        theta = _agreed(
            source, ("rope_theta", raw.get("rope_theta")), ("rope_parameters.rope_theta", rope.get("rope_theta"))
        )
        direct = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "num_target_layers",
        )  # fmt: skip
        either = {
            name: _agreed(source, (name, raw.get(name)), (f"dflash_config.{name}", nested.get(name)))
            for name in ("block_size", "mask_token_id", "target_layer_ids")
        }
        _require_mask_id(either["mask_token_id"], nested, source)
        fields = {name: raw.get(name) for name in direct} | {"rope_theta": theta} | either
        shown = {name: f"dflash_config.{name}" for name in ("mask_token_id", "target_layer_ids")}
        missing = [shown.get(name, name) for name, value in fields.items() if value is None]
        if missing:
            raise ConfigError(
                f"{source}: missing {', '.join(missing)}; a drafter's config needs them in z-lab's config.json layout"
            )
        layer_types = _layer_types(raw, nested, source)
        try:
            config = cls.model_validate(
                fields
                | {
                    "target_layer_ids": _as_tuple(either["target_layer_ids"]),
                    "layer_types": layer_types,
                    "sliding_window": _window(raw, nested, source) if "sliding_attention" in layer_types else None,
                    "causal": _resolve_causal(raw, nested, _stated_types(raw, layer_types)),
                }
            )
        except ValidationError as error:
            raise ConfigError(f"{source}: {_one_line(error)}") from None
        require_mask_not_eos(config, _ids(raw.get("eos_token_id")), source=f"{source}: eos_token_id")
        return config

    def to_dict(self) -> dict[str, Any]:
        """z-lab's ``config.json``, readable by every loader known to need one or the other RoPE form.

        ``is_causal`` applies to every layer, so it is written only where all layers have one rule, and left to the
        layer types where they mix; :class:`ConfigError` where neither says what is meant.
        """
        by_type = tuple(kind == "sliding_attention" for kind in self.layer_types)
        uniform = len(set(self.causal)) == 1
        if not uniform and self.causal != by_type:
            raise ConfigError(
                f"causal {list(self.causal)} with layer_types {list(self.layer_types)} cannot be expressed in a "
                f"config.json: is_causal applies to every layer"
            )
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **self.body(),
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        } | ({"is_causal": self.causal[0]} if uniform else {})

    def body(self) -> dict[str, Any]:
        """The fields of the drafter's own transformer under the names of a Qwen3 config, which every layout has."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the 11·L + 3 tensors of a checkpoint (z-lab ``dflash/model.py``)."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * head, self.num_key_value_heads * head
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, self.tap_width), "hidden_norm.weight": (hidden,)}
        for i in range(self.num_hidden_layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (hidden,)}


def default_tap_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule: evenly from block 1 to block N-3, ``round(1 + i·(N-4)/(n-1))``, rounded half to even."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def require_mask_not_eos(config: DrafterConfig, eos_ids: Iterable[int], *, source: str) -> None:
    """:class:`ConfigError` if the mask is one of ``eos_ids``, which ``source`` says end a sequence.

    A mask that is also a token of the text is learned as that token: blocks are drafted from the embedding of the end
    of a sequence, and whoever looks for the end in a block finds it in every slot that is not yet drafted.
    """
    if config.mask_token_id in set(eos_ids):
        raise ConfigError(
            f"{source} has {config.mask_token_id}, which is the drafter's mask_token_id as well; the mask must be a "
            f"row of the embedding that no text uses: correct the id, or train the drafter with a reserved token"
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """A drafter's config.json as it stands; :class:`ConfigError` names the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a drafter's config.json") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a drafter's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); expected a drafter's config.json") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object, expected a drafter's config.json")
    return raw


def _tap_problems(taps: tuple[int, ...], num_target_layers: int) -> list[str]:
    if not taps:
        return ["target_layer_ids is empty, a drafter needs at least one tap"]
    beyond = [tap for tap in taps if not 0 <= tap < num_target_layers]
    if beyond:
        return [
            f"target_layer_ids names layer {beyond[0]}, but the target has layers 0..{num_target_layers - 1} "
            f"(num_target_layers {num_target_layers})"
        ]
    if list(taps) != sorted(set(taps)):
        return [f"target_layer_ids {list(taps)} must be ascending without repeats: fc's columns are in that order"]
    if num_target_layers - 1 in taps:
        return [
            f"target_layer_ids names the target's last layer {num_target_layers - 1}: its hidden state is normed in "
            f"some engines and raw in others; tap an earlier layer"
        ]
    return []


def _section(raw: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    section = raw.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: {name} is {section!r}, expected an object")
    return section


def _refuse_other_models(
    raw: Mapping[str, Any], nested: Mapping[str, Any], rope: Mapping[str, Any], source: str
) -> None:
    if "DFlash2DraftModel" in str(raw.get("architectures")):
        raise ConfigError(
            f"{source}: architectures says DFlash2DraftModel, only DFlash-1 drafters can be computed here"
        )
    for name, neutral in _ONLY_AS.items():
        if name in raw and raw[name] not in neutral:
            raise ConfigError(f"{source}: {name} is {raw[name]!r}, this drafter is computed only with {neutral[-1]!r}")
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{source}: rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError(
            f"{source}: rope_parameters.partial_rotary_factor is {rope['partial_rotary_factor']!r}: trainers rotate "
            f"the whole head and engines a part of it; only a drafter that rotates the whole head is computed here"
        )
    if other := sorted(name for name, value in rope.items() if name not in _KNOWN_IN_ROPE and value is not None):
        raise ConfigError(f"{source}: rope_parameters.{other[0]} is set; only plain RoPE is computed here")
    unknown = sorted(
        name
        for name, value in nested.items()
        if name not in _KNOWN_IN_DFLASH_CONFIG
        and value not in (None, False)
        and value not in _NEUTRAL_IN_DFLASH_CONFIG.get(name, ())
    )
    if unknown:
        raise ConfigError(
            f"{source}: dflash_config.{unknown[0]} is set; a drafter with that option would be computed wrongly here"
        )


def _require_mask_id(mask_token_id: Any, nested: Mapping[str, Any], source: str) -> None:
    if mask_token_id is None and nested.get("mask_token") is not None:
        raise ConfigError(
            f"{source}: dflash_config.mask_token is {nested['mask_token']!r} and mask_token_id is missing; look the "
            f"token up in the target's tokenizer and state its id as dflash_config.mask_token_id"
        )


def _agreed(source: str, *places: tuple[str, Any]) -> Any:
    """The value of a field that may stand in several places, None where it stands in none."""
    stated = [(name, value) for name, value in places if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise ConfigError(f"{source}: {stated[0][0]} is {stated[0][1]} but {name} is {value}; keep the right one")
    return stated[0][1] if stated else None


def _layer_types(raw: Mapping[str, Any], nested: Mapping[str, Any], source: str) -> tuple[Any, ...]:
    """``layer_types``; where it is absent every layer is full, unless the config speaks of windows.

    ``dflash_config.use_swa`` (Model-Optimizer's exports) puts a window on every layer where none is called sliding.
    """
    stated, layers = raw.get("layer_types"), raw["num_hidden_layers"]
    if stated is None and raw.get("use_sliding_window") and not nested.get("use_swa"):
        raise ConfigError(f"{source}: use_sliding_window is set without layer_types; name the type of each layer")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ConfigError(f"{source}: num_hidden_layers is {layers}, a drafter has at most {_MOST_LAYERS}")
    if stated is None:
        stated = ["full_attention"] * layers if isinstance(layers, int) else []
    if not isinstance(stated, list):
        raise ConfigError(f"{source}: layer_types is {stated!r}, expected a list with one entry a layer")
    if raw.get("use_sliding_window") is False and "sliding_attention" in stated:
        raise ConfigError(
            f"{source}: use_sliding_window is false but layer_types has sliding_attention, and loaders that go by the "
            f"one see another window than those that go by the other; correct the wrong one"
        )
    if nested.get("use_swa") and "sliding_attention" not in stated:
        return ("sliding_attention",) * len(stated)
    return tuple(stated)


def _stated_types(raw: Mapping[str, Any], resolved: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types that in-block causality goes by: what ``layer_types`` says, before ``use_swa`` overrides the window."""
    stated = raw.get("layer_types")
    return tuple(stated) if isinstance(stated, list) else ("full_attention",) * len(resolved)


def _window(raw: Mapping[str, Any], nested: Mapping[str, Any], source: str) -> Any:
    window = nested.get("swa_window_size")
    if window is not None and "sliding_attention" not in _stated_types(raw, ()):
        return window  # no layer is called sliding, so the top-level field is the base model's and means nothing
    return _agreed(
        source,
        ("sliding_window", raw.get("sliding_window")),
        ("dflash_config.swa_window_size", nested.get("swa_window_size")),
    )


def _resolve_causal(raw: Mapping[str, Any], nested: Mapping[str, Any], layer_types: tuple[Any, ...]) -> tuple[Any, ...]:
    """In-block causality per layer in the engines' order: ``is_causal``, ``dflash_config.causal``, the layer's type."""
    for stated in (raw.get("is_causal"), nested.get("causal")):
        if stated is not None:
            return (stated,) * len(layer_types)
    return tuple(kind == "sliding_attention" for kind in layer_types)


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids of a key that holds one, a list of them, or nothing."""
    if isinstance(value, int):
        return (value,)
    return tuple(one for one in value if isinstance(one, int)) if isinstance(value, list) else ()


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples; anything but a list is left for validation to name."""
    return tuple(value) if isinstance(value, list) else value


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    return f"{where} is {first['input']!r}: {message}" if where else message
