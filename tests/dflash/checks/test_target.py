"""Checks of hidden states against what they should be: their own layer, the probe, the completions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash import checks
from dflash.batch import Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.hidden_states import LoadedTaps
from dflash.probe import Probe, make_probe
from dflash.report import Check
from dflash.target import Target
from tests.dflash.pairs import write_drafter, write_target

LAYERS = [1, 3, 5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    write_target(directory / "target", hybrid=True)
    write_drafter(directory / "drafter")
    return directory


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return Target.load(directory / "target", kernel="torch")


@pytest.fixture(scope="module")
def probe(target: Target) -> Probe:
    return make_probe(target, [*range(2, 62), *range(20, 30)], [1, 2, 3, 5], fingerprint="as written")


def tapped(target: Target) -> list[Text]:
    texts = [list(range(2, 40)), list(range(40, 2, -2)), [7] * 3]
    taps = LoadedTaps(target).tap(texts, LAYERS)
    return [Text(f"p{row}", tokens, 1, one.taps) for row, (tokens, one) in enumerate(zip(texts, taps, strict=True))]


def test_taps_are_the_hidden_states_of_their_layer(target: Target) -> None:
    check = checks.tap_source(target, LAYERS, tapped(target))
    assert check.status == "pass"
    assert isinstance(check.measured, float)
    assert check.measured < 1e-5


@pytest.mark.parametrize(
    "fault",
    [
        lambda texts: [replace(text, taps=text.taps.roll(1, 0)) for text in texts],
        lambda texts: [replace(text, taps=text.taps.roll(32, 1)) for text in texts],
        lambda texts: [
            replace(texts[0], taps=texts[1].taps, tokens=texts[0].tokens[:19]),
            replace(texts[1], taps=texts[0].taps[:19]),
            texts[2],
        ],
        lambda texts: [replace(texts[0], taps=texts[0].taps * float("nan")), *texts[1:]],
    ],
    ids=["position", "columns", "text", "nan"],
)
def test_taps_of_another_place_are_found(target: Target, fault: Callable[[list[Text]], list[Text]]) -> None:
    check = checks.tap_source(target, LAYERS, fault(tapped(target)))
    assert check.status == "fail"
    assert "is not hidden_states[" in check.explanation


def test_without_a_loaded_target_the_source_of_taps_is_not_verified(target: Target) -> None:
    check = checks.tap_source(None, LAYERS, tapped(target))
    assert check.status == "skipped"
    assert "without --cache and --offload" in check.explanation


def test_the_fingerprint_says_what_the_states_do_to_the_drafts(
    target: Target, directory: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build_drafter(read_checkpoint(directory / "drafter"), device="cpu", dtype=torch.float32)
    source = LoadedTaps(target)
    check = checks.hidden_state_fingerprint(source, drafter, target, probe)
    assert (check.status, check.measured) == ("pass", 0.0)
    assert "0 of 60 draft tokens change" in check.explanation
    for tap, column in enumerate((0, 64, 96)):  # tap 2 is in the probe, not the drafter's
        spoiled = probe.taps.clone()
        spoiled[:, column : column + 32] *= 1.001
        check = checks.hidden_state_fingerprint(source, drafter, target, replace(probe, taps=spoiled))
        assert check.status == "fail"
        assert f"tap {LAYERS[tap]} of the probe" in check.explanation
        assert check.measured == pytest.approx(0.001, rel=0.01)
    assert "files are not those of the training" in check.explanation
    noisy = replace(probe, taps=probe.taps + torch.randn_like(probe.taps) * probe.taps.std())
    check = checks.hidden_state_fingerprint(source, drafter, target, noisy)
    assert " 0 of 60 draft tokens" not in check.explanation


def test_the_limit_is_five_times_the_rounding_the_writer_saw(target: Target, directory: Path, probe: Probe) -> None:
    drafter = build_drafter(read_checkpoint(directory / "drafter"), device="cpu", dtype=torch.float32)
    moved = replace(probe, taps=probe.taps * 1.001)
    wide, narrow = (replace(moved, rounding=[size] * 4) for size in (2.1e-4, 1.9e-4))
    assert checks.hidden_state_fingerprint(LoadedTaps(target), drafter, target, wide).status == "pass"
    assert checks.hidden_state_fingerprint(LoadedTaps(target), drafter, target, narrow).status == "fail"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda probe: replace(probe, taps=probe.taps.bfloat16()), "give --dtype bfloat16"),
        (lambda probe: replace(probe, layer_ids=[1, 2, 3, 6]), "the probe has no tap 5"),
        (lambda probe: "the checkpoint carries no probe.safetensors", "carries no probe"),
    ],
)
def test_a_probe_that_cannot_be_compared_is_not_verified(
    target: Target, directory: Path, probe: Probe, change: Callable[[Probe], Probe | str], words: str
) -> None:
    drafter = build_drafter(read_checkpoint(directory / "drafter"), device="cpu", dtype=torch.float32)
    check = checks.hidden_state_fingerprint(LoadedTaps(target), drafter, target, change(probe))
    assert check.status == "skipped"
    assert words in check.explanation
    if isinstance(change(probe), str) or "no tap" in words:
        assert checks.tap_statistics(drafter, tapped(target), change(probe)).status == "skipped"


def test_states_of_another_size_are_found_whatever_the_text(target: Target, directory: Path, probe: Probe) -> None:
    drafter = build_drafter(read_checkpoint(directory / "drafter"), device="cpu", dtype=torch.float32)
    texts = tapped(target)
    assert checks.tap_statistics(drafter, texts, probe).status == "pass"
    scaled = [replace(text, taps=torch.cat((text.taps[:, :64], 2 * text.taps[:, 64:]), dim=1)) for text in texts]
    check = checks.tap_statistics(drafter, scaled, probe)
    assert check.status == "fail"
    assert "of tap 5" in check.explanation
    nan = [replace(text, taps=torch.cat((text.taps[:, :32] * float("nan"), text.taps[:, 32:]), 1)) for text in texts]
    assert checks.tap_statistics(drafter, nan, probe).status == "fail"


def agreement(own: list[float], *, by: str = "http://server", exact: bool = False, retokenized: int = 0) -> Check:
    """The check for completions of one text with these shortfalls, after a prompt whose own do not count."""
    tokens = list(range(3 + len(own)))
    shortfall: Tensor = torch.tensor([9.0, 9.0, *own, 0.0])
    texts = [Text("p0", tokens, 3, torch.empty(0))]
    return checks.reference_agreement(texts, [shortfall], exact=exact, completions_by=by, retokenized=retokenized)


@pytest.mark.parametrize(
    ("own", "status", "measured"),
    [
        ([0.0] * 100, "pass", 1.0),
        ([0.0] * 98 + [0.2] * 2, "pass", 1.0),
        ([0.0] * 96 + [0.2] * 4, "warn", 1.0),
        ([0.0] * 98 + [0.3] * 2, "pass", 0.98),
        ([0.0] * 97 + [0.3] * 3, "warn", 0.97),
        ([0.0] * 94 + [0.3] * 6, "fail", 0.94),
        ([0.0] * 94 + [float("nan")] * 6, "fail", 0.94),
    ],
)
def test_completions_are_the_targets_argmax_near_ties_apart(own: list[float], status: str, measured: float) -> None:
    check = agreement(own)
    assert (check.status, check.measured) == (status, measured)
    if status == "fail":
        assert "another, quantised or fine-tuned model is served" in check.explanation


def test_the_targets_own_completions_in_float32_have_no_near_ties() -> None:
    assert agreement([0.0] * 94 + [0.2] * 6, by="target", exact=True).status == "fail"
    assert agreement([0.0] * 98 + [5e-4] * 2, by="target", exact=True).status == "pass"


def test_completions_that_came_as_text_are_counted() -> None:
    assert "2 completions came as text" in agreement([0.0], retokenized=2).explanation


def test_streamed_taps_leave_the_agreement_open() -> None:
    check = checks.reference_agreement([], None, exact=True, completions_by="target", retokenized=0)
    assert (check.status, "without --offload" in check.explanation) == ("skipped", True)


@pytest.mark.parametrize(
    ("here", "trained", "status"),
    [
        ("torch", "torch", "pass"),
        ("torch", "fla", "fail"),
        ("fla", "torch", "fail"),
        ("torch", None, "skipped"),
        ("none", None, "pass"),
    ],
)
def test_the_kernel_is_that_of_the_training(
    target: Target, directory: Path, here: str, trained: str | None, status: str
) -> None:
    checkpoint = replace(read_checkpoint(directory / "drafter"), training={"kernel": trained} if trained else {})
    facts = LoadedTaps(target).facts.model_copy(update={"kernel": here})
    check = checks.kernel(checkpoint, facts)
    assert check.status == status
    if status == "fail":
        assert f"--kernel {trained}" in check.explanation
