"""What a checkpoint says beside its tensors, taken out of what its pickle describes.

That can hold one list a thousand times inside of itself, so nothing here walks further than a bound.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from dflash.checkpoint_layout import CheckpointError, DamagedError, NotACheckpointError, TensorRecord
from dflash.formats import unwrapped

T = TypeVar("T")

_STATES = ("model_state_dict", "state_dict", "model")
_MOST_VALUES, _DEEPEST, _MOST_SCALARS, _LONGEST_SCALAR = 10_000, 16, 64, 1000


def state_in(source: str, content: Any) -> dict[str, TensorRecord]:
    """The model's tensors by name: those of ``model_state_dict``, or what else trainers call it, or of a bare one.

    :class:`NotACheckpointError` says what was found instead.
    """
    state = content
    if isinstance(content, Mapping):
        state = next((content[key] for key in _STATES if isinstance(content.get(key), Mapping)), content)
    tensors = {
        name: value
        for name, value in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(name, str) and isinstance(value, TensorRecord)
    }
    if not tensors:
        keys = [str(key)[:40] for key in content if isinstance(key, str)] if isinstance(content, Mapping) else []
        found = f"keys {', '.join(keys[:8])}" if keys else "no dictionary"
        raise NotACheckpointError(f"{source} holds {found}, expected tensors under {_STATES[0]}")
    return tensors


def drafters(source: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The drafter's tensors under plain names: of a module that holds more than it, those of ``draft_model``.

    :class:`CheckpointError` for two that have one name once prefixes are stripped.
    """
    inside = {name: one for name, one in tensors.items() if "draft_model." in name.removesuffix(unwrapped(name))}
    plain: dict[str, T] = {}
    for name, one in (inside or tensors).items():
        if unwrapped(name) in plain:
            raise CheckpointError(f"{source}: {unwrapped(name)} is there twice once prefixes are stripped; keep one")
        plain[unwrapped(name)] = one
    return plain


def config_in(source: str, content: Any) -> bytes | None:
    """The drafter's config under key ``config`` as the text of a config.json; None where there is none.

    A trainer's own settings under the same key say nothing about the drafter. :class:`DamagedError` for a config that
    no JSON can hold.
    """
    config = content.get("config") if isinstance(content, Mapping) else None
    if not isinstance(config, Mapping) or not ("dflash_config" in config or "hidden_size" in config):
        return None
    try:
        return json.dumps(_plain(config, [_MOST_VALUES], _DEEPEST), indent=1, allow_nan=False).encode()
    except ValueError as error:
        raise DamagedError(f"{source}: its key config is no plain config ({error}); save numbers and strings") from None


def scalars_in(content: Any) -> dict[str, Any]:
    """Numbers and short texts that were saved at the top level or under ``metrics``; those of the top level win."""
    if not isinstance(content, Mapping):
        return {}
    nested = content.get("metrics")
    places = (nested if isinstance(nested, Mapping) else {}, content)
    found = {key: value for place in places for key, value in place.items() if isinstance(key, str) and _scalar(value)}
    return dict(list(found.items())[:_MOST_SCALARS])


def _scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_SCALAR
    if isinstance(value, float):
        return value - value == 0  # neither NaN nor infinite, which JSON has no words for
    return isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 63)


def _plain(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0 or not depth:
        raise ValueError("it is too large")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("it has a key that is not text")
        return {key: _plain(one, left, depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, left, depth - 1) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"it holds a {type(value).__name__}")
