"""Turns on a GPU, and what is left to the others on it; where no GPU is, torch.cuda is stood in for."""

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dflash import beside_others, gpu_share, memory
from dflash.beside_others import settled, weight_bytes
from dflash.cli import app
from dflash.errors import DFlashError, UsageError
from dflash.failure import DISK_FULL, Failure, parse_failure, told
from dflash.gpu_memory import free_outside
from dflash.gpu_share import GpuBusyError, GpuMemoryError, LockError, Share, claim, emptiest_first, shared
from dflash.kernels import KernelError
from dflash.latency import ServedModelSlowError
from dflash.request import Request
from tasks.evaluation_jobs import SAID_BY_HOSTS
from tests.dflash.pairs import write_drafter, write_prompts, write_target

GIB = 1 << 30


@dataclass
class FakeCuda:
    """Two GPUs, of which ``free`` bytes are free; what torch was told to keep to is in ``fractions``."""

    free: list[int]
    total: int = 48 * GIB
    reserved: int = 0
    fractions: dict[int, float] = field(default_factory=dict)

    def device_count(self) -> int:
        return len(self.free)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free[torch.device(device).index], self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fractions[torch.device(device).index] = fraction

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fractions.get(torch.device(device).index, 1.0)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0000-{torch.device(device).index}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda([6 * GIB, 11 * GIB])
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def silent(text: str) -> None:
    pass


def test_torch_keeps_to_what_is_free_less_the_reserve(cuda: FakeCuda) -> None:
    claim(Share(reserve_gib=2), torch.device("cuda:1"), cuda)
    assert cuda.fractions == {1: 9 / 48}
    # the limit is this process's: what is asked for later is held against it as well
    assert memory.free_bytes("cuda:1") == 9 * GIB - memory.DEVICE_RESERVE
    assert memory.free_bytes("cuda:0") == 6 * GIB - memory.DEVICE_RESERVE


def test_what_this_process_holds_already_counts_as_its_own(cuda: FakeCuda) -> None:
    cuda.reserved = GIB
    claim(Share(reserve_gib=2), torch.device("cuda:0"), cuda)
    assert cuda.fractions == {0: 5 / 48}
    assert memory.free_bytes("cuda:0") == 4 * GIB - memory.DEVICE_RESERVE


def test_a_gpu_without_room_beside_the_reserve_is_refused_and_nothing_is_set(cuda: FakeCuda) -> None:
    with pytest.raises(GpuMemoryError, match=r"cuda:0 has 6\.0 GiB free, 5\.5 GiB of it are kept") as refused:
        claim(Share(reserve_gib=5.5), torch.device("cuda:0"), cuda)
    assert refused.value.state_name == "GpuMemoryShort"
    assert cuda.fractions == {}


class FakeNvml:
    """NVIDIA's management library with two GPUs of 6 and 11 GiB free; functions write where they are pointed to."""

    def __init__(self, free: dict[str, int]) -> None:
        self.free = free
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        names = list(self.free)
        if uuid.decode() not in names:
            return 6  # NVML_ERROR_NOT_FOUND
        device._obj.value = 1 + names.index(uuid.decode())
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, found: Any) -> int:
        found._obj.free = list(self.free.values())[device.value - 1]
        return 0


def test_the_emptiest_gpu_comes_first_and_none_is_touched_to_find_out(cuda: FakeCuda) -> None:
    nvml = FakeNvml({"GPU-0000-0": 6 * GIB, "GPU-0000-1": 11 * GIB})
    assert free_outside(["0000-1", "GPU-0000-0"], nvml) == [11 * GIB, 6 * GIB]
    assert emptiest_first(["cuda:0", "cuda:1"], cuda, nvml) == ["cuda:1", "cuda:0"]
    assert nvml.open == 0
    # a GPU that it does not know, or no such library: they keep their order
    assert free_outside(["0000-0", "0000-7"], nvml) is None
    assert emptiest_first(["cuda:0", "cuda:1"], cuda, FakeNvml({})) == ["cuda:0", "cuda:1"]
    assert emptiest_first(["cuda:0", "cuda:1"], cuda, object()) == ["cuda:0", "cuda:1"]


def test_a_gpu_that_nobody_uses_is_taken(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_share, "free_outside", lambda uuids, library: [6 * GIB, 11 * GIB])
    share = Share(locks=tmp_path)
    with shared(share, torch.device("cuda"), any_gpu=True, say=silent) as first:
        with shared(share, torch.device("cuda"), any_gpu=True, say=silent) as second:
            assert (str(first), str(second)) == ("cuda:1", "cuda:0")
            with (
                pytest.raises(GpuBusyError, match=f"cuda:0 is used by process {os.getpid()}, cuda:1 is used by"),
                shared(Share(locks=tmp_path, patience=0.0), torch.device("cuda"), any_gpu=True, say=silent),
            ):
                pass
        with shared(share, torch.device("cuda:0"), any_gpu=False, say=silent) as again:
            assert str(again) == "cuda:0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-0000-0.lock", "gpu-0000-1.lock"]


