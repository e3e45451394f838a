"""``step_N/`` directories: written whole or not at all, read back only when whole, and not too many of them.

A checkpoint is filled under a temporary name, sealed with its manifest, put on disk and renamed. Whatever ends a run in
between leaves the temporary directory, which the next run removes, and every earlier checkpoint as it was.
"""

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.checkpoint_layout import CheckpointError, DamagedError
from dflash.errors import DFlashError
from dflash.manifest import MANIFEST, Manifest, file_sha256, read_manifest, require_sha256, seal, verify
from dflash.output import to_disk
from dflash.training.run_config import CheckpointSection

STATE = "training_state.pt"
_NAME = re.compile(r"step_(\d+)")
_PARTIAL = ".step_"
# What torch and safetensors leave of the error's number when they put it into a sentence of their own.
_FULL_DISK_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122")


class SaveError(DFlashError):
    """A checkpoint could not be written; those before it are as they were."""


class DiskFullError(SaveError):
    """A checkpoint could not be written for want of space; those before it are as they were."""


@dataclass(frozen=True)
class Whole:
    """A checkpoint that is all there."""

    path: Path
    manifest: Manifest


Fill = Callable[[Path], Mapping[str, Any]]
"""Writes the files of a checkpoint into the directory it is given and returns the metrics for its manifest."""


def save(output: Path, step: int, fill: Fill, *, recipe: Mapping[str, Any]) -> Path:
    """Write ``output/step_N`` with what ``fill`` puts there; a ``step_N`` that is already there makes room.

    Raises :class:`DiskFullError`, or :class:`SaveError` for anything else the machine refuses; both leave nothing
    behind.
    """
    final = output / f"step_{step}"
    partial: Path | None = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{step}.", dir=output))
        partial.chmod(0o755)
        metrics = fill(partial)
        seal(partial, step=step, metrics=metrics, recipe=recipe)
        mode = (partial / MANIFEST).stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)  # safetensors keeps its files to their owner; a relay is often somebody else
            to_disk(path)
        to_disk(partial)
        if final.exists():  # damaged, or of a run that went on from an earlier step
            shutil.rmtree(final)
        partial.rename(final)
        to_disk(output)
    except DFlashError:
        raise
    except Exception as error:  # torch and safetensors each have a way of their own to say that a write failed
        if _is_full(error):
            raise DiskFullError(
                f"{final} could not be written: the disk is full. The checkpoints before it are as they were; make "
                f"room and start the same command again to go on from the last"
            ) from error
        if not isinstance(error, OSError):
            raise
        raise SaveError(f"{final} could not be written ({error.strerror or error}); see to {output}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def newest_whole(output: Path, *, warn: Callable[[str], None]) -> Whole | None:
    """The newest checkpoint of ``output`` whose every file is as its manifest says; None where there is none.

    One that is not whole is left where it is, named to ``warn``, and passed over for the one before.
    """
    for step in sorted(steps_of(output), reverse=True):
        path = output / f"step_{step}"
        try:
            return Whole(path, _verified(path))
        except CheckpointError as error:
            warn(f"{path} is damaged and passed over: {error}")
    return None


def best(output: Path, *, until: int) -> Whole | None:
    """The checkpoint of highest measured τ, the earliest of equals; None where no checkpoint says one.

    Those of steps behind ``until``, where the run is, do not count.
    """
    measured = [(tau, whole) for whole in _sealed(output, until) if (tau := tau_of(whole.manifest)) is not None]
    return max(measured, key=lambda one: one[0])[1] if measured else None


def tau_of(manifest: Manifest) -> float | None:
    """The τ that was measured when the checkpoint was saved."""
    tau = manifest.metrics.get("tau")
    return float(tau) if isinstance(tau, int | float) else None


def retain(output: Path, section: CheckpointSection, *, until: int) -> list[Path]:
    """Remove the checkpoints that ``section`` does not keep, and say which; damaged ones are nobody's to remove.

    Nor are those of steps behind ``until``, where the run is: it went on from an earlier one because they are damaged,
    be it in bytes that no manifest shows, and they neither count as kept nor as best. Raises :class:`SaveError` for one
    that cannot be removed.
    """
    whole = _sealed(output, until)
    kept = {one.path for one in whole[-section.keep_last :]}
    if section.keep_every is not None:
        kept |= {one.path for one in whole if one.manifest.step % section.keep_every == 0}
    if section.keep_best and (highest := best(output, until=until)) is not None:
        kept.add(highest.path)
    removed = [one.path for one in whole if one.path not in kept]
    for path in removed:
        _remove(path)
    return removed


def remove_partial(output: Path) -> None:
    """What a killed run was writing when it ended. Only for the process that writes into ``output``."""
    for path in output.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def steps_of(output: Path) -> list[int]:
    """The steps of which ``output`` has a directory, whole or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in output.iterdir() if path.is_dir()) if output.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def _sealed(output: Path, until: int) -> list[Whole]:
    """Checkpoints that have a manifest, by step up to ``until``; their files are not looked into."""
    found = []
    for step in (step for step in steps_of(output) if step <= until):
        path = output / f"step_{step}"
        try:
            found.append(Whole(path, read_manifest(path)[0]))
        except CheckpointError:
            continue
    return found


def _verified(path: Path) -> Manifest:
    """The manifest of a checkpoint to go on from: all files are here, and their bytes are those that were written."""
    manifest, _ = read_manifest(path)
    verify(path, manifest)
    for name in manifest.files:
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{file} is missing, the manifest lists it")
        require_sha256(file, file_sha256(file), manifest)
    if STATE not in manifest.files:
        raise DamagedError(f"{path} has no {STATE}; it was brought here without what a run goes on from")
    return manifest


def _remove(path: Path) -> None:
    """Under a name that is no checkpoint's first: half of a removed one is never taken for one."""
    doomed = path.with_name(f".{path.name}.removed")
    try:
        path.rename(doomed)
    except OSError as error:
        raise SaveError(f"{path} could not be removed ({error.strerror}); see to {path.parent}") from None
    shutil.rmtree(doomed, ignore_errors=True)


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk or quota is behind ``error``, however it was wrapped."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in _FULL_DISK_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
