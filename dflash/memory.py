"""How much memory is free, asked before anything large is put there."""

from pathlib import Path

import torch

from dflash.errors import DFlashError

HOST_RESERVE = 1 << 28
DEVICE_RESERVE = 1 << 28
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class MemoryShortageError(DFlashError):
    """What must be in memory at one time does not fit in what is free."""


def free_bytes(device: torch.device | str) -> int:
    """Bytes that can be allocated on ``device`` now, less a reserve for what others and the allocator need.

    On CUDA what the driver has left, beside whatever else runs there, and what torch holds unused, but no more than the
    share of the device that this process may use; on the CPU what the kernel calls available, or what the container's
    limit leaves if that is less.
    """
    device = torch.device(device)
    if device.type == "cuda":
        left, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        unused = torch.cuda.memory_reserved(device) - allocated
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
        return max(0, min(left + unused, allowed) - DEVICE_RESERVE)
    return max(0, int(min(_available(), _container_left())) - HOST_RESERVE)


def show_bytes(count: float) -> str:
    """``count`` bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _available() -> int:
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise MemoryShortageError(f"{_MEMINFO} does not say how much memory is available ({error})") from None


def _container_left() -> float:
    """What the control group's limit leaves; page cache that can be dropped is not counted as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        pages = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return float("inf") if limit == "max" else int(limit) - used + int(pages.get("inactive_file", 0))
    except (OSError, ValueError):  # no control groups, or version 1
        return float("inf")
