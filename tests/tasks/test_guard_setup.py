"""The printed set-up, run as printed on a machine of its own, whose sshd then refuses what it should."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from tasks import changes, process, public_keys
from tasks.actions import Revoke
from tasks.approvals import ApprovalStore, Approved
from tasks.audit import Audit
from tasks.doctor_sessions import full_plan
from tasks.errors import Refused
from tasks.finding import Finding
from tasks.guard_doctor import diagnose
from tasks.guard_setup import CONFIGURATION, GATE, authorized_keys_line, gate_configuration, gate_sha256, setup_text
from tasks.identities import Identities
from tasks.inventory import Inventory, parse
from tasks.lab_isolated import can_isolate
from tasks.plans import Plan
from tasks.process import Popen
from tasks.reconcile import host_log, plan_reconcile
from tasks.ssh import Connector
from tests.changing import with_second_person
from tests.guard_state import make_key, public_line
from tests.labs import on_a_machine_of_its_own
from tests.sshds import GATE as SHIPPED
from tests.sshds import Operator, Site

SSHD_CONFIG, HOST_KEY = Path("/etc/ssh/sshd_config"), Path("/etc/ssh/ssh_host_ed25519_key.pub")
LOGIN = "dflash"
ADDRESS = "127.1.2.6"  # a CA without a passphrase signs for this one

needs_root = pytest.mark.skipif(not can_isolate(), reason="making a machine of its own for the test needs root")


class Machine:
    """The host that this thread is on, with its own /etc, and an operator on the same one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("etc", "usr/local/sbin", "var/lib", "home"):
            upper, work = folder / "upper" / name, folder / "work" / name
            upper.mkdir(parents=True)
            work.mkdir(parents=True)
            layers = f"lowerdir=/{name},upperdir={upper},workdir={work}"
            process.run(["mount", "-t", "overlay", "overlay", "-o", layers, f"/{name}"])
        Path("/run/sshd").mkdir()
        make_key(folder / "ca")
        self.other_key = make_key(folder / "other")
        self.sshd: Popen[bytes] | None = None

    def inventory(self, **changes: object) -> Inventory:
        keys = sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))
        host = {
            "role": "training",
            "address": ADDRESS,
            "user": LOGIN,
            "host_keys": [public_keys.normalise(key.read_text()) for key in keys],
            "source_addresses": ["127.0.0.1"],
        }
        guard = {"ca_public_key": public_line(self.folder / "ca"), "lab": True}
        spare = {"role": "inference", "address": "127.1.230.172", "user": "root", "host_keys": [self.other_key]}
        return parse(json.dumps({"version": 1, "guard": guard, "hosts": {"train": host | changes, "infer": spare}}))

    def set_up(self, text: str, *, user: str = "root", gate: bytes | None = None) -> subprocess.CompletedProcess[str]:
        """Run what was printed, as it was printed, with the gate program beside it."""
        place = self.folder / "brought"
        place.mkdir(exist_ok=True)
        (place / "setup.sh").write_text(text)
        (place / "dflash-gate").write_bytes(SHIPPED.read_bytes() if gate is None else gate)
        return process.run(["runuser", "-u", user, "--", "sh", "setup.sh"], cwd=place, check=False)

    def start_sshd(self) -> None:
        self.sshd = process.start(["/usr/sbin/sshd", "-D", "-E", str(self.folder / "log")])
        deadline = time.monotonic() + 20
        while process.run(["ssh-keyscan", ADDRESS], check=False).stdout == "":
            assert time.monotonic() < deadline, (self.folder / "log").read_text()

    def approved(self, known: Inventory, plan: Plan) -> tuple[Connector, Approved]:
        audit = Audit(self.folder / "audit.jsonl")
        store = ApprovalStore(known, audit, self.folder / "guard")
        approved = store.approve(store.request(plan).id, reason="test", ca_key=self.folder / "ca")
        return Connector(known, store, audit), approved

    def diagnosed(self, known: Inventory) -> dict[str, Finding]:
        """Everything that the doctor finds, under an approval."""
        host = known.host("train")
        connector, full = self.approved(known, full_plan(host))
        found = diagnose(connector, host, full=full, identities=Identities((), ()), pause=0)
        return {finding.name: finding for finding in found}

    def revoke(self, known: Inventory) -> None:
        """Revoke an approval that works, and find that it no longer does."""
        host = known.host("train")
        connector, approved = self.approved(known, plan_reconcile(host))
        assert host_log(connector, host, approved.read)
        action = Revoke(host=host.name, host_keys=host.fingerprints, serial=approved.read.serial)
        _, permitted = self.approved(known, Plan(changes=(action,), effect="a test"))
        changes.revoke(connector, host, permitted.of(action), action)
        refused = "sshd did not accept" if host.enforcement == "host" else "revoked"
        with pytest.raises(Refused, match=refused):
            host_log(connector, host, approved.read)


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    # the login has to get to what was brought
    for above in (folder, *list(folder.parents)[:2]):
        above.chmod(0o755)
    running = Machine(folder)
    try:
        yield running
    finally:
        if running.sshd is not None:
            running.sshd.terminate()
            running.sshd.wait()


