import base64
import re
import time
from dataclasses import replace
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


def test_a_gate_that_authorized_keys_starts_is_told_serial_and_end(guard: GuardState, signed: Path) -> None:
    terms = replace(TERMS, enforcement="authorized-keys")
    again = signed.with_name("again.pub")
    again.write_bytes(signed.with_name("throwaway.pub").read_bytes())
    certificate = signing.sign(again, terms, SigningKey(guard.keys["ca"], guard.ca_key, attended=False))
    assert certificates.read(certificate, guard.keys["ca"]).terms == terms
    printed = process.run(["ssh-keygen", "-L", "-f", certificate]).stdout
    assert f"force-command .dflash/dflash-gate {TERMS.digest} {TERMS.serial} {TERMS.not_after}\n" in printed


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_a_ca_key_of_another_type_signs_as_well(guard: GuardState, signed: Path, kind: str, tmp_path: Path) -> None:
    public = make_key(tmp_path / "ca", kind=kind)
    make_key(tmp_path / "throwaway")
    key = SigningKey(public, tmp_path / "ca", attended=False)
    assert certificates.read(signing.sign(tmp_path / "throwaway.pub", TERMS, key), public).terms == TERMS


def test_a_signature_over_a_sha1_digest_approves_nothing(guard: GuardState, signed: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "ca", kind="rsa")
    sha1 = sign_otherwise(guard, "-t", "ssh-rsa", ca=tmp_path / "ca")
    with pytest.raises(CertificateError, match="SHA-1"):
        certificates.read(sha1, public)


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
        (("-V", "-1m:forever"), (), "no end"),
        (("-V", "always:forever"), (), "no end"),
        (("-O", f"force-command=./dflash-gate {'d' * 64}"), ("force-command",), "options"),
        (("-O", f"force-command=dflash-gate {'d' * 64} x"), ("force-command",), "forced command"),
        (("-O", f"force-command=.dflash/dflash-gate {'d' * 64}"), ("force-command",), "options"),
        (("-O", f"force-command=.dflash/dflash-gate {'d' * 64} 2 9"), ("force-command",), "options"),
        (("-O", f"force-command=.dflash/dflash-gate {'d' * 64} 1 99"), ("force-command",), "options"),
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
