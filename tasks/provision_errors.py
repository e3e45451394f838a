"""Why a host did not get its environment, each by a name of its own with what to do about it."""

from typing import ClassVar

from dflash.errors import DFlashError


class NoPythonError(DFlashError):
    """The host has no Python that this program can run on."""

    state_name = "NoPython"


class GpuMissingError(DFlashError):
    """The host's entry asks for kernels that need a GPU, and it has none that can be seen."""

    state_name = "GpuMissing"


class HostDiskFullError(DFlashError):
    """The host has no room for what was to be put there."""

    state_name = "DiskFull"


class ProvisionError(DFlashError):
    """The environment was not built; what was current there still is."""

    state_name: ClassVar[str] = "ProvisionFailed"
    mend: ClassVar[str] = "its last words are above; mend that and run it again"


class BuildFailedError(ProvisionError):
    """The venv could not be made, or the wheels could not be installed."""

    state_name = "BuildFailed"
    mend = "mend that there (a Python without the module venv needs the package python3-venv), and run it again"


class VerificationError(ProvisionError):
    """What was built is not what was locked, or cannot be imported; it was removed."""

    state_name = "VerificationFailed"
    mend = "it was removed again: look at the versions in the constraints, or at the host's libraries"


class KernelsMissingError(ProvisionError):
    """fla's kernels do not load on the host."""

    state_name = "KernelsMissing"
    mend = "mend the driver or the GPU's use there, or say gpu: {kernel: torch} for the host in hosts.yaml"


class EnvironmentInUseError(ProvisionError):
    """The environment that should be built is there, damaged, and processes use it."""

    state_name = "EnvironmentInUse"
    mend = "wait for them or stop them, then run it again"


class CurrentTakenError(ProvisionError):
    """Something else than a symbolic link is called ``current``."""

    state_name = "CurrentTaken"
    mend = "move it away, then run it again"


class HostChangedError(ProvisionError):
    """The host is not any more what it was when it was asked."""

    state_name = "HostChanged"
    mend = "run it again; it is asked anew"


class InterruptedProvisionError(ProvisionError):
    """The connection broke while it was built."""

    state_name = "ProvisionInterrupted"
    mend = "nothing half-made is used; run it again"


PROBLEMS: dict[str, type[ProvisionError]] = {
    "changed": HostChangedError,
    "wheels-missing": HostChangedError,
    "damaged": HostChangedError,
    "not-a-link": CurrentTakenError,
    "in-use": EnvironmentInUseError,
    "venv": BuildFailedError,
    "install": BuildFailedError,
    "file": BuildFailedError,
    "verify": VerificationError,
    "kernels": KernelsMissingError,
}
