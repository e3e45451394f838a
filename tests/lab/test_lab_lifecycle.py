"""How a lab comes and goes: each test has a machine where no lab is, whatever else runs on this one."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.errors import DFlashError
from tasks import lab as lab_module
from tasks import process
from tasks.lab import Lab, LabBusyError, LabDownError, LabError
from tasks.lab_isolated import NETNS, IsolatedSite, can_isolate
from tasks.lab_record import ISOLATED_RECORD
from tasks.lab_sites import wait_until
from tests.labs import on_a_machine_of_its_own

NAMESPACES = {"dflash-operator", "dflash-kpro6", "dflash-ct129"}
CHECKOUT = Path(lab_module.__file__).parent.parent

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not can_isolate(), reason="namespaces need root"),
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") is None, reason="no sshd here"),
]


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dflash-lab-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def names() -> set[str]:
    return set(os.listdir(NETNS)) if NETNS.exists() else set()


def crash(lab: Lab) -> None:
    """Kill the lab's processes, and nothing else of it."""
    for life in lab._record.first_processes.values():
        os.kill(life.pid, signal.SIGKILL)
    assert wait_until(lambda: not lab._record.alive)


@on_a_machine_of_its_own
def test_down_leaves_nothing_behind(state: Path) -> None:
    before = process.run(["ip", "-o", "address"]).stdout
    lab = Lab.up(state)
    assert names() == NAMESPACES
    lives = [*lab._record.first_processes.values(), *lab._record.sshds.values()]
    lab.down()
    assert names() == set()
    assert not any(life.alive for life in lives)
    assert not ISOLATED_RECORD.exists()
    assert list(state.iterdir()) == []
    assert process.run(["ip", "-o", "address"]).stdout == before
    with pytest.raises(LabDownError, match="dflash-ops lab up"):
        Lab.running(state)
    assert not Lab.remove(state)


@on_a_machine_of_its_own
def test_down_keeps_what_the_lab_did_not_make(state: Path) -> None:
    lab = Lab.up(state)
    process.run(["ip", "netns", "add", "another"])
    (lab.folder / "notes").write_text("mine")
    (state / "guard").mkdir()
    lab.down()
    assert names() == {"another"}
    assert (lab.folder / "notes").read_text() == "mine"
    assert (state / "guard").is_dir()


@on_a_machine_of_its_own
def test_a_folder_that_no_lab_made_is_left_alone(state: Path) -> None:
    for name in ("keys", "kpro6"):
        (state / "lab" / name).mkdir(parents=True)
        (state / "lab" / name / "mine").touch()
    (state / "lab/hosts.yaml").write_text("mine")
    assert not Lab.remove(state)
    with pytest.raises(LabError, match=r"lab/keys is there and no lab made it"):
        Lab.up(state)
    assert not Lab.remove(state)
    assert (state / "lab/hosts.yaml").read_text() == "mine"
    assert all((state / "lab" / name / "mine").exists() for name in ("keys", "kpro6"))
    assert names() == set()


@on_a_machine_of_its_own
def test_down_deletes_nothing_behind_a_link(state: Path) -> None:
    lab = Lab.up(state)
    elsewhere = state / "elsewhere"
    shutil.move(lab.folder / "keys", elsewhere)
    (lab.folder / "keys").symlink_to(elsewhere)
    (lab.host_path("kpro6", "/srv") / "link").symlink_to(elsewhere)
    lab.down()
    assert (elsewhere / "ca").exists()
    assert [entry.name for entry in lab.folder.iterdir()] == ["keys"]


@on_a_machine_of_its_own
def test_down_deletes_nothing_through_a_mount(state: Path) -> None:
    lab = Lab.up(state)
    elsewhere = state / "else where"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    point = lab.host_path("kpro6", "/mnt/with blank")
    point.mkdir()
    process.run(["mount", "--bind", elsewhere, point])
    with pytest.raises(LabError, match="with blank is mounted inside"):
        lab.down()
    assert (elsewhere / "file").read_text() == "kept"
    process.run(["umount", point])
    assert Lab.remove(state)
    assert not lab.folder.exists()


@on_a_machine_of_its_own
def test_a_second_lab_is_told_about_the_first(state: Path) -> None:
    lab = Lab.up(state / "first")
    with pytest.raises(LabBusyError) as caught:
        Lab.up(state / "second")
    assert f"{state / 'first/lab'} (brought up by process {os.getpid()})" in str(caught.value)
    assert all(host.reachable for host in lab.status())
    lab.down()
    Lab.up(state / "second").down()


@on_a_machine_of_its_own
def test_two_ups_at_once_make_one_lab(state: Path) -> None:
    program = "import sys; from pathlib import Path; from tasks.lab import Lab; Lab.up(Path(sys.argv[1]))"
    ups = [process.start([sys.executable, "-c", program, str(state)], cwd=CHECKOUT) for _ in range(2)]
    assert [up.wait(timeout=60) for up in ups] == [0, 0]
    lab = Lab.running(state)
    assert all(host.reachable for host in lab.status())
    lab.down()


