"""The lab without namespaces: two sshds of the current user on loopback addresses."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import inventory, process
from tasks import lab as lab_module
from tasks.lab import Lab, LabError
from tasks.lab_isolated import can_isolate
from tasks.lab_sites import wait_until
from tests.labs import on_a_machine_of_its_own

CHECKOUT = Path(lab_module.__file__).parent.parent
NOBODY = 65534

# what a user without any privilege does: bring it up, look at it, log in, meet the gate, take it down
SESSION = """
import json, os, subprocess, sys
from pathlib import Path
from tasks import inventory
from tasks.lab import Lab

state = Path(sys.argv[1])
lab = Lab.up(state)
again = Lab.up(state)

def ssh(host, *arguments, **options):
    options = {"UserKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "no", "BatchMode": "yes", **options}
    words = [f"-o{key}={value}" for key, value in options.items()]
    command = ["ssh", "-F", "none", "-q", *words, "-p", str(host.port), f"{host.user}@{host.address}", *arguments]
    return subprocess.run(command, input="", capture_output=True, text=True)

hosts = inventory.load(lab.hosts_file).hosts
login = ssh(hosts["ct129"], f"id -u; ls {hosts['ct129'].environments}", IdentityFile=lab.folder / "keys/login")
key = state / "key"
subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
sign = ["ssh-keygen", "-q", "-s", lab.ca_key, "-I", "x", "-n", "dflash-gate", "-V", "+5m", "-O", "clear", f"{key}.pub"]
subprocess.run(sign, check=True)
gate = ssh(hosts["kpro6"], "id", IdentityFile=key, CertificateFile=f"{key}-cert.pub")
print(json.dumps({
    "uid": os.getuid(),
    "privileged": lab.privileged,
    "weaker": lab.weaker,
    "same": [host.sshd for host in lab.status()] == [host.sshd for host in again.status()],
    "reachable": [host.reachable for host in lab.status()],
    "addresses": [host.address for host in lab.status()],
    "login": login.stdout.split(),
    "gate": gate.returncode,
}))
again.down()
lab_gone = not (state / "lab").exists()
print(lab_gone)
"""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") is None, reason="no sshd here"),
    pytest.mark.skipif(not can_isolate(), reason="making a machine of its own for the test needs root"),
]


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dflash-lab-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@on_a_machine_of_its_own
def test_a_user_without_privilege_gets_two_loopback_hosts(state: Path) -> None:
    # nobody, with a shell: seen by this thread only
    names = state / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines()
    named = [line for line in lines if line.split(":")[2] != str(NOBODY)]
    names.write_text("\n".join([*named, f"tester:x:{NOBODY}:{NOBODY}::{state}:/bin/sh", ""]))
    process.run(["mount", "--bind", names, "/etc/passwd"])
    shutil.chown(state, NOBODY, NOBODY)
    # this Python may lie in a folder that only root may enter
    read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *read, "--"]
    finished = process.run([*user, sys.executable, "-c", SESSION, state], cwd=CHECKOUT, timeout=120)
    report, gone = finished.stdout.splitlines()
    found = json.loads(report)
    assert found == {
        "uid": NOBODY,
        "privileged": False,
        "weaker": found["weaker"],
        "same": True,
        "reachable": [True, True],
        "addresses": ["127.1.2.6", "127.1.230.172"],
        "login": [str(NOBODY), "current"],
        "gate": 77,
    }
    assert "nothing keeps ct129 from reaching kpro6" in found["weaker"]
    assert gone == "True"


@on_a_machine_of_its_own
def test_without_namespaces_the_hosts_paths_are_this_machines(state: Path) -> None:
    lab = Lab.up(state, isolated=False)
    hosts = inventory.load(lab.hosts_file).hosts
    assert hosts["kpro6"].checkpoints == str(lab.host_path("kpro6", "/workspace/dflash/checkpoints"))
    assert lab.seen("kpro6", "/workspace/dflash/checkpoints") == hosts["kpro6"].checkpoints
    assert hosts["kpro6"].source_addresses == ("127.0.0.1",)
    assert hosts["kpro6"].port != 22
    with pytest.raises(LabError, match="as root"):
        lab.cut_link("kpro6")
    lab.down()


@on_a_machine_of_its_own
def test_its_sshd_can_be_killed_mended_and_taken_down(state: Path) -> None:
    lab = Lab.up(state, isolated=False)
    ports = [host.port for host in lab.status()]
    lab.kill_sshd("ct129")
    assert [host.reachable for host in lab.status()] == [True, False]
    lab.restart_sshd("ct129")
    assert [host.reachable for host in lab.status()] == [True, True]
    assert [host.port for host in lab.status()] == ports
    lab.kill_sshd("kpro6")
    again = Lab.up(state, isolated=False)
    assert [host.reachable for host in again.status()] == [True, True]
    assert wait_until(lambda: not any(life.alive for life in lab._record.sshds.values()))
    again.down()
    assert list(state.iterdir()) == []
    assert not Path("/run/sshd").exists()


@on_a_machine_of_its_own
def test_it_does_not_disturb_an_isolated_lab_elsewhere(state: Path) -> None:
    isolated = Lab.up(state / "root")
    other = Lab.up(state / "user", isolated=False)
    assert all(host.reachable for host in (*isolated.status(), *other.status()))
    other.down()
    assert all(host.reachable for host in isolated.status())
    isolated.down()


@on_a_machine_of_its_own
def test_an_isolated_lab_replaces_the_loopback_one_of_its_folder(state: Path) -> None:
    before = Lab.up(state, isolated=False)
    lab = Lab.up(state)
    assert lab.privileged
    assert not before._record.alive
    assert all(host.reachable for host in lab.status())
    lab.down()
    assert list(state.iterdir()) == []
