"""A GPU that others use too: evaluations take turns on it, and each leaves the others their memory.

Before anything large is put there, the evaluating process takes the lock of one GPU, asks what is free on it, and has
torch keep to that less a reserve. The lock is the kernel's (``flock``): it ends with the process, however that ends, so
no lock is ever stale, and nobody else has to know that an evaluation runs.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.errors import DFlashError, UsageError
from dflash.gpu_memory import free_outside
from dflash.memory import free_bytes, show_bytes

LEAST_BYTES = 1 << 30
"""What must be free beside the reserve at least: CUDA's context, its kernels, a drafter and one layer."""
POLL_SECONDS = 1.0
SAY_AGAIN_SECONDS = 60.0
PATIENCE_SECONDS = 12 * 3600.0
"""How long the turn of others is waited for: as long as a night of evaluations."""


class GpuBusyError(DFlashError):
    """Other evaluations held every GPU for longer than this one may wait."""

    state_name = "GpuBusy"


class GpuMemoryError(DFlashError):
    """What is free on the GPU, less what must stay free, is too little; nothing was put there, or it was taken back."""

    state_name = "GpuMemoryShort"


class LockError(DFlashError):
    """The folder of the locks cannot be used, so that nobody can tell whose turn it is."""


def default_locks() -> Path:
    """The folder where processes of this machine that were told no other meet."""
    return Path(tempfile.gettempdir()) / "dflash-gpu-locks"


@dataclass(frozen=True)
class Share:
    """How the GPU is shared: ``reserve_gib`` of what is free stays free, and ``locks`` is where turns are taken."""

    reserve_gib: float = 0.0
    locks: Path | None = None
    patience: float = PATIENCE_SECONDS
    """Seconds to wait for the turn of others."""

    @property
    def reserve_bytes(self) -> int:
        return round(self.reserve_gib * (1 << 30))


@contextmanager
def shared(share: Share, device: torch.device, *, any_gpu: bool, say: Callable[[str], None]) -> Iterator[torch.device]:
    """The device of this process's turn: ``device`` or, with ``any_gpu``, whichever GPU is free first.

    Its lock is held while the block runs, and torch keeps to what was free there less the reserve. ``say`` is told whom
    it waits for.

    Raises :class:`GpuBusyError` when no turn came within the patience, :class:`GpuMemoryError` when there is too little
    memory, in the block too, and :class:`LockError`.
    """
    names = _candidates(device, any_gpu, torch.cuda)
    with _turn(share, names, lambda: emptiest_first(names, torch.cuda), say) as name:
        chosen = torch.device(name)
        try:
            claim(share, chosen, torch.cuda)
            yield chosen
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"{name} ran out of memory under the limit that leaves {share.reserve_gib:g} GiB to others "
                f"({_first_sentence(error)}); stream the layers with --offload, or free memory there"
            ) from error


def emptiest_first(names: Sequence[str], cuda: Any, library: Any = None) -> list[str]:
    """The devices, the one with the most free memory first; in their own order where that cannot be told from outside.

    ``library`` is NVIDIA's management library where it is not the one of this machine.
    """
    if len(names) < 2:
        return list(names)
    free = free_outside([str(cuda.get_device_properties(torch.device(name)).uuid) for name in names], library)
    order = dict(zip(names, free or [0] * len(names), strict=True))
    return sorted(names, key=lambda name: order[name], reverse=True)


def claim(share: Share, device: torch.device, cuda: Any) -> None:
    """Ask what is free on ``device`` and have torch take no more of it than that less the reserve.

    ``cuda`` is ``torch.cuda``. On the CPU there is nothing to set, and what is free is asked all the same.
    """
    if device.type != "cuda":
        left = free_bytes(device) - share.reserve_bytes
        if left <= 0:
            raise _too_little(device, left, share)
        return
    free, total = cuda.mem_get_info(device)
    own = cuda.memory_reserved(device)
    left = free + own - share.reserve_bytes
    if left < LEAST_BYTES:
        raise _too_little(device, left, share)
    cuda.set_per_process_memory_fraction(left / total, device)


def _too_little(device: torch.device, left: int, share: Share) -> GpuMemoryError:
    need = LEAST_BYTES if device.type == "cuda" else 1
    return GpuMemoryError(
        f"{device} has {show_bytes(max(0, left + share.reserve_bytes))} free, {share.reserve_gib:g} GiB of it are kept "
        f"for others, and an evaluation needs {show_bytes(need)} beside that at least: free memory there, have the "
        "server take less, or lower gpu.reserve_gib in hosts.yaml (--reserve-gib)"
    )


def _candidates(device: torch.device, any_gpu: bool, cuda: Any) -> list[str]:
    if device.type != "cuda":
        return [str(device)]
    if any_gpu:
        return [f"cuda:{index}" for index in range(cuda.device_count())]
    index = cuda.current_device() if device.index is None else device.index
    if index >= cuda.device_count():
        raise UsageError(f"--device cuda:{index}: this machine has {cuda.device_count()} GPUs, counted from 0")
    return [f"cuda:{index}"]


def _lock_name(device: str, cuda: Any) -> str:
    """What the GPU is known by to every process, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    if not device.startswith("cuda"):
        return "cpu"
    properties = cuda.get_device_properties(torch.device(device))
    return re.sub("[^0-9a-z-]", "-", f"gpu-{properties.uuid}".lower())


@contextmanager
def _turn(
    share: Share, names: Sequence[str], in_order: Callable[[], Sequence[str]], say: Callable[[str], None]
) -> Iterator[str]:
    """Hold the lock of one of ``names``, tried in the order that ``in_order`` gives at that moment."""
    folder = share.locks or default_locks()
    files = {name: _opened(folder, _lock_name(name, torch.cuda)) for name in names}
    begun = time.monotonic()
    said = -SAY_AGAIN_SECONDS
    try:
        while True:
            held = next((name for name in in_order() if _taken(files[name])), None)
            if held is not None:
                yield held
                return
            waited = time.monotonic() - begun
            holders = ", ".join(f"{name} is used by {_holder(files[name])}" for name in names)
            if waited >= share.patience:
                raise GpuBusyError(
                    f"no turn on a GPU came within {share.patience:.0f} s: {holders}; wait for it, or end it"
                )
            if waited - said >= SAY_AGAIN_SECONDS:
                said = waited
                say(f"waiting for its turn: {holders}")
            time.sleep(min(POLL_SECONDS, max(0.01, share.patience - waited)))
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _opened(folder: Path, name: str) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LockError(
            f"{folder}/{name}.lock cannot be opened ({error.strerror}), so that turns cannot be taken; name a folder "
            "of your own with --gpu-locks"
        ) from None


def _taken(descriptor: int) -> bool:
    """Whether the lock is this process's now; the file then says whose it is, for others to show."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    return True


def _holder(descriptor: int) -> str:
    told = os.pread(descriptor, 100, 0).decode("ascii", "replace")
    return told if re.fullmatch("process [0-9]+", told) else "another process"


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0][:200]
