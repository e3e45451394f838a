"""``rounds.jsonl``: the rounds behind a report, one a line. Imports no torch."""

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dflash.errors import DFlashError
from dflash.metrics import Round, by_prompt
from dflash.report import Report


class RoundsError(DFlashError):
    """A file of rounds cannot be read, or is not of the report it lies beside."""


def write_rounds(path: Path, rounds: Iterable[Round]) -> None:
    """Write one line a round."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(one.to_dict()) + "\n" for one in rounds)


def read_rounds(path: Path, report: Report) -> list[Round]:
    """The rounds of ``report``, in their order; none where a server gave only its totals.

    Raises :class:`RoundsError` when a line is damaged, or when the rounds are not those that the report counted.
    """
    rounds: list[Round] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                rounds.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        raise RoundsError(f"{path}: cannot be read ({error.strerror}); expected the rounds of a report") from None
    if rounds or report.settings.mode != "served":
        _require_of_report(path, rounds, report)
    return rounds


_ROUND = TypeAdapter(Round)
_MEND = "copy it again from where it was measured, or take it away for a page without rounds"


def _parse(line: bytes, place: str) -> Round:
    try:
        return _ROUND.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RoundsError(f"{place}: {f'{key}: ' if key else ''}{first['msg']}; {_MEND}") from None


def _require_of_report(path: Path, rounds: list[Round], report: Report) -> None:
    slots = report.settings.block_size - 1
    told = {one.id: (one.rounds, one.tau) for one in report.prompts if one.rounds}
    found = {prompt: (count, advance / count) for prompt, (advance, count) in by_prompt(rounds).items()}
    for prompt in told | found:
        ours, theirs = found.get(prompt), told.get(prompt)
        if ours is None or theirs is None or ours[0] != theirs[0] or abs(ours[1] - (theirs[1] or 0)) > 1e-9:
            raise RoundsError(
                f"{path}: prompt {prompt!r} has {ours[0] if ours else 'no'} rounds here and "
                f"{theirs[0] if theirs else 'none'} in the report, or another τ; {_MEND}"
            )
    completions = {one.id: one.token_ids for one in report.prompts}
    starts: dict[str, int] = {}
    expected: dict[str, int] = {}
    for one in rounds:
        start = starts.setdefault(one.prompt, one.anchor)
        place = one.anchor - start
        right = completions[one.prompt][place + 1 : place + 1 + slots]
        fits = len(one.drafted) == len(one.right) == len(one.rank_of_right) == slots
        if not fits or one.anchor != expected.get(one.prompt, start) or list(one.right[: len(right)]) != right:
            raise RoundsError(
                f"{path}: the round of prompt {one.prompt!r} at {one.anchor} does not fit the report's completion; "
                f"{_MEND}"
            )
        expected[one.prompt] = one.anchor + one.advance
