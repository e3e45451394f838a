"""When a range counts as arrived: by the digest of what the destination wrote, and by nothing that was sent."""

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tasks.inventory import Location
from tasks.journal import Journal
from tasks.relay import RelayResult, Settings, relay
from tasks.transfer import Receiver, TransferError

RANGE = 100_000
SIZE = 4 * RANGE + 7


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(os.urandom(SIZE))
    return tmp_path / "source"


def relay_here(source: Path, destination: Path) -> RelayResult:
    connector: Any = None
    settings = Settings(streams=1, range_bytes=RANGE)
    return relay(connector, None, Location(None, str(source)), Location(None, str(destination)), settings)


@pytest.mark.parametrize("spoilt", [False, True])
def test_range_whose_confirmation_was_lost_is_hashed_where_it_lies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    there = tmp_path / "there" / "file"
    with monkeypatch.context() as patched:
        patched.setattr("tasks.streams.UNCONFIRMED_BYTES", 1)
        patched.setattr(Journal, "stored", cut)
        with pytest.raises(KeyboardInterrupt):
            relay_here(source, there)
    (part,) = there.parent.iterdir()
    if spoilt:
        part.write_bytes(bytes(SIZE))
    # of the second nothing is known but that it may have gone out
    assert relay_here(source, there).moved in ({SIZE} if spoilt else {SIZE - RANGE, SIZE - 2 * RANGE})
    assert there.read_bytes() == source.read_bytes()


def test_range_that_was_stored_as_another_is_an_error_and_moves_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, stored = tmp_path / "there" / "file", Receiver.stored
    asked = count()
    with monkeypatch.context() as patched:
        patched.setattr(Receiver, "stored", lambda receiver: stored(receiver)[:: -1 if next(asked) == 1 else 1])
        with pytest.raises(TransferError, match="they were changed on the way"):
            relay_here(source, there)
    assert not there.exists()
    assert RANGE <= relay_here(source, there).moved < SIZE
    assert there.read_bytes() == source.read_bytes()