def test_what_does_not_fit_under_the_limit_has_a_name_and_the_turn_ends(cuda: FakeCuda, tmp_path: Path) -> None:
    share = Share(reserve_gib=2, locks=tmp_path)
    with (
        pytest.raises(GpuMemoryError, match="ran out of memory under the limit that leaves 2 GiB to others") as short,
        shared(share, torch.device("cuda:0"), any_gpu=False, say=silent),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. See documentation")
    assert "Tried" not in str(short.value)
    with shared(Share(locks=tmp_path, patience=0.0), torch.device("cuda:0"), any_gpu=False, say=silent):
        pass


def test_a_turn_is_waited_for_and_whom_one_waits_for_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []
    share = Share(locks=tmp_path)

    def second() -> None:
        with shared(share, torch.device("cpu"), any_gpu=False, say=said.append):
            order.append("second")

    with shared(share, torch.device("cpu"), any_gpu=False, say=silent):
        waiting = threading.Thread(target=second)
        waiting.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert said == [f"waiting for its turn: cpu is used by process {os.getpid()}"]


def test_a_turn_ends_with_the_process_that_has_it_however_it_ends(tmp_path: Path) -> None:
    told, tell = os.pipe()
    holding = os.fork()
    if not holding:
        with shared(Share(locks=tmp_path), torch.device("cpu"), any_gpu=False, say=silent):
            os.write(tell, b"held")
            time.sleep(600)
    try:
        assert os.read(told, 4) == b"held"
        mine = Share(locks=tmp_path, patience=0.0)
        with (
            pytest.raises(GpuBusyError, match=f"cpu is used by process {holding}") as busy,
            shared(mine, torch.device("cpu"), any_gpu=False, say=silent),
        ):
            pass
        assert busy.value.state_name == "GpuBusy"
    finally:
        os.kill(holding, signal.SIGKILL)
        os.waitpid(holding, 0)
    with shared(mine, torch.device("cpu"), any_gpu=False, say=silent) as device:
        assert device == torch.device("cpu")


def test_a_folder_of_locks_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LockError, match="name a folder of your own with --gpu-locks"),
        shared(Share(locks=tmp_path / "file"), torch.device("cpu"), any_gpu=False, say=silent),
    ):
        pass
    (tmp_path / "cpu.lock").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(LockError),
        shared(Share(locks=tmp_path), torch.device("cpu"), any_gpu=False, say=silent),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_too_little_free_on_the_cpu_is_refused_too(tmp_path: Path) -> None:
    with (
        pytest.raises(GpuMemoryError, match="cpu has"),
        shared(Share(reserve_gib=10**6, locks=tmp_path), torch.device("cpu"), any_gpu=False, say=silent),
    ):
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_target(folder / "target", hybrid=True)
    write_drafter(folder / "drafter")
    write_prompts(folder / "prompts.jsonl")
    return folder


def test_layers_are_streamed_only_when_the_weights_do_not_fit(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(
        files / "target", files / "drafter", files / "prompts.jsonl", tmp_path, device="cpu", offload="auto"
    )
    parameters = sum(tensor.numel() for tensor in torch_weights(files / "target"))
    drafter = sum(file.stat().st_size for file in (files / "drafter").glob("*.safetensors"))
    assert weight_bytes(request) == 4 * parameters + drafter
    for free, expected in ((weight_bytes(request), True), (2 * weight_bytes(request), False)):
        monkeypatch.setattr(beside_others, "free_bytes", lambda device, free=free: free)
        assert settled(request).offload is expected


def torch_weights(target: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(target / "model.safetensors").values())


def test_the_command_names_what_it_refuses_in_a_file_and_does_nothing(files: Path, tmp_path: Path) -> None:
    argv = ["evaluate", "--target", str(files / "target"), "--checkpoint", str(files / "drafter")]
    argv += ["--prompts", str(files / "prompts.jsonl"), "--output", str(tmp_path / "report")]
    argv += ["--device", "cpu", "--kernel", "fla", "--failure", str(tmp_path / "failure.json")]
    refused = CliRunner().invoke(app, [*argv, "--reserve-gib", "0.1", "--gpu-locks", str(tmp_path / "locks")])
    assert isinstance(refused.exception, KernelError)
    written = parse_failure((tmp_path / "failure.json").read_bytes())
    assert written == Failure(state="KernelRefused", message=str(refused.exception))
    assert "kernel fla was asked for, but the device is cpu" in written.message
    assert not (tmp_path / "report").exists()
    assert not (tmp_path / "locks").exists()  # it did not even ask for its turn


def test_every_state_that_a_host_may_name_is_one_of_its_failures() -> None:
    """What the operator's machine believes, which imports none of this."""
    named = {error.state_name for error in (GpuBusyError, GpuMemoryError, KernelError, ServedModelSlowError)}
    assert set(SAID_BY_HOSTS) == named | {DISK_FULL}
    with pytest.raises(UsageError), told(None):
        raise UsageError("nothing is written where nobody asked for it")


def test_a_full_disk_has_one_name_whatever_did_not_fit(tmp_path: Path) -> None:
    full = DFlashError("the cache could not be written")
    full.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(DFlashError), told(tmp_path / "failure.json"):
        raise full
    assert parse_failure((tmp_path / "failure.json").read_bytes()) == Failure(
        state=DISK_FULL, message="the cache could not be written"
    )
    assert parse_failure(b"no JSON") is None


def test_a_lock_that_is_a_folder_of_the_machine_has_a_default() -> None:
    assert gpu_share.default_locks().name == "dflash-gpu-locks"