@needs_root
@on_a_machine_of_its_own
def test_what_is_printed_for_sshd_makes_a_host_that_the_doctor_finds_guarded(tmp_path: Path) -> None:
    with machine(tmp_path) as host:
        known = host.inventory()
        # any other login of this host takes any key, which the doctor finds and the block keeps from the gate's
        whoever = "AuthorizedKeysCommandUser root\nAuthorizedKeysCommand /bin/echo %t %k\n"
        SSHD_CONFIG.write_text(before := whoever + SSHD_CONFIG.read_text())
        done = host.set_up(setup_text(known, known.host("train")))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "systemctl reload ssh" in done.stdout.splitlines()[-1]
        assert SSHD_CONFIG.read_text().startswith(before)
        host.start_sshd()
        found = host.diagnosed(known)
        assert [one.name for one in found.values() if one.status == "fail"] == ["other login"], found
        for name in ("replay", "altered action line", "other source address", "port forwarding", "jump host", "budget"):
            assert found[name].status == "pass", found[name]
        assert gate_sha256()[:16] in found["gate program"].measured
        assert "could lie" not in found["gate program"].measured
        assert "an altered gate could answer this too" in found["gate program"].explanation
        assert "gate and job are one user" in found["gate and job user"].measured
        # what the gate revokes, sshd refuses at the door
        host.revoke(known)
        # a second time changes nothing
        assert host.set_up(setup_text(known, known.host("train"))).returncode == 0
        assert SSHD_CONFIG.read_text().count(f"Match User {LOGIN}") == 1


@needs_root
@on_a_machine_of_its_own
def test_set_up_stops_at_what_is_not_as_expected(tmp_path: Path) -> None:
    with machine(tmp_path) as host:
        known = host.inventory()
        text = setup_text(known, known.host("train"))
        fewer = host.inventory(host_keys=[public_keys.normalise(HOST_KEY.read_text())])
        stopped = host.set_up(setup_text(fewer, fewer.host("train")))
        assert stopped.returncode == 1
        assert "is not among host_keys of train in hosts.yaml" in stopped.stdout
        altered = host.set_up(text, gate=SHIPPED.read_bytes() + b"\n")
        assert altered.returncode == 1
        assert "dflash-gate: FAILED" in altered.stdout
        assert not Path(GATE).exists()
        mode = Path("/var/lib").stat().st_mode
        elsewhere = host.inventory(gate_state="/var/lib")
        taken = host.set_up(setup_text(elsewhere, elsewhere.host("train")))
        assert taken.returncode == 1
        assert "/var/lib is not a folder of" in taken.stdout
        assert Path("/var/lib").stat().st_mode == mode
        keys = Path(f"/home/{LOGIN}/.ssh/authorized_keys")
        process.run(["usermod", "--home", f"/home/{LOGIN}", LOGIN])
        keys.parent.mkdir(parents=True)
        keys.write_text("an administrator's\n")
        used = host.set_up(text)
        assert used.returncode == 1
        assert "which this would lock out" in used.stdout
        keys.unlink()
        config = SSHD_CONFIG.read_text()
        SSHD_CONFIG.write_text(f"{config}\nMatch User {LOGIN}\n  ForceCommand /bin/sh\n")
        earlier = host.set_up(text)
        assert earlier.returncode == 1
        assert "does not hold: look at what stands before the block" in earlier.stdout
        SSHD_CONFIG.write_text(f"{config}\nNonsense yes\n")
        broken = host.set_up(text)
        assert broken.returncode == 1
        assert "put it back" in broken.stdout
        SSHD_CONFIG.write_text(config)
        assert host.set_up(text).returncode == 0


@pytest.mark.slow
@needs_root
@on_a_machine_of_its_own
def test_what_is_printed_for_authorized_keys_makes_a_gate_in_the_logins_home(tmp_path: Path) -> None:
    with machine(tmp_path) as host:
        process.run(["useradd", "--create-home", "--shell", "/bin/sh", LOGIN])
        known = host.inventory(enforcement="authorized-keys", gate_state=f"/home/{LOGIN}/.dflash/state")
        text = setup_text(known, known.host("train"))
        assert host.set_up(text).returncode != 0
        for _ in range(2):
            done = host.set_up(text, user=LOGIN)
            assert done.returncode == 0, done.stdout + done.stderr
        lines = Path(f"/home/{LOGIN}/.ssh/authorized_keys").read_text().splitlines()
        assert lines == [authorized_keys_line(known, known.host("train"))]
        assert "command=" not in lines[0]
        host.start_sshd()
        found = host.diagnosed(known)
        assert [one.name for one in found.values() if one.status == "fail"] == [], found
        assert found["enforcement"].status == found["gate and job user"].status == "warn"
        for name in ("replay", "altered action line", "port forwarding", "gate program"):
            assert found[name].status == "pass", found[name]
        host.revoke(known)
        with Path(f"/home/{LOGIN}/.ssh/authorized_keys").open("a") as file:
            file.write(make_key(tmp_path / "own") + "\n")
        more = host.set_up(text, user=LOGIN)
        assert "each of them passes the gate by" in more.stdout


