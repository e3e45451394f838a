"""What stands beside a selection's files: of another checkpoint nothing may, for a reader would take it for a part."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.relay.company import require_alone
from deploy.relay.disk import ReceiveError
from dflash.checkpoint_layout import NotACheckpointError
from tasks.inventory import Location
from tasks.relay import RelayResult, Settings, relay
from tasks.selection import What
from tasks.transfer import ReceiverError
from tests.tasks.checkpoints import step, zlab


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.relayable.SETTLING_SECONDS", 0.0)


def relay_here(source: Path, *destinations: Path, what: What = "drafter") -> RelayResult:
    connector: Any = None
    first, *also = (Location(None, str(place)) for place in destinations)
    return relay(connector, None, Location(None, str(source)), first, Settings(what=what), also=also)


def test_what_would_stay_of_another_checkpoint_is_refused_before_a_byte(tmp_path: Path) -> None:
    relay_here(step(tmp_path, 5), tmp_path / "there")
    before = sorted(os.listdir(tmp_path / "there"))
    with pytest.raises(ReceiverError, match=r"holds 'drafter.safetensors' of '.*step_5', which this does not replace"):
        relay_here(zlab(tmp_path, "released"), tmp_path / "there")
    assert sorted(os.listdir(tmp_path / "there")) == before


def test_every_destination_is_looked_at(tmp_path: Path) -> None:
    relay_here(step(tmp_path, 5), tmp_path / "second")
    with pytest.raises(ReceiverError, match=r"second' holds 'drafter.safetensors'"):
        relay_here(zlab(tmp_path, "released"), tmp_path / "first", tmp_path / "second")
    assert not (tmp_path / "first").exists()


def test_next_step_replaces_all_of_the_one_before(tmp_path: Path) -> None:
    relay_here(step(tmp_path, 5), tmp_path / "there")
    relay_here(step(tmp_path, 6), tmp_path / "there")
    for name in ("drafter.safetensors", "manifest.json"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "step_6" / name).read_bytes()


ABOUT = {"identity": "zip:1", "selected": "drafter"}


def lay(folder: Path, name: str, text: str = "", **fields: str) -> None:
    """A file and its sidecar, as a relay leaves them; ``text`` is what stands there instead."""
    (folder / name).touch()
    (folder / f"{name}.relay.json").write_text(text or json.dumps({"source": "train:/a", **fields}))


def test_what_is_of_the_same_or_will_be_replaced_may_stay(tmp_path: Path) -> None:
    lay(tmp_path, "probe.safetensors", **ABOUT)
    lay(tmp_path, "model.safetensors", **ABOUT | {"identity": "zip:2"})
    require_alone(str(tmp_path), ["model.safetensors"], ABOUT)
    for other in ({"identity": "zip:2"}, {"selected": "model"}):
        lay(tmp_path, "manifest.json", **ABOUT | other)
        with pytest.raises(ReceiveError, match=r"holds 'manifest.json' of 'train:/a'"):
            require_alone(str(tmp_path), ["model.safetensors"], ABOUT)


@pytest.mark.parametrize(
    "left",
    [
        lambda folder: (folder / "manifest.json").touch(),
        lambda folder: (folder / "manifest.json.relay.json").write_text('{"identity": "zip:2"}'),
        lambda folder: lay(folder, "step_4.pt", identity="zip:2"),
        lambda folder: lay(folder, "a.json", '{"identity": "zi'),
        lambda folder: lay(folder, "a.json", "[]"),
        os.rmdir,
    ],
    ids=["no relay's", "gone", "read by no directory's reader", "half-written", "a list", "no folder"],
)
def test_what_is_not_known_or_not_read_is_not_in_the_way(tmp_path: Path, left: Callable[[Path], object]) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    left(folder)
    found = sorted(folder.glob("*"))
    require_alone(str(folder), ["model.safetensors"], ABOUT)
    assert sorted(folder.glob("*")) == found


def test_all_of_a_directory_that_is_no_checkpoint_arrives(tmp_path: Path) -> None:
    source, there = tmp_path / "features", tmp_path / "there"
    (source / "shard 1").mkdir(parents=True)
    (source / "shard 1" / "new\nline").write_bytes(b"1")
    (source / "index.jsonl").write_bytes(b"{}\n")
    (source / "empty").touch()
    result = relay_here(source, there, what="all")
    assert (result.bytes, len(result.files)) == (4, 3)
    for path in ("shard 1/new\nline", "index.jsonl", "empty"):
        assert (there / path).read_bytes() == (source / path).read_bytes()
    assert relay_here(source, there, what="all").moved == 0
    with pytest.raises(NotACheckpointError, match=r"expected a manifest.json"):
        relay_here(source, tmp_path / "drafter")
