"""The object store at the command line: as the way, and as an end."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli import app
from tasks.ends import LocalReader
from tasks.errors import Refused
from tasks.gate import ByteStream
from tasks.store_errors import ObjectMissingError
from tests.flows.conftest import Operator
from tests.object_stores import BUCKET, StoreServer, in_environment, store_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """In the network of this folder's sshds."""
    folder = tmp_path_factory.mktemp("store-of-flows") / "s3"
    with store_server("rclone", folder, address="127.9.31.4") as running, in_environment(running.environment):
        yield running


@pytest.fixture
def staged(operator: Operator, server: StoreServer) -> Operator:
    """An operator whose hosts.yaml names the store."""
    server.clear()
    tree = json.loads(operator.hosts_file.read_text())
    tree["staging"] = server.staging().model_dump(mode="json")
    operator.hosts_file.write_text(json.dumps(tree))
    return operator


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["relay", *argv])


def done(*argv: str) -> Result:
    result = run(*argv)
    assert result.exit_code == 0, (result.exception, result.stderr)
    return result


def approve_last(operator: Operator) -> None:
    store = operator.connector.store
    (request,) = (request for request in store.requests() if request.status == "pending")
    store.approve(request.id, reason="a test", ca_key=operator.site.ca_key)


def there(operator: Operator) -> Path:
    return operator.hosts_file.parent / "there" / "copy.safetensors"


def test_staged_relay_is_read_under_the_grant_or_uploaded_under_its_own_approval(staged: Operator) -> None:
    ends = (staged.source, f"ct129:{there(staged)}")
    with pytest.raises(Refused):
        CliRunner().invoke(app, ["relay", *ends, "--via", "s3"], catch_exceptions=False)
    approve_last(staged)
    done(*ends, "--via", "s3")
    assert there(staged).read_bytes() == staged.checkpoint.read_bytes()

    there(staged).unlink()
    assert "kpro6 puts them there itself, which is asked for" in done(*ends, "--via", "s3", "--upload", "--plan").stdout
    assert isinstance(run(*ends, "--via", "s3", "--upload").exception, Refused)
    approve_last(staged)
    result = json.loads(done(*ends, "--via", "s3", "--upload", "--json").stdout)
    assert result["moved"] == staged.checkpoint.stat().st_size
    assert there(staged).read_bytes() == staged.checkpoint.read_bytes()


def test_plan_names_the_way(staged: Operator) -> None:
    source = staged.hosts_file.parent / "here.bin"
    source.write_bytes(bytes(100_000))
    ends = (str(source), f"ct129:{there(staged)}")
    assert "100 kB of 100 kB move, by the object store" in done(*ends, "--via", "s3", "--plan").stdout
    assert "or by the object store, whichever is faster" in done(*ends, "--via", "auto", "--plan").stdout
    assert not there(staged).exists()


def test_auto_says_why(staged: Operator) -> None:
    source = staged.hosts_file.parent / "here.bin"
    source.write_bytes(bytes(100_000))
    result = done(str(source), f"ct129:{there(staged)}", "--via", "auto")
    assert "ssh" in result.stderr
    assert "100 kB take" in result.stderr
    assert there(staged).read_bytes() == source.read_bytes()


def test_object_is_an_end_like_any_other(staged: Operator, server: StoreServer) -> None:
    source, copy = staged.hosts_file.parent / "here.bin", staged.hosts_file.parent / "back.bin"
    source.write_bytes(bytes(range(256)) * 1000)
    done(str(source), f"s3://{BUCKET}/kept/step_1.pt")
    assert server.content("kept/step_1.pt") == source.read_bytes()
    result = done(f"s3://{BUCKET}/kept/step_1.pt", str(copy), f"ct129:{there(staged)}", "--json")
    assert all(json.loads(line)["verified"] for line in result.stdout.splitlines())
    assert copy.read_bytes() == there(staged).read_bytes() == source.read_bytes()
    done(f"s3://{BUCKET}/kept/step_1.pt", f"s3://{BUCKET}/kept/again.pt")
    assert server.content("kept/again.pt") == source.read_bytes()


