"""An evaluation from files to a report, in phases that are announced and timed.

A replay walks greedy completions, a decoding lets the target verify every block, and a served measurement reads what a
running server counted. All three end in the same report.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dflash import checks, completions, served
from dflash.assembly import make_report, prompt_results
from dflash.batch import Text, Vocabulary
from dflash.beside_others import beside_others
from dflash.cache import Cache
from dflash.checkpoints import DrafterCheckpoint, build_drafter
from dflash.checks import Evidence
from dflash.completion_store import Completion
from dflash.config import DrafterConfig, require_mask_not_eos
from dflash.decode import Times, decode
from dflash.drafter import Drafter
from dflash.errors import UsageError
from dflash.hidden_states import CachedTaps, LoadedTaps, TappedText, TapSource, require_positions, target_key
from dflash.latency import Probes
from dflash.lossless import lossless, read_again
from dflash.metrics import DDTREE_NODES, SEED, Round, by_prompt, compare, interval, summarize
from dflash.offload import StreamedTaps, decode_estimate
from dflash.output import whole_directory
from dflash.plots import report_plots, require_matplotlib
from dflash.progress import Phases
from dflash.reference_completions import fitted, loaded_target, reference_completions
from dflash.renderings import ROUNDS, write_renderings
from dflash.replay import Replay, replay
from dflash.report import Check, Metrics, Report, Served
from dflash.request import Inputs, Mode, Request, read_inputs
from dflash.rounds_file import write_rounds
from dflash.sampling import make_sampler
from dflash.target import Target
from dflash.token_texts import token_texts
from dflash.vocabulary import SlicedVocabulary

PHASES: dict[Mode, int] = {"replay": 5, "decode": 5, "served": 2}
"""How many phases :func:`measure` announces."""


def evaluate(request: Request, phases: Phases, *, plots: bool = False) -> Report:
    """Measure, and write ``report.json``, ``rounds.jsonl``, ``report.md`` and ``report.html`` into ``request.output``.

    ``plots``: and the charts as PNG and SVG into ``plots`` there; refused before the measurement without matplotlib.
    The directory appears complete or not at all. A failed check is in the report, not an exception.
    """
    if request.cache is not None and request.cache.resolve().is_relative_to(request.output.resolve()):
        raise UsageError(
            f"--cache {request.cache} lies in --output {request.output}, which comes last; put it elsewhere"
        )
    if plots:
        require_matplotlib()
    with whole_directory(request.output) as directory:
        report, rounds = measure(request, phases)
        (directory / "report.json").write_text(report.to_json(), encoding="utf-8")
        write_rounds(directory / ROUNDS, rounds)
        write_renderings(directory, report, rounds)
        if plots:
            report_plots(report, rounds, directory / "plots")
    return report


def measure(request: Request, phases: Phases) -> tuple[Report, list[Round]]:
    """The report and the rounds behind it (none of a server, which shows only their number); writes no report."""
    request.require_consistent()
    if request.mode == "served":
        return _measure_served(request, phases)
    with beside_others(request, phases) as (chosen, probes):
        return _measure_here(chosen, phases, probes)


@dataclass(frozen=True)
class Measured:
    """One drafter's rounds, the texts they went over with its own taps, and the replay over those.

    ``shortfalls`` are those of the texts' hidden states; ``lossless`` the number of prompts and the check. ``sampled``:
    the rounds are of drawn drafts, so what the replay finds with the likeliest ones is no figure beside theirs.
    """

    texts: list[Text]
    rounds: list[Round]
    replay: Replay
    shortfalls: list[torch.Tensor] | None
    lossless: tuple[int, Check] | None = None
    times: Times | None = None
    sampled: bool = False

    def agreement(self) -> float | None:
        """Share of the completion tokens that are the target's argmax in its teacher-forced pass."""
        if self.shortfalls is None:
            return None
        pairs = zip(self.texts, self.shortfalls, strict=True)
        written = torch.cat([shortfall[text.prompt_length - 1 : -1] for text, shortfall in pairs])
        return float((written == 0).double().mean()) if len(written) else None

    def metrics(self) -> Metrics:
        """All figures of the drafter."""
        seconds = None
        if self.times and self.times.draft and self.times.verify and self.times.step:
            seconds = (self.times.draft, self.times.verify, self.times.step)
        return summarize(
            self.rounds,
            [] if self.sampled else self.replay.random,
            {} if self.sampled else self.replay.trees,
            seed=SEED,
            lossless_prompts=self.lossless[0] if self.lossless else None,
            times=seconds,
        )


