"""What somebody has to act on differently has a state of its own, and a sentence that says what to do."""

import json
import os
import sys
from pathlib import Path

import pytest

from dflash.checkpoint_layout import ChangedError, DamagedError, NotACheckpointError, UnsafePickleError
from dflash.errors import DFlashError
from tasks import process
from tasks.contents import SourceError
from tasks.errors import FileChanged
from tasks.journal import JournalError, OnItsWayError
from tasks.process import PIPE
from tasks.store_errors import ObjectMissingError, StoreAccessError, StoreBusyError, UntrustworthyStoreError
from tasks.transfer import (
    DestinationDeniedError,
    DestinationFullError,
    FetchError,
    Receiver,
    ReceiverError,
    ReceiverLostError,
    SourceChangedError,
)

STATES = {
    "SourceChanged": (SourceChangedError, FileChanged),
    "CheckpointChanged": (ChangedError,),
    "CheckpointDamaged": (DamagedError,),
    "CheckpointUnsafe": (UnsafePickleError,),
    "NotACheckpoint": (NotACheckpointError,),
    "NotRelayable": (SourceError,),
    "DiskFull": (DestinationFullError,),
    "DestinationNotWritable": (DestinationDeniedError,),
    "DestinationFailed": (ReceiverError,),
    "DestinationLost": (ReceiverLostError,),
    "AlreadyRunning": (OnItsWayError,),
    "JournalUnusable": (JournalError,),
    "StoreRefused": (StoreAccessError,),
    "StoreUnreachable": (StoreBusyError, FetchError),
    "StoreUntrustworthy": (UntrustworthyStoreError,),
    "NoSuchObject": (ObjectMissingError,),
}
PAGE = Path(__file__).parents[2] / "docs" / "relay.md"


@pytest.mark.parametrize("state", STATES)
def test_failure_of_a_relay_has_its_state_and_its_line(state: str) -> None:
    assert {error.state_name for error in STATES[state]} == {state}
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{state}` |"))
    assert len(row.split("|")[3].strip()) > 10


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"ok": False, "message": "no room", "kind": "full"}, DestinationFullError),
        ({"ok": False, "message": "read-only", "kind": "denied"}, DestinationDeniedError),
        ({"ok": False, "message": "other", "kind": None}, ReceiverError),
        ({"ok": False, "message": "of an older one"}, ReceiverError),
        ({"ok": False, "message": "strange", "kind": ["full"]}, ReceiverError),
    ],
)
def test_kind_of_a_receivers_failure_is_its_error(reply: dict[str, object], error: type[DFlashError]) -> None:
    answer = json.dumps(reply)
    argv = [sys.executable, "-c", f"import sys; sys.stdin.readline(); print({answer!r})"]
    running = process.start(argv, stdin=PIPE, stdout=PIPE)
    receiver = Receiver(running, "infer:/x", lambda code: ReceiverLostError(str(code)))
    with pytest.raises(DFlashError) as raised:
        receiver.hash(0, 1)
    assert type(raised.value) is error
    running.communicate()


def test_full_disk_and_one_that_is_not_ours_are_told_apart(tmp_path: Path) -> None:
    from deploy.relay.disk import NoRoomError, ReceiveError, explained, kind_of

    full, denied = OSError(28, os.strerror(28), "/a"), PermissionError(13, os.strerror(13), "/a")
    assert [kind_of(error) for error in (full, denied, NoRoomError("n"), ReceiveError("r"), OSError(5, "i"))] == [
        "full",
        "denied",
        "full",
        None,
        None,
    ]
    assert explained(full) == "'/a': No space left on device: make room and relay it again"
    assert explained(denied) == "'/a': Permission denied: let its user write there, or name another folder"
