"""What the operator does by hand on a protected host, printed for exactly that host and never performed from here.

The text is a shell script to be read first: everything that depends on hosts.yaml is written into it, it checks that it
runs on the host it is for, and it stops at the first thing that is not as expected. The last step, which makes sshd
read its new configuration, stays a line to type.
"""

import hashlib
import json
import re
from importlib.resources import as_file, files
from string import Template

from dflash.errors import UsageError
from tasks import public_keys
from tasks.actions import escape
from tasks.inventory import Host, Inventory

GATE = "/usr/local/sbin/dflash-gate"
CONFIGURATION = "/etc/dflash/gate.json"
CA = "/etc/dflash/ca.pub"
PRINCIPALS = "/etc/dflash/principals"
SUDO = "/usr/bin/sudo"
PERFORM = "perform"
"""Argument by which the gate starts itself as the job user."""
GATE_HOME = ".dflash"
"""Folder in the login's home with the gate and its configuration, where the enforcement is ``authorized-keys``."""
DEFAULT_STATE = str(Host.model_fields["gate_state"].default)


def setup_text(inventory: Inventory, host: Host) -> str:
    """The script that makes ``host`` refuse what the operator did not sign, by the enforcement of its entry.

    :raises UsageError: ``host`` is not protected, or its entry cannot be set up as it is.
    """
    if not host.protected:
        raise UsageError(f"{host.name} is not protected, so nothing is set up there; protected are the training hosts")
    if host.enforcement == "client":
        return _filled("setup-client.txt", user=host.user, name=host.name, address=host.address)
    for name, path in (("gate_state", host.gate_state), ("gate", gate_path(host))):
        if not re.fullmatch(r"[A-Za-z0-9/._-]+", path):
            raise UsageError(
                f"{name} '{escape(path)}' of {host.name} cannot stand in sshd's configuration; "
                "use letters, digits and . _ - only"
            )
    return (
        _authorized_keys_text(inventory, host) if host.enforcement == "authorized-keys" else _host_text(inventory, host)
    )


def gate_path(host: Host) -> str:
    """Where the gate program lies on ``host`` once it is set up."""
    if host.gate is not None:
        return host.gate
    if host.enforcement == "authorized-keys":
        # both are in the folder that the login made in its home
        return f"{host.gate_state.rpartition('/')[0]}/dflash-gate"
    return GATE


def gate_sha256() -> str:
    """sha256 in hex of the gate program that this installation ships."""
    return hashlib.sha256(_shipped("dflash-gate").encode()).hexdigest()


def gate_configuration(inventory: Inventory, host: Host) -> str:
    """The gate.json of ``host``."""
    settings: dict[str, object] = {
        "state": host.gate_state,
        "host_keys": [public_keys.fingerprint(key) for key in host.host_keys],
        "read_limit": host.read_limit,
    }
    if host.enforcement == "host":
        # what the gate revokes is refused by sshd as well; sshd asks no such list for authorized_keys
        settings |= {"ca": CA, "revoked": f"{host.gate_state}/revoked"}
    if host.job_user is not None:
        settings["job"] = [SUDO, "-n", "-u", host.job_user, "--"]
    if inventory.guard.two_person:
        settings["second_persons"] = inventory.guard.second_persons
    return json.dumps(settings, indent=2)


def match_block(host: Host) -> str:
    """The block of sshd_config under which logins of the gate's user reach the gate and nothing else."""
    return _filled(
        "sshd_match.conf",
        user=host.user,
        ca=CA,
        principals=PRINCIPALS,
        revoked=f"{host.gate_state}/revoked",
        gate=gate_path(host),
        config=CONFIGURATION,
    ).rstrip("\n")


def authorized_keys_line(inventory: Inventory, host: Host) -> str:
    """The line of authorized_keys by which the operator's certificates log in; it has no command of its own."""
    sources = ",".join(host.source_addresses)
    return _filled("authorized_keys", sources=sources, ca_public_key=inventory.guard.ca_public_key).rstrip("\n")


def _host_text(inventory: Inventory, host: Host) -> str:
    if host.user == "root":
        raise UsageError(
            f"user of {host.name} is root, and the gate must not run as root; "
            "name a login that is used for nothing else, such as dflash"
        )
    block = match_block(host)
    inside = [line.strip() for line in block.splitlines() if line.startswith(" ")]
    return _filled(
        "setup-host.sh",
        **_common(inventory, host),
        gate=gate_path(host),
        config=CONFIGURATION,
        configuration=gate_configuration(inventory, host),
        ca=CA,
        principals=PRINCIPALS,
        revoked=f"{host.gate_state}/revoked",
        fingerprints="|".join(f'*"{public_keys.fingerprint(key)}"*' for key in host.host_keys),
        jobs=_job_user_text(host),
        last="6" if host.job_user is None else "7",
        match=block,
        settings="\n".join(line for line in inside if not line.startswith("#")),
    )


def _job_user_text(host: Host) -> str:
    if host.job_user is None:
        return ""
    if host.job_user in ("root", host.user):
        raise UsageError(
            f"job_user of {host.name} is {host.job_user}, and what is approved to run must not own the budgets; "
            "name the user that trains, or leave it out"
        )
    sudoers = _filled("sudoers", user=host.user, job_user=host.job_user, gate=gate_path(host), perform=PERFORM).rstrip(
        "\n"
    )
    return _filled("setup-job-user.sh", user=host.user, job_user=host.job_user, sudoers=sudoers)


def _authorized_keys_text(inventory: Inventory, host: Host) -> str:
    if host.gate_state == DEFAULT_STATE:
        raise UsageError(
            f"gate_state of {host.name} is {DEFAULT_STATE}, which {host.user} cannot make; set it in hosts.yaml to a "
            f"folder of that login's own, such as /home/{host.user}/{GATE_HOME}/state"
        )
    if gate_path(host).rpartition("/")[0].rpartition("/")[2] != GATE_HOME:
        raise UsageError(
            f"the gate of {host.name} would be looked for as {gate_path(host)}, and it is started in the login's own "
            f"{GATE_HOME}; set gate_state in hosts.yaml to /home/{host.user}/{GATE_HOME}/state, or gate to its path"
        )
    if inventory.guard.two_person:
        raise UsageError(
            f"guard.two_person needs enforcement: host, and {host.name} has authorized-keys: its gate does not see "
            "which request a certificate is for, so it could not tell what the second person signed"
        )
    return _filled(
        "setup-authorized-keys.sh",
        **_common(inventory, host),
        configuration=gate_configuration(inventory, host),
        authorized_keys=authorized_keys_line(inventory, host),
    )


def _common(inventory: Inventory, host: Host) -> dict[str, str]:
    with as_file(files("deploy").joinpath("training-host", "dflash-gate")) as program:
        where = escape(str(program))
    return {
        "name": host.name,
        "address": host.address,
        "user": host.user,
        "state": host.gate_state,
        "program": where,
        "sha256": gate_sha256(),
        "ca_public_key": inventory.guard.ca_public_key,
    }


def _filled(template: str, /, **values: str) -> str:
    return Template(_shipped(template)).substitute(values)


def _shipped(name: str) -> str:
    return files("deploy").joinpath("training-host", name).read_text("utf-8")
