"""deploy/setup-debian.sh on a machine that lacks things, with an apt-get that only says what it was asked."""

import os
import shutil
import subprocess  # the script is run in namespaces of its own
import sys
from pathlib import Path

import pytest

from tasks.lab_isolated import can_isolate

SCRIPT = Path(__file__).parent.parent / "deploy/setup-debian.sh"
POLICY = "/usr/sbin/policy-rc.d"

pytestmark = pytest.mark.skipif(not can_isolate(), reason="hiding /usr/sbin from the script needs root")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with the shell's tools and an apt-get that logs; no sshd, ip or ssh."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("id", "grep", "cat", "mv", "rm", "chmod", "sh", "ssh", "ssh-keygen"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(os.path.realpath(found))
    write(folder / "apt-get", f'echo "$*" >> {tmp_path}/log; {POLICY}; echo "policy $?" >> {tmp_path}/log')
    return folder


def write(program: Path, body: str) -> None:
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def run(
    programs: Path, *, before: str = "", after: str = "", python: str = sys.executable, packages: str = ""
) -> tuple[int, str, str]:
    """Run the script where /usr/sbin holds only what ``before`` puts there; exit code, stderr, output of ``after``."""
    program = "\n".join(
        [
            # without the empty folder all the rest would happen to the machine
            "mount -t tmpfs tmpfs /usr/sbin || exit 99",
            before,
            f"PATH={programs} sh {SCRIPT} {packages} > /dev/null; code=$?",
            after,
            "exit $code",
        ]
    )
    finished = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return finished.returncode, finished.stderr, finished.stdout


def log(programs: Path) -> list[str]:
    file = programs.parent / "log"
    return file.read_text().splitlines() if file.exists() else []


def test_what_is_missing_is_installed_while_no_service_may_start(programs: Path) -> None:
    code, stderr, left = run(programs, after="ls -A /usr/sbin")
    assert (code, stderr, left) == (0, "", "")
    assert log(programs) == [
        "update",
        "policy 101",
        "install -y --no-install-recommends openssh-server iproute2",
        "policy 101",
    ]


def test_nothing_is_asked_of_apt_when_nothing_is_missing(programs: Path) -> None:
    code, stderr, _ = run(programs, before="touch /usr/sbin/sshd /usr/sbin/ip; chmod +x /usr/sbin/*")
    assert (code, stderr) == (0, "")
    assert log(programs) == []


def test_packages_that_are_asked_for_are_installed_where_they_are_missing(programs: Path) -> None:
    write(programs / "dpkg-query", 'case "$*" in *there) echo "install ok installed" ;; *) exit 1 ;; esac')
    before = "touch /usr/sbin/sshd /usr/sbin/ip; chmod +x /usr/sbin/*"
    code, stderr, _ = run(programs, before=before, packages="there missing")
    assert (code, stderr) == (0, "")
    assert log(programs)[2] == "install -y --no-install-recommends missing"


def test_a_policy_that_was_there_is_there_again(programs: Path) -> None:
    before = f"printf '#!/bin/sh\\nexit 104\\n' > {POLICY}; chmod 0755 {POLICY}"
    code, _, left = run(programs, before=before, after=f"cat {POLICY}; ls /usr/sbin")
    assert code == 0
    assert left == "#!/bin/sh\nexit 104\npolicy-rc.d\n"


def test_a_failed_install_is_one_line_and_puts_the_policy_back(programs: Path) -> None:
    write(programs / "apt-get", "exit 100")
    before = f"echo mine > {POLICY}"
    code, stderr, left = run(programs, before=before, after=f"cat {POLICY}; ls /usr/sbin")
    assert code == 1
    assert stderr.startswith("error: apt-get update failed")
    assert stderr.count("\n") == 1
    assert left == "mine\npolicy-rc.d\n"


def test_what_a_killed_run_left_is_put_right(programs: Path) -> None:
    write(programs / "apt-get", "kill -9 $PPID; sleep 1")
    fresh = f"echo mine > {POLICY}"
    again = f"PATH={programs} sh {SCRIPT}; cat {POLICY}; ls /usr/sbin"
    write(programs / "apt-get-again", "exit 0")
    swap = f"mv {programs}/apt-get-again {programs}/apt-get"
    _, _, left = run(programs, before=fresh, after=f"{swap}; {again}")
    assert left == "mine\npolicy-rc.d\n"


def test_a_user_is_told_what_to_install(programs: Path) -> None:
    (programs / "id").unlink()
    write(programs / "id", "echo 1000")
    (programs / "ssh").unlink()
    code, stderr, _ = run(programs)
    assert code == 1
    wanted = "openssh-client openssh-server"
    assert stderr == f"error: missing: {wanted}; install with: sudo apt-get install --no-install-recommends {wanted}\n"
    assert log(programs) == []


def test_a_python_without_venv_gets_its_own_package(programs: Path) -> None:
    write(programs / "python", 'case "$2" in *ensurepip*) exit 1 ;; *) echo 9.99 ;; esac')
    run(programs, python=str(programs / "python"))
    assert log(programs)[2] == "install -y --no-install-recommends python9.99-venv openssh-server iproute2"


def test_no_python_is_one_line(programs: Path) -> None:
    code, stderr, _ = run(programs, python="")
    assert code == 1
    assert stderr.startswith("error: no Python 3.11 or newer was found")
