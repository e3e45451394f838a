"""The running lab: two hosts that share neither routes nor files, and an sshd on each that is what it says."""

import os
import socket
import subprocess  # the lab's sshds are tried with a client that is not ours
import sys
from pathlib import Path

import pytest

import tasks
from tasks import inventory, process
from tasks.lab import Lab, LabError
from tasks.lab_sites import wait_until
from tests.labs import MachineNetwork

pytestmark = pytest.mark.lab

CHECKOUT = Path(tasks.__file__).parent.parent
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=2)"


@pytest.fixture
def isolated(lab: Lab) -> Lab:
    if not lab.privileged:
        pytest.skip("networks and files of their own need root")
    return lab


def ssh(lab: Lab, host: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The system's ssh with the lab's pinned keys and nothing of the user's."""
    return subprocess.run(
        [*ssh_argv(lab, host, **options), *arguments], input="", capture_output=True, text=True, timeout=60, check=False
    )


def ssh_argv(lab: Lab, host: str, **options: object) -> list[str]:
    entry = inventory.load(lab.hosts_file).host(host)
    known = lab.folder.parent / f"known-{host}"
    name = entry.address if entry.port == 22 else f"[{entry.address}]:{entry.port}"
    known.write_text("".join(f"{name} {key}\n" for key in entry.host_keys))
    settings = {
        "UserKnownHostsFile": known,
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "Port": entry.port,
        "User": entry.user,
        "IdentityFile": lab.folder / "keys/login",
        **options,
    }
    return ["ssh", "-F", "none", *(f"-o{key}={value}" for key, value in settings.items()), entry.address]


def test_the_machines_own_network_is_untouched(isolated: Lab, machine_network: MachineNetwork) -> None:
    assert machine_network.before
    assert machine_network.now() == machine_network.before
    operator = isolated.exec("operator", ["ip", "-o", "address"], check=True).stdout
    assert "10.1.2.1/24" in operator
    assert "10.1.230.1/24" in operator


def test_both_hosts_answer_the_operator_at_their_addresses(lab: Lab) -> None:
    status = {host.name: host for host in lab.status()}
    assert all(host.reachable and host.sshd for host in status.values())
    expected = ("10.1.2.6", "10.1.230.172") if lab.privileged else ("127.1.2.6", "127.1.230.172")
    assert (status["kpro6"].address, status["ct129"].address) == expected


@pytest.mark.parametrize(
    ("source", "gateway", "address"), [("ct129", "10.1.230.1", "10.1.2.6"), ("kpro6", "10.1.2.1", "10.1.230.172")]
)
def test_no_host_reaches_the_other(isolated: Lab, source: str, gateway: str, address: str) -> None:
    refused = isolated.exec(source, ["python3", "-c", CONNECT, address])
    assert "Network is unreachable" in refused.stderr
    # nor through the operator, whoever sets a route
    isolated.exec(source, ["ip", "route", "add", "default", "via", gateway], check=True)
    try:
        assert "Connection refused" in isolated.exec(source, ["python3", "-c", CONNECT, gateway]).stderr
        lost = isolated.exec(source, ["python3", "-c", CONNECT, address])
        assert "timed out" in lost.stderr or "unreachable" in lost.stderr
    finally:
        isolated.exec(source, ["ip", "route", "del", "default"], check=True)


def test_nothing_is_forwarded_and_every_loopback_is_up(isolated: Lab) -> None:
    assert isolated.exec("operator", ["cat", "/proc/sys/net/ipv4/ip_forward"]).stdout == "0\n"
    for name in ("operator", "kpro6", "ct129"):
        assert "127.0.0.1" in isolated.exec(name, ["ip", "-o", "address", "show", "lo", "up"]).stdout


def test_files_of_one_host_cannot_be_opened_from_the_other(isolated: Lab) -> None:
    secret = isolated.host_path("kpro6", "/workspace/dflash/checkpoints/secret")
    secret.write_text("only on kpro6")
    assert isolated.exec("kpro6", ["cat", "/workspace/dflash/checkpoints/secret"]).stdout == "only on kpro6"
    process_there = isolated.exec("operator", ["ip", "netns", "pids", "dflash-kpro6"]).stdout.split()[0]
    for path in (
        "/workspace/dflash/checkpoints/secret",
        str(secret),
        f"/proc/{process_there}/root/workspace/dflash/checkpoints/secret",
        f"/proc/1/root{secret}",
        f"/.machine{secret}",
    ):
        assert "No such file" in isolated.exec("ct129", ["cat", path]).stderr, path
    secret.unlink()


def test_a_host_sees_only_its_own_processes_and_its_own_shared_memory(isolated: Lab) -> None:
    seen = isolated.exec("ct129", ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.split()
    assert set(seen) <= {"sleep", "sshd", "sh", "cat", "env"}
    isolated.exec("kpro6", ["touch", "/dev/shm/here"], check=True)
    assert isolated.exec("ct129", ["ls", "/dev/shm"]).stdout == ""
    assert isolated.exec("ct129", ["hostname"]).stdout == "ct129\n"


def test_what_a_host_shows_of_the_machine_is_read_only(isolated: Lab) -> None:
    for folder in ("/usr", "/etc/ssl", sys.prefix, sys.base_prefix, CHECKOUT):
        written = isolated.exec("ct129", ["touch", f"{folder}/written"])
        assert "Read-only file system" in written.stderr, folder
    own = [f"{folder}/own" for folder in ("/root", "/tmp", "/run", "/workspace", "/etc/dflash")]
    isolated.exec("ct129", ["touch", *own], check=True)
    isolated.exec("ct129", ["rm", *own], check=True)


def test_no_secret_of_the_machine_is_shown(isolated: Lab) -> None:
    for path in ("/etc/shadow", str(isolated.ca_key), str(isolated.folder), f"{Path.home()}/.ssh"):
        assert isolated.exec("kpro6", ["ls", path]).returncode != 0, path


def test_the_hosts_files_are_on_a_disk(isolated: Lab) -> None:
    mounts = [line.split() for line in isolated.exec("kpro6", ["cat", "/proc/mounts"]).stdout.splitlines()]
    assert [kind for _, point, kind, *_ in mounts if point == "/"] not in ([], ["tmpfs"])


def test_the_current_environment_of_the_inference_host_is_the_running_one(lab: Lab) -> None:
    python = f"{inventory.load().host('ct129').environments}/current/bin/python"
    program = "'import dflash, os, sys; print(dflash.__file__, os.path.realpath(sys.prefix))'"
    answered = ssh(lab, "ct129", python, "-c", program)
    assert answered.stdout.split() == [str(CHECKOUT / "dflash/__init__.py"), os.path.realpath(sys.prefix)], (
        answered.stderr
    )


def test_the_ordinary_key_opens_the_inference_host_only(lab: Lab) -> None:
    user = ssh(lab, "ct129", "id", "-un")
    assert user.stdout.strip() == inventory.load().host("ct129").user, user.stderr
    assert "Permission denied" in ssh(lab, "kpro6", "id").stderr


def test_every_host_key_is_pinned_and_shown_by_the_right_host(lab: Lab) -> None:
    for name in ("kpro6", "ct129"):
        host = inventory.load().host(name)
        scanned = process.run(["ssh-keyscan", "-p", str(host.port), host.address]).stdout
        shown = {" ".join(line.split()[1:3]) for line in scanned.splitlines() if not line.startswith("#")}
        assert shown == set(host.host_keys)
        assert len(shown) == 3


def test_the_training_host_runs_the_gate_whatever_a_certificate_says(lab: Lab, tmp_path: Path) -> None:
    key = tmp_path / "key"
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    certificate = {"IdentityFile": key, "CertificateFile": f"{key}-cert.pub"}
    sign = ["ssh-keygen", "-q", "-s", lab.ca_key, "-I", "test", "-V", "+5m", "-O", "clear"]
    # no force-command: with sshd alone this certificate would give a shell
    process.run([*sign, "-z", "1", "-n", "dflash-gate", f"{key}.pub"])
    answered = ssh(lab, "kpro6", "touch", "/tmp/reached", **certificate)
    assert answered.returncode == 77, answered
    assert "force-command" in answered.stdout + answered.stderr
    assert not lab.host_path("kpro6", "/tmp/reached").exists()
    process.run([*sign, "-z", "2", "-n", "somebody-else", f"{key}.pub"])
    assert "Permission denied" in ssh(lab, "kpro6", "true", **certificate).stderr


def test_the_gate_belongs_to_root_and_nobody_else_writes_it(isolated: Lab) -> None:
    listed = isolated.exec("kpro6", ["stat", "-c", "%U %a", "/opt/dflash/dflash-gate", "/etc/dflash/gate.json"])
    assert listed.stdout.splitlines() == ["root 755", "root 644"]


def test_many_sessions_may_begin_at_once(lab: Lab) -> None:
    host = inventory.load().host("ct129")
    connections = [socket.create_connection((host.address, host.port), timeout=10) for _ in range(40)]
    try:
        assert all(connection.recv(8) == b"SSH-2.0-" for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def test_a_killed_sshd_is_gone_with_its_sessions_and_comes_back(lab: Lab) -> None:
    session = subprocess.Popen(
        [*ssh_argv(lab, "ct129"), "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(b"alive\n")
    session.stdin.flush()
    assert session.stdout.readline() == b"alive\n"
    try:
        lab.kill_sshd("ct129")
        assert session.wait(timeout=10) == 255
        assert [(each.sshd, each.reachable) for each in lab.status() if each.name == "ct129"] == [(None, False)]
    finally:
        session.communicate()
        lab.restart_sshd("ct129")
    assert all(each.sshd and each.reachable for each in lab.status())
    assert ssh(lab, "ct129", "true").returncode == 0


def test_a_cut_link_loses_the_host_until_it_is_restored(isolated: Lab) -> None:
    isolated.cut_link("kpro6")
    try:
        assert {host.name: host.reachable for host in isolated.status()} == {"kpro6": False, "ct129": True}
    finally:
        isolated.restore_link("kpro6")
    assert wait_until(lambda: all(host.reachable for host in isolated.status()))


def test_exec_passes_input_output_and_the_exit_code_on(lab: Lab) -> None:
    finished = lab.exec("kpro6", ["sh", "-c", "cat; echo to-stderr >&2; exit 7"], input="to-stdout\n")
    assert (finished.returncode, finished.stdout, finished.stderr) == (7, "to-stdout\n", "to-stderr\n")
    with pytest.raises(LabError, match="no host 'kpro7'"):
        lab.exec("kpro7", ["true"])


def test_the_command_line_runs_a_command_there(lab: Lab) -> None:
    program = "from dflash.errors import run_cli; from flows.cli_lab import app; run_cli(app)"
    command = [sys.executable, "-c", program, "exec", "ct129", "--", "sh", "-c", "uname -n; exit 9"]
    finished = process.run(command, check=False, cwd=CHECKOUT)
    assert finished.returncode == 9
    assert not lab.privileged or finished.stdout == "ct129\n"
    shown = process.run([sys.executable, "-c", program, "status"], cwd=CHECKOUT).stdout
    assert "kpro6" in shown
    assert "ct129" in shown


def test_up_returns_the_lab_that_is_up(lab: Lab) -> None:
    before = [host.sshd for host in lab.status()]
    again = Lab.up(lab.folder.parent)
    assert [host.sshd for host in again.status()] == before
