"""τ of a running server, while a prompt set passes through it (``--mode served``).

What a round is, the server says: SGLang in ``meta_info`` of each answer, vLLM in each answer when it runs with
``--per-request-spec-decode-metrics``, else in the counters of ``/metrics``, read before and after each prompt, which
then have to be nobody else's. Two readings of it are kept apart:

- ``tau`` is the acceptance length as everywhere in the project: (tokens - 1) / rounds of a completion. The first token
  came from the prefill, and a last round that reaches over the end counts with what it emitted.
- ``tau_raw`` is the server's own figure. SGLang's (completion_tokens / spec_verify_ct) counts the prefill's token, so
  it is larger by 1 / rounds; vLLM's (1 + accepted / drafts) leaves it out but counts drafts accepted beyond the end.

Figures by position come from the server's histogram or counters, where it has them, and are of the second kind: a draft
accepted beyond the end is accepted. An own drafter's slots, their ranks and random anchors a server does not show.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash.completions import CONCURRENCY, TIMEOUT, Asker, Completion, Server, ServerError, at
from dflash.http_client import Http, StatusError, each
from dflash.metrics import NoRoundsError
from dflash.report import Check, Metrics, Tau
from dflash.vllm_counters import look, settled

TRIES = 3
"""How often a prompt is measured whose counters show other traffic."""

MOST_SLOTS = 1024
"""More drafts in a round than this are no figure of a block's."""

CORRECT_DRAFTS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED_DRAFTS = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
DRAFTS_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""SGLang's names for one thing, newest first: drafts accepted, drafts made, rounds by drafts accepted; no bonus."""
VLLM_STATISTICS = ("metrics", "speculative_decoding")
"""Where vLLM's answer says what its rounds were."""
FACTS = (
    "version",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "attention_backend",
    "speculative_draft_attention_backend",
    "disable_radix_cache",
    "tp_size",
)
"""What τ may depend on, of SGLang's ``/server_info``."""


@dataclass(frozen=True)
class ServedPrompt:
    """One prompt's completion and rounds. ``tokens`` is the server's own count, ``ids`` may be re-tokenised text.

    ``raw`` is Σ advance and rounds as the server counts them. ``accepted`` and ``drafted`` are its numbers of draft
    tokens, ``by_accepted`` [B] its rounds by accepted drafts 0…B-1; ``None`` where it does not say.
    """

    id: str
    ids: list[int]
    tokens: int
    rounds: int
    raw: tuple[int, int]
    accepted: int | None
    drafted: int | None
    by_accepted: list[int] | None
    retokenized: bool = False

    @property
    def tau(self) -> float | None:
        """(tokens - 1) / rounds; ``None`` without a round."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def tau_raw(self) -> float | None:
        """The server's own figure; ``None`` without a round."""
        return self.raw[0] / self.raw[1] if self.raw[1] else None


@dataclass(frozen=True)
class Served:
    """A prompt set's way through a server. ``facts`` is what the server tells of how it speculates, if anything."""

    server: Server
    prompts: list[ServedPrompt]
    alone: Check
    facts: dict[str, Any]

    @property
    def tau_raw(self) -> float:
        """The server's own figure over all rounds. Raises :class:`~dflash.metrics.NoRoundsError`."""
        advance, rounds = (sum(prompt.raw[part] for prompt in self.prompts) for part in (0, 1))
        return advance / _some(rounds)


def measure_served(
    server: Server,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    tokenizer: Any = None,
    concurrency: int = CONCURRENCY,
    progress: Callable[[int, int], None],
) -> Served:
    """Send each prompt (id, token ids) through ``server``, greedily, and read what its rounds were.

    Several go at once where the server counts by request; where only its counters tell, one at a time, and the check
    ``served-alone`` fails when somebody else's tokens are among them. ``tokenizer`` as for
    :func:`dflash.completions.complete`. Raises :class:`ServerError`, also when the server does not speculate.
    """

    done: list[str] = []
    disturbed: list[str] = []

    async def measure() -> Served:
        async with Http(server.url, timeout=TIMEOUT) as http:
            asker = Asker(http, server, max_new_tokens, ignore_eos, tokenizer)
            read = _of_sglang if server.kind == "sglang" else _of_vllm
            _, first = await asker.ask(prompts[0][1])
            by_request = server.kind == "sglang" or isinstance(at(first, *VLLM_STATISTICS), dict)
            if not by_request:
                await _require_idle(http)

            async def one(prompt: tuple[str, list[int]]) -> ServedPrompt:
                id, tokens = prompt
                if by_request:
                    completion, reply = await asker.ask(tokens)
                    result = read(id, completion, reply)
                else:
                    result, alone = await _by_counters(http, asker, id, tokens, tries=1 if disturbed else TRIES)
                    disturbed.extend([] if alone else [id])
                done.append(id)
                progress(len(done), len(prompts))
                return result

            results = await each(prompts, one, concurrency=concurrency if by_request else 1)
            return Served(server, results, _alone(by_request, disturbed, len(prompts)), await _facts(http, server))

    try:
        return asyncio.run(measure())
    except ServerError as error:
        raise ServerError(f"{error}; {len(done)} of {len(prompts)} prompts were measured") from None


