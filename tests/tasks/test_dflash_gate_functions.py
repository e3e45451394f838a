"""The gate program as a module: its form, and its functions without a host."""

import ast
import importlib.machinery
import importlib.util
import os
import re
import struct
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    }
    fields |= changes
    critical = b"".join(
        _string(name.encode()) + _string(_string(value.encode())) for name, value in fields["options"].items()
    )
    return (
        _string(fields["name"])
        + _string(b"nonce")
        + _string(bytes(32))
        + struct.pack(">QI", 42, fields["kind"])
        + _string(b"request head")
        + _string(b"".join(map(_string, fields["principals"])))
        + struct.pack(">QQ", *fields["valid"])
        + _string(critical)
        + _string(b"") * 2
        + _string(b"ca key")
        + _string(b"signature")
    )


def test_certificate_is_read() -> None:
    read = gate.check_certificate(_certificate(), 150, "10.1.2.1")
    assert (read.serial, read.key_id, read.valid_before, read.digest) == (42, "request head", 200, "a" * 64)


@pytest.mark.parametrize(
    ("changes", "now", "client", "message"),
    [
        ({"name": b"ssh-rsa-cert-v01@openssh.com"}, 150, "10.1.2.1", "no ed25519 user certificate"),
        ({"kind": 2}, 150, "10.1.2.1", "no ed25519 user certificate"),
        ({"options": {"source-address": "10.1.2.1"}}, 150, "10.1.2.1", "no force-command"),
        ({"options": GOOD | {"force-command": "sh"}}, 150, "10.1.2.1", "no force-command"),
        ({"options": GOOD | {"force-command": f"dflash-gate {'a' * 64};id"}}, 150, "10.1.2.1", "no force-command"),
        ({"options": GOOD | {"force-command": f"dflash-gate {'a' * 64}\n"}}, 150, "10.1.2.1", "no force-command"),
        ({"options": GOOD | {"verify-required": ""}}, 150, "10.1.2.1", "options"),
        ({"options": {"force-command": GOOD["force-command"]}}, 150, "10.1.2.1", "options"),
        ({"principals": []}, 150, "10.1.2.1", "cannot be used"),
        ({"principals": [b"root"]}, 150, "10.1.2.1", "principals"),
        ({"principals": [b"dflash-gate", b"root"]}, 150, "10.1.2.1", "principals"),
        ({}, 99, "10.1.2.1", "not valid now"),
        ({}, 200, "10.1.2.1", "not valid now"),
        ({}, 150, "10.1.3.1", "this login is from 10.1.3.1"),
        ({}, 150, "::1", "this login is from ::1"),
        ({}, 150, "", "does not appear to be an IPv4"),
    ],
)
def test_certificate_is_refused(changes: dict[str, Any], now: float, client: str, message: str) -> None:
    with pytest.raises(gate.Refusal, match=message):
        gate.check_certificate(_certificate(**changes), now, client)


@given(st.data())
def test_a_damaged_certificate_is_refused_or_still_names_a_digest(data: st.DataObject) -> None:
    blob = bytearray(_certificate())
    del blob[data.draw(st.integers(0, len(blob))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if blob:
            blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = gate.check_certificate(bytes(blob), 150, "10.1.2.1")
    except gate.Refusal:
        return
    assert re.fullmatch("[0-9a-f]{64}", read.digest)


@pytest.mark.parametrize("path", ["/", "/a", "/a b/c.pt", "/a/…", "/..a/b."])
def test_plain_paths(path: str) -> None:
    assert gate.is_plain(path)


@pytest.mark.parametrize("path", ["", "a", "//a", "/a/", "/a//b", "/a/./b", "/a/../b", "/..", "/a\0", None, 7, ["/a"]])
def test_paths_that_could_mean_another_place(path: object) -> None:
    assert not gate.is_plain(path)


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
