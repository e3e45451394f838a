"""The learning rate, what decays, and what becomes of gradients."""

import math

import pytest
import torch
from torch import nn

from dflash.training.optimizer import adamw, clip_gradients, learning_rate, scale_gradients
from dflash.training.run_config import OptimizerSection


def _section(**changes: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"learning_rate": 1.0, "max_steps": 100} | changes)


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine() -> None:
    section = _section(warmup_ratio=0.04)
    rates = [learning_rate(section, step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[52] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 95 / 96)))


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    section = _section(schedule="constant", warmup_ratio=0.5)
    assert learning_rate(section, 99, 100) == learning_rate(section, 50, 100) == 1.0
    assert learning_rate(section, 0, 100) == pytest.approx(0.02)


def test_a_warm_up_shorter_than_a_step_is_none() -> None:
    assert learning_rate(_section(warmup_ratio=0.04), 0, 10) == 1.0
    assert learning_rate(_section(warmup_ratio=0.0), 0, 10) == 1.0


def test_weight_decay_is_for_matrices_only() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = adamw(module, _section(weight_decay=0.5, betas=(0.8, 0.9)))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(parameter)] for parameter in module.parameters()] == [0.5, 0.0, 0.0, 0.0]
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_gradients_are_scaled_then_clipped_to_the_norm() -> None:
    weight = nn.Parameter(torch.zeros(2))
    unused = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    scale_gradients([weight, unused], 2.0)
    assert weight.grad.tolist() == [6.0, 8.0]
    assert clip_gradients([weight, unused], 1.0) == pytest.approx(10.0)
    assert weight.grad.norm() == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients([weight, unused], 1e9) == pytest.approx(1.0, rel=1e-5)
