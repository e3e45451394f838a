"""Connections and ssh processes against real sshds: who answers is decided by the key, before authentication."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.errors import DFlashError
from tasks import process, ssh
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.process import DEVNULL, PIPE
from tasks.routes import RouteError, Settings
from tasks.ssh import ConnectionFailed, Connector, HostKeyError
from tests.sshds import Operator, Site

# another spelling of the protected host's address, which the inventory cannot see through
DISGUISED = "127.66054"


@pytest.fixture
def stranger(tmp_path: Path) -> str:
    """A host key that no server has."""
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(tmp_path / "stranger")])
    return (tmp_path / "stranger.pub").read_text().strip()


def _connect(connector: Connector, host: Host) -> None:
    connector.connect(host).close()


def _start(connector: Connector, host: Host) -> None:
    running = connector.start(host, ["true"], stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    _, said = running.communicate(timeout=60)
    if running.returncode == 255:
        raise connector.failure(host, said.decode())


@pytest.fixture(params=[_connect, _start], ids=["fabric", "openssh"])
def reach(request: pytest.FixtureRequest) -> Callable[[Connector, Host], None]:
    """Both ways to a host."""
    return request.param  # type: ignore[no-any-return]


Reach = Callable[[Connector, Host], None]


def test_runs_a_command_and_moves_files(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("content")
    with operator.connector.connect(operator.infer) as connection:
        assert connection.run("echo hello; exit 3", hide=True, warn=True).exited == 3
        connection.put(str(tmp_path / "here"), str(tmp_path / "there"))
        connection.get(str(tmp_path / "there"), str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "content"


def test_argv_arrives_as_it_was_given(operator: Operator) -> None:
    argv = ["printf", "%s\\n", "a b", "$(id)", "; exit 9", "'\"", "*", ""]
    running = operator.connector.start(operator.infer, argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    output, _ = running.communicate(timeout=60)
    assert output.decode().split("\n")[:-1] == argv[2:]
    assert running.returncode == 0


def test_no_way_to_a_protected_host_without_an_approval(operator: Operator, site: Site, reach: Reach) -> None:
    before = site.protected.logged()
    with pytest.raises(Refused, match="train is protected") as refusal:
        reach(operator.connector, operator.train)
    assert refusal.value.exit_code == 77
    assert site.protected.logged() == before
    assert operator.events("refusal")[-1]["host"] == "train"


def test_a_protected_host_under_another_name_is_refused_before_authentication(
    site: Site, tmp_path: Path, reach: Reach
) -> None:
    """An entry of hosts.yaml that leads there, with the ordinary host's keys pinned."""
    for port in (site.protected.port, site.protected.second_port):
        operator = site.operator(tmp_path / str(port), infer={"address": DISGUISED, "port": port})
        before = len(site.protected.logged())
        with pytest.raises(Refused, match="is train, which is protected") as refusal:
            reach(operator.connector, operator.infer)
        assert "nothing was authenticated" in str(refusal.value)
        _assert_nothing_was_authenticated(site.protected.logged()[before:])
        assert "train" in operator.events("refusal")[-1]["reason"]


def test_a_protected_host_that_shows_another_of_its_keys_is_refused(site: Site, tmp_path: Path, reach: Reach) -> None:
    ecdsa = [key for key in site.ordinary.host_keys if key.startswith("ecdsa")]
    changes = {"address": DISGUISED, "port": site.protected.port, "host_keys": ecdsa}
    operator = site.operator(tmp_path / "operator", infer=changes)
    with pytest.raises(Refused, match="is train, which is protected"):
        reach(operator.connector, operator.infer)


def test_an_unknown_host_key_is_an_error_that_names_both(
    site: Site, tmp_path: Path, stranger: str, reach: Reach
) -> None:
    operator = site.operator(tmp_path / "operator", infer={"host_keys": [stranger]})
    before = len(site.ordinary.logged())
    with pytest.raises(HostKeyError, match="nothing was authenticated") as error:
        reach(operator.connector, operator.infer)
    assert operator.infer.fingerprints[0] in str(error.value)
    assert any(key in str(error.value) for key in site.inventory().host("infer").fingerprints)
    _assert_nothing_was_authenticated(site.ordinary.logged()[before:])


def test_a_host_without_a_pinned_key_type_is_an_error(site: Site, tmp_path: Path, reach: Reach) -> None:
    process.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-C", "", "-f", str(tmp_path / "rsa")])
    pinned = [(tmp_path / "rsa.pub").read_text().strip()]
    operator = site.operator(tmp_path / "operator", infer={"host_keys": pinned})
    with pytest.raises(HostKeyError, match=r"showed the host key ssh-ed25519 SHA256:.*; pinned are SHA256:"):
        reach(operator.connector, operator.infer)


