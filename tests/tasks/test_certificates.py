import base64
import re
import time
from pathlib import Path

import pytest

from tasks import certificates, process, signing
from tasks.certificates import Certificate, CertificateError, Terms
from tasks.signing import SigningKey
from tests.guard_state import GuardState, make_key

NOW = int(time.time())
TERMS = Terms("0a1b2c3d", "e" * 64, "d" * 64, 2**63 - 1, ("10.1.2.1", "10.9.0.0/16"), NOW - 60, NOW + 600)


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> GuardState:
    return GuardState(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def signed(guard: GuardState) -> Path:
    make_key(guard.folder / "throwaway")
    return signing.sign(
        guard.folder / "throwaway.pub", TERMS, SigningKey(guard.keys["ca"], guard.ca_key, attended=False)
    )


def sign_otherwise(guard: GuardState, *changes: str, ca: Path | None = None, drop: tuple[str, ...] = ()) -> Path:
    """A certificate as :func:`certificates.sign` makes it, but for some options of ssh-keygen."""
    argv = ["-I", TERMS.key_id, "-z", "1", "-n", "dflash-gate", "-V", "-1m:+10m", "-O", "clear"]
    options = TERMS.options.items()
    argv += [word for name, value in options if name not in drop for word in ("-O", f"{name}={value}")]
    public = guard.folder / "throwaway.pub"
    other = public.with_name("other.pub")
    other.write_bytes(public.read_bytes())
    process.run(["ssh-keygen", "-q", "-s", ca or guard.ca_key, *argv, *changes, other])
    return other.with_name("other-cert.pub")


def test_what_is_signed_is_read_back(guard: GuardState, signed: Path) -> None:
    certificate = certificates.read(signed, guard.keys["ca"])
    assert certificate == Certificate(TERMS)
    assert certificate.not_after == NOW + 600


def test_openssh_reads_the_same_certificate(signed: Path) -> None:
    printed = process.run(["ssh-keygen", "-L", "-f", signed]).stdout
    assert f'Key ID: "{TERMS.key_id}"' in printed
    assert f"Serial: {TERMS.serial}" in printed
    assert re.search(r"Principals: \n\s+dflash-gate\n", printed)
    assert f"force-command dflash-gate {TERMS.digest}" in printed
    assert "source-address 10.1.2.1,10.9.0.0/16" in printed
    assert "Extensions: (none)" in printed


def test_a_certificate_of_another_ca_approves_nothing(guard: GuardState, signed: Path) -> None:
    make_key(guard.folder / "ca2")
    with pytest.raises(CertificateError, match="another CA"):
        certificates.read(sign_otherwise(guard, ca=guard.folder / "ca2"), guard.keys["ca"])


@pytest.mark.parametrize(
    ("changes", "drop", "reason"),
    [
        ((), ("force-command",), "forced command"),
        (("-O", "force-command=/bin/sh"), ("force-command",), "forced command"),
        ((), ("source-address",), "options"),
        (("-O", "permit-pty"), (), "options"),
        (("-O", "verify-required"), (), "options"),
        (("-n", "dflash-gate,root"), (), "for the user"),
        (("-n", "root"), (), "for the user"),
        (("-h",), ("force-command", "source-address"), "for|command|options"),
        (("-I", "me"), (), "key id"),
    ],
)
def test_what_the_guard_would_not_sign_approves_nothing(
    guard: GuardState, signed: Path, changes: tuple[str, ...], drop: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(CertificateError, match=reason):
        certificates.read(sign_otherwise(guard, *changes, drop=drop), guard.keys["ca"])


def test_every_altered_byte_is_found(guard: GuardState, signed: Path, tmp_path: Path) -> None:
    kind, content, *_ = signed.read_text().split()
    raw = base64.b64decode(content)
    forged = tmp_path / "forged-cert.pub"
    for place in range(len(raw)):
        altered = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        forged.write_text(f"{kind} {base64.b64encode(altered).decode()}\n")
        with pytest.raises(CertificateError, match="approves nothing"):
            certificates.read(forged, guard.keys["ca"])


@pytest.mark.parametrize("content", ["", "garbage", "\0", "ssh-ed25519 AAAA"])
def test_a_file_that_is_no_certificate(guard: GuardState, tmp_path: Path, content: str) -> None:
    file = tmp_path / "x-cert.pub"
    for text in (content, (guard.folder / "ca.pub").read_text()):
        file.write_text(text)
        with pytest.raises(CertificateError, match="approves nothing"):
            certificates.read(file, guard.keys["ca"])
    with pytest.raises(CertificateError, match="No such file"):
        certificates.read(tmp_path / "none", guard.keys["ca"])
