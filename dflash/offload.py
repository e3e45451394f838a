"""Hidden states of a target that does not fit: one layer at a time, straight from its files.

The layers are the outer loop. The states of all texts wait in host memory while each layer is read once, runs over
every batch and is dropped, so a pass costs one reading of the weights however many texts there are::

    embedding rows -> states          on the CPU, only the rows that are used
    for layer in 0 … last tap:        read -> device, run all batches, keep the tap
                                      nothing behind the last tap is read

The layers are transformers' own, called with the masks, rotary tables and positions that transformers' own model
makes for them, so the states are bit for bit those of the loaded target in the same batches.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from dflash.hidden_states import (
    PASS_TOKENS,
    HiddenStateError,
    Progress,
    TappedText,
    TargetFacts,
    facts_of,
    not_finite,
    padded,
    passes,
    require_lengths,
)
from dflash.kernels import Kernel, kernel_for
from dflash.memory import MemoryShortageError, free_bytes, show_bytes
from dflash.shards import Reader, Shards
from dflash.target import end_tokens, require_layers, require_rows

_SPEED_BYTES = 1 << 28
_DELTA_RULE_COPIES = 16
_LAYER_COPIES = 10


@dataclass(frozen=True)
class StreamedTaps:
    """A target on disk as a :class:`dflash.hidden_states.TapSource`. It computes no logits, so no shortfall."""

    shards: Shards
    device: torch.device
    dtype: torch.dtype
    kernel: Kernel | Literal["none"]

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: Literal["auto", "fla", "torch"] = "auto",
    ) -> Self:
        """Compare names and shapes with the target's class, from the headers alone.

        Raises :class:`TargetLoadError` naming each weight at fault, :class:`KernelError`.
        """
        shards = Shards.open(directory)
        chosen = kernel_for(shards.config, kernel, device=device, source=str(directory))
        return cls(shards, torch.device(device), dtype, chosen)

    @cached_property
    def facts(self) -> TargetFacts:
        shards = self.shards
        wanted = shards.skeleton().state_dict()
        return facts_of(
            str(shards.directory),
            shards.config,
            class_name=shards.model_class.__name__,
            names=list(wanted),
            kernel=self.kernel,
            dtype=self.dtype,
            eos_token_ids=end_tokens(shards.config, _generation_config(shards.directory)),
        )

    @torch.no_grad()  # not inference mode: a drafter may be trained on these tensors
    def tap(
        self, ids: Sequence[Sequence[int]], layer_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[TappedText]:
        """One pass over the weights up to the last tap. ``progress`` counts batches times layers.

        Raises also :class:`MemoryShortageError` when the states of all texts, or a layer with one text, do not fit.
        """
        config, path = self.shards.config, str(self.shards.directory)
        require_layers(layer_ids, config.num_hidden_layers, path=path)
        require_lengths(ids, config, path=path)
        if not ids or not layer_ids:
            return [TappedText(torch.empty(len(text), 0, dtype=self.dtype), None) for text in ids]
        lengths = [len(text) for text in ids]
        groups = list(passes(lengths, self._pass_tokens(lengths, layer_ids)))
        width, last = config.hidden_size, max(layer_ids)
        taps = [torch.empty(length, len(layer_ids) * width, dtype=self.dtype) for length in lengths]
        caller = _Caller(self.shards.skeleton(), self.device)
        with self.shards.reader() as reader:
            states = [_embedded(reader, self.shards, [ids[place] for place in group], self.dtype) for group in groups]
            for embedded, group in zip(states, groups, strict=True):
                if not bool(embedded.isfinite().all()):
                    raise HiddenStateError(not_finite(path, group[0], 0, self.shards.embedding_name))
            for layer, block in self._blocks(reader, caller, last):
                columns = [place for place, asked in enumerate(layer_ids) if asked == layer]
                for batch, group in enumerate(groups):
                    self._advance(caller, block, layer, states[batch])
                    for row, place in enumerate(group):
                        own = states[batch][row, : lengths[place]]
                        if not bool(own.isfinite().all()):
                            raise HiddenStateError(not_finite(path, place, layer, _spoiled(block, layer)))
                        for column in columns:
                            taps[place][:, column * width : (column + 1) * width] = own
                    if progress is not None:
                        progress(layer * len(groups) + batch + 1, (last + 1) * len(groups))
                del block  # else it would be held while the next one is read
        return [TappedText(tap, None) for tap in taps]

    def _advance(self, caller: "_Caller", block: nn.Module, layer: int, states: Tensor) -> None:
        """``states`` [B, S, H] become the layer's output; half the rows at a time where all are too many."""
        try:
            states.copy_(caller(block, layer, states.to(self.device)))
        except torch.OutOfMemoryError:
            if len(states) == 1:
                raise MemoryShortageError(
                    f"layer {layer} and one text of {states.shape[1]} tokens do not fit on {self.device} beside what "
                    f"is there; free some memory or use --device cpu"
                ) from None
            for half in states.chunk(2):
                self._advance(caller, block, layer, half)

    def _blocks(self, reader: Reader, caller: "_Caller", last: int) -> Iterator[tuple[int, nn.Module]]:
        """Each layer on the device, the one before dropped first.

        For a GPU the next one is meanwhile read into host memory, if two fit there. On the CPU the layer itself would
        be there twice, and reading and computing would share the same cores.
        """
        sizes = self.shards.layer_bytes(self.dtype)
        ahead = self.device.type != "cpu" and free_bytes("cpu") >= 2 * max(sizes)
        with ThreadPoolExecutor(1) as reading:
            following: Future[dict[str, Tensor]] | None = None
            for layer in range(last + 1):
                weights = following.result() if following else self._read(reader, layer)
                following = reading.submit(self._read, reader, layer + 1, "cpu") if ahead and layer < last else None
                block = caller.loaded(layer, weights)
                del weights
                yield layer, block
                del block

    def _read(self, reader: Reader, layer: int, device: str | None = None) -> dict[str, Tensor]:
        prefix = f"model.layers.{layer}."
        return {
            name.removeprefix(prefix): reader.tensor(name, dtype=self.dtype, device=device or self.device)
            for name in self.shards.layer(layer)
        }

    def _pass_tokens(self, lengths: Sequence[int], layer_ids: Sequence[int]) -> int:
        """Padded tokens of a batch that fit beside the largest layer, :data:`PASS_TOKENS` at most."""
        config = self.shards.config
        token = config.hidden_size * self.dtype.itemsize
        host = (len(set(layer_ids)) + 2) * sum(lengths) * token
        layer = max(self.shards.layer_bytes(self.dtype)[: max(layer_ids) + 1])
        working = _working_bytes(config, self.dtype)
        if self.device.type == "cpu":
            free_host = free_device = free_bytes("cpu")
            free_device -= host
        else:
            free_host, free_device = free_bytes("cpu"), free_bytes(self.device)
        if host > free_host:
            raise MemoryShortageError(
                f"the states of {sum(lengths)} tokens take {show_bytes(host)}, {show_bytes(free_host)} of host memory "
                f"are free; measure fewer prompts or shorter completions"
            )
        needed = layer + max(lengths) * working
        if needed > free_device:
            instead = "measure shorter completions" if self.device.type == "cpu" else "use --device cpu"
            raise MemoryShortageError(
                f"one layer ({show_bytes(layer)}) and one text of {max(lengths)} tokens need {show_bytes(needed)} on "
                f"{self.device}, {show_bytes(max(0, free_device))} are free; free some or {instead}"
            )
        return min(PASS_TOKENS, int(free_device - layer) // working)


class _Caller:
    """Calls single layers as the model would. ``skeleton`` is the causal-LM class on the meta device."""

    def __init__(self, skeleton: PreTrainedModel, device: torch.device) -> None:
        model: Any = skeleton.get_submodule("model").train(False)
        self._model = model
        self._empty: list[nn.Module] = list(model.layers)
        self._recorders = [_Recorder() for _ in self._empty]
        self._model.layers = nn.ModuleList(self._recorders)
        self._model.norm = nn.Identity()
        rotary = model.rotary_emb
        self._model.rotary_emb = type(rotary)(rotary.config).to(device)
        self._device = device

    def loaded(self, layer: int, weights: dict[str, Tensor]) -> nn.Module:
        """The layer with these weights on the device; :meth:`load_state_dict` refuses any that do not fit."""
        block = copy.deepcopy(self._empty[layer])
        block.load_state_dict({name: weight.to(self._device) for name, weight in weights.items()}, assign=True)
        return block.requires_grad_(False)

    def __call__(self, block: nn.Module, layer: int, states: Tensor) -> Tensor:
        """Output [B, S, H] of ``block`` as layer ``layer`` for its input ``states`` [B, S, H]."""
        self._model(inputs_embeds=states, use_cache=False)
        arguments = self._recorders[layer].arguments
        for recorder in self._recorders:
            recorder.arguments = {}
        output: Tensor = block(states, **arguments)
        return output


class _Recorder(nn.Module):
    """Stands where a layer would and keeps what the model calls it with."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden_states


@dataclass(frozen=True)
class Estimate:
    """How long plain decoding would take with layers read for every token."""

    tokens: int
    bytes_per_token: int
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        return self.tokens * self.bytes_per_token / self.bytes_per_second

    def __str__(self) -> str:
        return (
            f"about {show_seconds(self.seconds)}: {show_bytes(self.bytes_per_token)} of weights read again for each of "
            f"{self.tokens} tokens, at the {show_bytes(self.bytes_per_second)}/s just measured"
        )


def decode_estimate(directory: str | Path, tokens: int) -> Estimate:
    """What ``tokens`` forward passes one after the other would cost if every layer were read for each.

    All prompts decoded together share a reading, so ``tokens`` is the longest completion in one batch.
    """
    shards = Shards.open(directory)
    lookup = {shards.embedding_name} - {shards.head_name}
    needed = sum(tensor.size for name, tensor in shards.tensors.items() if name not in lookup)
    return Estimate(tokens, needed, _read_speed(shards))


def show_seconds(seconds: float) -> str:
    """``seconds`` in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _read_speed(shards: Shards) -> float:
    """Bytes a second of a short read of the last layers, the least likely to be in the page cache from another read."""
    done = 0
    started = time.perf_counter()
    with shards.reader() as reader:
        for name in reversed([name for name in shards.tensors if name.startswith("model.layers.")]):
            reader.tensor(name, dtype=shards.tensors[name].torch_dtype)
            done += shards.tensors[name].size
            if done >= _SPEED_BYTES:
                break
    return done / max(time.perf_counter() - started, 1e-6)


def _embedded(reader: Reader, shards: Shards, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Embeddings [B, S, H] on the CPU of texts padded with token 0, each row read once."""
    ids = padded(texts)
    require_rows(ids, shards.config.vocab_size, path=str(shards.directory))
    tokens, place = torch.unique(ids, return_inverse=True)
    rows = torch.empty(len(tokens), shards.config.hidden_size, dtype=dtype)
    for row, token in enumerate(tokens.tolist()):
        reader.rows(shards.embedding_name, token, token + 1, out=rows[row : row + 1])
    return rows[place]


def _spoiled(block: nn.Module, layer: int) -> str | None:
    weights = block.state_dict().items()
    name = next((name for name, weight in weights if not bool(weight.isfinite().all())), None)
    return name and f"model.layers.{layer}.{name}"


def _working_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Generous bytes a token of what a layer allocates while it runs; the delta rule's torch code works in float32."""
    attention = config.num_attention_heads * config.head_dim
    size = (_LAYER_COPIES * (config.hidden_size + attention) + 4 * config.intermediate_size) * dtype.itemsize
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        heads = max(config.linear_num_value_heads, config.linear_num_key_heads)
        size += _DELTA_RULE_COPIES * heads * max(config.linear_key_head_dim, config.linear_value_head_dim) * 4
    return int(size)


def _generation_config(directory: Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(str(directory))
    except OSError:
        return None
