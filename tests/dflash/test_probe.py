"""Probes written and read, and the rounding their writer measures."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash.probe import FEWEST_TOKENS, Probe, ProbeError, make_probe, read_probe, relative_errors, write_probe
from dflash.target import Target
from tests.dflash.pairs import write_target

IDS = [*range(2, 62), *range(10, 16)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(write_target(tmp_path_factory.mktemp("target"), hybrid=True), kernel="torch")


@pytest.fixture(scope="module")
def probe(target: Target) -> Probe:
    return make_probe(target, IDS, [1, 4], fingerprint="abc")


def test_a_probe_holds_the_targets_taps_and_their_rounding(target: Target, probe: Probe) -> None:
    assert torch.equal(probe.taps, target.taps(torch.tensor([IDS]), [1, 4]).taps[0])
    assert (probe.kernel, probe.target_fingerprint, probe.dtype) == ("torch", "abc", torch.float32)
    assert all(0 < size < 1e-5 for size in probe.rounding)


def test_rounding_is_between_the_chunked_and_the_recurrent_form(
    target: Target, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent form that decays otherwise shows in the writer's own figure, tap by tap."""
    recurrent = modeling_qwen3_5.torch_recurrent_gated_delta_rule

    def faster(*tensors: torch.Tensor, g: torch.Tensor, **options: object) -> object:
        return recurrent(*tensors, g=1.01 * g, **options)

    monkeypatch.setattr(modeling_qwen3_5, "torch_recurrent_gated_delta_rule", faster)
    other = make_probe(target, IDS, [1, 4], fingerprint="abc")
    assert torch.equal(other.taps, probe.taps)
    assert all(theirs > 20 * ours for ours, theirs in zip(probe.rounding, other.rounding, strict=True))


def test_errors_are_relative_and_by_tap() -> None:
    expected = torch.tensor([[3.0, 4.0, 6.0, 8.0], [0.0, 0.0, 0.0, 0.0]])
    moved = expected + torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, float("nan")]])
    assert relative_errors(moved, expected, 2)[0] == pytest.approx(0.1)
    assert relative_errors(moved, expected, 2)[1] != relative_errors(moved, expected, 2)[1]


def test_what_is_written_is_read(probe: Probe, tmp_path: Path) -> None:
    write_probe(tmp_path / "probe.safetensors", probe)
    again = read_probe(tmp_path / "probe.safetensors")
    assert torch.equal(again.taps, probe.taps)
    assert (again.ids, again.layer_ids, again.rounding) == (probe.ids, probe.layer_ids, probe.rounding)
    assert (again.kernel, again.target_fingerprint) == (probe.kernel, probe.target_fingerprint)


def test_a_short_probe_is_refused(target: Target) -> None:
    with pytest.raises(ProbeError, match=f"64 tokens is too short, it takes at least {FEWEST_TOKENS}"):
        make_probe(target, IDS[:64], [1], fingerprint="abc")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"format": "dflash-probe", "version": "2", "about": "{}"}, {}, "version 2, expected dflash-probe version 1"),
        ({"format": "pt"}, {}, "is pt version None"),
        ({"format": "dflash-probe", "version": "1", "about": "{}"}, {}, "is no complete probe"),
        (None, {"ids": torch.arange(3)}, "66 ids|3 ids, taps"),
    ],
)
def test_another_file_is_named(
    probe: Probe, tmp_path: Path, metadata: dict[str, str] | None, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = tmp_path / "probe.safetensors"
    write_probe(path, probe)
    if metadata is None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
    save_file(load_file(path) | tensors, path, metadata=metadata)
    with pytest.raises(ProbeError, match=message):
        read_probe(path)


def test_a_torn_or_missing_file_is_named(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "probe.safetensors"
    with pytest.raises(ProbeError, match="cannot be read"):
        read_probe(path)
    write_probe(path, probe)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ProbeError, match=r"probe\.safetensors: cannot be read"):
        read_probe(path)
