"""Greedy texts of a tiny pair and the walk over them, as the tests that compare walks need them."""

import json
from collections.abc import Mapping

import torch

from dflash.batch import Text
from dflash.drafter import Drafter
from dflash.metrics import Round
from dflash.replay import replay
from dflash.target import Target
from tests.tiny import Pair


def tiny_prompts(pair: Pair, target: Target, count: int) -> dict[str, list[int]]:
    """Token ids of the pair's first ``count`` prompts by id."""
    lines = [json.loads(line) for line in pair.prompts.read_text(encoding="utf-8").splitlines()[:count]]
    return {line["id"]: target.tokenizer(line["prompt"])["input_ids"] for line in lines}


def greedy_texts(
    target: Target, tap_ids: tuple[int, ...], prompts: Mapping[str, list[int]], new_tokens: int
) -> list[Text]:
    """Each prompt with ``new_tokens`` greedy tokens behind it, EOS ignored, and its taps."""
    texts = []
    completions = target.generate_greedy(list(prompts.values()), new_tokens, ignore_eos=True)
    for (id, prompt), completion in zip(prompts.items(), completions, strict=True):
        tokens = prompt + completion
        texts.append(Text(id, tokens, len(prompt), target.taps(torch.tensor([tokens]), tap_ids).taps[0]))
    return texts


def walk(drafter: Drafter, target: Target, texts: list[Text]) -> list[Round]:
    """The rounds of the replay over ``texts``."""
    return replay(drafter, target, texts, max_blocks=None, seed=0, progress=lambda done, total: None).walk


def tau(rounds: list[Round]) -> float:
    """Pooled τ."""
    return sum(one.advance for one in rounds) / len(rounds)
