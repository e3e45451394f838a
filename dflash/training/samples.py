"""The samples of a run: lines of data as documents of tokens, with what the target wrote in them marked.

They are tokenised once and kept under a key of everything they depend on: the files' content, the tokenizer and its
template, and the settings that decide what becomes of a line.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.prompts import ThinkingError
from dflash.training import token_store
from dflash.training.batch import Sample
from dflash.training.chats import Marked, Piece, UntrainableError, chat_pieces, encode, pair_pieces
from dflash.training.lines import Chat, DataError, ExactIds, Line, Source, dataset_source, file_source
from dflash.training.run_config import DataSection
from dflash.training.token_store import TokenStore, TokenStoreError, Writer

VERSION = 2
LINES_AT_ONCE = 256
"""Lines that are tokenised in one call, which uses all cores."""
DECODED = 32
"""Lines of a source whose ids are decoded and compared with their text."""


class SampleCounts(BaseModel):
    """What became of the lines: ``read`` = ``kept`` + ``too_short`` + all of ``refused``.

    ``truncated`` of the kept were cut at the end. ``refused`` are samples, ``turns_left_out`` single assistant turns of
    kept chats that serve as context only, both by reason. ``retokenized`` of the kept are not the target's own tokens
    but the tokenizer's reading of its text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    read: int
    kept: int
    truncated: int
    too_short: int
    refused: dict[str, int]
    turns_left_out: dict[str, int]
    retokenized: int
    tokens: int
    loss_tokens: int

    def lines(self) -> list[str]:
        """For people: one line of totals, and one for each reason why something is not trained on."""
        said = [
            f"{self.kept} of {self.read} samples, {self.tokens} tokens, {self.loss_tokens} of them the target's own",
            *([f"{self.truncated} were cut at the end"] if self.truncated else []),
            *([f"{self.too_short} were left out: too few tokens of the target's own"] if self.too_short else []),
        ]
        said += [f"{count} were left out: {reason}" for reason, count in sorted(self.refused.items())]
        said += [f"{count} turns are context only: {reason}" for reason, count in sorted(self.turns_left_out.items())]
        if self.retokenized:
            said.append(f"{self.retokenized} are a tokenizer's reading of the target's text, not its own tokens")
        return said


class Samples:
    """Samples by index, read from disk as they are asked for (a :class:`dflash.training.batch.SampleSet`)."""

    def __init__(self, directory: Path) -> None:
        """Open what :func:`load_samples` kept. Raises :class:`TokenStoreError`."""
        self._store = TokenStore(directory)
        try:
            self.counts = SampleCounts.model_validate(self._store.said.get("counts"))
        except ValidationError:
            raise TokenStoreError(f"{directory} says no counts; remove the directory, it is made again") from None

    @property
    def directory(self) -> Path:
        return self._store.directory

    @property
    def sha256(self) -> str:
        """Of all tokens, marks and borders: what features of these samples depend on."""
        return self._store.sha256

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return self._store.lengths

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Sample:
        """:class:`IndexError` outside of 0…len − 1, so that iterating ends."""
        ids, written = self._store.read(index)
        return Sample(index, torch.from_numpy(ids), torch.from_numpy(written))


