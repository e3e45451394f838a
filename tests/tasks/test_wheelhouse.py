"""Gathering wheels with the real pip, out of a folder; what pip says when it cannot; this program as a wheel."""

import io
import json
import os
import platform
import zipfile
from pathlib import Path

import pytest

from dflash.errors import DFlashError
from tasks import process, wheelhouse
from tasks.own_wheel import OwnWheel, own_wheel
from tasks.resolving import ConflictError, Target, WheelMissingError
from tasks.wheelhouse import (
    IndexFailedError,
    IndexUnreachableError,
    NoRoomError,
    Wheelhouse,
    failure,
    pack,
    read_report,
    unpacked_bytes,
)
from tests.wheelhouses import sha256, small_wheel

TARGET = Target(version=platform.python_version(), machine=platform.machine(), libc=platform.libc_ver())
OWN = OwnWheel("dflash_pipeline-0.1.0-py3-none-any.whl", b"a wheel", ("alpha>=1",))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip may take wheels from: alpha, which needs beta, and pip."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    small_wheel(folder, "alpha", requires="beta")
    small_wheel(folder, "beta", body="x = 1")
    small_wheel(folder, "pip", "99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.slow
def test_what_was_resolved_once_stays_and_travels_by_its_hash(shelf: Path, tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    lock = house.lock(OWN, (), TARGET, "")
    assert [(one.name, one.sha256) for one in lock.packages] == [
        ("alpha", sha256(shelf / "alpha-1.0-py3-none-any.whl")),
        ("beta", sha256(shelf / "beta-1.0-py3-none-any.whl")),
        ("dflash-pipeline", OWN.sha256),
    ]
    lines: list[str] = []
    found = house.gather(lock, [one.sha256 for one in (*lock.packages, lock.pip)], TARGET, lines.append)
    assert {path.name for path in found.values()} == {one.file_name for one in (*lock.packages, lock.pip)}
    assert all(sha256(path) == digest for digest, path in found.items())

    # the index has something newer now, and then nothing at all
    small_wheel(shelf, "beta", "2.0")
    assert house.lock(OWN, (), TARGET, "") == lock
    assert house.lock(OWN, (), TARGET, "", refresh=True) != lock
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert house.gather(lock, list(found), TARGET) == found


@pytest.mark.slow
def test_a_constraint_chooses_and_a_platform_without_wheels_is_named(shelf: Path, tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    small_wheel(shelf, "beta", "2.0")
    assert {one.version for one in house.lock(OWN, (), TARGET, "beta==1.0").packages if one.name == "beta"} == {"1.0"}
    other = TARGET.model_copy(update={"machine": "riscv64"})
    (shelf / "beta-2.0-py3-none-any.whl").rename(shelf / "beta-2.0-cp39-cp39-win32.whl")
    (shelf / "beta-1.0-py3-none-any.whl").unlink()
    with pytest.raises(WheelMissingError, match="no wheel of beta for Python"):
        house.lock(OWN, (), other, "")


@pytest.mark.slow
def test_another_file_of_the_same_name_is_not_taken(shelf: Path, tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    lock = house.lock(OWN, (), TARGET, "")
    small_wheel(shelf, "beta", body="x = 2")
    with pytest.raises(IndexFailedError):
        house.gather(lock, [one.sha256 for one in lock.packages], TARGET)


@pytest.mark.parametrize(
    ("log", "error", "says"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", WheelMissingError, "torch==2.13.0"),
        (
            "WARNING: Retrying\nERROR: Could not install: HTTPSConnectionPool: Max retries exceeded",
            IndexUnreachableError,
            "network",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip.Connection object "
            "at 0x7fe0>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/numpy/\n"
            "ERROR: Cannot install numpy because these package versions have conflicting dependencies.\n"
            "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            IndexUnreachableError,
            "machine: NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'); see",
        ),
        (
            "ERROR: Cannot install six because these package versions have conflicting dependencies.\n"
            "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            ConflictError,
            "constraints allow: Cannot install six because",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            NoRoomError,
            "make room",
        ),
        ("/usr/bin/python3: No module named pip", IndexFailedError, "ensurepip"),
        ("ERROR: something \x1b[31mred", IndexFailedError, "something \\x1b[31mred"),
        ("", IndexFailedError, "no word"),
    ],
)
def test_what_pip_says_has_a_name_and_a_mend(log: str, error: type[DFlashError], says: str) -> None:
    found = failure(log, TARGET)
    assert type(found) is error
    assert says in str(found)
    assert found.state_name != "Failed"


def test_a_report_that_is_none_is_said_so() -> None:
    for text in ("", "[]", json.dumps({"install": [{"metadata": {}}]})):
        with pytest.raises(IndexFailedError, match="pip's report"):
            read_report(text)


def test_the_same_wheels_are_the_same_parcel(shelf: Path, tmp_path: Path) -> None:
    wheels = {sha256(path): path for path in shelf.iterdir()}
    pack(wheels, tmp_path / "one.tar")
    os.utime(shelf / "beta-1.0-py3-none-any.whl", (1, 1))
    pack(dict(reversed(wheels.items())), tmp_path / "two.tar")
    assert sha256(tmp_path / "one.tar") == sha256(tmp_path / "two.tar")
    assert unpacked_bytes(wheels.values()) > 3 * 4 * 4096


def test_a_full_disk_here_is_named(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(wheelhouse.os, "replace", full)
    with pytest.raises(NoRoomError, match="make room"):
        pack({sha256(path): path for path in shelf.iterdir()}, tmp_path / "one.tar")
    assert not list(tmp_path.glob(".packing*"))


def test_this_program_is_the_same_wheel_for_the_same_files_and_can_be_run_from_it(tmp_path: Path) -> None:
    made = own_wheel()
    assert own_wheel().sha256 == made.sha256
    file = tmp_path / made.file_name
    file.write_bytes(made.content)
    told = process.run(
        [
            "python3",
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(file)!r}); import dflash.errors; print(dflash.errors.__file__)",
        ]
    )
    assert told.stdout.strip() == f"{file}/dflash/errors.py"
    with zipfile.ZipFile(io.BytesIO(made.content)) as wheel:
        names = wheel.namelist()
        assert wheel.testzip() is None
    assert {
        "deploy/host/environment.py",
        "deploy/training-host/dflash-gate",
        "dflash/prompt_files/nightly.jsonl",
    } <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "benchmarks/"))]
