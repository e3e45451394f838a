"""``lossless``: speculative decoding must write what the target writes alone.

In float32 every token must be equal. In bfloat16 a block and a single token go through other kernels, which round
otherwise, and where two tokens are nearly as good as each other the rounding chooses. So at the first difference of a
prompt the target reads the common beginning once more, without a cache: where both tokens are within 0.25 of its best
logit, the difference is a near-tie, and the comparison of that prompt stops there, since what follows answers another
text. A larger margin is no rounding: reports of wrongly kept recurrent states show margins of 0.6 to 2.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.batch import Text
from dflash.report import Check
from dflash.target import Target

NEAR_TIE = 0.25

Logits = Callable[[Sequence[int]], Tensor]
"""The target's logits [V] behind some tokens, read in one pass without a cache."""


@dataclass(frozen=True)
class Difference:
    """The first place where a completion is not the greedy one: ``position`` counts from its first token.

    ``None`` for a token stands for an end of the completion. ``margin`` is the best logit less that of the worse of the
    two tokens, never below the margin of the two best; ``None`` where one completion ended.
    """

    prompt: str
    position: int
    decoded: int | None
    greedy: int | None
    margin: float | None


@dataclass(frozen=True)
class Lossless:
    """``prompts`` are the prompts whose completion is the greedy one to its end.

    The first difference of every other prompt is in ``near_ties`` or in ``differences``.
    """

    check: Check
    prompts: int
    near_ties: list[Difference]
    differences: list[Difference]


def lossless(
    decoded: Sequence[Text],
    greedy: Sequence[Sequence[int]],
    logits: Logits,
    *,
    exact: bool,
    stopped: bool = False,
) -> Lossless:
    """Compare greedily ``decoded`` texts with the completions ``greedy`` of the same prompts.

    ``exact``: the target computes in float32, where no difference is allowed. ``stopped``: decoding was bounded by
    rounds, so a completion may end before the greedy one.
    """
    firsts = [
        _first_difference(text, completion, logits, stopped) for text, completion in zip(decoded, greedy, strict=True)
    ]
    found = [one for one in firsts if one is not None]
    near = [] if exact else [one for one in found if one.margin is not None and one.margin <= NEAR_TIE]
    wrong = [one for one in found if one not in near]
    return Lossless(_check(wrong, near, len(decoded), exact), len(decoded) - len(found), near, wrong)


def read_again(target: Target) -> Logits:
    """The logits of ``target`` for :func:`lossless`: a teacher-forced pass over all tokens, on its device."""

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)], device=target.device)
        row: Tensor = target.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        return row.float()

    return logits


def _first_difference(text: Text, greedy: Sequence[int], logits: Logits, stopped: bool) -> Difference | None:
    decoded = text.tokens[text.prompt_length :]
    shorter = min(len(decoded), len(greedy))
    position = next((place for place in range(shorter) if decoded[place] != greedy[place]), shorter)
    if position == len(greedy) == len(decoded) or (stopped and position == len(decoded)):
        return None
    if position == shorter:
        mine = decoded[position] if position < len(decoded) else None
        theirs = greedy[position] if position < len(greedy) else None
        return Difference(text.id, position, mine, theirs, None)
    row = logits(text.tokens[: text.prompt_length + position])
    worse = min(float(row[decoded[position]]), float(row[greedy[position]]))
    return Difference(text.id, position, decoded[position], greedy[position], float(row.max()) - worse)


def _check(wrong: Sequence[Difference], near: Sequence[Difference], prompts: int, exact: bool) -> Check:
    """float32 counts the prompts that differ; bfloat16 measures the largest margin at a first difference."""
    margins = [one.margin for one in (*wrong, *near) if one.margin is not None]
    ended = sum(one.margin is None for one in wrong)
    if exact:
        measured: float | int | str = len(wrong)
    else:
        measured = f"{ended} ended elsewhere" if ended else round(max(margins, default=0.0), 4)
    same = prompts - len(wrong) - len(near)
    said = f"{same} of {prompts} completions are the target's own greedy ones to the end"
    if near:
        said += f"; the comparison of {len(near)} stopped at a near-tie: {', '.join(_place(one) for one in near[:5])}"
        said += f" and {len(near) - 5} more" if len(near) > 5 else ""
    if wrong:
        said += (
            f"; first difference of {_place(wrong[0])}: {_word(wrong[0].decoded)} decoded, {_word(wrong[0].greedy)} "
            f"greedily: the verification does not go on from the state that the target would have; look at the "
            f"roll-back of keys, values and recurrent states"
        )
    return Check(
        name="lossless",
        status="fail" if wrong else "pass",
        measured=measured,
        limit=0 if exact else NEAR_TIE,
        explanation=said,
    )


def _place(one: Difference) -> str:
    margin = "" if one.margin is None else f" (margin {one.margin:.3f})"
    return f"prompt {one.prompt} at token {one.position}{margin}"


def _word(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
