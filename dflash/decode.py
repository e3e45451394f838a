"""Speculative decoding with the target verifying: the acceptance that serving has, on dense and hybrid targets.

One text at a time: the prefill gives the first token, and then each round drafts a block behind the last known token,
runs the target over the block, and commits the drafts that the sampler lets stand with the target's own token behind
them. The drafter sees the target's states of committed tokens strictly before the anchor; each is projected to keys and
values once. Those states, which are also the taps of the resulting text, come from the verification pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.batch import DraftError, Text, ranks_of
from dflash.drafter import Drafter
from dflash.errors import DFlashError
from dflash.masks import layer_masks
from dflash.metrics import Round, judge
from dflash.rollback import RollbackCache, RoomyLayer
from dflash.sampling import Sampler
from dflash.target import Target

STEPS = 3
"""Plain one-token steps of the target timed behind each text."""


class VerifyError(DFlashError):
    """The target's logits are not finite."""


@dataclass(frozen=True)
class Times:
    """Mean seconds of a draft, of a verification with its rollback, and of a plain one-token step of the target.

    ``None`` where there was none. The first of each kind in a run is left out when there are others: it pays for
    kernels that are compiled or loaded. A draft includes the projection of the taps the round before committed.
    """

    draft: float | None
    verify: float | None
    step: float | None
    drafts: int
    verifications: int
    steps: int


@dataclass(frozen=True)
class Decoding:
    """``texts`` with the taps met on the way, on the CPU; ``rounds`` by text and anchor."""

    texts: list[Text]
    rounds: list[Round]
    times: Times


