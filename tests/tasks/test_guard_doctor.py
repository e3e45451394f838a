"""The doctor against real sshds: a guarded one, and ones that are open in one way each."""

import getpass
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from tasks import identities, offers, process
from tasks.finding import Finding
from tasks.guard_doctor import ca_key, diagnose
from tasks.identities import Identities, Identity, identities_here
from tasks.offers import Offers, hear
from tasks.ssh import ConnectionFailed, HostKeyError
from tests.guard_state import PASSPHRASE, make_key, public_line
from tests.sshds import Operator, Site, Sshd

NONE_HERE = Identities((), ())
Start = Callable[..., Sshd]


def of(site: Site, folder: Path, sshd: Sshd, **changes: Any) -> Operator:
    """An operator whose protected host is ``sshd``."""
    train = {"port": sshd.port, "host_keys": list(sshd.host_keys)}
    return site.operator(folder / "operator", train=train | changes)


def diagnosed(operator: Operator, known: Identities = NONE_HERE, **options: Any) -> dict[str, Finding]:
    found = diagnose(operator.connector, operator.train, identities=known, pause=0, **options)
    return {finding.name: finding for finding in found}


def with_status(found: dict[str, Finding], status: str) -> set[str]:
    return {name for name, finding in found.items() if finding.status == status}


def test_a_guarded_host_passes_and_what_needs_a_session_is_skipped(operator: Operator, site: Site) -> None:
    known = Identities((Identity(public_line(site.login_key), "login"),), ())
    before = len(site.protected.logged())
    found = diagnosed(operator, known)
    assert with_status(found, "fail") == set()
    assert {"host keys", "no certificate", "certificate of another CA"} <= with_status(found, "pass")
    assert found[f"ordinary keys as {getpass.getuser()}"].measured == "1 refused"
    for name in ("replay", "budget", "gate program", "jump host"):
        assert found[name].measured == "needs approval"
        assert found[name].status == "skipped"
    assert [entry["host"] for entry in operator.events("doctor")] == ["train"]
    assert "Accepted publickey" not in site.protected.logged()[before:]


def test_only_a_protected_host_is_looked_at(operator: Operator) -> None:
    with pytest.raises(UsageError, match="not protected"):
        diagnose(operator.connector, operator.infer, pause=0)


def test_an_ordinary_key_that_is_taken_is_found_without_being_used(site: Site, tmp_path: Path, start: Start) -> None:
    """Its private half lies beside it, and still nobody is let in."""
    sshd = start(authorized_keys=str(site.login_key.with_suffix(".pub")))
    operator = of(site, tmp_path, sshd)
    known = identities_here(folder=_ssh_folder(tmp_path, site.login_key))
    found = diagnosed(operator, known)
    name = f"ordinary keys as {getpass.getuser()}"
    assert with_status(found, "fail") == {name}
    assert "login at 127.1.2.6" in found[name].measured
    assert "past the gate" in found[name].explanation
    for word in ("Accepted publickey", "Starting session"):
        assert word not in sshd.logged()


def _ssh_folder(tmp_path: Path, *keys: Path) -> Path:
    folder = tmp_path / "dot-ssh"
    folder.mkdir()
    for key in keys:
        shutil.copy(key, folder)
        shutil.copy(key.with_suffix(".pub"), folder)
    return folder


def test_a_host_that_lets_any_key_in_fails(site: Site, tmp_path: Path, start: Start) -> None:
    sshd = start("AuthorizedKeysCommandUser root\nAuthorizedKeysCommand /bin/echo %t %k")
    found = diagnosed(of(site, tmp_path, sshd))
    assert with_status(found, "fail") == {"no certificate"}
    assert "anybody gets in" in found["no certificate"].explanation