def served_rounds(served: Served) -> dict[str, tuple[int, int]]:
    """Σ advance (the prefill's token left out) and number of rounds of each prompt that has one."""
    return {prompt.id: (prompt.tokens - 1, prompt.rounds) for prompt in served.prompts if prompt.rounds}


def served_metrics(served: Served, *, ci95: tuple[float, float] | None) -> Metrics:
    """The figures a server shows; what it does not show is empty. ``ci95`` is of the pooled τ.

    A round counts as cut where the server accepted more than the completion holds. Raises
    :class:`~dflash.metrics.NoRoundsError`.
    """
    with_rounds = [prompt for prompt in served.prompts if prompt.rounds]
    rounds = _some(sum(prompt.rounds for prompt in with_rounds))
    taus = [(prompt.tokens - 1) / prompt.rounds for prompt in with_rounds]
    by_accepted = _sum_histograms(with_rounds)
    reached = [sum(by_accepted[slot:]) for slot in range(len(by_accepted))]  # [B]: rounds that accepted slot 0…B-1
    return Metrics(
        tau=Tau(
            pooled=sum(prompt.tokens - 1 for prompt in with_rounds) / rounds, macro=sum(taus) / len(taus), ci95=ci95
        ),
        rounds=rounds,
        tokens=sum(prompt.tokens for prompt in with_rounds),
        cut_rounds=sum(
            prompt.rounds + prompt.accepted > prompt.tokens - 1 for prompt in with_rounds if prompt.accepted is not None
        ),
        accepted_by_position=reached[1:],
        acceptance_by_position=[count / reached[0] for count in reached[1:]],
        conditional_by_position=[count / before if before else None for before, count in pairwise(reached)],
        accuracy_by_position=[],
        histogram=by_accepted,
        streak={},
        random_anchor_tau=None,
    )


def _of_sglang(id: str, completion: Completion, reply: Any) -> ServedPrompt:
    """``meta_info`` of /generate, in both generations of its names.

    Source: TokenizerManager._calculate_spec_decoding_metrics of sgl-project/sglang. A request that was never verified
    has no figures there.
    """
    meta = at(reply, "meta_info")
    tokens = _count(meta, ("completion_tokens",))
    tokens = len(completion.ids) if tokens is None else tokens
    rounds = _count(meta, ("spec_verify_ct",))
    if not rounds and tokens > 1:
        raise ServerError(
            "the server does not speculate (no spec_verify_ct above 0 in meta_info of /generate); start SGLang with "
            "--speculative-algorithm DFLASH and the drafter as --speculative-draft-model-path"
        )
    rounds = rounds or 0
    return ServedPrompt(
        id=id,
        ids=completion.ids,
        tokens=tokens,
        rounds=rounds,
        raw=(tokens if rounds else 0, rounds),
        accepted=_count(meta, CORRECT_DRAFTS),
        drafted=_count(meta, PROPOSED_DRAFTS),
        by_accepted=_histogram(meta, DRAFTS_HISTOGRAM, rounds),
        retokenized=completion.retokenized,
    )


def _of_vllm(id: str, completion: Completion, reply: Any) -> ServedPrompt:
    """``metrics.speculative_decoding`` of /v1/completions (SpeculativeDecodingMetrics of vllm-project/vllm)."""
    statistics = at(reply, *VLLM_STATISTICS)
    if not isinstance(statistics, dict) and len(completion.ids) > 1:
        raise ServerError(
            f"an answer has no {'.'.join(VLLM_STATISTICS)}, which others had; is one server behind the URL?"
        )
    if isinstance(statistics, dict):
        for name in ("num_spec_steps", "num_accepted_draft_tokens"):
            if _count(statistics, (name,)) is None:
                raise ServerError(
                    f"{'.'.join(VLLM_STATISTICS)} of an answer has no number {name}, so its rounds cannot be read; "
                    f"start vLLM without --per-request-spec-decode-metrics and they are read from its counters"
                )
    rounds = _count(statistics, ("num_spec_steps",)) or 0
    accepted = _count(statistics, ("num_accepted_draft_tokens",)) or 0
    return _from_drafts(
        id,
        completion,
        reply,
        drafts=rounds,
        accepted=accepted,
        drafted=_count(statistics, ("num_draft_tokens",)) or 0,
        by_accepted=_histogram(statistics, ("acceptance_histogram",), rounds),
    )


