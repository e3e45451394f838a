"""Hidden states of the target at every token of the texts: from a loaded target, layer by layer, or out of a cache.

Whoever measures asks a :class:`TapSource` and does not know which it is. States that are NaN or infinite never leave
here: the error names the layer and, where a weight is to blame, the weight.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from transformers import PreTrainedConfig

from dflash.cache import Cache, CachedText, CacheError, TargetKey
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.kernels import kernel_for
from dflash.target import Target, TargetLoadError, TargetMismatchError, require_layers, text_config

PASS_TOKENS = 1 << 14
"""Padded tokens in one pass of the target."""
WORTH_A_PASS = 1 << 10
"""Padded tokens from which a pass is computing rather than starting kernels or reading weights."""
PADDING = 1.25
"""The longest text of a pass over its shortest, at most, once the pass is worth it."""
FINGERPRINT_BYTES = 1 << 16
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)

Progress = Callable[[int, int], None]


class HiddenStateError(DFlashError):
    """A hidden state or a logit of the target is NaN or infinite."""


class TextLengthError(DFlashError):
    """A text has no token, or is longer than the target has positions."""


@dataclass(frozen=True)
class TappedText:
    """``taps`` [S, K·H] on the CPU in the target's dtype, columns in the order of the asked layers.

    ``shortfall`` [S] float32: the best logit after position s less the logit of token s + 1, 0 where that token is as
    good as any, 0 in the last entry; None where the head was not computed (streamed layers end at the last tap).
    """

    taps: Tensor
    shortfall: Tensor | None


class TargetFacts(BaseModel):
    """What is known of a target once its files have been compared with its class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    class_name: str
    tensors: int
    blocks: int
    """Blocks found at ``model.layers``."""
    kernel: str
    dtype: str
    fingerprint: str
    num_layers: int
    """Blocks that the config says there are."""
    hidden_size: int
    vocab_size: int
    eos_token_ids: list[int]
    max_position_embeddings: int | None

    def require_fit(self, config: DrafterConfig, *, source: str) -> None:
        """:class:`TargetMismatchError` unless a drafter of this ``config`` was made for a target of these sizes."""
        pairs = (
            ("hidden_size", config.hidden_size, self.hidden_size),
            ("num_target_layers", config.num_target_layers, self.num_layers),
        )
        for name, drafter, target in pairs:
            if drafter != target:
                raise TargetMismatchError(
                    f"{source}: the drafter's {name} is {drafter}, the target {self.path} has {target}; "
                    f"evaluate it against the target it was trained on"
                )
        if config.mask_token_id >= self.vocab_size:
            raise TargetMismatchError(
                f"{source}: mask_token_id {config.mask_token_id} is outside the target's vocabulary of "
                f"{self.vocab_size} rows; the mask is a row of the target's embedding"
            )