def _assert_nothing_was_authenticated(logged: str) -> None:
    assert "Connection from" in logged
    for word in ("Accepted", "Failed", "Postponed", "publickey", "Starting session", "Authenticat"):
        assert word not in logged, logged


def test_a_host_that_does_not_answer_is_one_line(site: Site, tmp_path: Path, reach: Reach) -> None:
    operator = site.operator(tmp_path / "operator", infer={"port": 1})
    with pytest.raises(ConnectionFailed, match=r"^infer \(127\.1\.230\.172 port 1\): .*$"):
        reach(operator.connector, operator.infer)


def test_a_refused_login_is_one_line(site: Site, tmp_path: Path, reach: Reach) -> None:
    operator = site.operator(tmp_path / "operator", infer={"identity_file": str(site.ca_key)})
    with pytest.raises(ConnectionFailed, match=r"^infer \(127\.1\.230\.172 port \d+\): .*$"):
        reach(operator.connector, operator.infer)


def test_no_key_and_a_key_with_a_passphrase_are_named(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-C", "", "-f", str(locked)])
    operator = site.operator(tmp_path / "operator", infer={"identity_file": str(locked)})
    with pytest.raises(ConnectionFailed, match="has a passphrase"):
        operator.connector.connect(operator.infer)
    operator = site.operator(tmp_path / "other", infer={"identity_file": None})
    monkeypatch.setattr(ssh, "effective_settings", Settings)
    with pytest.raises(ConnectionFailed, match="no private key was found"):
        operator.connector.connect(operator.infer)


def test_jumps_are_pinned_hop_by_hop(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str, reach: Reach
) -> None:
    """``far`` is the ordinary host's second port, reached over its first."""
    ed25519, ecdsa = site.ordinary.host_keys
    far = site.ordinary_entry(address="127.1.230.172", port=site.ordinary.second_port, host_keys=[ecdsa])
    hop = site.ordinary_entry(address="127.124588", host_keys=[ed25519])
    settings = {"127.1.230.172": Settings("127.1.230.172", proxy_jump=("infer",))}
    monkeypatch.setattr(ssh, "effective_settings", lambda address: settings.get(address, Settings(address)))
    operator = site.operator(tmp_path / "operator", infer=hop, far=far)
    reach(operator.connector, operator.inventory.host("far"))
    operator = site.operator(tmp_path / "other", infer=hop | {"host_keys": [stranger]}, far=far)
    with pytest.raises(DFlashError):
        reach(operator.connector, operator.inventory.host("far"))
    settings["127.1.230.172"] = Settings("127.1.230.172", proxy_jump=("train",))
    with pytest.raises(Refused, match="no jump goes over it"):
        reach(operator.connector, operator.inventory.host("far"))


def test_an_approval_opens_no_other_host(operator: Operator) -> None:
    approval = operator.approve(path="/etc/hostname")
    with pytest.raises(Refused, match="is for train, not for infer"):
        operator.connector.start_gate(approval, operator.infer, stdin=PIPE, stdout=PIPE, stderr=PIPE)


def test_no_agent_reaches_a_child(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("SSH_ASKPASS", "/bin/ask")
    assert not {"SSH_AUTH_SOCK", "SSH_ASKPASS"} & ssh.environment().keys()
    running = operator.connector.start(operator.infer, ["sleep", "60"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    environment = Path(f"/proc/{running.pid}/environ").read_bytes()
    running.terminate()
    running.wait()
    assert b"SSH_AUTH_SOCK" not in environment


def test_a_child_is_its_own_session_and_dies_with_its_thread(operator: Operator) -> None:
    started = []

    def start() -> None:
        argv = ["sleep", "60"]
        started.append(operator.connector.start(operator.infer, argv, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL))
        assert os.getsid(started[0].pid) == started[0].pid
        # the wish to die with this thread is made by setpriv, which then becomes ssh
        while Path(f"/proc/{started[0].pid}/comm").read_text().strip() != "ssh":
            time.sleep(0.01)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(20) == -15


def test_effective_settings_are_those_of_the_ssh_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ssh.effective_settings("10.1.2.3").hostname == "10.1.2.3"
    broken = tmp_path / "ssh"
    broken.write_text("#!/bin/sh\necho 'config line 3: Bad configuration option' >&2\nexit 255\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RouteError, match="Bad configuration option"):
        ssh.effective_settings("10.1.2.3")
    broken.unlink()
    with pytest.raises(ConnectionFailed, match="install openssh-client"):
        ssh.effective_settings("10.1.2.3")
