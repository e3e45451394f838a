"""The gate program as a module: its form, and its functions without a host."""

import ast
import base64
import importlib.machinery
import importlib.util
import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tests.sshds import GATE

MIB = 1 << 20


def _load() -> Any:
    loader = importlib.machinery.SourceFileLoader("dflash_gate_under_test", str(GATE))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    exec(compile(GATE.read_text(), str(GATE), "exec"), module.__dict__)
    return module


gate = _load()


# --- the file


def test_is_one_file_of_the_standard_library_within_600_lines() -> None:
    source = GATE.read_text()
    imported = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert set(imported) <= sys.stdlib_module_names
    assert len(source.splitlines()) <= 600
    assert os.access(GATE, os.X_OK)


def test_parses_as_python_3_9() -> None:
    assert ast.parse(GATE.read_text(), feature_version=(3, 9)).body  # a SyntaxError is the failure


# --- functions


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


GOOD = {"force-command": f"dflash-gate {'a' * 64}", "source-address": "10.1.2.0/24,127.0.0.1"}


def _certificate(**changes: Any) -> bytes:
    """A certificate blob; its signature, which sshd would have verified, is none."""
    fields: dict[str, Any] = {
        "name": b"ssh-ed25519-cert-v01@openssh.com",
        "kind": 1,
        "principals": [b"dflash-gate"],
        "valid": (100, 200),
        "options": GOOD,
        "extensions": b"",
    }
    fields |= changes
    critical = b"".join(
        _string(name.encode()) + _string(_string(value.encode())) for name, value in fields["options"].items()
    )
    return (
        _string(fields["name"])
        + _string(bytes(range(32)))
        + _string(bytes(32))
        + struct.pack(">QI", 42, fields["kind"])
        + _string(b"request head")
        + _string(b"".join(map(_string, fields["principals"])))
        + struct.pack(">QQ", *fields["valid"])
        + _string(critical)
        + _string(_string(fields["extensions"]) + _string(b"") if fields["extensions"] else b"")
        + _string(b"")
        + _string(b"ca key")
        + _string(b"signature")
    )


@pytest.fixture
def login(tmp_path: Path) -> Callable[[bytes], Path]:
    """The file that sshd writes for a login with this key."""

    def write(blob: bytes) -> Path:
        file = tmp_path / "login"
        file.write_text(f"publickey ssh-ed25519-cert-v01@openssh.com {base64.b64encode(blob).decode()}\n")
        return file

    return write


def test_certificate_is_read(login: Callable[[bytes], Path]) -> None:
    read = gate.login_certificate(str(login(_certificate())))
    assert read == (42, "request head", 200, "a" * 64, 100)


def test_certificate_of_ssh_keygen_is_read(tmp_path: Path, login: Callable[[bytes], Path]) -> None:
    """With as many addresses as make lengths of more than one byte."""
    for key in ("ca", "own"):
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(tmp_path / key)])
    sources = ",".join(f"10.1.2.{number},fd00::{number}/128" for number in range(1, 200))
    argv = ["ssh-keygen", "-q", "-s", str(tmp_path / "ca"), "-I", "12ab " + "c" * 64, "-n", "dflash-gate", "-z", "77"]
    argv += ["-V", "20300101Z:20300102Z", "-O", "clear", "-O", f"force-command=dflash-gate {'b' * 64}"]
    process.run([*argv, "-O", f"source-address={sources}", str(tmp_path / "own.pub")])
    blob = base64.b64decode((tmp_path / "own-cert.pub").read_text().split()[1])
    read = gate.login_certificate(str(login(blob)))
    assert (read.serial, read.key_id, read.digest) == (77, "12ab " + "c" * 64, "b" * 64)
    assert read.valid_before - read.valid_after == 24 * 3600


@pytest.mark.parametrize(
    "changes",
    [
        {"name": b"ssh-rsa-cert-v01@openssh.com"},
        {"kind": 2},
        {"options": {"source-address": "10.1.2.1"}},
        {"options": GOOD | {"force-command": "sh"}},
        {"options": GOOD | {"force-command": f"dflash-gate {'a' * 64};id"}},
        {"options": GOOD | {"force-command": f"dflash-gate {'a' * 64}\n"}},
        {"options": GOOD | {"force-command": f"dflash-gate {'A' * 64}"}},
        {"options": GOOD | {"verify-required": ""}},
        {"options": {"force-command": GOOD["force-command"]}},
        {"principals": []},
        {"principals": [b"root"]},
        {"principals": [b"dflash-gate", b"root"]},
        {"extensions": b"permit-pty"},
    ],
)
def test_certificate_is_refused(changes: dict[str, Any], login: Callable[[bytes], Path]) -> None:
    with pytest.raises(gate.Refusal, match="no force-command, principal and options as"):
        gate.login_certificate(str(login(_certificate(**changes))))


@pytest.mark.parametrize("path", ["/", "/a", "/a b/c.pt", "/a/…", "/..a/b."])
def test_plain_paths(path: str) -> None:
    assert gate.parse_request(json.dumps({"verb": "stat", "path": path}).encode()) == ("stat", path, {})


@pytest.mark.parametrize("path", ["", "a", "//a", "/a/", "/a//b", "/a/./b", "/a/../b", "/..", "/a\0", None, 7, ["/a"]])
def test_paths_that_could_mean_another_place(path: object) -> None:
    with pytest.raises(gate.Refusal, match="not a request of this gate"):
        gate.parse_request(json.dumps({"verb": "stat", "path": path}).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b'{"verb": "stat"}',
        b'{"verb": "run", "path": "/a"}',
        b'{"verb": ["stat"], "path": "/a"}',
        b'{"verb": "stat", "path": "/a", "more": 1}',
        b'{"verb": "read", "path": "/a"}',
        b'{"verb": "read", "path": "/a", "offset": -1, "length": 1}',
        b'{"verb": "read", "path": "/a", "offset": true, "length": 1}',
        b'{"verb": "read", "path": "/a", "offset": 0.0, "length": 1}',
        b'{"verb": "stat", "path": "/a/../b"}',
        b'{"verb": "stat", "path": "/\\ud800"}',
        b"[" * 60000,
        b'{"verb": "stat", "path": "/\xff"}',
    ],
)
def test_a_malformed_request_is_refused(line: bytes) -> None:
    with pytest.raises(gate.Refusal, match="not a request of this gate"):
        gate.parse_request(line)


def test_pace_keeps_the_rate_and_makes_up_for_little() -> None:
    rate, now = 10 * MIB, 1000.0
    following = 0.0
    for _ in range(100):
        following, wait = gate.pace(following, MIB, rate, now)
        now += wait
    assert now - 1000 == pytest.approx(99 / 10 - 0.05)
    # after a pause only 50 ms worth of bytes are made up for
    now += 3600
    following, wait = gate.pace(following, MIB, rate, now)
    assert wait == 0
    assert gate.pace(following, MIB, rate, now)[1] == pytest.approx(0.05)


def test_pace_forgets_a_time_from_before_a_reboot() -> None:
    assert gate.pace(1e9, MIB, 10 * MIB, 5.0) == (pytest.approx(5.1), 0.0)


def test_a_clock_that_is_set_back_prolongs_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    now = gate.clock()
    real = gate.time.time
    monkeypatch.setattr(gate.time, "time", lambda: real() - 3600)
    assert gate.clock() >= now - 1
    monkeypatch.setattr(gate.time, "time", lambda: real() + 3600)
    assert gate.clock() > now + 3000
