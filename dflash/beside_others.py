"""An evaluation on a machine that serves: whose turn it is, what it may use, and when it has to wait."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from dflash import completions
from dflash.gpu_share import shared
from dflash.latency import Probes, probing
from dflash.memory import free_bytes
from dflash.offload import StreamedTaps
from dflash.progress import Phases
from dflash.request import Request

SPARE = 1.15
"""Times its weights a loaded target takes at least: activations, and what the allocator cannot use."""


@contextmanager
def beside_others(request: Request, phases: Phases) -> Iterator[tuple[Request, Probes | None]]:
    """The request with device and offloading settled, and the probes of the served model where one is beside it.

    Without ``request.share`` nothing is shared and nothing waits. With it, in this order: the kernel that was asked for
    must be the one that would run (:class:`~dflash.kernels.KernelError`), then comes a turn on a GPU and what is free
    there (:mod:`dflash.gpu_share`), then the latency of ``request.server`` before anything is computed
    (:mod:`dflash.latency`). While the block runs, every phase that reports progress waits when the server slows down.
    """
    if request.share is None:
        yield settled(request), None
        return
    with ExitStack() as stack:
        with phases.phase("share", "turn on the GPU"):
            device = request.torch_device()
            StreamedTaps.open(request.target, device=device, dtype=request.torch_dtype(), kernel=request.kernel)
            turn = shared(request.share, device, any_gpu=request.device in ("auto", "cuda"), say=phases.say)
            chosen = settled(replace(request, device=str(stack.enter_context(turn))))
            probes = None
            if request.server is not None:
                probes = stack.enter_context(probing(completions.connect(request.server)))
        if probes is not None:
            phases.between = lambda: probes.pause(phases.say)
            stack.callback(phases.forget_between)
        yield chosen, probes


def settled(request: Request) -> Request:
    """The request with "auto" offloading decided: whether the loaded target would fit into what is free now.

    To decode, the target has to be loaded, so there nothing is decided.
    """
    if request.offload != "auto":
        return request
    needed = weight_bytes(request) * SPARE
    fits = request.mode == "decode" or needed <= free_bytes(request.torch_device())
    return replace(request, offload=not fits)


def weight_bytes(request: Request) -> int:
    """Bytes of the target's weights in the dtype asked for, and those of the files of both drafters."""
    shards = StreamedTaps.open(request.target, kernel="torch").shards
    target = sum(tensor.size // tensor.torch_dtype.itemsize for tensor in shards.tensors.values())
    drafters = sum(_file_bytes(path) for path in (request.checkpoint, request.reference) if path is not None)
    return target * request.torch_dtype().itemsize + drafters


def _file_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