@dataclass
class Stopwatch:
    """Durations by name; a CUDA ``device`` has finished its work at both ends of each."""

    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"draft": [], "verify": [], "step": []})

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[name].append(self._now() - started)

    def times(self) -> Times:
        means = {}
        for name, values in self.seconds.items():
            kept = values[1:] or values
            means[name] = sum(kept) / len(kept) if kept else None
        counts = {name: len(values) for name, values in self.seconds.items()}
        return Times(**means, drafts=counts["draft"], verifications=counts["verify"], steps=counts["step"])

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def decode(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    max_new_tokens: int,
    end: frozenset[int],
    sampler: Sampler,
    max_blocks: int | None,
    progress: Callable[[int, int], None],
) -> Decoding:
    """Decode each prompt (id, token ids) to ``max_new_tokens``, a token of ``end``, or ``max_blocks`` rounds.

    Greedy rounds are those of :func:`dflash.replay.replay` over the target's greedy completions, except that a
    completion which ``max_blocks`` stopped has no right tokens behind its last round. A sampled draft's rank is still
    its right token's place in the drafter's order. ``progress(done, total)`` counts completion tokens; what a text
    leaves unused is taken off the total. Raises :class:`dflash.batch.DraftError`, :class:`VerifyError` and
    :class:`dflash.rollback.RollbackError`.
    """
    watch = Stopwatch(target.device)
    texts: list[Text] = []
    rounds: list[Round] = []
    done, total = 0, len(prompts) * max_new_tokens

    def advanced(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    for id, prompt in prompts:
        session = Session(drafter, target, id, prompt, room=max_new_tokens)
        rounds += _decode_text(session, sampler, max_new_tokens, end, max_blocks, watch, advanced)
        texts.append(session.text())
        total -= max_new_tokens - (len(session.tokens) - len(prompt))
        progress(done, total)
        _time_steps(session, watch)
    return Decoding(texts, rounds, watch.times())


class Session:
    """One text being decoded: its tokens, the target's cache, the drafter's keys and values, and the taps so far.

    ``logits`` [1, V] are the target's behind the prompt, ``cache`` is its cache. Once a first token is appended to
    ``tokens``, the last token is the anchor of the next block and the only one that the target has not read.
    """

    @torch.inference_mode()
    def __init__(self, drafter: Drafter, target: Target, id: str, prompt: Sequence[int], *, room: int) -> None:
        """Read a non-empty ``prompt``; ``room`` is how many tokens are expected behind it."""
        room += len(prompt) + drafter.config.block_size + STEPS
        self.id = id
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self._drafter = drafter
        self._target = target
        self.cache = RollbackCache(target, room=room)
        self._context = [RoomyLayer(room) for _ in drafter.layers]
        self._taps: list[Tensor] = []  # [n, K·H] each, of all tokens that the target has read
        self._block = torch.empty(0)  # [B, K·H], taps of the block under verification
        self.logits = self.read(prompt)
        self._feed(self._taps[0])

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Run the target over ``ids``, which stay in its cache; its logits [1, V] behind the last of them."""
        with self._tapped() as taps:
            hidden = self.cache.extend(torch.tensor([list(ids)]))
        self._taps.append(taps())
        return self._finite(self._target.logits(hidden[:, -1]))

    @torch.inference_mode()
    def draft(self) -> tuple[Tensor, Tensor]:
        """Hidden states [B-1, H] and logits [1, B-1, V] of slots 1…B-1 of a block at the anchor.

        Raises :class:`dflash.batch.DraftError` where they are not finite.
        """
        config, device = self._drafter.config, self._target.device
        anchor = len(self.tokens) - 1
        if self._context[0].get_seq_length() < anchor:
            self._feed(self._taps[-1])
        ids = torch.tensor([[self.tokens[-1]] + (config.block_size - 1) * [config.mask_token_id]], device=device)
        positions = torch.arange(anchor, anchor + config.block_size, device=device)[None]
        masks = layer_masks(config, positions[:, :1], anchor)
        blocks = self._target.embed(ids).to(self._drafter.fc.weight.dtype)
        hidden: Tensor = self._drafter(blocks, positions, [layer.key_value for layer in self._context], masks)[:, 1:]
        if not hidden.isfinite().all():
            raise DraftError(
                f"prompt {self.id}: the drafter's output at position {anchor} is not finite; look for NaN in the "
                f"target's weights or overflow in the dtype"
            )
        return hidden[0], self._target.logits(hidden)

    @torch.inference_mode()
    def verify(self, drafted: Sequence[int]) -> Tensor:
        """The target's logits [1, B, V] behind the anchor and each of B-1 drafts; call :meth:`commit` next."""
        with self._tapped() as taps:
            hidden = self.cache.propose(torch.tensor([[self.tokens[-1], *drafted]]))
        self._block = taps()
        return self._finite(self._target.logits(hidden))

    @torch.inference_mode()
    def commit(self, accepted: int, following: Sequence[int]) -> None:
        """Append ``following``, of which the first ``accepted`` are drafts; the target forgets the other drafts."""
        self.cache.keep(1 + accepted)
        self._taps.append(self._block[: 1 + accepted])
        self.tokens += following

    def text(self) -> Text:
        """The text with the taps of all its tokens; the target reads the last one for that if it has not yet."""
        unread = self.tokens[self.cache.length :]
        if unread:
            self.read(unread)
        return Text(self.id, list(self.tokens), self.prompt_length, torch.cat(self._taps).cpu())

    @torch.inference_mode()
    def ranks(self, hidden: Tensor, right: Tensor) -> Tensor:
        """Ranks [B-1] of the tokens ``right`` [B-1] in the orders that a block's ``hidden`` [B-1, H] gives.

        The head runs over one block, as it did for the draft: in another shape it would round otherwise, and a greedy
        draft could be another token than the one of rank 0.
        """
        logits = self._target.logits(hidden[None])[0].float()
        return ranks_of(right.to(logits.device), logits)

    def _feed(self, taps: Tensor) -> None:
        """Append the drafter's keys and values of committed tokens, whose ``taps`` [n, K·H] it has not had."""
        weight = self._drafter.fc.weight
        start = self._context[0].get_seq_length()
        positions = torch.arange(start, start + len(taps), device=weight.device)
        context = self._drafter.project_context(taps.to(weight)[None])
        for layer, (keys, values) in zip(self._context, self._drafter.context_kv(context, positions), strict=True):
            layer.update(keys, values)

    @contextmanager
    def _tapped(self) -> Iterator[Callable[[], Tensor]]:
        """Collect the taps of one pass; the function yielded joins them, [n, K·H], once the pass is over."""
        parts: dict[int, Tensor] = {}
        with self._target.tapped(self._drafter.config.target_layer_ids, parts.__setitem__):
            yield lambda: torch.cat([parts[place][0] for place in sorted(parts)], dim=-1)

    def _finite(self, logits: Tensor) -> Tensor:
        if not logits.isfinite().all():
            weight = self._target.spoiled_weight()
            why = (
                f"its weight {weight} holds NaN or infinity"
                if weight
                else "its weights are finite: the dtype overflows"
            )
            raise VerifyError(
                f"prompt {self.id}: the target's logits behind position {len(self.tokens) - 1} are not finite; {why}"
            )
        return logits


@dataclass(frozen=True)
class _Draft:
    """A block as it was drafted: ``hidden`` [B-1, H] gives the ranks of the right tokens once they are known."""

    anchor: int
    drafted: list[int]
    hidden: Tensor


def _decode_text(
    session: Session,
    sampler: Sampler,
    max_new_tokens: int,
    end: frozenset[int],
    max_blocks: int | None,
    watch: Stopwatch,
    advanced: Callable[[int], None],
) -> list[Round]:
    """Decode ``session`` to its end and judge its rounds; ``advanced(n)`` is told of each n tokens."""
    last = session.prompt_length + max_new_tokens
    session.tokens.append(int(sampler.sample(session.logits)))
    advanced(1)
    drafts: list[_Draft] = []
    while len(session.tokens) < last and session.tokens[-1] not in end:
        if max_blocks is not None and len(drafts) == max_blocks:
            break
        with watch.time("draft"):
            hidden, draft_logits = session.draft()
            drafted = sampler.draft(draft_logits)
            tokens = drafted[0].tolist()
        drafts.append(_Draft(len(session.tokens) - 1, tokens, hidden))
        with watch.time("verify"):
            verdict = sampler.verify(drafted, draft_logits, session.verify(tokens))
            accepted = int(verdict.accepted)
            following = _to_the_end([*tokens[:accepted], int(verdict.token)], last - len(session.tokens), end)
            session.commit(min(accepted, len(following)), following)
        advanced(len(following))
    return _judged(session, drafts)


def _to_the_end(tokens: list[int], left: int, end: frozenset[int]) -> list[int]:
    """``tokens`` up to the first that ends the text, and ``left`` at most."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: min(stop, left)]


def _judged(session: Session, drafts: Sequence[_Draft]) -> list[Round]:
    """The rounds, now that the tokens behind each block are known; slots beyond the end have none."""
    rounds = []
    for one in drafts:
        slots = len(one.drafted)
        following = session.tokens[one.anchor + 1 : one.anchor + 2 + slots]
        right = torch.tensor((following + slots * [0])[:slots])
        rounds.append(judge(session.id, one.anchor, one.drafted, session.ranks(one.hidden, right).tolist(), following))
    return rounds


def _time_steps(session: Session, watch: Stopwatch) -> None:
    """Time the target writing on alone, as it would without a drafter. The session is of no use behind this."""
    token = session.tokens[-1]
    for _ in range(STEPS):
        with watch.time("step"):
            token = int(session.read([token]).float().argmax())
