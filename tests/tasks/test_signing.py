"""Who signs with the CA key, and who cannot."""

import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import certificates, process, public_keys, signing
from tasks.certificates import Terms
from tasks.errors import Refused
from tasks.lab_sites import HOSTS
from tasks.signing import LAB_ADDRESSES, SigningKey
from tests.guard_state import PASSPHRASE, GuardState, make_key
from tests.terminals import Terminal, at_a_terminal
from tests.tokens import SK_ED25519, Token

NOW = int(time.time())
TERMS = Terms("0a1b2c3d", "e" * 64, "d" * 64, 2**63 - 1, ("10.1.2.1", "10.9.0.0/16"), NOW - 60, NOW + 600)
APPROVE = """
import sys
from pathlib import Path
from dflash.errors import run_cli
from tests.guard_state import GuardState
guard = object.__new__(GuardState)
guard.folder = Path(sys.argv[1])
run_cli(lambda: guard.store.approve(sys.argv[2], reason="a test", ca_key=guard.ca_key))
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", (tmp_path / "nobody").open("w+"))


def key_of(guard: GuardState, *, agent: bool = False) -> SigningKey:
    known = guard.inventory
    return signing.signing_key(known.guard, known.host("kpro6"), guard.ca_key, agent=agent)


def test_the_ca_key_must_be_the_one_in_the_inventory(tmp_path: Path) -> None:
    guard = GuardState(tmp_path)
    known = guard.inventory
    assert key_of(guard) == SigningKey(guard.keys["ca"], guard.ca_key, attended=False)
    for other, reason in (("training", "is not the one in hosts.yaml"), ("nowhere", "No such file")):
        with pytest.raises(Refused, match=reason):
            signing.signing_key(known.guard, known.host("kpro6"), guard.folder / other)
    with pytest.raises(Refused, match="ssh-keygen -p -f"):
        signing.signing_key(known.guard, known.host("kpro6"), guard.hosts_file)
    with pytest.raises(Refused, match="--ca-key"):
        signing.signing_key(known.guard, known.host("kpro6"), None)


def test_a_ca_key_without_a_passphrase_signs_in_the_lab_only(tmp_path: Path, terminal: None) -> None:
    with pytest.raises(Refused, match=r"no passphrase.*ssh-keygen -p"):
        key_of(GuardState(tmp_path / "real", lab=False))
    with pytest.raises(Refused, match=r"the lab's addresses only, and kpro6 has 10\.1\.2\.7"):
        key_of(GuardState(tmp_path / "elsewhere", address="10.1.2.7"))


def test_the_lab_addresses_are_those_of_the_lab() -> None:
    assert {address for host in HOSTS.values() for address in (host.address, host.loopback)} == LAB_ADDRESSES


def test_a_ca_key_with_a_passphrase_needs_a_terminal(tmp_path: Path, nobody: None) -> None:
    with pytest.raises(Refused, match="no terminal"):
        key_of(GuardState(tmp_path, passphrase=PASSPHRASE, lab=False))


def test_a_ca_key_in_a_token_needs_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: None) -> None:
    guard = GuardState(tmp_path)
    token = Token(SK_ED25519)
    guard.keys["ca"] = token.public_line
    guard.hosts_file.write_text(guard.hosts_text())
    handle = public_keys.PrivateKeyFile(token.blob, encrypted=False)
    monkeypatch.setattr("tasks.public_keys.read_private_key_file", lambda path: handle)
    with pytest.raises(Refused, match="asks for a touch, and there is no terminal"):
        key_of(guard)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert key_of(guard).attended


def test_terms_that_ssh_keygen_does_not_sign_are_refused(tmp_path: Path) -> None:
    guard = GuardState(tmp_path)
    make_key(tmp_path / "throwaway")
    with pytest.raises(Refused, match="not signed: ssh-keygen"):
        signing.sign(tmp_path / "throwaway.pub", replace(TERMS, source_addresses=("nowhere",)), key_of(guard))


# --- an agent


@contextmanager
def agent(folder: Path, key: Path, *, answer: str) -> Iterator[str]:
    """A real agent that holds ``key`` and asks a program whether it may sign; that one answers as ``answer`` exits."""
    askpass, asked = folder / "askpass", folder / "asked"
    askpass.write_text(f'#!/bin/sh\necho "$1" >> {shlex.quote(str(asked))}\nexit {answer}\n')
    askpass.chmod(0o700)
    socket = str(folder / "socket")
    env = os.environ | {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": "none"}
    running = process.start(["ssh-agent", "-D", "-a", socket], env=env, stdout=process.DEVNULL)
    try:
        while not os.path.exists(socket):
            assert running.poll() is None
            time.sleep(0.01)
        process.run(["ssh-add", "-q", "-c", key], env=env | {"SSH_AUTH_SOCK": socket})
        yield socket
    finally:
        running.terminate()
        running.wait()


@pytest.fixture
def real(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path / "guard", lab=False)


def test_an_agent_signs_what_it_confirms(
    real: GuardState, tmp_path: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = real.store.request(real.plan())
    with agent(tmp_path, real.ca_key, answer="0") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        approved = real.store.approve(request.id, reason="a test", agent=True)
    assert real.store.require(real.plan()) == approved
    assert certificates.read(approved.read.certificate_path, real.keys["ca"]).terms.serial == approved.read.serial
    assert "Allow use of key" in (tmp_path / "asked").read_text()


def test_an_agent_that_says_no_approves_nothing(
    real: GuardState, tmp_path: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = real.store.request(real.plan())
    with agent(tmp_path, real.ca_key, answer="1") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        with pytest.raises(Refused, match="did the agent say no"):
            real.store.approve(request.id, reason="a test", agent=True)
    assert "Allow use of key" in (tmp_path / "asked").read_text()
    assert real.store.find(real.plan()) is None
    assert real.store.get(request.id).status == "pending"
    assert real.events() == ["request", "decision", "unsigned"]


def test_an_agent_without_the_ca_key_or_no_agent_approves_nothing(
    real: GuardState, tmp_path: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = real.store.request(real.plan())
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(Refused, match="there is no agent"):
        real.store.approve(request.id, reason="a test", agent=True)
    with agent(tmp_path, real.folder / "training", answer="0") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        with pytest.raises(Refused, match="does it not hold the CA key"):
            real.store.approve(request.id, reason="a test", agent=True)
    assert real.store.get(request.id).status == "pending"


def test_an_agent_signs_for_nobody_who_is_not_at_a_terminal(
    real: GuardState, tmp_path: Path, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = real.store.request(real.plan())
    with agent(tmp_path, real.ca_key, answer="0") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        with pytest.raises(Refused, match="at a terminal"):
            real.store.approve(request.id, reason="a test", agent=True)
        with pytest.raises(Refused, match="no passphrase"):
            real.store.approve(request.id, reason="a test", ca_key=real.ca_key)
    assert not (tmp_path / "asked").exists()


# --- a passphrase at a terminal


@pytest.fixture
def locked(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path / "guard", lab=False, passphrase=PASSPHRASE)


@pytest.fixture
def temporary() -> Iterator[dict[str, str]]:
    """An environment with a temporary folder of its own; its path is short, for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield os.environ | {"TMPDIR": folder}