@on_a_machine_of_its_own
def test_a_namespace_that_no_lab_made_is_left_alone(state: Path) -> None:
    process.run(["ip", "netns", "add", "dflash-ct129"])
    with pytest.raises(LabError, match="ip netns delete dflash-ct129"):
        Lab.up(state)
    assert names() == {"dflash-ct129"}
    assert not ISOLATED_RECORD.exists()
    process.run(["ip", "netns", "delete", "dflash-ct129"])
    Lab.up(state).down()


@on_a_machine_of_its_own
def test_a_namespace_that_took_the_place_of_ours_is_not_removed(state: Path) -> None:
    lab = Lab.up(state)
    crash(lab)
    process.run(["ip", "netns", "delete", "dflash-kpro6"])
    process.run(["ip", "netns", "add", "dflash-kpro6"])
    lab.down()
    assert names() == {"dflash-kpro6"}


@on_a_machine_of_its_own
def test_a_crashed_lab_is_mended_with_its_keys_and_files(state: Path) -> None:
    lab = Lab.up(state)
    hosts = lab.hosts_file.read_text()
    kept = lab.host_path("kpro6", "/workspace/dflash/checkpoints/step_1.pt")
    kept.write_text("kept")
    crash(lab)
    assert not any(host.reachable for host in lab.status())
    again = Lab.up(state)
    assert all(host.reachable for host in again.status())
    assert again.hosts_file.read_text() == hosts
    assert again.exec("kpro6", ["cat", "/workspace/dflash/checkpoints/step_1.pt"]).stdout == "kept"
    again.down()


@on_a_machine_of_its_own
def test_a_killed_sshd_is_mended(state: Path) -> None:
    lab = Lab.up(state)
    os.kill(lab._record.sshds["kpro6"].pid, signal.SIGKILL)
    assert wait_until(lambda: lab.status()[0].sshd is None)
    again = Lab.up(state)
    assert all(host.reachable for host in again.status())
    again.down()


@on_a_machine_of_its_own
def test_a_crashed_lab_does_not_block_one_elsewhere(state: Path) -> None:
    crash(Lab.up(state / "first"))
    lab = Lab.up(state / "second")
    assert all(host.reachable for host in lab.status())
    # the files of the first wait for its own down
    assert (state / "first/lab/hosts.yaml").exists()
    assert Lab.remove(state / "first")
    assert not (state / "first/lab").exists()
    assert all(host.reachable for host in lab.status())
    lab.down()


@on_a_machine_of_its_own
def test_a_lab_whose_folder_was_deleted_is_replaced(state: Path) -> None:
    lab = Lab.up(state)
    shutil.rmtree(lab.folder)
    again = Lab.up(state)
    assert all(host.reachable for host in again.status())
    again.down()


@on_a_machine_of_its_own
def test_up_works_after_a_reboot(state: Path) -> None:
    lab = Lab.up(state)
    hosts = lab.hosts_file.read_text()
    crash(lab)
    for name in NAMESPACES:
        process.run(["ip", "netns", "delete", name])
    ISOLATED_RECORD.unlink()
    again = Lab.up(state)
    assert all(host.reachable for host in again.status())
    assert again.hosts_file.read_text() == hosts
    again.down()


@on_a_machine_of_its_own
def test_an_up_that_fails_takes_back_what_it_made(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SshdError(DFlashError):
        pass

    def fail(*_: object) -> None:
        raise SshdError

    monkeypatch.setattr(IsolatedSite, "start_sshd", fail)
    with pytest.raises(SshdError):
        Lab.up(state)
    assert names() == set()
    assert not ISOLATED_RECORD.exists()


@on_a_machine_of_its_own
def test_an_sshd_that_refuses_its_configuration_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "session_path", lambda: 'broken"quote')
    with pytest.raises(process.ProcessError, match="sshd_config"):
        Lab.up(state)
    assert names() == set()


@on_a_machine_of_its_own
def test_a_lab_tied_to_its_caller_ends_with_it(state: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from tasks.lab import Lab\n"
        "Lab.up(Path(sys.argv[1]), outlive=False); os.kill(os.getpid(), 9)"
    )
    assert process.run([sys.executable, "-c", program, str(state)], cwd=CHECKOUT, check=False).returncode == -9
    lab = Lab.running(state)
    assert wait_until(lambda: not lab._record.alive)
    again = Lab.up(state)
    assert all(host.reachable for host in again.status())
    again.down()


@pytest.fixture
def state_in_the_checkout() -> Iterator[Path]:
    build = CHECKOUT / "build"
    build.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir=build))
    yield folder
    shutil.rmtree(folder)


@on_a_machine_of_its_own
def test_a_state_folder_inside_the_checkout_is_hidden_from_the_hosts(state_in_the_checkout: Path) -> None:
    lab = Lab.up(state_in_the_checkout)
    listed = lab.exec("ct129", ["ls", "-A", str(state_in_the_checkout)])
    assert (listed.returncode, listed.stdout) == (0, "")
    assert lab.exec("ct129", ["ls", str(CHECKOUT / "tasks/lab.py")]).returncode == 0
    assert "Read-only" in lab.exec("ct129", ["touch", str(state_in_the_checkout / "written")]).stderr
    lab.down()