def _measure_here(request: Request, phases: Phases, probes: Probes | None) -> tuple[Report, list[Round]]:
    device, dtype = request.torch_device(), request.torch_dtype()
    with phases.phase("tokenizer", "tokenizer"):
        inputs = read_inputs(request)
        server = completions.connect(request.server) if request.server else None
        taps = _tap_source(request)
        _require_fit(request, inputs)

    written_in = "tokens" if server is None else "prompts"
    # in an event loop nothing may block: there the turn is awaited instead
    with phases.phase(
        "reference_completions", "reference completions", unit=written_in, waits=server is None
    ) as progress:
        turn = None if probes is None else partial(probes.turn, phases.say)
        written = [] if request.temperature else reference_completions(request, inputs, server, taps, progress, turn)

    with phases.phase("hidden_states", "target and hidden states") as progress:
        written = fitted(request, taps.facts, written)
        tapped = _tap(request, inputs, written, taps, progress)

    with phases.phase("drafter", "drafter"):
        drafters = [build_drafter(one, device=device, dtype=dtype) for one in inputs.drafters]
        vocabulary = _vocabulary(request, inputs, written, taps)

    with phases.phase("blocks", "blocks", unit="tokens") as progress:
        parts = [_part(progress, place, len(drafters)) for place in range(len(drafters))]
        each = list(zip(drafters, parts, strict=True))
        if request.mode == "decode":
            results = [_decode(request, inputs, written, one, loaded_target(taps), part) for one, part in each]
        else:
            results = [_replay(request, inputs, written, tapped, one, vocabulary, part) for one, part in each]
        ours, theirs = results[0], results[1] if len(results) > 1 else None
        evidence = Evidence(
            checkpoint=inputs.checkpoint,
            reference=inputs.reference,
            drafter=drafters[0],
            vocabulary=vocabulary,
            taps=taps,
            texts=ours.texts,
            shortfalls=ours.shortfalls,
            completions_by=request.server or "target",
            retokenized=sum(one.retokenized for one in written),
            rounds=ours.replay.walk,
            random_rounds=ours.replay.random,
            dtype=dtype,
            seed=SEED,
            overlapping=inputs.left_out,
        )
        found = _config_source(inputs.checkpoint) + _remembered(checks.all_checks(evidence), evidence, taps)
        found += [ours.lossless[1]] if ours.lossless else []
        found += [probes.check()] if probes is not None else []

    report = make_report(
        request,
        inputs,
        taps.facts,
        found,
        phases.timings,
        metrics=ours.metrics(),
        reference_metrics=theirs.metrics() if theirs else None,
        comparison=compare(by_prompt(ours.rounds), by_prompt(theirs.rounds), seed=SEED) if theirs else None,
        prompts=prompt_results(
            ours.texts, by_prompt(ours.rounds), inputs.tokenizer, by_prompt(theirs.rounds) if theirs else None
        ),
        token_texts=token_texts(inputs.tokenizer, _tokens(ours)),
        served_model=server.model if server else None,
        retokenized=evidence.retokenized,
        agreement=ours.agreement(),
    )
    return report, ours.rounds


def _measure_served(request: Request, phases: Phases) -> tuple[Report, list[Round]]:
    assert request.server is not None
    with phases.phase("tokenizer", "tokenizer"):
        inputs = read_inputs(request)
        server = completions.connect(request.server)
        facts = StreamedTaps.open(request.target, kernel="torch").facts
        facts = facts.model_copy(update={"kernel": "the server's", "dtype": "the server's"})

    with phases.phase("served", f"prompts through {server.url}", unit="prompts") as progress:
        result = served.measure_served(
            server,
            list(zip(inputs.ids, inputs.prompts, strict=True)),
            max_new_tokens=request.max_new_tokens,
            ignore_eos=request.ignore_eos,
            tokenizer=inputs.tokenizer,
            progress=progress,
        )
    texts = [
        Text(one.id, prompt + one.ids, len(prompt), torch.empty(0))
        for one, prompt in zip(result.prompts, inputs.prompts, strict=True)
    ]
    totals = served.served_rounds(result)
    metrics = served.served_metrics(result, ci95=interval(totals, seed=SEED))
    report = make_report(
        request,
        inputs,
        facts,
        [
            result.alone,
            *_served_block(metrics, inputs.checkpoint.config.block_size),
            checks.fc_shape(inputs.checkpoint),
            checks.taps_as_reference(inputs.checkpoint.config, None),
            checks.prompt_overlap(inputs.left_out, len(inputs.prompts)),
        ],
        phases.timings,
        metrics=metrics,
        served=Served(
            kind="sglang" if server.kind == "sglang" else "vllm", tau_raw=result.tau_raw, settings=result.facts
        ),
        prompts=prompt_results(texts, totals, inputs.tokenizer),
        served_model=server.model,
        retokenized=sum(one.retokenized for one in result.prompts),
    )
    return report, []