def test_object_and_hosts_get_it_from_one_reading_of_the_source(
    staged: Operator, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    reading = LocalReader.read

    def counted(self: LocalReader, path: str, offset: int, length: int) -> AbstractContextManager[ByteStream]:
        read.append(length)
        return reading(self, path, offset, length)

    monkeypatch.setattr(LocalReader, "read", counted)
    source = staged.hosts_file.parent / "here.bin"
    source.write_bytes(bytes(range(256)) * 1000)
    done(str(source), f"ct129:{there(staged)}", f"s3://{BUCKET}/one", f"s3://{BUCKET}/two")
    assert server.content("one") == server.content("two") == there(staged).read_bytes() == source.read_bytes()
    # the first bytes tell that it is no checkpoint
    assert read == [4, source.stat().st_size]


def test_plan_of_an_object_tells_what_moves_and_how(staged: Operator, server: StoreServer) -> None:
    source = staged.hosts_file.parent / "here.bin"
    source.write_bytes(bytes(100_000))
    shown = done(str(source), f"s3://{BUCKET}/kept/step_1.pt", "--plan", "--bandwidth", "10kB/s").stdout
    assert "100 kB of 100 kB move, this machine puts it there in parts of 16.78 MB" in shown
    assert "at no more than 10 kB/s, so in 10s or more" in shown
    assert server.keys() == []
    done(str(source), f"s3://{BUCKET}/kept/step_1.pt")
    way = json.loads(done(f"s3://{BUCKET}/kept/step_1.pt", f"ct129:{there(staged)}", "--plan", "--json").stdout)["way"]
    assert (way["source_bytes"], way["moving_bytes"], way["how"]) == (
        100_000,
        100_000,
        "the host fetches it from the store",
    )
    assert not there(staged).exists()
    with pytest.raises(ObjectMissingError):
        CliRunner().invoke(app, ["relay", f"s3://{BUCKET}/none", "/x", "--plan"], catch_exceptions=False)


def test_plan_of_an_object_from_a_protected_host_asks_before_it_looks(staged: Operator) -> None:
    shown = json.loads(done(staged.source, f"s3://{BUCKET}/kept/step_1.pt", "--plan", "--json").stdout)
    assert (shown["way"], shown["approval"], len(shown["actions"])) == (None, None, 1)


def test_way_of_a_directory_is_chosen_by_its_largest_file(staged: Operator, tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    save_file({"norm.weight": torch.ones(20_000)}, tmp_path / "step" / "model.safetensors")
    result = done(str(tmp_path / "step"), f"ct129:{there(staged).parent}", "--via", "auto")
    assert "ssh: 80.24 kB take" in result.stderr
    assert sorted(name for name in os.listdir(there(staged).parent) if not name.endswith(".relay.json")) == [
        "config.json",
        "model.safetensors",
    ]


def test_protected_source_of_an_object_needs_an_approval(staged: Operator, server: StoreServer) -> None:
    result = run(staged.source, f"s3://{BUCKET}/kept/step_1.pt")
    assert isinstance(result.exception, Refused)
    assert server.keys() == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/a", "ct129:/b", "--via", "carrier pigeon"], "--via 'carrier pigeon' is not one of ssh, s3, auto"),
        (["s3://", "ct129:/b"], "is not s3://BUCKET/KEY"),
        (["/a", f"s3://{BUCKET}/b", "--what", "drafter"], "an object is all of a file"),
        (["/a", f"s3://{BUCKET}/b", "--dtype", "bfloat16"], "all of it moves as it is, so --dtype has no say"),
        (["/a", f"s3://{BUCKET}/b", "--via", "s3"], "an object as an end is the way already"),
        (["/a", f"s3://{BUCKET}/b", "--streams", "4"], "--streams are of the way over ssh"),
        (["/a", "ct129:/b", "--streams", "4", "--via", "s3"], "--streams are of the way over ssh"),
        (["/a", "ct129:/b", "--upload"], "--upload is of the way by the store"),
        (["/a", "ct129:/b", "--upload", "--via", "s3", "--what", "drafter"], "leave out --upload"),
        (["/a", "ct129:/b", "--output", "pt"], "all of it moves as it is, so --output has no say"),
        (["/a", "ct129:/b", "ct129:/b"], "one place is named twice"),
        (["/a", "ct129:/b", "ct129://b/."], "ct129:/b is named twice"),
        ([f"s3://{BUCKET}/a", f"s3://{BUCKET}/a"], "one place is named twice"),
        (["/a", f"s3://{BUCKET}/b", "kpro6:/b"], "is protected: a relay reads from there"),
    ],
)
def test_what_cannot_be_is_said(staged: Operator, argv: list[str], message: str) -> None:
    assert message in str(run(*argv).exception)


def test_without_a_store_the_way_by_it_is_named(operator: Operator) -> None:
    source = operator.hosts_file.parent / "here.bin"
    source.write_bytes(b"1")
    exception = run(str(source), f"ct129:{there(operator)}", "--via", "s3").exception
    assert "hosts.yaml names no object store" in str(exception)
