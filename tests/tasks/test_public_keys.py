from pathlib import Path

import pytest

from tasks import process, public_keys
from tasks.public_keys import PublicKeyError
from tests.guard_state import make_key, public_line

KINDS = ("ed25519", "ecdsa", "rsa")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    for kind in KINDS:
        make_key(folder / kind, kind=kind)
    make_key(folder / "secret", passphrase="correct horse")
    return {path.stem: path for path in folder.glob("*[!b]")}


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_is_the_one_ssh_keygen_prints(keys: dict[str, Path], kind: str) -> None:
    printed = process.run(["ssh-keygen", "-l", "-f", f"{keys[kind]}.pub"]).stdout.split()[1]
    assert public_keys.fingerprint(public_keys.normalise(public_line(keys[kind]))) == printed


def test_a_comment_is_no_part_of_a_key(keys: dict[str, Path]) -> None:
    line = public_line(keys["rsa"])
    assert public_keys.normalise(f"  {line}  root@kpro6 x \n") == line


@pytest.mark.parametrize("kind", KINDS)
def test_every_shortened_key_is_refused(keys: dict[str, Path], kind: str) -> None:
    line = public_line(keys[kind])
    for length in range(len(line) - 1):
        with pytest.raises(PublicKeyError):
            public_keys.normalise(line[:length])


def test_other_texts_are_refused(keys: dict[str, Path], tmp_path: Path) -> None:
    words = public_line(keys["ed25519"]).split()
    weak = make_key(tmp_path / "weak", kind="rsa")
    for text in ("", "ssh-ed25519", f"ssh-rsa {words[1]}", f"ssh-dss {words[1]}", f"{words[0]} {words[1]}AAAA"):
        with pytest.raises(PublicKeyError):
            public_keys.normalise(text)
    assert public_keys.normalise(weak) == weak


@pytest.mark.parametrize("name", [*KINDS, "secret"])
def test_a_private_key_file_tells_its_public_half_without_a_passphrase(keys: dict[str, Path], name: str) -> None:
    key = public_keys.read_private_key_file(keys[name])
    assert key.public == public_keys.blob(public_line(keys[name]))
    assert key.encrypted == (name == "secret")


def test_a_private_key_in_another_form_names_the_conversion(tmp_path: Path) -> None:
    key = tmp_path / "pem"
    process.run(["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "", "-f", key])
    for text in (key.read_text(), "", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"):
        key.write_text(text)
        with pytest.raises(PublicKeyError, match="ssh-keygen -p -f"):
            public_keys.read_private_key_file(key)
