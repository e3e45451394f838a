"""Checkpoints to select from, a source that counts what is read of it, and a selection written out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tasks.repack import LARGEST_RANGE, assembled
from tasks.selection import Selection
from tasks.sources import LocalSource, Look, Source

DRAFTER = Path(__file__).parents[1] / "fixtures" / "tiny-hybrid-dflash"


class CountedSource:
    """A source on this machine that remembers each question."""

    def __init__(self, path: Path) -> None:
        self._local = LocalSource(path)
        self.place, self.single = self._local.place, self._local.single
        self.questions: list[tuple[str, tuple[tuple[int, int], ...]]] = []

    @property
    def moved(self) -> int:
        return sum(length for _, ranges in self.questions for _, length in ranges)

    def look(self) -> Look:
        return self._local.look()

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        self.questions.append((file, tuple(ranges)))
        return self._local.read(file, ranges)


def write_out(selection: Selection, source: Source, folder: Path, *, most: int = LARGEST_RANGE) -> Path:
    """Make the files of ``selection`` below ``folder`` as a relay would: sized before their first byte."""
    for output in selection.outputs:
        path = folder / output.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(output.size)
            read = lambda name, offset, length: source.read(name, [(offset, length)])  # noqa: E731
            for place, data in assembled(output, read, most=most):
                file.seek(place)
                file.write(data)
        assert path.stat().st_size == output.size
    return folder


def weights(prefix: str = "module.") -> dict[str, torch.Tensor]:
    """The tiny hybrid target's drafter in float32, under the names a trainer would save it by."""
    return {f"{prefix}{name}": tensor.float() for name, tensor in load_file(DRAFTER / "model.safetensors").items()}


def adam(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state of an optimizer that has made a step on ``state``."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in state.values() if tensor.is_floating_point()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
