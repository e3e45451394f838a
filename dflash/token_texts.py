"""What single tokens say, for pages that show a completion token by token. Imports no torch."""

from collections.abc import Iterable
from typing import Any

REPLACEMENT = "\ufffd"


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    r"""The text of each token of ``ids``, in rising order; a part of a character shows its bytes as ``\xe2\x82``."""
    return {token: _text(tokenizer, token) for token in sorted(set(ids))}


def _text(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):  # an id that only the mask has
        return text
    if piece.startswith("▁") and not text.startswith(" "):  # a decoder that drops the space a text begins with
        return f" {text}"
    if REPLACEMENT in text and all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece).decode(errors="backslashreplace")
    return text


def _bytes() -> dict[str, int]:
    """The character that stands for each byte in the vocabulary of a byte-level tokenizer (GPT-2's rule).

    Bytes that print stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes()