class TapSource(Protocol):
    """Gives the outputs of the target's blocks for whole texts."""

    @property
    def facts(self) -> TargetFacts: ...

    def tap(
        self, ids: Sequence[Sequence[int]], layer_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[TappedText]:
        """One :class:`TappedText` for each of ``ids``. ``progress(done, total)`` counts in a unit of its own.

        Raises :class:`TargetMismatchError` for a layer that cannot be tapped, :class:`TextLengthError` before anything
        has run, :class:`HiddenStateError` where a state is not finite.
        """
        ...


@dataclass(frozen=True)
class LoadedTaps:
    """A whole target on its device, in padded passes."""

    target: Target

    @cached_property
    def facts(self) -> TargetFacts:
        target = self.target
        return facts_of(
            target.path,
            target.config,
            class_name=target.class_name,
            names=list(target.model.state_dict()),
            kernel=target.kernel,
            dtype=target.dtype,
            eos_token_ids=target.eos_token_ids,
        )

    def tap(
        self, ids: Sequence[Sequence[int]], layer_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[TappedText]:
        """See :class:`TapSource`; ``progress`` counts texts."""
        require_lengths(ids, self.target.config, path=self.target.path)
        texts: dict[int, TappedText] = {}
        for group in passes([len(text) for text in ids], PASS_TOKENS):
            result = self.target.taps(padded([ids[place] for place in group]), layer_ids, shortfall=True)
            assert result.shortfall is not None
            taps, shortfall = result.taps.cpu(), result.shortfall.cpu()
            for row, place in enumerate(group):
                end = len(ids[place])
                own = shortfall[row, :end].clone()
                own[-1] = 0
                texts[place] = TappedText(taps[row, :end].clone(), own)
                self._require_finite(texts[place], layer_ids, place)
            if progress is not None:
                progress(len(texts), len(ids))
        return [texts[place] for place in range(len(ids))]

    def _require_finite(self, text: TappedText, layer_ids: Sequence[int], place: int) -> None:
        layer = first_not_finite(text.taps, layer_ids)
        if layer is None and text.shortfall is not None and bool(text.shortfall.isfinite().all()):
            return
        raise HiddenStateError(not_finite(self.target.path, place, layer, self.target.spoiled_weight()))


@dataclass
class CachedTaps:
    """Looks in ``cache`` and opens the target only for what is missing there, or for all without a cache.

    ``shortfalls``: an entry without one counts as missing; False where the source cannot give any.
    ``forwards`` counts the texts that went through the target. ``path``: where the target is now, if the cache may
    have met it elsewhere.
    """

    open: Callable[[], TapSource]
    cache: Cache | None
    shortfalls: bool = True
    path: str | None = None
    forwards: int = 0
    _source: TapSource | None = field(default=None, repr=False)

    @property
    def source(self) -> TapSource:
        """The target behind, opened at the first use."""
        if self._source is None:
            self._source = self.open()
            if self.cache is not None:
                self.cache.keep_facts(self._source.facts.model_dump_json())
        return self._source

    @property
    def opened(self) -> TapSource | None:
        """The target behind where something has needed it, else None."""
        return self._source

    @cached_property
    def facts(self) -> TargetFacts:
        """From the cache if it knows this target."""
        kept = self.cache.facts() if self.cache is not None else None
        if kept is None:
            return self.source.facts
        try:
            facts = TargetFacts.model_validate_json(kept)
        except ValidationError as error:
            assert self.cache is not None
            raise CacheError(
                f"cache {self.cache.home}/facts.json is damaged ({error.errors()[0]['msg']}); remove the file"
            ) from None
        return facts.model_copy(update={"path": self.path or facts.path})

    def tap(
        self, ids: Sequence[Sequence[int]], layer_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[TappedText]:
        """See :class:`TapSource`; only layers that are missing are asked of the source, and all of them at once."""
        facts = self.facts
        require_layers(layer_ids, facts.num_layers, path=facts.path)
        require_positions(ids, facts.max_position_embeddings, path=facts.path)
        if self.cache is None:
            self.forwards += len(ids)
            return self.source.tap(ids, layer_ids, progress=progress)
        missing = [place for place, text in enumerate(ids) if not self._complete(text, layer_ids)]
        if missing:
            self._fill([ids[place] for place in missing], layer_ids, progress)
        found = (self.cache.get(text, layer_ids) for text in ids)
        return [TappedText(torch.cat([one.taps[layer] for layer in layer_ids], dim=1), one.shortfall) for one in found]

    def _fill(self, ids: Sequence[Sequence[int]], layer_ids: Sequence[int], progress: Progress | None) -> None:
        """Put into the cache what it lacks of ``layer_ids`` for the texts ``ids``, in one go."""
        assert self.cache is not None
        absent = {layer for text in ids for layer in layer_ids if layer not in self.cache.layers(text)}
        asked = sorted(absent) or list(layer_ids)[:1]  # or only the shortfall is missing
        self.forwards += len(ids)
        for text, tapped in zip(ids, self.source.tap(ids, asked, progress=progress), strict=True):
            columns = tapped.taps.chunk(len(asked), dim=1)
            self.cache.put(text, CachedText(dict(zip(asked, columns, strict=True)), tapped.shortfall))

    def _complete(self, ids: Sequence[int], layer_ids: Sequence[int]) -> bool:
        assert self.cache is not None
        layers = self.cache.layers(ids)
        return all(layer in layers for layer in layer_ids) and (not self.shortfalls or "shortfall" in layers)


def facts_of(
    path: str,
    config: PreTrainedConfig,
    *,
    class_name: str,
    names: Sequence[str],
    kernel: str,
    dtype: torch.dtype,
    eos_token_ids: frozenset[int],
) -> TargetFacts:
    """Facts of a target with the weights ``names`` in its causal-LM class. ``path`` is a directory."""
    blocks = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    return TargetFacts(
        path=path,
        class_name=class_name,
        tensors=len(names),
        blocks=len(blocks),
        kernel=kernel,
        dtype=str(dtype).removeprefix("torch."),
        fingerprint=fingerprint(Path(path)),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(eos_token_ids),
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
    )


def target_key(
    directory: Path, *, kernel: Literal["auto", "fla", "torch"], dtype: torch.dtype, device: torch.device | str
) -> TargetKey:
    """What the hidden states of a target depend on besides the tokens, found without reading its weights."""
    chosen = kernel_for(text_config(str(directory)), kernel, device=device, source=str(directory))
    name = str(dtype).removeprefix("torch.")
    return TargetKey(fingerprint(directory), tokenizer_digest(directory), chosen, name)


def fingerprint(directory: Path) -> str:
    """sha256 over ``config.json`` and the name, size, first and last 64 KiB of each weight file of a target.

    It tells two models apart without reading fifty gigabytes; it is no proof against one made to collide.
    """
    try:
        digest = hashlib.sha256((directory / "config.json").read_bytes())
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"\n{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read())
    except OSError as error:
        raise TargetLoadError(f"target {directory} cannot be read ({error.strerror}); is it a whole model?") from None
    return digest.hexdigest()


def tokenizer_digest(directory: Path) -> str:
    """sha256 over the tokenizer's files of a target, the chat template, and the file that says what ends a text."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def passes(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places by rising length, in groups of at most ``tokens`` padded tokens, or of one text, and of little padding."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda one: lengths[one]):
        padded = group and len(group) * lengths[place] > WORTH_A_PASS and lengths[place] > PADDING * lengths[group[0]]
        if padded or (group and (len(group) + 1) * lengths[place] > tokens):
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Token ids [B, S] with zeros on the right, which no earlier position sees."""
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    return ids


def require_lengths(ids: Sequence[Sequence[int]], config: PreTrainedConfig, *, path: str) -> None:
    """:func:`require_positions` by a target's ``config``."""
    require_positions(ids, getattr(config, "max_position_embeddings", None), path=path)


def require_positions(
    ids: Sequence[Sequence[int]],
    positions: int | None,
    *,
    path: str,
    new_tokens: int = 0,
    names: Sequence[str] | None = None,
) -> None:
    """:class:`TextLengthError` for an empty text, or one that with ``new_tokens`` more is longer than ``positions``.

    The error calls the texts by their ``names``, or else by their places.
    """
    for place, text in enumerate(ids):
        name = f"text {place}" if names is None else names[place]
        if not text:
            raise TextLengthError(f"{name} has no token; every text needs at least one")
        if positions is not None and len(text) + new_tokens > positions:
            more = f" and {new_tokens} are to be written" if new_tokens else ""
            raise TextLengthError(
                f"{name} has {len(text)} tokens{more}, the target {path} has {positions} positions "
                f"(max_position_embeddings); leave it out or write fewer tokens"
            )


def first_not_finite(taps: Tensor, layer_ids: Sequence[int]) -> int | None:
    """The lowest of ``layer_ids`` whose columns of ``taps`` [S, K·H] are not all finite."""
    if not layer_ids or bool(taps.isfinite().all()):
        return None
    columns = zip(layer_ids, taps.chunk(len(layer_ids), dim=1), strict=True)
    return min(layer for layer, tap in columns if not bool(tap.isfinite().all()))


def not_finite(path: str, place: int, layer: int | None, weight: str | None) -> str:
    """The message for text ``place``; ``layer`` is None where the states are finite and the logits are not."""
    what = "the logits" if layer is None else f"the hidden states of layer {layer}"
    why = (
        f"its weight {weight} holds NaN or infinity: copy the target again"
        if weight
        else "its weights are finite: the dtype overflows, use another"
    )
    return f"text {place}: {what} of the target {path} are not finite; {why}"
