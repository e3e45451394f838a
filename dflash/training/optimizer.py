"""AdamW on float32 masters, its learning rate as a pure function of the step, and what is done to gradients before."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from dflash.training.run_config import OptimizerSection


def adamw(module: nn.Module, section: OptimizerSection) -> AdamW:
    """AdamW over the parameters of ``module``. Matrices alone decay: the weights of norms have no reason to."""
    parameters = list(module.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    # the fused kernel reads and writes each state once; on the CPU the plain loop is what resumes to the last bit
    fused = all(parameter.device.type == "cuda" for parameter in parameters)
    return AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=fused)


def learning_rate(section: OptimizerSection, step: int, total: int) -> float:
    """The rate of ``step``, from 0, of ``total``: a linear warm-up over ``warmup_ratio`` of them, then the schedule.

    The cosine falls to zero just behind the last step (arXiv 2602.06036 §5.1 trains with it and a warm-up of 4 %).
    """
    warmup = section.warmup_ratio * total
    if step < warmup:
        return section.learning_rate * min(1.0, (step + 1) / warmup)
    if section.schedule == "constant":
        return section.learning_rate
    return section.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """``rate`` for the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients: from the sum over slots to the mean, once the weight of all ranks is known."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale the gradients down to a norm of ``limit`` and return the norm there was, over all shards."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