@needs_root
@pytest.mark.skipif(shutil.which("sudo") is None, reason="no sudo here")
@on_a_machine_of_its_own
def test_commands_run_as_the_job_user_who_cannot_reach_the_budgets(tmp_path: Path) -> None:
    with machine(tmp_path) as host:
        process.run(["useradd", "--create-home", "train"])
        known = host.inventory(job_user="train")
        done = host.set_up(setup_text(known, known.host("train")))
        assert done.returncode == 0, done.stdout + done.stderr
        host.start_sshd()
        found = host.diagnosed(known)
        assert [one.name for one in found.values() if one.status == "fail"] == [], found
        assert found["gate and job user"].status == "pass"


def test_the_job_user_gets_one_line_of_sudoers_and_the_gate_a_prefix(site: Site, tmp_path: Path) -> None:
    known = site.operator(tmp_path, train={"user": LOGIN, "job_user": "train"}).inventory
    text = setup_text(known, known.host("train"))
    assert f"\n{LOGIN} ALL=(train) NOPASSWD: {GATE} perform\n" in text
    assert text.index("visudo") < text.index("mv /etc/sudoers.d/dflash-gate.new")
    assert json.loads(gate_configuration(known, known.host("train")))["job"] == [
        "/usr/bin/sudo", "-n", "-u", "train", "--",
    ]  # fmt: skip


def test_a_gate_elsewhere_is_set_up_there(site: Site, tmp_path: Path) -> None:
    known = site.operator(tmp_path, train={"user": LOGIN, "gate": "/opt/gate", "job_user": "train"}).inventory
    text = setup_text(known, known.host("train"))
    assert f"ForceCommand /opt/gate {CONFIGURATION}" in text
    assert "-m 0755 dflash-gate /opt/gate\n" in text
    assert GATE not in text
    assert full_plan(known.host("train")).grant.paths == ("/opt/gate",)  # type: ignore[union-attr]


def test_two_persons_are_in_the_gates_configuration(site: Site, tmp_path: Path) -> None:
    operator = with_second_person(site.operator(tmp_path / "operator"), tmp_path / "second")
    configuration = json.loads(gate_configuration(operator.inventory, operator.train))
    assert configuration["second_persons"] == {"second": public_line(tmp_path / "second")}
    assert configuration["host_keys"] == [public_keys.fingerprint(key) for key in operator.train.host_keys]
    assert "job" not in configuration
    keys_only = operator.train.model_copy(update={"enforcement": "authorized-keys", "gate_state": "/home/d/.dflash/s"})
    with pytest.raises(UsageError, match="two_person needs enforcement: host"):
        setup_text(operator.inventory, keys_only)


def test_client_enforcement_is_told_to_be_passable(site: Site, tmp_path: Path) -> None:
    known = site.operator(tmp_path, train={"enforcement": "client"}).inventory
    text = setup_text(known, known.host("train"))
    assert "THIS CAN BE BYPASSED" in text
    assert all(line.startswith("#") for line in text.splitlines())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"user": "root"}, "must not run as root"),
        ({"user": LOGIN, "job_user": "root"}, "must not own the budgets"),
        ({"user": LOGIN, "job_user": LOGIN}, "must not own the budgets"),
        ({"user": LOGIN, "gate_state": "/var/lib/$(id)"}, "letters, digits"),
        ({"user": LOGIN, "gate": "/opt/a b/dflash-gate"}, "gate '/opt/a b/dflash-gate'"),
        ({"user": LOGIN, "enforcement": "authorized-keys"}, f"/home/{LOGIN}/.dflash/state"),
        ({"user": LOGIN, "enforcement": "authorized-keys", "gate_state": "/srv/gate/state"}, "/srv/gate/dflash-gate"),
    ],
)
def test_what_cannot_be_set_up_is_named(site: Site, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    known = site.operator(tmp_path, train=changes).inventory
    with pytest.raises(UsageError, match=re.escape(says)):
        setup_text(known, known.host("train"))


def test_an_ordinary_host_is_not_set_up(operator: Operator) -> None:
    with pytest.raises(UsageError, match="not protected"):
        setup_text(operator.inventory, operator.infer)