def _tap_source(request: Request) -> CachedTaps:
    """Hidden states of the target from the cache, the loaded target or its streamed layers, opened when needed."""
    device, dtype = request.torch_device(), request.torch_dtype()
    cache = None
    if request.cache is not None:
        key = target_key(request.target, kernel=request.kernel, dtype=dtype, device=device)
        cache = Cache.open(request.cache, key)

    def open_() -> TapSource:
        if request.offload:
            return StreamedTaps.open(request.target, device=device, dtype=dtype, kernel=request.kernel)
        return LoadedTaps(Target.load(request.target, device=device, dtype=dtype, kernel=request.kernel))

    taps = CachedTaps(open_, cache, shortfalls=not request.offload, path=str(request.target))
    if request.offload and request.mode == "decode":
        raise UsageError(
            f"--mode decode with --offload would take {decode_estimate(request.target, request.max_new_tokens)}; "
            f"use --mode replay, which reads each layer once"
        )
    return taps


def _require_fit(request: Request, inputs: Inputs) -> None:
    """Everything that can be said against the drafters and prompts before the target works for them."""
    facts = StreamedTaps.open(request.target, kernel="torch").facts
    for drafter in inputs.drafters:
        facts.require_fit(drafter.config, source=str(drafter.path))
        require_mask_not_eos(drafter.config, facts.eos_token_ids, source=f"eos_token_id of the target {request.target}")
    require_positions(
        inputs.prompts,
        facts.max_position_embeddings,
        path=facts.path,
        new_tokens=request.max_new_tokens,
        names=[f"prompt {id!r}" for id in inputs.ids],
    )


def _tap(
    request: Request,
    inputs: Inputs,
    written: Sequence[Completion],
    taps: CachedTaps,
    progress: Callable[[int, int], None],
) -> list[TappedText]:
    """Hidden states of every text; decoding meets its own on the way and needs none."""
    if request.mode == "decode":
        loaded_target(taps)
        return []
    ids = [prompt + one.ids for prompt, one in zip(inputs.prompts, written, strict=True)]
    return taps.tap(ids, inputs.layer_ids, progress=progress)


def _part(progress: Callable[[int, int], None], place: int, parts: int) -> Callable[[int, int], None]:
    """Progress of the ``place``-th of so many parts of a phase, all as long as this one."""
    return lambda done, total: progress(place * total + done, parts * total)


def _vocabulary(
    request: Request, inputs: Inputs, written: Sequence[Completion], taps: CachedTaps
) -> Target | SlicedVocabulary:
    """The loaded target, or where none is, the embedding rows in use and the head out of its files."""
    if isinstance(taps.opened, LoadedTaps):
        return taps.opened.target
    tokens = {token for prompt, one in zip(inputs.prompts, written, strict=True) for token in (*prompt, *one.ids)}
    for drafter in inputs.drafters:
        tokens |= {drafter.config.mask_token_id} | checks.recorded_token_ids(drafter)
    return SlicedVocabulary.open(request.target, tokens, device=request.torch_device(), dtype=request.torch_dtype())


def _replay(
    request: Request,
    inputs: Inputs,
    written: Sequence[Completion],
    tapped: Sequence[TappedText],
    drafter: Drafter,
    vocabulary: Vocabulary,
    progress: Callable[[int, int], None],
) -> Measured:
    columns = _columns(inputs.layer_ids, drafter.config)
    texts = [
        Text(id, prompt + one.ids, len(prompt), text.taps if columns is None else text.taps[:, columns])
        for id, prompt, one, text in zip(inputs.ids, inputs.prompts, written, tapped, strict=True)
    ]
    walked = _walk(request, drafter, vocabulary, texts, progress)
    shortfalls = [text.shortfall for text in tapped if text.shortfall is not None]
    return Measured(texts, walked.walk, walked, shortfalls if len(shortfalls) == len(tapped) else None)