def load_samples(
    data: DataSection,
    tokenizer: Any,
    *,
    cache: Path,
    vocab_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Samples:
    """The samples of ``data``: those in ``cache``, or tokenised now and kept there.

    ``tokenizer`` is the target's (transformers, fast), ``vocab_size`` the rows of its embedding. ``progress`` counts
    bytes of each file and rows of each data set, in turn. Several processes get the same samples; one of them should
    go first, or each does the work. Raises :class:`DataError` for a line that is none and for data of another target,
    :class:`dflash.prompts.ThinkingError` for chats without ``data.thinking``, :class:`TokenStoreError`.
    """
    sources = [file_source(path) for path in data.files]
    sources += [dataset_source(name, data.split) for name in data.datasets]
    key = _key(data, sources, tokenizer, vocab_size)
    directory = cache / f"samples-{key[:32]}"
    if not directory.is_dir():
        with token_store.writing(directory) as writer:
            _Reading(data, tokenizer, vocab_size, writer, progress).read(sources)
    return Samples(directory)


def _key(data: DataSection, sources: Sequence[Source], tokenizer: Any, vocab_size: int) -> str:
    parts = {
        "version": VERSION,
        "sources": [source.digest for source in sources],
        "tokenizer": _tokenizer_digest(tokenizer),
        "thinking": data.thinking,
        "max_length": data.max_length,
        "min_loss_tokens": data.min_loss_tokens,
        "vocab_size": vocab_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str:
    """Of the vocabulary, how it is applied, and the template; not of padding and truncation, which calls set."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    content = json.dumps([backend, tokenizer.chat_template, tokenizer.eos_token], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class _Reading:
    """One pass over all sources into a store."""

    def __init__(
        self,
        data: DataSection,
        tokenizer: Any,
        vocab_size: int,
        writer: Writer,
        progress: Callable[[int, int], None],
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._writer = writer
        self._progress = progress
        self._thinking = data.thinking
        """The one mode of all lines that say theirs."""
        self._totals: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()

    def read(self, sources: Sequence[Source]) -> None:
        for source in sources:
            lines = source.read(lambda done, size=source.size: self._progress(done, size))  # type: ignore[misc]
            checked = self._checked(lines)
            while batch := list(islice(checked, LINES_AT_ONCE)):
                self._keep_all(batch)
        counts = SampleCounts(
            refused=dict(self._refused),
            turns_left_out=dict(self._turns),
            **{
                name: self._totals[name]
                for name in ("read", "kept", "truncated", "too_short", "retokenized", "tokens", "loss_tokens")
            },
        )
        if not counts.kept:
            raise DataError(
                f"{', '.join(source.name for source in sources)}: no sample is left to train on; "
                f"{'; '.join(counts.lines())}"
            )
        self._writer.said["counts"] = counts.model_dump()

    def _checked(self, lines: Iterator[tuple[str, Line]]) -> Iterator[tuple[str, Line]]:
        """The lines, each of them fit for this target and in this thinking mode."""
        decoded = 0
        for place, line in lines:
            if isinstance(line, Chat) and self._data.thinking is None:
                raise ThinkingError(f"{place}: is a chat, and data.thinking is not given; say true or false")
            if isinstance(line, ExactIds):
                self._require_own(place, line)
                if line.response is not None and decoded < DECODED:
                    self._require_same_text(place, line)
                    decoded += 1
            yield place, line

    def _require_own(self, place: str, line: ExactIds) -> None:
        if line.thinking is None:
            return
        if self._thinking is None:
            self._thinking = line.thinking
        if line.thinking != self._thinking:
            wanted = "data.thinking is" if self._data.thinking is not None else "lines before it with thinking"
            raise DataError(
                f"{place}: was written with thinking {_switch(line.thinking)}, and {wanted} {_switch(self._thinking)}; "
                f"regenerate the data in the mode that is served"
            )

    def _require_same_text(self, place: str, line: ExactIds) -> None:
        """Ids of another tokenizer are often in range, and then read as some other text."""
        known = all(token < self._vocab_size for token in line.response_ids)  # those that are not are named later
        read = {self._tokenizer.decode(line.response_ids, skip_special_tokens=skip) for skip in (False, True)}
        if known and line.response not in read:
            raise DataError(
                f"{place}: its response_ids read {min(read)[:60]!r} with this target's tokenizer, and its response "
                f"{str(line.response)[:60]!r}; was the file written with another model?"
            )

    def _keep_all(self, batch: Sequence[tuple[str, Line]]) -> None:
        """Marked documents in the order of the lines; texts are tokenised together."""
        found: list[Marked | UntrainableError | list[Piece]] = [self._found(line) for _, line in batch]
        encoded = iter(encode([one for one in found if isinstance(one, list)], self._tokenizer))
        for (place, line), one in zip(batch, found, strict=True):
            self._totals["read"] += 1
            marked = next(encoded) if isinstance(one, list) else one
            if isinstance(marked, UntrainableError):
                self._refused[str(marked)] += 1
                continue
            kept = self._keep(place, marked)
            self._totals["retokenized"] += kept and isinstance(line, ExactIds) and line.retokenized

    def _found(self, line: Line) -> Marked | UntrainableError | list[Piece]:
        try:
            if isinstance(line, ExactIds):
                start = len(line.prompt_ids)
                return Marked(line.prompt_ids + line.response_ids, [(start, start + len(line.response_ids))])
            if not isinstance(line, Chat):
                return pair_pieces(line)
            pieces, left_out = chat_pieces(line.messages, self._tokenizer, thinking=bool(self._data.thinking))
            self._turns += left_out
            return pieces
        except UntrainableError as error:
            return error

    def _keep(self, place: str, marked: Marked) -> bool:
        """Whether the document, cut to length, has enough that the target wrote."""
        largest = max(marked.ids, default=0)
        if largest >= self._vocab_size:
            raise DataError(
                f"{place}: has token {largest}, and the target has {self._vocab_size} rows; was it written for another "
                f"model?"
            )
        length = min(len(marked.ids), self._data.max_length)
        spans = [(start, min(end, length)) for start, end in marked.spans if start < length]
        loss_tokens = sum(end - start for start, end in spans)
        if loss_tokens < self._data.min_loss_tokens:
            self._totals["too_short"] += 1
            return False
        self._writer.add(marked.ids[:length], spans)
        self._totals["kept"] += 1
        self._totals["truncated"] += length < len(marked.ids)
        self._totals["tokens"] += length
        self._totals["loss_tokens"] += loss_tokens
        return True


def _switch(thinking: bool) -> str:
    return "on" if thinking else "off"
