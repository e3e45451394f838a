"""What a drafter in training is really worth: walk τ on held-out prompts, by the evaluator's own replay and metrics.

The target writes its greedy completions once, and its states at every token are taken once; both are kept in a
directory of the run (:mod:`dflash.cache`), so that every measurement of a run and of its resumption walks the
same texts. A figure here is the one that ``dflash evaluate`` finds for the same drafter, dtype and prompts.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from dflash.batch import Text, Vocabulary
from dflash.cache import Cache, TargetKey
from dflash.completion_store import Completion, CompletionStore
from dflash.drafter import Drafter
from dflash.errors import UsageError
from dflash.hidden_states import CachedTaps, LoadedTaps, require_positions, tokenizer_digest
from dflash.metrics import SEED, accuracy_by_position, by_prompt, tau, tau_pooled
from dflash.prompts import read_prompts, tokenize
from dflash.replay import replay
from dflash.target import Target
from dflash.training.run_config import EvaluationSection

Progress = Callable[[int, int], None]


class HeldOutError(UsageError):
    """Nothing can be measured on the held-out prompts."""


class Truth(BaseModel):
    """One measurement. ``accuracy`` [B-1] is by position over the walk; τ counts the bonus token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tau_pooled: float
    tau_macro: float
    ci95: tuple[float, float] | None
    random_anchor_tau: float | None
    accuracy: tuple[float | None, ...]
    rounds: int
    tokens: int
    prompts: int
    seconds: float

    def values(self) -> dict[str, float]:
        """As :class:`~dflash.training.metric_log.MetricLog` takes them; what is not known is left out."""
        low, high = self.ci95 or (None, None)
        named = {
            "tau": self.tau_pooled,
            "tau_macro": self.tau_macro,
            "tau_low": low,
            "tau_high": high,
            "random_anchor_tau": self.random_anchor_tau,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "prompts": self.prompts,
            "seconds": self.seconds,
        } | {f"accuracy_{slot}": share for slot, share in enumerate(self.accuracy, start=1)}
        return {name: float(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts with the target's completions and its states there, on the CPU."""

    texts: list[Text]
    prompts_sha256: str
    seed: int = SEED

    @classmethod
    def prepare(
        cls,
        evaluation: EvaluationSection,
        target: Target,
        layer_ids: Sequence[int],
        *,
        thinking: bool | None,
        directory: Path,
        seed: int = SEED,
        progress: Progress = lambda done, total: None,
    ) -> Self:
        """Read, complete and tap the prompts; what ``directory`` has is not computed again.

        ``thinking`` is the training data's, where ``evaluation`` has none of its own. ``progress(done, total)`` counts
        first the tokens that the target writes, then the texts that it reads. Raises :class:`HeldOutError` where no
        completion is longer than one token, and what the prompts and the cache raise.
        """
        prompt_set = read_prompts(evaluation.prompts, limit=evaluation.num_prompts)
        own = thinking if evaluation.thinking is None else evaluation.thinking
        prompts = tokenize(prompt_set.prompts, target.tokenizer, thinking=own)
        loaded = LoadedTaps(target)
        facts = loaded.facts
        ids = [prompt.id for prompt in prompt_set.prompts]
        require_positions(
            prompts,
            facts.max_position_embeddings,
            path=facts.path,
            new_tokens=evaluation.max_new_tokens,
            names=[f"prompt {id!r}" for id in ids],
        )
        key = TargetKey(facts.fingerprint, tokenizer_digest(Path(target.path)), facts.kernel, facts.dtype)
        cache = Cache.open(directory, key)
        written = _completions(evaluation, target, prompts, cache, progress)
        tokens = [prompt + one for prompt, one in zip(prompts, written, strict=True)]
        if not any(len(one) > 1 for one in written):
            raise HeldOutError(
                f"{evaluation.prompts}: no completion is longer than one token, so no block could be drafted; use "
                f"other prompts or evaluation.ignore_eos"
            )
        taps = CachedTaps(lambda: loaded, cache, shortfalls=False, path=facts.path)
        tapped = taps.tap(tokens, list(layer_ids), progress=progress)
        texts = [
            Text(id, text, len(prompt), states.taps)
            for id, text, prompt, states in zip(ids, tokens, prompts, tapped, strict=True)
        ]
        return cls(texts, prompt_set.sha256, seed)

    @property
    def identity(self) -> str:
        """sha256 of the prompts as the target reads them: two τ are comparable where it is the same."""
        prompts = [[text.id, text.tokens[: text.prompt_length]] for text in self.texts]
        return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()

    def measure(
        self, drafter: Drafter, vocabulary: Vocabulary, *, progress: Progress = lambda done, total: None
    ) -> Truth:
        """Walk every text. ``drafter`` is as its checkpoint will be read: in the dtype it is saved in.

        Raises :class:`~dflash.batch.DraftError` on NaN or infinite hidden states.
        """
        started = time.monotonic()
        walked = replay(drafter, vocabulary, self.texts, max_blocks=None, seed=self.seed, progress=progress)
        totals = by_prompt(walked.walk)
        found = tau(totals, seed=self.seed)
        return Truth(
            tau_pooled=found.pooled,
            tau_macro=found.macro,
            ci95=found.ci95,
            random_anchor_tau=tau_pooled(walked.random) if walked.random else None,
            accuracy=tuple(accuracy_by_position(walked.walk)),
            rounds=len(walked.walk),
            tokens=sum(one.advance for one in walked.walk) + len(totals),
            prompts=len(totals),
            seconds=time.monotonic() - started,
        )


def _completions(
    evaluation: EvaluationSection,
    target: Target,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    progress: Progress,
) -> list[list[int]]:
    """The greedy completion of each prompt, kept under the settings that ``dflash evaluate --cache`` keeps them by."""
    how = {"max_new_tokens": evaluation.max_new_tokens, "ignore_eos": evaluation.ignore_eos}
    store = CompletionStore.open(cache.completions_file("target", how), how)
    missing = [prompt for prompt in prompts if store.get(prompt) is None]
    done, most = 0, len(missing) * evaluation.max_new_tokens

    def count(added: int) -> None:
        nonlocal done
        done += added
        progress(done, most)

    generated = target.generate_greedy(
        missing, evaluation.max_new_tokens, ignore_eos=evaluation.ignore_eos, progress=count
    )
    for prompt, ids in zip(missing, generated, strict=True):
        store.put(prompt, Completion(ids))
    found = (store.get(prompt) for prompt in prompts)
    return [one.ids for one in found if one is not None]
