"""Fixtures: the tiny target and drafter pairs."""

from dataclasses import dataclass
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
PROMPTS = Path(__file__).parents[1] / "prompts" / "tiny.jsonl"


@dataclass(frozen=True)
class Pair:
    """A target, its reference drafter in z-lab's layout, and prompts in the target's language."""

    target: Path
    drafter: Path
    prompts: Path


@pytest.fixture(scope="session")
def tiny_hybrid() -> Pair:
    """Gated delta nets ×3 + full attention ×1, twice; a drafter of one sliding causal and one full layer."""
    return Pair(FIXTURES / "tiny-hybrid", FIXTURES / "tiny-hybrid-dflash", PROMPTS)


@pytest.fixture(scope="session")
def tiny_dense() -> Pair:
    """Eight layers of full attention, tied head; a drafter of two full layers."""
    return Pair(FIXTURES / "tiny-dense", FIXTURES / "tiny-dense-dflash", PROMPTS)


@pytest.fixture(scope="session")
def training_checkpoints() -> Path:
    """Directory with step_100.pt, step_200.pt and step_400.pt of a drafter for the hybrid target."""
    from tests.fixtures.make_checkpoints import training_checkpoints as make  # torch, which most tests do without

    return make()
