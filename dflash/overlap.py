"""Prompts that were in the training data, found by shared runs of 13 words. Imports no torch.

The rule is GPT-3's (arXiv 2005.14165, appendix C): lower case, punctuation dropped, runs of 13 words; a text shorter
than that is one run. Words rather than tokens, so that chat templates and tokenizers make no difference. The training
data is either JSON lines with the texts themselves or, where those must not leave the training host, a file of 8-byte
hashes of their runs that :func:`write_grams` made.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DFlashError
from dflash.prompts import ChatPrompt, RawPrompt

WORDS = 13
_LOOKED_AT = 1 << 16
"""Hashes of a file that are looked at to see whether it is sorted."""
_WORD = re.compile(r"\w+")
_TEXT_FIELDS = ("text", "prompt", "completion", "response", "content", "value")
_LIST_FIELDS = ("messages", "conversations")


class TrainingDataError(DFlashError):
    """A file of training texts or of their hashes cannot be read."""


def overlapping(prompts: Sequence[RawPrompt | ChatPrompt], training: Path) -> list[str]:
    """Ids, in their order, of the prompts that share a run of 13 words with a text of ``training``.

    Of a chat the user's turns count: system prompts are shared by design. ``training`` is a ``.npy`` of
    :func:`write_grams` or JSON lines with ``text``, ``prompt`` and ``completion``, or ``messages``. Raises
    :class:`TrainingDataError`.
    """
    wanted = {prompt.id: {gram for text in _texts_of(prompt) for gram in grams(text)} for prompt in prompts}
    every = np.array(sorted(set().union(*wanted.values())), dtype=np.uint64)
    seen = set(_seen(every, training).tolist())
    return [id for id, own in wanted.items() if own & seen]


def grams(text: str) -> list[int]:
    """64-bit hashes of the runs of 13 words of ``text``, one for a shorter text, none for one without a word."""
    words = _WORD.findall(text.lower())
    runs = (words[start : start + WORDS] for start in range(max(1, len(words) - WORDS + 1))) if words else iter(())
    return [int.from_bytes(hashlib.blake2b(" ".join(run).encode(), digest_size=8).digest(), "big") for run in runs]


def write_grams(path: Path, texts: Iterable[str]) -> int:
    """Write the sorted hashes of all runs of ``texts`` as ``.npy``; returns how many there are."""
    hashes = np.unique(np.fromiter((gram for text in texts for gram in grams(text)), dtype=np.uint64))
    with path.open("wb") as file:
        np.save(file, hashes)
    return len(hashes)


def training_texts(path: Path) -> Iterator[str]:
    """The texts of a file of JSON lines, turn by turn. Raises :class:`TrainingDataError` that names the line."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield from _texts_in(_object(line, f"{path}:{number}"), f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingDataError(f"{path}: cannot be read ({error}); expected JSON lines or a .npy of hashes") from None


def _seen(wanted: NDArray[np.uint64], training: Path) -> NDArray[np.uint64]:
    if training.suffix != ".npy":
        asked, found, blank = set(wanted.tolist()), set[int](), True
        for text in training_texts(training):
            found |= asked.intersection(grams(text))
            blank = blank and not text.strip()
        if blank:
            raise TrainingDataError(f"{training}: has no text, so nothing could be found in it; was it cut off?")
        return np.array(sorted(found), dtype=np.uint64)
    try:
        hashes = np.load(training, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TrainingDataError(f"{training}: cannot be read ({error}); write it again with write_grams") from None
    if hashes.dtype != np.uint64 or hashes.ndim != 1 or not len(hashes):
        raise TrainingDataError(f"{training}: holds {hashes.dtype} {list(hashes.shape)}, expected sorted uint64 hashes")
    some = hashes[:: len(hashes) // _LOOKED_AT + 1]
    if bool((some[1:] <= some[:-1]).any()):
        raise TrainingDataError(f"{training}: its hashes are not sorted; write it again with write_grams")
    places = np.searchsorted(hashes, wanted).clip(max=len(hashes) - 1)
    known: NDArray[np.uint64] = wanted[hashes[places] == wanted]
    return known


def _texts_of(prompt: RawPrompt | ChatPrompt) -> list[str]:
    if isinstance(prompt, RawPrompt):
        return [prompt.prompt]
    return [message.content for message in prompt.messages if message.role == "user"]


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TrainingDataError(f"{place}: is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise TrainingDataError(f"{place}: is no JSON object")
    return raw


def _texts_in(raw: dict[str, Any], place: str) -> list[str]:
    turns = [turn for field in _LIST_FIELDS for turn in _objects(raw.get(field))]
    # a turn's content may be a list of parts
    entries = (raw, *turns, *(part for turn in turns for part in _objects(turn.get("content"))))
    texts = [entry[field] for entry in entries for field in _TEXT_FIELDS if isinstance(entry.get(field), str)]
    if not texts:
        raise TrainingDataError(
            f"{place}: has none of {', '.join((*_TEXT_FIELDS[:3], *_LIST_FIELDS))}; expected training texts"
        )
    return texts


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
