import base64
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import certificates, process, signing
from tasks.certificates import Certificate, CertificateError, Terms
from tasks.errors import Refused
from tasks.lab_sites import HOSTS
from tasks.signing import LAB_ADDRESSES, SigningKey
from tests.guard_state import GuardState, make_key

NOW = int(time.time())
TERMS = Terms("0a1b2c3d", "e" * 64, "d" * 64, 2**63 - 1, ("10.1.2.1", "10.9.0.0/16"), NOW - 60, NOW + 600)


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> GuardState:
    return GuardState(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def signed(guard: GuardState) -> Path:
    make_key(guard.folder / "throwaway")
    return signing.sign(guard.folder / "throwaway.pub", TERMS, key_of(guard))


def key_of(guard: GuardState) -> SigningKey:
    known = guard.inventory
    return signing.signing_key(known.guard, known.host("kpro6"), guard.ca_key)


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


def test_the_ca_key_must_be_the_one_in_the_inventory(guard: GuardState) -> None:
    known = guard.inventory
    signing.signing_key(known.guard, known.host("kpro6"), guard.ca_key)
    for other, reason in (("training", "is not the one in hosts.yaml"), ("nowhere", "No such file")):
        with pytest.raises(Refused, match=reason):
            signing.signing_key(known.guard, known.host("kpro6"), guard.folder / other)
    with pytest.raises(Refused, match="ssh-keygen -p -f"):
        signing.signing_key(known.guard, known.host("kpro6"), guard.hosts_file)


def test_a_ca_key_without_a_passphrase_signs_in_the_lab_only(tmp_path: Path) -> None:
    real = GuardState(tmp_path / "real", lab=False)
    with pytest.raises(Refused, match=r"no passphrase.*ssh-keygen -p"):
        signing.signing_key(real.inventory.guard, real.inventory.host("kpro6"), real.ca_key)
    elsewhere = GuardState(tmp_path / "elsewhere", address="10.1.2.7")
    with pytest.raises(Refused, match=r"the lab's addresses only, and kpro6 has 10\.1\.2\.7"):
        signing.signing_key(elsewhere.inventory.guard, elsewhere.inventory.host("kpro6"), elsewhere.ca_key)


def test_a_ca_key_with_a_passphrase_needs_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = GuardState(tmp_path, passphrase="correct horse", lab=False)
    monkeypatch.setattr("sys.stdin", (tmp_path / "hosts.yaml").open())
    with pytest.raises(Refused, match="no terminal"):
        signing.signing_key(guard.inventory.guard, guard.inventory.host("kpro6"), guard.ca_key)


def test_the_lab_addresses_are_those_of_the_lab() -> None:
    assert {address for host in HOSTS.values() for address in (host.address, host.loopback)} == LAB_ADDRESSES


def test_terms_that_ssh_keygen_does_not_sign_are_refused(guard: GuardState, signed: Path) -> None:
    with pytest.raises(Refused, match="not signed: ssh-keygen"):
        signing.sign(guard.folder / "throwaway.pub", replace(TERMS, source_addresses=("nowhere",)), key_of(guard))
