"""Who decides which drafts stand: samplers as pure functions over [R, …] batches of blocks of the same target.

A round knows the drafter's distributions q at slots 1…B-1 and the target's distributions p behind slots 0…B-1, so p[k]
is what slot k + 1 is verified by and p[B-1] gives the bonus token. What is emitted follows the target's own
distribution under every sampler here; they differ in how many drafts survive.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dflash.errors import UsageError

SamplerName = Literal["greedy", "rejection", "target-match"]


@dataclass(frozen=True)
class Verdict:
    """``accepted`` [R]: leading drafts that stand, 0…B-1. ``token`` [R]: the target's own token behind them."""

    accepted: Tensor
    token: Tensor


class Sampler(Protocol):
    """How tokens are chosen from logits: the target's, the drafter's, and between the two."""

    @property
    def name(self) -> SamplerName: ...

    @property
    def temperature(self) -> float: ...

    def sample(self, logits: Tensor) -> Tensor:
        """The target's tokens [R] for its ``logits`` [R, V]."""
        ...

    def draft(self, logits: Tensor) -> Tensor:
        """Drafted tokens [R, B-1] for the drafter's ``logits`` [R, B-1, V]."""
        ...

    def verify(self, drafted: Tensor, draft_logits: Tensor, target_logits: Tensor) -> Verdict:
        """What the target makes of ``drafted`` [R, B-1], given logits [R, B-1, V] and its own [R, B, V]."""
        ...


def make_sampler(
    name: SamplerName, *, temperature: float = 0.0, seed: int = 0, device: torch.device | str = "cpu"
) -> Sampler:
    """The sampler of that name, its generator seeded on the ``device`` of the logits.

    Temperature 0 is greedy whatever the name. Raises :class:`UsageError` on a temperature that does not fit the name.
    """
    if temperature < 0:
        raise UsageError(f"temperature {temperature} is negative; give 0 for greedy or a positive number")
    if temperature == 0:
        return Greedy()
    if name == "greedy":
        raise UsageError(f"the greedy sampler has temperature 0, not {temperature}; choose rejection or target-match")
    generator = torch.Generator(device=device).manual_seed(seed)
    return Rejection(temperature, generator) if name == "rejection" else TargetMatch(temperature, generator)


@dataclass(frozen=True)
class Greedy:
    """Both sides take their best token; a draft stands while it is the target's best."""

    name: SamplerName = "greedy"
    temperature: float = 0.0

    def sample(self, logits: Tensor) -> Tensor:
        return logits.float().argmax(-1)

    def draft(self, logits: Tensor) -> Tensor:
        return logits.float().argmax(-1)

    def verify(self, drafted: Tensor, draft_logits: Tensor, target_logits: Tensor) -> Verdict:
        return match(drafted, self.sample(target_logits))


@dataclass(frozen=True)
class Rejection:
    """Speculative sampling: drafts are drawn from q, stand with min(1, p/q), and a rejected one is drawn again from
    the residual max(p - q, 0) (Leviathan et al. 2023, algorithm 1; Chen et al. 2023)."""

    temperature: float
    generator: torch.Generator
    name: SamplerName = "rejection"

    def sample(self, logits: Tensor) -> Tensor:
        return draw(probabilities(logits, self.temperature), self.generator)

    def draft(self, logits: Tensor) -> Tensor:
        return self.sample(logits)

    def verify(self, drafted: Tensor, draft_logits: Tensor, target_logits: Tensor) -> Verdict:
        q, p = probabilities(draft_logits, self.temperature), probabilities(target_logits, self.temperature)
        return reject(drafted, q, p, self.generator)


@dataclass(frozen=True)
class TargetMatch:
    """z-lab's rule: drafts are the drafter's best tokens, the target draws at every position, and a draft stands while
    it is what was drawn. Slots behind the first difference were drawn for nothing."""

    temperature: float
    generator: torch.Generator
    name: SamplerName = "target-match"

    def sample(self, logits: Tensor) -> Tensor:
        return draw(probabilities(logits, self.temperature), self.generator)

    def draft(self, logits: Tensor) -> Tensor:
        return logits.float().argmax(-1)

    def verify(self, drafted: Tensor, draft_logits: Tensor, target_logits: Tensor) -> Verdict:
        return match(drafted, self.sample(target_logits))


def match(drafted: Tensor, chosen: Tensor) -> Verdict:
    """Drafts [R, B-1] stand while they are the tokens ``chosen`` [R, B] by the target."""
    accepted = _leading(drafted == chosen[:, :-1])
    return Verdict(accepted, chosen.gather(1, accepted[:, None])[:, 0])


def reject(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> Verdict:
    """Drafts [R, B-1], drawn from ``q`` [R, B-1, V], stand with min(1, p/q); ``p`` is [R, B, V].

    Behind the last draft q is zero, so the residual there is p itself, which gives the bonus token.
    """
    rows = torch.arange(len(drafted), device=drafted.device)
    chances = torch.rand(drafted.shape, generator=generator, device=drafted.device)
    drafted_q = q.gather(2, drafted[..., None])[..., 0]
    drafted_p = p[:, :-1].gather(2, drafted[..., None])[..., 0]
    accepted = _leading(chances * drafted_q < drafted_p)
    padded_q = torch.cat((q, torch.zeros_like(p[:, :1])), dim=1)
    return Verdict(accepted, draw(residual(p[rows, accepted], padded_q[rows, accepted]), generator))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) / Σ, [R, V]: what is left of p once q has had its share.

    Where nothing is left (p = q up to rounding, where a rejection has no chance but rounding's) it is p.
    """
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last axis, in float32 whatever the logits are in."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(chances: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each distribution of ``chances`` [..., V]."""
    flat = chances.flatten(0, -2)
    return torch.multinomial(flat, 1, generator=generator).view(chances.shape[:-1])


def _leading(right: Tensor) -> Tensor:
    """[R]: how many leading entries of ``right`` [R, slots] are true."""
    return right.long().cumprod(dim=1).sum(dim=1)