def _decode(
    request: Request,
    inputs: Inputs,
    written: Sequence[Completion],
    drafter: Drafter,
    target: Target,
    progress: Callable[[int, int], None],
) -> Measured:
    """Decoding, and a replay over the texts that came of it for the figures that need more than its own blocks."""
    sampler = make_sampler(request.sampler, temperature=request.temperature, seed=SEED, device=target.device)
    decoding = decode(
        drafter,
        target,
        list(zip(inputs.ids, inputs.prompts, strict=True)),
        max_new_tokens=request.max_new_tokens,
        end=frozenset() if request.ignore_eos else target.eos_token_ids,
        sampler=sampler,
        max_blocks=request.max_blocks,
        progress=_part(progress, 0, 2),
    )
    equal = None
    if request.temperature == 0:
        result = lossless(
            decoding.texts,
            [one.ids for one in written],
            read_again(target),
            exact=target.dtype == torch.float32,
            stopped=request.max_blocks is not None,
        )
        equal = (result.prompts, result.check)
    walked = _walk(request, drafter, target, decoding.texts, _part(progress, 1, 2))
    sampled = bool(request.temperature) and request.sampler == "rejection"
    return Measured(decoding.texts, decoding.rounds, walked, None, equal, decoding.times, sampled)


def _walk(
    request: Request,
    drafter: Drafter,
    vocabulary: Vocabulary,
    texts: Sequence[Text],
    progress: Callable[[int, int], None],
) -> Replay:
    return replay(
        drafter,
        vocabulary,
        texts,
        max_blocks=request.max_blocks,
        seed=SEED,
        progress=progress,
        trees=DDTREE_NODES,
    )


def _tokens(measured: Measured) -> set[int]:
    """Every token of a completion or of a draft."""
    completions = {token for text in measured.texts for token in text.tokens[text.prompt_length :]}
    return completions.union(*(one.drafted for one in measured.rounds))


def _columns(layer_ids: Sequence[int], config: DrafterConfig) -> torch.Tensor | None:
    """The columns of this drafter's taps among those of ``layer_ids``; None where they are the same."""
    if list(config.target_layer_ids) == list(layer_ids):
        return None
    width = config.hidden_size
    places = [layer_ids.index(layer) for layer in config.target_layer_ids]
    return torch.cat([torch.arange(place * width, (place + 1) * width) for place in places])


def _remembered(found: list[Check], evidence: Evidence, taps: CachedTaps) -> list[Check]:
    """Checks of the loaded target, kept with the taps they are of, and taken from there when it is not loaded."""
    cache = taps.cache
    if cache is None:
        return found
    tokens = hashlib.sha256(json.dumps([text.tokens for text in evidence.texts]).encode()).hexdigest()
    batch = evidence.checkpoint.metric_replay
    digests = {
        # streamed layers give no loaded target's word for their states
        "tap-source": f"{tokens} {list(evidence.checkpoint.config.target_layer_ids)} {taps.shortfalls}",
        "clean-targets": hashlib.sha256(batch.read_bytes()).hexdigest() if batch else "",
    }
    known = []
    for check in found:
        digest = digests.get(check.name) if check.name in checks.NEED_TARGET else None
        if digest and check.status != "skipped":
            cache.remember(check.name, digest, check)
        elif digest:
            check = cache.remembered(check.name, digest) or check
        known.append(check)
    return known


def _served_block(metrics: Metrics, block_size: int) -> list[Check]:
    """A warning when the server counts other slots than the checkpoint's block has; no word where it counts none."""
    slots = len(metrics.accepted_by_position)
    if slots in (0, block_size - 1):
        return []
    return [
        Check(
            name="served-block",
            status="warn",
            measured=slots + 1,
            limit=block_size,
            explanation=f"the server drafts {slots} tokens a round and the checkpoint's blocks have {block_size - 1}: "
            f"look whether it runs this checkpoint, and with all of its block",
        )
    ]


def _config_source(checkpoint: DrafterCheckpoint) -> list[Check]:
    """A warning when the checkpoint came without a config and borrowed the reference drafter's."""
    if checkpoint.config_source != "reference":
        return []
    return [
        Check(
            name="config-source",
            status="warn",
            measured="reference",
            limit="key config, config.json beside it, or --drafter-config",
            explanation="the checkpoint has no config, so the reference drafter's was taken; taps, block size and "
            "windows may differ from training: give --drafter-config",
        )
    ]