def test_one_passphrase_signs_every_action_of_a_plan(locked: GuardState, temporary: dict[str, str]) -> None:
    plan = locked.changing(locked.put(), locked.launch(), grant=locked.grant())
    request = locked.store.request(plan)
    code, said = at_a_terminal(APPROVE, [str(locked.folder), request.id], ("passphrase", PASSPHRASE), env=temporary)
    assert code == 0, said
    assert (said.count("Enter passphrase"), PASSPHRASE in said) == (1, False)
    approved = locked.store.require(plan)
    assert [approval.digest for approval in approved.approvals] == [action.digest() for action in plan.actions]
    assert not our_agents(temporary)


@pytest.mark.parametrize("actions", [1, 2])
def test_a_wrong_passphrase_approves_nothing(locked: GuardState, temporary: dict[str, str], actions: int) -> None:
    plan = locked.changing(*[locked.put(f"/workspace/{number}") for number in range(actions)])
    request = locked.store.request(plan)
    # ssh-add asks until nothing is typed
    answers = [("passphrase", "wrong"), ("again", "")] if actions > 1 else [("passphrase", "wrong")]
    code, said = at_a_terminal(APPROVE, [str(locked.folder), request.id], *answers, env=temporary)
    assert code == 77, said
    assert "nothing was approved, try again" in said
    assert locked.store.get(request.id).status == "pending"
    assert not list((locked.store.folder / "keys").glob("*-cert.pub"))
    assert locked.events() == ["request", "decision", "unsigned"]
    assert not our_agents(temporary)


def test_a_passphrase_is_not_taken_from_a_program(locked: GuardState, tmp_path: Path) -> None:
    askpass = tmp_path / "askpass"
    askpass.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    askpass.chmod(0o700)
    env = os.environ | {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": "none"}
    request = locked.store.request(locked.changing(locked.put(), locked.launch()))
    dialogue = ("passphrase", "wrong"), ("again", "")
    code, said = at_a_terminal(APPROVE, [str(locked.folder), request.id], *dialogue, env=env)
    assert code == 77, said


def our_agents(env: dict[str, str]) -> list[str]:
    """The agents that signing started and did not end, and what it left in the temporary folder."""
    running = process.run(["pgrep", "-f", f"ssh-agent -a {env['TMPDIR']}"], check=False).stdout.split()
    return running + os.listdir(env["TMPDIR"])
