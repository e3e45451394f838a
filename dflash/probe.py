"""A text whose taps the trainer recorded: what lets another machine see that it computes the same hidden states.

``probe.safetensors`` (version 1) holds ``ids`` [S] int64 and ``taps`` [S, K·H] in the target's dtype, and as metadata
the tap ids, the kernel, the target's fingerprint, and how far each tap moves when the writer computes it another legal
way: token by token through a cache, which takes the recurrent form of linear attention where one pass takes the chunked
one. That difference is the size of honest rounding for this target in this dtype; the reader allows five times it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from dflash.errors import DFlashError
from dflash.target import Target

VERSION = 1
FEWEST_TOKENS = 65
"""Below that no chunk of the delta rule (64 tokens) is filled, and a kernel that joins chunks wrongly goes unseen."""
_FORMAT = "dflash-probe"


class ProbeError(DFlashError):
    """A probe cannot be read, or is of another version."""


@dataclass(frozen=True)
class Probe:
    """``taps`` [S, K·H], CPU, columns in the order of ``layer_ids``; ``rounding`` is one relative difference a tap."""

    ids: list[int]
    layer_ids: list[int]
    taps: Tensor
    rounding: list[float]
    kernel: str
    target_fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        return self.taps.dtype


def make_probe(target: Target, ids: Sequence[int], layer_ids: Sequence[int], *, fingerprint: str) -> Probe:
    """Tap ``ids`` with ``target``, in one pass and token by token. ``fingerprint`` is of the target's files.

    Raises :class:`ProbeError` on fewer than :data:`FEWEST_TOKENS` ids.
    """
    if len(ids) < FEWEST_TOKENS:
        raise ProbeError(f"a probe of {len(ids)} tokens is too short, it takes at least {FEWEST_TOKENS}")
    taps = target.taps(torch.tensor([list(ids)]), layer_ids).taps[0].cpu()
    stepwise = _token_by_token(target, ids, layer_ids)
    return Probe(
        list(ids), list(layer_ids), taps, relative_errors(stepwise, taps, len(layer_ids)), target.kernel, fingerprint
    )


def relative_errors(taps: Tensor, expected: Tensor, count: int) -> list[float]:
    """‖taps - expected‖ / ‖expected‖ of each of the ``count`` taps, over all positions of two [S, K·H]; NaN stays."""
    pairs = zip(taps.float().chunk(count, dim=-1), expected.float().chunk(count, dim=-1), strict=True)
    return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


def write_probe(path: Path, probe: Probe) -> None:
    """Write ``probe``; the caller names a path that nobody reads yet and renames it."""
    about = {
        "layer_ids": probe.layer_ids,
        "rounding": probe.rounding,
        "kernel": probe.kernel,
        "target_fingerprint": probe.target_fingerprint,
    }
    tensors = {"ids": torch.tensor(probe.ids), "taps": probe.taps.contiguous()}
    save_file(tensors, path, metadata={"format": _FORMAT, "version": str(VERSION), "about": json.dumps(about)})


def read_probe(path: Path) -> Probe:
    """Read a probe. Raises :class:`ProbeError` that names the file."""
    about, tensors = read_versioned(path, _FORMAT, VERSION, ProbeError)
    try:
        ids, taps = tensors["ids"], tensors["taps"]
        layers = [int(layer) for layer in about["layer_ids"]]
        rounding = [float(value) for value in about["rounding"]]
        probe = Probe(ids.tolist(), layers, taps, rounding, str(about["kernel"]), str(about["target_fingerprint"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProbeError(f"{path}: {type(error).__name__} {error}; the file is no complete probe") from None
    fits = taps.ndim == 2 and len(ids) == len(taps) and layers and taps.shape[1] % len(layers) == 0
    if not fits or len(rounding) != len(layers):
        raise ProbeError(f"{path}: {len(ids)} ids, taps {list(taps.shape)} and {len(layers)} layers do not fit")
    return probe


def read_versioned(
    path: Path, form: str, version: int, error_class: type[DFlashError]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata's ``about`` and the tensors of a safetensors file of this form and version."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        about = json.loads(metadata.get("about", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise error_class(f"{path}: cannot be read ({error}); copy it again from the training host") from None
    found = metadata.get("format"), metadata.get("version")
    if found != (form, str(version)) or not isinstance(about, dict):
        raise error_class(f"{path}: is {found[0]} version {found[1]}, expected {form} version {version}")
    return about, tensors


@torch.inference_mode()
def _token_by_token(target: Target, ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """[S, K·H], CPU: the taps as decoding computes them."""
    cache = DynamicCache(config=target.config)
    rows = []
    for token in ids:
        output = target.model(
            input_ids=torch.tensor([[token]], device=target.device),
            cache=cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        rows.append(torch.cat([output.hidden_states[layer + 1][0, 0] for layer in layer_ids]).cpu())
    return torch.stack(rows)
