"""Checks of the trainer's own forward pass, before it has trained anything: what a block sees, and what it does not.

The doctor makes the same checks of a finished drafter through the replay's forward; here it is the module that is about
to be trained, with its masks (flex or dense), its packed rows, and all its blocks side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.checks.verdict import skipped, verdict
from dflash.report import Check
from dflash.training.batch import Features
from dflash.training.blocks import Blocks
from dflash.training.objective import TrainingModel

LOOKED_AT = 3
"""Blocks of each row that are perturbed around, one after the other; in a packed row they are of several documents."""
CONTEXT = "context-strictly-before-anchor"
APART = "blocks-apart"


@dataclass(frozen=True)
class Pass:
    """A micro-batch as the trainer's forward takes it; ``embeddings`` [N, n·B, H] are those of its blocks."""

    model: TrainingModel
    features: Features
    blocks: Blocks
    embeddings: Tensor

    def hidden(self, taps: Tensor, embeddings: Tensor) -> Tensor:
        """Hidden states [N, n, B-1, H]."""
        found: Tensor = self.model(taps, self.blocks, self.features.starts, embeddings)
        return found


def context_strictly_before_anchor(one: Pass, *, seed: int) -> Check:
    """No block moves by one bit when every state outside of [start of its document, anchor) is replaced.

    The gradient with respect to those is exactly zero as well, where the attention has a backward pass (flex has none
    on the CPU). And so that the check can fail, replacing the state just before the anchor must move the block.
    Measured is the largest change of a block relative to its size, or the gradient's share outside if that is more.
    """
    seen = _context_of(one)
    taps = one.features.taps
    measured, control = 0.0, 0.0
    for rows, chosen, draw in _looked_at(one, seed):
        visible = seen[rows, chosen]  # [R, S]
        with torch.no_grad():
            clean = one.hidden(taps, one.embeddings)[rows, chosen]
            outside = one.hidden(_replaced(taps, rows, ~visible, draw), one.embeddings)[rows, chosen]
            inside = one.hidden(_replaced(taps, rows, visible, draw), one.embeddings)[rows, chosen]
        measured = max(measured, _change(outside, clean), _gradient_share(one, rows, chosen, visible))
        control = max(control, _change(inside, clean))
    return _told(
        CONTEXT,
        measured,
        control,
        right="blocks do not move when the states from the anchor on, and those of other documents, are replaced",
        wrong="a block of the trainer's forward sees states at its anchor or behind it, or another document's: such "
        "a state knows the answer and does not exist yet in serving; the mask must cut at start ≤ key < anchor",
        blind="replacing the states before the anchor changes nothing: the drafter does not read its context",
    )


def blocks_apart(one: Pass, *, seed: int) -> Check:
    """No block moves by one bit when the slots of all other blocks of its row are replaced."""
    size = one.embeddings.shape[1] // one.blocks.anchors.shape[1]
    measured, control = 0.0, 0.0
    for rows, chosen, draw in _looked_at(one, seed):
        own = torch.zeros(len(rows), one.embeddings.shape[1], dtype=torch.bool, device=one.embeddings.device)
        for place, block in enumerate(chosen.tolist()):
            own[place, block * size : (block + 1) * size] = True
        with torch.no_grad():
            clean = one.hidden(one.features.taps, one.embeddings)[rows, chosen]
            others = one.hidden(one.features.taps, _replaced(one.embeddings, rows, ~own, draw))[rows, chosen]
            itself = one.hidden(one.features.taps, _replaced(one.embeddings, rows, own, draw))[rows, chosen]
        measured, control = max(measured, _change(others, clean)), max(control, _change(itself, clean))
    return _told(
        APART,
        measured,
        control,
        right="blocks do not move when the blocks beside them are replaced",
        wrong="a block of the trainer's own forward sees the slots of another one: blocks beside each other share "
        "nothing but the context; look at the mask's block condition",
        blind="replacing a block's own slots changes nothing: the drafter does not read its block",
    )


Draw = Callable[[Tensor], Tensor]


def _looked_at(one: Pass, seed: int) -> Iterator[tuple[Tensor, Tensor, Draw]]:
    """Rows [R] that have blocks and one block of each [R], its first, its last and between, with replacements."""
    counts = (one.blocks.anchors >= 0).sum(dim=1)  # fillers come last
    rows = counts.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    for turn in range(LOOKED_AT if len(rows) else 0):
        chosen = turn * (counts[rows] - 1) // (LOOKED_AT - 1)
        yield rows, chosen, lambda like: torch.randn(like.shape, generator=generator).to(like)


def _context_of(one: Pass) -> Tensor:
    """[N, n, S]: the states that each block may see at all, whatever a layer's window."""
    place = torch.arange(one.features.ids.shape[1], device=one.blocks.anchors.device)
    anchors, starts = one.blocks.anchors[..., None], one.blocks.starts[..., None]
    return (place >= starts) & (place < anchors)


def _replaced(values: Tensor, rows: Tensor, where: Tensor, draw: Draw) -> Tensor:
    """``values`` [N, P, C] with noise of their size where ``where`` [R, P] says so in ``rows`` [R]."""
    changed = values.detach().clone()
    part = changed[rows]
    size = part.float().square().mean().sqrt()
    changed[rows] = torch.where(where[..., None], (draw(part.float()) * size).to(part.dtype), part)
    return changed


def _gradient_share(one: Pass, rows: Tensor, chosen: Tensor, visible: Tensor) -> float:
    """Share of the gradient of the chosen blocks' output that lies at states they may not see."""
    if one.model.attention == "flex" and one.features.taps.device.type != "cuda":
        return 0.0
    leaf = one.features.taps.detach().float().requires_grad_()
    with torch.enable_grad():
        hidden = one.hidden(leaf, one.embeddings)[rows, chosen]
        # a fixed direction: the sum of normed states has almost no gradient of its own
        direction = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)
        [gradient] = torch.autograd.grad((hidden.float() * direction).sum(), leaf)
    size = gradient[rows].abs().sum(-1)
    total = float(size.sum())
    return float((size * ~visible).sum()) / total if total > 0 else 0.0


def _change(hidden: Tensor, expected: Tensor) -> float:
    moved = (hidden - expected).float().abs().amax()
    found = float(moved / expected.float().abs().amax())
    return found if found == found else float("inf")


def _told(name: str, measured: float, control: float, *, right: str, wrong: str, blind: str) -> Check:
    if measured == 0 and control == 0:
        return verdict(name, False, control, "more than 0 before the anchor", blind)
    if measured > 0:
        return verdict(name, False, measured, 0.0, wrong)
    return verdict(name, True, measured, 0.0, right)


def not_verified(name: str) -> Check:
    """For rows without a block."""
    return skipped(name, 0.0, "none of the first rows has an anchor, so there is no block to look at")