def test_a_host_that_takes_certificates_of_another_ca_fails(
    operator: Operator, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other CA is for once the one that this host trusts."""
    make = Offers.key_pair
    monkeypatch.setattr(
        Offers, "key_pair", lambda self, name: site.ca_key if name.endswith("-ca") else make(self, name)
    )
    before = len(site.protected.logged())
    found = diagnosed(operator)
    assert with_status(found, "fail") == {"certificate of another CA", "certificate without force-command"}
    assert "Accepted publickey" not in site.protected.logged()[before:]


def test_a_connection_that_breaks_is_no_refusal(site: Site, tmp_path: Path, start: Start) -> None:
    sshd = start("AuthorizedKeysCommandUser root\nAuthorizedKeysCommand /bin/echo %T")
    found = diagnosed(of(site, tmp_path, sshd), Identities((Identity(public_line(site.login_key), "login"),), ()))
    assert found["certificate of another CA"].status == "skipped"
    assert found[f"ordinary keys as {getpass.getuser()}"].measured == "0 refused; not offered: login"


@pytest.mark.slow
def test_passwords_fail_where_the_sshd_enforces_and_warn_elsewhere(site: Site, tmp_path: Path, start: Start) -> None:
    sshd = start("Match all\n  PasswordAuthentication yes")
    for enforcement, status in (("host", "fail"), ("client", "warn")):
        found = diagnosed(of(site, tmp_path / enforcement, sshd, enforcement=enforcement))
        assert found["no certificate"].status == status
        assert found["no certificate"].measured == "refused, but password may be tried"


def test_a_host_key_that_is_not_pinned_fails(site: Site, tmp_path: Path) -> None:
    operator = site.operator(tmp_path / "operator", train={"host_keys": [site.protected.host_keys[0]]})
    found = diagnosed(operator)
    assert with_status(found, "fail") == {"host keys"}
    assert "ecdsa" in found["host keys"].measured


def test_another_machine_in_its_place_gets_no_further_attempt(site: Site, tmp_path: Path, start: Start) -> None:
    sshd = start()
    operator = site.operator(tmp_path / "operator", train={"port": sshd.port})
    with pytest.raises(HostKeyError, match="another machine"):
        diagnosed(operator)
    assert "user" not in sshd.logged()


def test_a_host_that_is_down_is_one_line(site: Site, tmp_path: Path) -> None:
    operator = site.operator(tmp_path / "operator", train={"port": 1})
    with pytest.raises(ConnectionFailed, match=r"^train \(127\.1\.2\.6 port 1\): .*refused$"):
        diagnosed(operator)


def test_each_address_of_a_host_is_looked_at(site: Site, tmp_path: Path, start: Start) -> None:
    own = start(authorized_keys=str(site.login_key.with_suffix(".pub")))
    alias = {"name": "box", "address": own.address, "port": own.port, "host_keys": list(own.host_keys)}
    operator = site.operator(tmp_path / "operator", train={"aliases": [alias]})
    found = diagnosed(operator, Identities((Identity(public_line(site.login_key), "login"),), ()))
    assert found["host keys"].measured == "4 shown, all pinned"
    assert found[f"ordinary keys as {getpass.getuser()}"].measured == f"taken: login at 127.1.2.6 port {own.port}"


def test_an_expired_certificate_of_the_operators_own_is_offered(
    operator: Operator, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert diagnosed(operator)["expired certificate"].status == "skipped"
    approval = operator.approve(path="/etc/hostname")
    argv = ["ssh-keygen", "-q", "-s", str(site.ca_key), "-I", f"{approval.id} {'0' * 64}", "-n", "dflash-gate"]
    argv += ["-z", "7", "-V", "-20m:-10m", "-O", "clear", "-O", f"force-command=dflash-gate {approval.digest}"]
    process.run([*argv, "-O", "source-address=127.0.0.0/8", f"{approval.key_path}.pub"])
    offered: list[str] = []
    offer = Offers.offer

    def watched(self: Offers, at: Any, found: Any) -> Any:
        offered.extend(one.where for one in found)
        return offer(self, at, found)

    monkeypatch.setattr(Offers, "offer", watched)
    assert diagnosed(operator)["expired certificate"].status == "pass"
    assert str(approval.certificate_path) in offered


@pytest.mark.slow
def test_more_keys_than_sshd_hears_in_one_connection_are_all_offered(site: Site, tmp_path: Path, start: Start) -> None:
    sshd = start("Match all\n  MaxAuthTries 2", authorized_keys=str(site.login_key.with_suffix(".pub")))
    keys = [Identity(make_key(tmp_path / f"key-{number}"), f"key {number}") for number in range(6)]
    odd = Identity("ssh-dss AAAAB3NzaC1kc3M=", "odd")
    last = Identity(public_line(site.login_key), "login")
    operator = of(site, tmp_path, sshd)
    answers = list(Offers(operator.connector, operator.train, tmp_path, 0).offer(operator.train, [odd, *keys, last]))
    assert {answer.identity.where: answer.taken for answer in answers} == {
        **{key.where: False for key in keys},
        "odd": None,
        "login": True,
    }
    found = diagnosed(of(site, tmp_path / "again", sshd), Identities((odd,), (Path("/unread"),)))
    measured = found[f"ordinary keys as {getpass.getuser()}"].measured
    assert measured == "0 refused; not offered: odd; not read: /unread"


def test_offers_are_made_one_after_the_other(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(operator.connector, "offer", lambda *_: "")
    monkeypatch.setattr(offers.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(offers.time, "sleep", waited.append)
    attempts = Offers(operator.connector, operator.train, tmp_path, 6.0)
    for _ in range(3):
        attempts.ask(operator.train)
    assert waited == [6.0, 6.0]


def test_what_ssh_says_is_taken_apart() -> None:
    said = (
        "debug1: Server host key: ssh-ed25519 SHA256:abc\n"
        "debug1: Authentications that can continue: publickey,password\n"
        "debug1: Offering public key: /tmp/a b/key.pub ED25519 SHA256:x explicit\n"
        "debug2: we sent a publickey packet, wait for reply\n"
        "debug1: Server accepts key: /tmp/a b/key.pub ED25519 SHA256:x explicit\n"
        "root@host: Permission denied (publickey,password).\n"
    )
    heard = hear(said)
    assert heard.offered == heard.accepted == ("/tmp/a b/key.pub",)
    assert heard.methods == ("publickey", "password")
    assert (heard.host_key, heard.let_in) == ("SHA256:abc", False)
    assert heard.complaint == "root@host: Permission denied (publickey,password)."
    assert hear('Authenticated to host ([127.0.0.1]:22) using "none".\n').let_in


def test_a_private_key_is_never_offered(operator: Operator, site: Site, tmp_path: Path) -> None:
    disguised = tmp_path / "key.pub"
    disguised.write_text(site.login_key.read_text())
    for key in (site.login_key, disguised):
        with pytest.raises(ConnectionFailed, match="only such are offered"):
            operator.connector.offer(operator.train, [key])


@contextmanager
def ssh_agent(folder: Path, monkeypatch: pytest.MonkeyPatch, key: Path) -> Iterator[None]:
    """A real agent that holds ``key``."""
    sock = folder / f"agent-{key.name}"
    agent = process.start(["ssh-agent", "-D", "-a", str(sock)], stdout=process.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    try:
        while process.run(["ssh-add", "-q", str(key)], check=False).returncode:
            time.sleep(0.05)
        yield
    finally:
        agent.terminate()
        agent.wait()


def test_the_identities_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dot-ssh"
    folder.mkdir()
    plain, locked = make_key(folder / "plain"), make_key(folder / "locked", passphrase=PASSPHRASE)
    for name in ("plain", "locked"):
        (folder / f"{name}.pub").unlink()
    older = make_key(folder / "older", kind="rsa")
    process.run(["ssh-keygen", "-q", "-p", "-m", "PEM", "-N", "", "-P", "", "-f", str(folder / "older")])
    (folder / "older.pub").unlink()
    hidden = folder / "hidden"
    shutil.copy(folder / "older", hidden)
    process.run(["ssh-keygen", "-q", "-p", "-m", "PEM", "-N", PASSPHRASE, "-P", "", "-f", str(hidden)])
    (folder / "config").write_text("Host *\n")
    elsewhere = make_key(tmp_path / "elsewhere")
    held = make_key(tmp_path / "held")
    with ssh_agent(tmp_path, monkeypatch, tmp_path / "held"):
        found = identities_here([tmp_path / "elsewhere"], folder)
    where = {one.line: one.where for one in found.found}
    assert where == {
        held: "agent",
        plain: str(folder / "plain"),
        locked: str(folder / "locked"),
        older: str(folder / "older"),
        elsewhere: str(tmp_path / "elsewhere"),
    }
    assert found.unread == (hidden,)
    assert identities.identities_here(folder=tmp_path / "none").found == ()


@pytest.mark.parametrize(
    ("passphrase", "lab", "status"), [("", True, "warn"), ("", False, "fail"), (PASSPHRASE, False, "pass")]
)
def test_a_ca_key_that_signs_unattended_is_found(
    site: Site, tmp_path: Path, passphrase: str, lab: bool, status: str
) -> None:
    operator = site.operator(tmp_path / "operator")
    public = make_key(tmp_path / "ca", passphrase=passphrase)
    guard = operator.inventory.guard.model_copy(update={"ca_public_key": public, "ca_key": tmp_path / "ca", "lab": lab})
    operator.connector.inventory = operator.inventory.model_copy(update={"guard": guard})
    assert ca_key(operator.connector).status == status


@pytest.mark.parametrize(("passphrase", "status"), [("", "fail"), (PASSPHRASE, "pass")])
def test_a_ca_key_that_no_file_names_is_found_among_the_users(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str, status: str
) -> None:
    operator = site.operator(tmp_path / "operator")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    public = make_key(tmp_path / ".ssh" / "dflash_ca", passphrase=passphrase)
    make_key(tmp_path / ".ssh" / "id_ed25519")
    guard = operator.inventory.guard.model_copy(update={"ca_public_key": public, "ca_key": None, "lab": False})
    operator.connector.inventory = operator.inventory.model_copy(update={"guard": guard})
    found = ca_key(operator.connector)
    assert found.status == status
    assert ("dflash_ca" in found.measured) == (status == "fail")
    assert found.measured != "not on this machine"


def test_a_ca_key_in_the_agent_is_a_warning(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = site.operator(tmp_path / "operator")
    with ssh_agent(tmp_path, monkeypatch, site.login_key):
        assert ca_key(operator.connector).measured == "not on this machine"
    with ssh_agent(tmp_path, monkeypatch, site.ca_key):
        found = ca_key(operator.connector)
    assert (found.status, found.measured) == ("warn", "in the ssh agent")
