"""The processes of a run: who they are, what they tell each other, and how they share one drafter.

torchrun says who they are, on one machine or, through its rendezvous, on several. Without it a run is one process.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dflash.errors import DFlashError, UsageError, one_line
from dflash.training.run_config import ParallelSection

PATIENCE = timedelta(hours=6)
"""How long a rank waits for another: rank 0 tokenises the data, writes checkpoints and measures τ alone."""

Value = TypeVar("Value")


class ElsewhereError(DFlashError):
    """Another rank failed in what this one waited for; it says itself how."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    world: int
    device: torch.device
    local: int = 0
    """Its number among the ranks of its machine."""

    @classmethod
    @contextmanager
    def joined(cls, device: str) -> Iterator[Self]:
        """Meet the other ranks for as long as the block lasts; ``device`` as ``target.device`` of a run's config.

        Raises :class:`UsageError` for a device that torch does not know or see, and for a single GPU that several
        ranks were told to share.
        """
        rank, world = this_rank(), int(os.environ.get("WORLD_SIZE", "1"))
        chosen = _device(device, world)
        if world == 1:
            yield cls(rank=0, world=1, device=chosen)
            return
        backend = "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=PATIENCE)
        _let_go_at_exit(dist.group.WORLD)
        try:
            yield cls(rank=rank, world=world, device=chosen, local=_local_rank())
        finally:
            dist.destroy_process_group()

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes, prints and measures."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` added up over all ranks, the same on each."""
        if self.world == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        return bool(self.sum(torch.tensor([float(flag)])).item())

    def share(self, value: Value) -> Value:
        """Rank 0's ``value``, on every rank; what the others pass is dropped."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        shared: Value = box[0]
        return shared

    def first(self, work: Callable[[], Value]) -> Value | None:
        """What ``work`` returns on rank 0, which alone does it; None on the others, which wait.

        An error of rank 0 ends the others as well, with :class:`ElsewhereError`.
        """
        result, error = _attempted(work) if self.main else (None, None)
        self._raise_of(0, error)
        return result

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """What ``work`` returns: first on one rank of each machine, then on the others, which find it done."""
        result, error = _attempted(work) if self.local == 0 else (None, None)
        for rank in range(self.world):
            self._raise_of(rank, error)
        return work() if result is None else result

    def _raise_of(self, rank: int, error: Exception | None) -> None:
        """Raise rank ``rank``'s ``error`` there, and elsewhere that there was one."""
        if self.world > 1:
            box = [None if error is None else one_line(str(error))]
            dist.broadcast_object_list(box, src=rank)
            if self.rank != rank and box[0] is not None:
                raise ElsewhereError(f"rank {rank} failed: {box[0]}")
        if self.rank == rank and error is not None:
            raise error


def wrap(model: nn.Module, section: ParallelSection, ranks: Ranks) -> nn.Module:
    """``model`` as the ranks train it together; it stays the module that the weights are read from.

    FSDP shards the drafter's float32 masters, their gradients and the optimizer's state, in one unit: they are what
    takes the memory, a drafter of some layers gathered whole for its forward pass takes little beside a target.
    """
    if section.compile:
        # Texts differ in length; the number of blocks in a row does not.
        model.compile(dynamic=True)
    if ranks.world == 1:
        return model
    if section.strategy == "fsdp":
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def synchronised(wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around a micro-batch's forward and backward pass: ranks add their gradients up after the ``last`` one only."""
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if last else wrapped.no_sync()
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    return nullcontext()


def this_rank() -> int:
    """The number of this process among all of the run, 0 where there is one; known before they have met."""
    return int(os.environ.get("RANK", "0"))


def _device(name: str, world: int) -> torch.device:
    local = _local_rank()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device: torch.device | None = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"target.device is {name}; expected auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError(f"target.device is {name}, and torch sees no GPU; leave it out or say cpu")
    if world > 1 and device.index is not None:
        raise UsageError(f"target.device is {name} for {world} ranks; say cuda, and each takes the one of its number")
    chosen = torch.device("cuda", local if device.index is None else device.index)
    there = torch.cuda.device_count()
    if chosen.index >= there:
        raise UsageError(
            f"target.device is {name}, so this rank takes GPU {chosen.index}, and torch sees {there} GPUs here; start "
            f"as many ranks as there are, or name one that is there"
        )
    torch.cuda.set_device(chosen)
    return chosen


def _let_go_at_exit(group: object) -> None:
    """Keep ``group`` until the process ends, or DDP's reducer is the last to hold it and never ends.

    Destroying a group waits for gloo's threads, and those may be waiting for Python's lock to drop a tensor. Python
    gives the lock up for that, the reducer, which goes when a run's last frame does, does not.
    """
    kept = [group]
    atexit.register(kept.clear)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _attempted(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others must not wait for what will not come
        return None, error
