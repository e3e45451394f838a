"""The guard's refusal, shared by every module that can meet it."""

from dflash.errors import DFlashError


class Refused(DFlashError):
    """The guard refused an action on a protected host; nothing was done there."""

    exit_code = 77
    state_name = "Refused"

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class HostBusy(Refused):
    """No session slot is free on the host; it can be tried again."""

    state_name = "HostBusy"


class FileChanged(Refused):
    """A file is not any more what was first seen of it under the approval."""

    state_name = "SourceChanged"
