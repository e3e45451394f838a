import base64
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature

from tasks import certificates, process, public_keys, security_keys, signing
from tasks.certificates import CertificateError, Terms
from tasks.gate import open_session
from tasks.plans import Plan
from tasks.security_keys import Signed
from tasks.signing import SigningKey
from tests.guard_state import make_key
from tests.sshds import both_sshds
from tests.terminals import Terminal
from tests.tokens import SK_ECDSA, SK_ED25519, Token, string

NOW = int(time.time())
TERMS = Terms("0a1b2c3d", "e" * 64, "d" * 64, 2**63 - 1, ("10.1.2.1",), NOW - 60, NOW + 600)


@pytest.fixture(params=[SK_ED25519, SK_ECDSA])
def token(request: pytest.FixtureRequest) -> Token:
    return Token(request.param)


def certify(token: Token, folder: Path) -> Path:
    """A certificate that ssh-keygen makes and the token signs."""
    make_key(folder / "throwaway")
    with token.agent(folder) as socket:
        key = SigningKey(token.public_line, None, attended=True, agent_socket=socket)
        return signing.sign(folder / "throwaway.pub", TERMS, key)


def test_what_a_token_signed_is_read_back(token: Token, tmp_path: Path) -> None:
    signed = certify(token, tmp_path)
    assert certificates.read(signed, token.public_line).terms == TERMS
    printed = process.run(["ssh-keygen", "-L", "-f", signed]).stdout
    assert public_keys.fingerprint(token.public_line) in printed


def test_a_key_in_a_token_is_a_key_for_persons_and_has_the_fingerprint_of_ssh_keygen(
    token: Token, tmp_path: Path
) -> None:
    file = tmp_path / "token.pub"
    file.write_text(token.public_line + "\n")
    line = public_keys.normalise_signing(file.read_text())
    assert public_keys.fingerprint(line) == process.run(["ssh-keygen", "-l", "-f", file]).stdout.split()[1]
    assert public_keys.is_in_token(line)
    with pytest.raises(public_keys.PublicKeyError, match="expected one of ssh-ed25519"):
        public_keys.normalise(line)
    for length in range(len(line) - 1):
        with pytest.raises(public_keys.PublicKeyError):
            public_keys.normalise_signing(line[:length])


def test_a_token_that_nobody_touched_approves_nothing(token: Token, tmp_path: Path) -> None:
    token.touched = False
    with pytest.raises(CertificateError, match="without a touch"):
        certificates.read(certify(token, tmp_path), token.public_line)


def test_another_token_approves_nothing(token: Token, tmp_path: Path) -> None:
    signed = certify(token, tmp_path)
    for other in (Token(token.kind), Token(SK_ED25519)):
        with pytest.raises(CertificateError, match="another CA"):
            certificates.read(signed, other.public_line)


def test_every_altered_byte_is_found(token: Token, tmp_path: Path) -> None:
    signed = certify(token, tmp_path)
    kind, content, *_ = signed.read_text().split()
    raw = base64.b64decode(content)
    for place in range(len(raw)):
        altered = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        signed.write_text(f"{kind} {base64.b64encode(altered).decode()}\n")
        with pytest.raises(CertificateError, match="approves nothing"):
            certificates.read(signed, token.public_line)


def test_a_touch_that_was_written_in_afterwards_is_found(token: Token, tmp_path: Path) -> None:
    token.touched = False
    signed = certify(token, tmp_path)
    kind, content, *_ = signed.read_text().split()
    raw = base64.b64decode(content)
    signed.write_text(f"{kind} {base64.b64encode(raw[:-5] + bytes([1]) + raw[-4:]).decode()}\n")
    with pytest.raises(CertificateError, match="its signature is wrong"):
        certificates.read(signed, token.public_line)


def test_a_hosts_sshd_and_gate_take_what_a_token_signed(
    token: Token, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "step.pt"
    step.write_bytes(b"x" * 1000)
    monkeypatch.setattr("sys.stdin", Terminal())
    (tmp_path / "site").mkdir()
    with both_sshds(tmp_path / "site", token.public_line) as site, token.agent(tmp_path) as socket:
        operator = site.operator(tmp_path / "operator")
        request = operator.store.request(Plan(grant=operator.grant(path=str(step)), effect="a test reads"))
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        approval = operator.store.approve(request.id, reason="a test", agent=True).read
        with open_session(operator.connector, operator.train, approval) as session:
            assert session.stat(str(step)).size == 1000
        assert public_keys.fingerprint(token.public_line) in site.protected.logged()


ALTERED: list[tuple[str, Callable[[bytes, bytes], bytes]]] = [
    ("another kind", lambda kind, rest: string(b"ssh-ed25519") + rest),
    ("without its flags", lambda kind, rest: string(kind) + rest[:-5]),
    ("with more behind them", lambda kind, rest: string(kind) + rest + b"\0"),
    ("nothing", lambda kind, rest: b""),
    ("no signature", lambda kind, rest: string(kind) + string(b"") + rest[-5:]),
]


@pytest.mark.parametrize(("name", "alter"), ALTERED, ids=[name for name, _ in ALTERED])
def test_a_signature_of_another_form_approves_nothing(
    token: Token, tmp_path: Path, name: str, alter: Callable[[bytes, bytes], bytes]
) -> None:
    signed = certify(token, tmp_path)
    kind, content, *_ = signed.read_text().split()
    raw = base64.b64decode(content)
    start = raw.rindex(string(token.kind.encode())) - 4
    assert struct.unpack(">I", raw[start : start + 4])[0] == len(raw) - start - 4
    rest = raw[start + 4 + 4 + len(token.kind) :]
    forged = raw[:start] + string(alter(token.kind.encode(), rest))
    signed.write_text(f"{kind} {base64.b64encode(forged).decode()}\n")
    with pytest.raises(CertificateError, match="approves nothing"):
        certificates.read(signed, token.public_line)


def test_bytes_behind_a_certificate_make_it_none(token: Token, tmp_path: Path) -> None:
    signed = certify(token, tmp_path)
    kind, content, *_ = signed.read_text().split()
    for more in (b"\0", string(b""), string(b"x")):
        signed.write_text(f"{kind} {base64.b64encode(base64.b64decode(content) + more).decode()}\n")
        with pytest.raises(CertificateError, match="no whole certificate"):
            certificates.read(signed, token.public_line)


def test_a_signature_is_of_the_kind_of_its_key(token: Token) -> None:
    content = b"what is signed"
    right = token.sign(content)
    security_keys.verify(Signed(content, token.blob, right))
    for other in ({SK_ED25519, SK_ECDSA} - {token.kind}).pop(), "ssh-ed25519":
        with pytest.raises(ValueError, match="of another kind"):
            security_keys.verify(
                Signed(content, token.blob, string(other.encode()) + right[len(string(token.kind.encode())) :])
            )
    with pytest.raises(InvalidSignature):
        security_keys.verify(Signed(content + b"!", token.blob, right))
