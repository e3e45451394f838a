"""Which tokens of a chat the target wrote, as it would have written them when served. Imports no torch.

A turn of the assistant is trained on only where the whole chat, as the template renders it, begins with exactly what
the target is asked with before that turn (the chat up to there and the generation prompt in the chosen thinking mode)
and goes on with exactly what the template makes of the turn. Templates rewrite earlier turns (Qwen3 and Qwen3.5 drop
the thoughts of all but the last one); such a turn fails the comparison, stays as context, and is counted.

What the target reads and what it writes are tokenised apart: served, it begins a token where its part begins.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.errors import DFlashError
from dflash.training.lines import Pair, Turn

UNASKED = "nothing is asked before the turn"
REWRITTEN = "the template rewrites the turn"
OTHER_MODE = "the template writes the turn otherwise than it asks for it in this thinking mode"
NO_THOUGHT = "thinking is on and the turn has no thought"
_EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>")


class UntrainableError(DFlashError):
    """A sample has no token that may be trained on. The message is the reason, the same for all such samples."""


@dataclass(frozen=True)
class Piece:
    """A part of a document's text; ``written`` by the target, up to the end token of its turn, or read by it."""

    text: str
    written: bool
    turn: bool = True
    """Of a chat: ends with the template's end of turn. A raw text has no template and no end."""


@dataclass(frozen=True)
class _Seam:
    """How a piece is tokenised: with the ``special`` tokens before a text, or as it reads ``behind`` another."""

    special: bool = False
    behind: str = ""


@dataclass(frozen=True)
class Marked:
    """A document: ``ids``, and the half-open ``spans`` of them that the target wrote, ascending."""

    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)


def chat_pieces(turns: Sequence[Turn], tokenizer: Any, *, thinking: bool) -> tuple[list[Piece], Counter[str]]:
    """The chat up to its last assistant turn in pieces, and the assistant turns left out, counted by reason.

    Raises :class:`UntrainableError` when no turn can be trained on.
    """
    last = max((place for place, turn in enumerate(turns) if turn.role == "assistant"), default=None)
    if last is None:
        raise UntrainableError("no assistant turn")
    chat = [turn.model_dump(exclude_none=True) for turn in turns[: last + 1]]
    whole = _render(chat, tokenizer, thinking)
    pieces: list[Piece] = []
    left_out: Counter[str] = Counter()
    cut = 0
    for place, turn in enumerate(chat):
        if turn["role"] != "assistant":
            continue
        asked = _render(chat[:place], tokenizer, thinking, ask=True) if place else ""
        answered = _render(chat[: place + 1], tokenizer, thinking)
        reason = _reason(whole, asked, answered, cut, thinking)
        if reason is not None:
            left_out[reason] += 1
            continue
        pieces += [Piece(whole[cut : len(asked)], written=False), Piece(whole[len(asked) : len(answered)], True)]
        cut = len(answered)
    if not pieces:
        raise UntrainableError(left_out.most_common(1)[0][0])
    return pieces, left_out


def pair_pieces(pair: Pair) -> list[Piece]:
    """A raw prompt and its continuation. Raises :class:`UntrainableError` for an empty response."""
    if not pair.response:
        raise UntrainableError("empty response")
    return [Piece(pair.prompt, written=False, turn=False), Piece(pair.response, written=True, turn=False)]


def encode(documents: Sequence[Sequence[Piece]], tokenizer: Any) -> list[Marked | UntrainableError]:
    """The tokens of each document, in few calls for all, or why there is none that may be trained on.

    ``tokenizer`` is a fast transformers tokenizer. Raw prompts get the special tokens that it puts before a text; the
    space that some put before every text (sentencepiece's) stands before the first piece of a document only.
    """
    ends = special_ids(tokenizer)
    spaced = _puts_a_space(tokenizer)

    def seam(place: int, piece: Piece) -> _Seam:
        if not place:
            return _Seam(special=not piece.turn)
        if not spaced:
            return _Seam()
        # a question comes behind an end of turn; an answer behind text, of which a line feed merges with nothing
        return _Seam(behind="\n" if piece.written or tokenizer.eos_token is None else tokenizer.eos_token)

    texts: dict[_Seam, list[str]] = {}
    for pieces in documents:
        for place, piece in enumerate(pieces):
            texts.setdefault(seam(place, piece), []).append(piece.text)
    encoded = {kind: iter(_encode(some, tokenizer, kind)) for kind, some in texts.items()}
    return [
        _marked([(piece, next(encoded[seam(place, piece)])) for place, piece in enumerate(pieces)], ends, tokenizer)
        for pieces in documents
    ]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that stand for no text, the end of a turn among them."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(special if tokenizer.eos_token_id is None else special | {tokenizer.eos_token_id})


def _reason(whole: str, asked: str, answered: str, cut: int, thinking: bool) -> str | None:
    """Why a turn is left out: how the chat is rendered up to it and with it, against the ``whole``.

    ``cut`` is where the last trained turn ends; what is asked behind it repeats that turn.
    """
    if not asked:
        return UNASKED
    if not whole.startswith(answered) or len(asked) < cut:
        return REWRITTEN
    if not answered.startswith(asked) or len(answered) == len(asked):
        return OTHER_MODE
    if thinking and _EMPTY_THOUGHT.match(answered, len(asked)):
        return NO_THOUGHT
    return None


def _render(chat: list[dict[str, Any]], tokenizer: Any, thinking: bool, *, ask: bool = False) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask, enable_thinking=thinking)
        )
    except Exception as error:  # a template raises what it likes, and jinja its own
        said = " ".join(str(error).split())[:100]
        raise UntrainableError(f"the template refuses the chat ({said})") from None


def _encode(texts: list[str], tokenizer: Any, seam: _Seam) -> list[list[int] | None]:
    """None for a text whose tokens merge with what it was put behind."""

    def ids(texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = tokenizer(
            texts,
            add_special_tokens=seam.special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return encoded

    if not seam.behind:
        return list(ids(texts))
    (before,) = ids([seam.behind])
    return [
        one[len(before) :] if one[: len(before)] == before else None
        for one in ids([seam.behind + text for text in texts])
    ]


def _puts_a_space(tokenizer: Any) -> bool:
    """Whether a text's tokens begin with a space that the text has not."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return " " in tokenizer.decode(ids + ids).strip()


def _marked(
    pieces: list[tuple[Piece, list[int] | None]], ends: frozenset[int], tokenizer: Any
) -> Marked | UntrainableError:
    """The target's part of a turn goes up to its first end token; what stands behind that it never writes."""
    marked = Marked([])
    for piece, ids in pieces:
        if ids is None:
            return UntrainableError("a part begins with a line feed that this tokenizer merges with the one before it")
        start = len(marked.ids)
        marked.ids.extend(ids)
        if not piece.written:
            continue
        length = len(ids)
        if piece.turn:
            length = next((place + 1 for place in reversed(range(len(ids))) if ids[place] in ends), 0)
            behind = ids[length:]
            if not length or (behind and tokenizer.decode(behind).strip()):
                return UntrainableError("the template ends a turn with no special token, so where it ends is not known")
            length = ids.index(ids[length - 1]) + 1  # a content may hold the end token as well: the target stops there
        marked.spans.append((start, start + length))
    return marked