def _from_drafts(
    id: str,
    completion: Completion,
    reply: Any,
    *,
    drafts: int,
    accepted: int,
    drafted: int,
    by_accepted: list[int] | None,
) -> ServedPrompt:
    """vLLM counts drafts; a step that had none emits one token and is a round all the same."""
    tokens = _count(at(reply, "usage"), ("completion_tokens",))
    tokens = len(completion.ids) if tokens is None else tokens
    without_draft = max(0, tokens - 1 - drafts - accepted)
    raw = (drafts + accepted, drafts)
    return ServedPrompt(
        id, completion.ids, tokens, drafts + without_draft, raw, accepted, drafted, by_accepted, completion.retokenized
    )


async def _require_idle(http: Http) -> None:
    """The server has just answered us, so it is given a moment to have nothing more to do."""
    counters = await settled(http, await look(http), 0)
    if counters.busy:
        raise ServerError(
            f"server {http.base}: is answering others ({counters.busy} requests running or waiting), and only its "
            f"counters tell of its rounds; measure when it is idle, or start vLLM with "
            f"--per-request-spec-decode-metrics summary"
        )


async def _by_counters(
    http: Http, asker: Asker, id: str, prompt: list[int], *, tries: int
) -> tuple[ServedPrompt, bool]:
    """The prompt between two looks at the counters, and whether they show nothing but it.

    It is measured again when they do not, which also covers a request that had to be sent twice and a restart.
    """
    for _ in range(tries):
        before = await look(http)
        completion, reply = await asker.ask(prompt)
        tokens = _count(at(reply, "usage"), ("completion_tokens",))
        tokens = len(completion.ids) if tokens is None else tokens
        after = await settled(http, before, tokens)
        # a server that was started again counts from zero, and less than nothing happened to no prompt
        slots = [
            max(0, after.by_position[slot] - before.by_position.get(slot, 0)) for slot in sorted(after.by_position)
        ]
        drafts = max(0, after.drafts - before.drafts)
        result = _from_drafts(
            id,
            completion,
            reply,
            drafts=drafts,
            accepted=max(0, after.accepted - before.accepted),
            drafted=max(0, after.drafted - before.drafted),
            by_accepted=[here - further for here, further in zip([drafts, *slots], [*slots, 0], strict=True)],
        )
        alone = not before.busy and not after.busy and after.generated - before.generated == tokens
        alone &= after.drafts >= before.drafts
        if alone:
            break
    return result, alone


def _alone(by_request: bool, disturbed: Sequence[str], prompts: int) -> Check:
    if by_request:
        return Check(
            name="served-alone",
            status="pass",
            measured="counted by request",
            limit=None,
            explanation="the server counts the rounds of each request by itself, so other traffic is not in them",
        )
    return Check(
        name="served-alone",
        status="fail" if disturbed else "pass",
        measured=len(disturbed),
        limit=0,
        explanation=f"{len(disturbed)} of {prompts} prompts with other tokens than theirs in the server's counters"
        + (f" ({', '.join(disturbed[:5])}); stop its other traffic and measure again" if disturbed else ""),
    )


async def _facts(http: Http, server: Server) -> dict[str, Any]:
    """What of ``FACTS`` the server tells; SGLang's page has an older name too, vLLM tells its version only."""
    for path in ("/server_info", "/get_server_info") if server.kind == "sglang" else ("/version",):
        try:
            page = await http.get(path)
        except StatusError:
            continue
        found = {name: at(page, name) for name in FACTS}
        return {name: value for name, value in found.items() if isinstance(value, str | int)}
    return {}


def _count(answer: Any, names: Sequence[str]) -> int | None:
    """The number under the first of ``names`` that has one."""
    for name in names:
        value = at(answer, name)
        if type(value) is int and value >= 0:
            return value
    return None


def _histogram(answer: Any, names: Sequence[str], rounds: int) -> list[int] | None:
    """[B] rounds by accepted drafts, if it is one of all the rounds."""
    for name in names:
        value = at(answer, name)
        counts = isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)
        if counts and sum(value) == rounds:
            histogram: list[int] = value
            return histogram
    return None


def _sum_histograms(prompts: Sequence[ServedPrompt]) -> list[int]:
    """[B]: rounds by accepted drafts over all prompts; empty unless every prompt has them and anything was drafted.

    A server may leave the zeros at the end out; how many slots there are then shows in the drafts of a round.
    """
    histograms = [prompt.by_accepted for prompt in prompts if prompt.by_accepted is not None]
    if len(histograms) < len(prompts) or not any(map(sum, histograms)):
        return []
    drafted = [prompt.drafted // prompt.rounds for prompt in prompts if prompt.drafted is not None]
    possible = [slots + 1 for slots in drafted if slots < MOST_SLOTS]
    size = max([len(histogram) for histogram in histograms] + possible)
    return [sum(histogram[place] for histogram in histograms if place < len(histogram)) for place in range(size)]


def _some(rounds: int) -> int:
    if not rounds:
        raise NoRoundsError("no completion is longer than one token, so the server has drafted nothing; use others")
    return rounds
