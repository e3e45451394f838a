"""The target's cache, from which the end of a block can be taken back.

Keys and values of attention are cropped: they lie in a buffer with room to spare, so appending writes the new rows only
and cropping moves the end. A gated delta net's recurrent state is a running sum over all tokens, which no crop can
shorten, and its convolution state is the last few inputs, of which a block overwrites the older ones. Both are copied
before a block; on partial acceptance they are put back and the layer's mixing runs again over the accepted prefix,
continuing from the state that was put back.

Only the mixing runs again, on the inputs the layer had in the verification pass. Every layer is causal, so the inputs
of the accepted prefix do not depend on what was rejected, and neither do the keys, values and taps of that pass: they
are kept as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from dflash.drafter import KeyValue
from dflash.errors import DFlashError
from dflash.target import Target


class RollbackError(DFlashError):
    """The target has a layer whose state cannot be taken back."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no types
    """Keys and values [N, n_kv, S, hd] at the front of buffers of ``room`` positions, twice as many when full."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = room
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def key_value(self) -> KeyValue:
        """All positions, as views of the buffers."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Append new positions and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        end = held + key_states.shape[-2]
        if self._buffers is None or end > self._room:
            self._grow(key_states, value_states, held, end)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[..., held:end, :], values[..., held:end, :] = key_states, value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.key_value

    def _grow(self, key_states: Tensor, value_states: Tensor, held: int, end: int) -> None:
        if end > self._room:
            self._room = 2 * end
        keys, values = (new.new_empty(*new.shape[:-2], self._room, new.shape[-1]) for new in (key_states, value_states))
        if held:
            keys[..., :held, :], values[..., :held, :] = self.key_value
        self._buffers = keys, values


class RollbackCache:
    """The cache of one text on ``target``. :meth:`extend` adds tokens for good, :meth:`propose` a block of which
    :meth:`keep` says how much stays. Raises :class:`RollbackError` for a target with layers of another kind than full
    attention and gated delta nets."""

    def __init__(self, target: Target, *, room: int) -> None:
        self.cache = DynamicCache(config=target.config)
        self._model = target.model.get_submodule("model")
        self._device = target.device
        self._nets: list[_Net] = []
        for place, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:
                self.cache.layers[place] = RoomyLayer(room)
            elif type(layer) is LinearAttentionLayer and hasattr(target.layers[place], "linear_attn"):
                self._nets.append(_Net(layer, target.layers[place].get_submodule("linear_attn")))
            else:
                raise RollbackError(
                    f"target {target.path}: layer {place} keeps a {type(layer).__name__}, which cannot be taken back "
                    f"after a rejected draft; decoding knows full attention and gated delta nets: use --mode replay"
                )
        self._proposed = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.cache.get_seq_length()

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> Tensor:
        """Normed hidden states [1, n, H] of ``ids`` [1, n], which stay."""
        hidden: Tensor = self._model(input_ids=ids.to(self._device), cache=self.cache, use_cache=True).last_hidden_state
        return hidden

    @torch.inference_mode()
    def propose(self, ids: Tensor) -> Tensor:
        """Normed hidden states [1, n, H] of a block ``ids`` [1, n] behind a text; call :meth:`keep` next."""
        for net in self._nets:
            net.save()
        with self._recorded():
            hidden = self.extend(ids)
        self._proposed = ids.shape[1]
        return hidden

    @torch.inference_mode()
    def keep(self, count: int) -> None:
        """Of the block proposed last, its first ``count`` tokens stay, 0…n."""
        rejected = self._proposed - count
        if rejected:
            for layer in self.cache.layers:
                if isinstance(layer, RoomyLayer):
                    layer.crop(-rejected)
            for net in self._nets:
                net.restore()
                net.replay(self.cache, count)
        self._proposed = 0
        for net in self._nets:
            net.inputs = None

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        handles = [net.mixing.register_forward_pre_hook(net.record, with_kwargs=True) for net in self._nets]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class _Net:
    """A gated delta net: its entry in the cache, the module, and what it takes to run a prefix of a block again."""

    state: LinearAttentionLayer
    mixing: nn.Module
    saved: tuple[dict[int, Tensor], dict[int, Tensor]] | None = None
    inputs: Tensor | None = None  # [1, n, H]

    def save(self) -> None:
        self.saved = (_copied(self.state.conv_states), _copied(self.state.recurrent_states))

    def restore(self) -> None:
        assert self.saved is not None
        for states, saved in zip((self.state.conv_states, self.state.recurrent_states), self.saved, strict=True):
            for place, tensor in saved.items():
                states[place].copy_(tensor)  # type: ignore[union-attr]  # both exist once a text has been read

    def record(self, _module: nn.Module, _arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.inputs = named["hidden_states"]

    def replay(self, cache: DynamicCache, count: int) -> None:
        assert self.inputs is not None
        if count:
            self.mixing(hidden_states=self.inputs[:, :count], cache=cache)


def _copied(states: dict[int, Tensor | None]) -> dict[int, Tensor]:
    return {place: tensor.clone() for place, tensor in states.items() if tensor is not None}
