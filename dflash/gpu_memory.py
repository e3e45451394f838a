"""How much memory of each GPU is free, without touching any of them.

To ask CUDA for it makes a context on the GPU that is asked, some hundred MiB that stay taken while the process lives:
on a full GPU that serves others these are not ours to take. NVIDIA's management library tells the same from outside.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """``nvmlMemory_t`` of nvml.h."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_outside(uuids: Sequence[str], library: Any = None) -> list[int] | None:
    """Bytes that are free on each GPU, by its UUID; None where the library is not there or does not know one."""
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(LIBRARY) if library is None else library
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            found = [_free(nvml, uuid) for uuid in uuids]
        finally:
            nvml.nvmlShutdown()
        known = [free for free in found if free is not None]
        return known if len(known) == len(found) else None
    return None


def _free(nvml: Any, uuid: str) -> int | None:
    device, memory = ctypes.c_void_p(), _Memory()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if nvml.nvmlDeviceGetHandleByUUID(name.encode("ascii"), ctypes.byref(device)) != 0:
        return None
    return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0 else None
