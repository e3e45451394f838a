"""The positive control of the leak tests: a context that includes the anchor gives figures that serving does not.

Both drafters are trained on text the target wrote, by the trainer's own objective; the one fault is put into the
predicate by this test. Offline figures are the leading right slots of a walk over fresh text under the mask that was
trained, which is what a faulty evaluation beside a faulty trainer sees; decoding is the real loop, in which the state
at an anchor does not exist yet. (Random anchors would not do: more of them lie in long right stretches than serving's.)
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dflash import masks
from dflash.batch import Text
from dflash.config import DrafterConfig
from dflash.decode import decode
from dflash.drafter import Drafter
from dflash.masks import LayerRule, MaskMod
from dflash.metrics import Round
from dflash.recipes import paper
from dflash.sampling import Greedy
from dflash.target import Target
from dflash.training.batch import Features
from dflash.training.blocks import Blocks, draw_blocks
from dflash.training.head_loss import LossSums, head_loss
from dflash.training.objective import TrainingModel, block_embeddings
from tests.dflash.greedy import greedy_texts, tiny_prompts, walk
from tests.fixtures.drafter_training import drafter_config, write_text
from tests.tiny import Pair

TAP, WINDOW = 6, 4
"""The tap nearest the output and a narrow window: little context beside the leak, so that it is learned in seconds."""
START, LENGTH, ROWS = 16, 112, 48
STEPS, STEP_ROWS, ANCHORS, LEARNING_RATE = 150, 8, 16, 3e-3
PROMPTS, NEW_TOKENS = 12, 64
strict = masks.block_mask_mod


def inclusive(
    rule: LayerRule, anchors: Tensor, block_size: int, context_length: int, starts: Tensor | None = None
) -> MaskMod:
    """The predicate with the fault: t ≤ a instead of t < a."""
    visible = strict(rule, anchors, block_size, context_length, starts)
    return lambda row, head, query, key: visible(row, head, query, key) | (key == anchors[row, query // block_size])


@dataclass(frozen=True)
class Outcome:
    """Accepted drafts a block offline and a round in decoding, and 95 % of the latter by resampling prompts."""

    offline: float
    decoded: float
    interval: tuple[float, float]


@pytest.fixture(scope="module")
def target(tiny_dense: Pair) -> Target:
    return Target.load(tiny_dense.target)


@pytest.fixture(scope="module")
def written(target: Target) -> Features:
    text = write_text(target, (TAP,), rows=ROWS, start=START, length=LENGTH, seed=11)
    mask = (torch.arange(LENGTH) >= START).expand(ROWS, -1)
    return Features(text.ids, mask, torch.zeros_like(text.ids), text.taps, [[row] for row in range(ROWS)])


@pytest.fixture(scope="module")
def fresh(target: Target, tiny_dense: Pair) -> list[Text]:
    prompts = tiny_prompts(tiny_dense, target, PROMPTS)
    return greedy_texts(target, (TAP,), prompts, NEW_TOKENS)


@pytest.mark.slow
def test_a_context_with_the_anchor_promises_more_than_decoding_keeps(
    target: Target, written: Features, fresh: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = trained(target, written, fresh, monkeypatch, faulty=True)
    assert outcome.offline > outcome.decoded + 1, outcome


@pytest.mark.slow
def test_a_context_before_the_anchor_keeps_what_it_promises(
    target: Target, written: Features, fresh: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = trained(target, written, fresh, monkeypatch, faulty=False)
    low, high = outcome.interval
    assert low <= outcome.offline <= high, outcome
    assert outcome.decoded > 1.5, outcome  # a drafter that drafts nothing would agree as well


def trained(
    target: Target,
    written: Features,
    fresh: list[Text],
    monkeypatch: pytest.MonkeyPatch,
    *,
    faulty: bool,
) -> Outcome:
    drafter = new_drafter()
    with monkeypatch.context() as patch:
        if faulty:
            patch.setattr(masks, "block_mask_mod", inclusive)
        train(drafter, target, written)
        drafter.requires_grad_(False)
        offline = mean(accepted(walk(drafter, target, fresh), fresh))
    rounds = decode(
        drafter,
        target,
        [(text.id, text.tokens[: text.prompt_length]) for text in fresh],
        max_new_tokens=NEW_TOKENS,
        end=frozenset(),
        sampler=Greedy(),
        max_blocks=None,
        progress=lambda done, total: None,
    ).rounds
    real = accepted(rounds, fresh)
    return Outcome(offline, mean(real), interval(real))


def accepted(rounds: list[Round], fresh: list[Text]) -> list[list[int]]:
    """Accepted drafts of each text's rounds that its end does not cut."""
    return [[one.accepted for one in rounds if one.prompt == text.id and not one.cut] for text in fresh]


def new_drafter() -> Drafter:
    raw = drafter_config("dense")
    raw |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW, "use_sliding_window": True}
    raw["dflash_config"]["target_layer_ids"] = [TAP]
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig.from_dict(raw, source="test"))
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    return drafter


def train(drafter: Drafter, target: Target, written: Features) -> None:
    model = TrainingModel(drafter, compute_dtype=torch.float32, attention="dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=STEPS, pct_start=0.04)
    order = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        picked = torch.randperm(ROWS, generator=order)[:STEP_ROWS]
        rows = rows_of(written, picked)
        sums = forward(model, target, rows, draw_blocks(rows, drafter.config, num_anchors=ANCHORS, seed=0, epoch=step))
        (sums.numerator / sums.weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def forward(model: TrainingModel, target: Target, rows: Features, blocks: Blocks) -> LossSums:
    config = model.drafter.config
    recipe = paper(config.block_size)
    assert recipe is not None
    hidden = model(rows.taps, blocks, rows.starts, block_embeddings(target, blocks, rows.ids, config))
    return head_loss(hidden, blocks, recipe, target, teacher=None, chunk_tokens=4096)


def rows_of(features: Features, picked: Tensor) -> Features:
    samples = [features.samples[row] for row in picked.tolist()]
    parts = features.ids[picked], features.loss_mask[picked], features.starts[picked], features.taps[picked]
    return Features(*parts, samples)


def mean(prompts: list[list[int]]) -> float:
    return sum(map(sum, prompts)) / sum(map(len, prompts))


def interval(prompts: list[list[int]]) -> tuple[float, float]:
    resampled = random.Random(0)
    means = sorted(mean(resampled.choices(prompts, k=len(prompts))) for _ in range(2000))
    return means[50], means[1949]
