"""Reports of the tiny pair, and a browser to look at their pages."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dflash.pages.browsing import Browser, why_no_browser
from tests.tiny import Pair

NOISE = {100: 0.06, 400: 0.02}


@dataclass(frozen=True)
class Measured:
    """A folder with ``step_N/`` as ``dflash evaluate`` left them."""

    folder: Path

    def report(self, step: int) -> dict:
        """``report.json`` of a step, as plain JSON: what pages are held against."""
        return json.loads((self.folder / f"step_{step}" / "report.json").read_text())

    def rounds(self, step: int) -> list[dict]:
        return [json.loads(line) for line in (self.folder / f"step_{step}" / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def measured(tiny_hybrid: Pair, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The hybrid pair's drafter with less and less noise in its weights, measured beside the one without."""
    from dflash.evaluate import evaluate
    from dflash.progress import Phases
    from dflash.request import Request

    folder = tmp_path_factory.mktemp("measured")
    for step, noise in NOISE.items():
        drafter = folder / "drafters" / f"step_{step}"
        shutil.copytree(tiny_hybrid.drafter, drafter)
        weights = load_file(drafter / "model.safetensors")
        torch.manual_seed(step)
        noisy = {name: one + noise * torch.randn_like(one) for name, one in weights.items()}
        save_file(noisy, drafter / "model.safetensors", metadata={"format": "pt"})
        request = Request(
            target=tiny_hybrid.target,
            checkpoint=drafter,
            reference=tiny_hybrid.drafter,
            prompts=tiny_hybrid.prompts,
            output=folder / f"step_{step}",
            max_new_tokens=32,
            num_prompts=3,
            device="cpu",
            kernel="torch",
            cache=folder / "cache",
        )
        evaluate(request, Phases(5))
    return Measured(folder)


@pytest.fixture(scope="session")
def _browser() -> Iterator[Browser]:
    if missing := why_no_browser():
        pytest.skip(missing)
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(_browser: Browser) -> Browser:
    """A window of a desktop's width, light, whatever the test before did to it."""
    _browser.resize(1280)
    _browser.dark(False)
    return _browser
