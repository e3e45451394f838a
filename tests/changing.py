"""Changes as the operator of the tests approves them."""

import hashlib
from pathlib import Path
from typing import Any

from tasks import process, public_keys
from tasks.actions import AnyChange, Launch, Put, Run
from tasks.approvals import Approval, ApprovalStore
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.ssh import Connector
from tests.sshds import Operator


def approve_changes(operator: Operator, *changes: AnyChange) -> tuple[Approval, ...]:
    """One approval for each change, of one request."""
    request = operator.store.request(Plan(changes=changes, effect="a test changes something"))
    return operator.store.approve(request.id, reason="test", ca_key=operator.site.ca_key).approvals


def approve_change(operator: Operator, change: AnyChange) -> Approval:
    (approval,) = approve_changes(operator, change)
    return approval


def with_second_person(operator: Operator, key: Path) -> Operator:
    """The same operator where ``second``, who holds ``key``, has to sign as well."""
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)])
    public = public_keys.normalise(key.with_suffix(".pub").read_text())
    guard = operator.inventory.guard.model_copy(update={"two_person": True, "second_persons": {"second": public}})
    inventory = operator.inventory.model_copy(update={"guard": guard})
    store = ApprovalStore(inventory, operator.audit, operator.store.folder)
    connector = Connector(inventory, store, operator.audit, operator.connector.warn)
    return Operator(operator.site, inventory, store, operator.audit, connector)


def shell(host: Host, script: str, *arguments: str, **changes: Any) -> Run:
    """Run ``script``; its ``arguments`` are $1 and so on."""
    argv = ("/bin/sh", "-c", script, "sh", *arguments)
    return Run(**on(host), **({"argv": argv, "seconds": 30} | changes))


def leave_mark(host: Host, file: Path, mark: str = "ran") -> Run:
    """Append a line to ``file``: how many there are says how often it ran."""
    return shell(host, 'echo "$1" >> "$2"', mark, str(file))


def put_of(host: Host, path: Path, content: bytes, **changes: Any) -> Put:
    sha256 = hashlib.sha256(content).hexdigest()
    return Put(**on(host), **({"path": str(path), "size": len(content), "sha256": sha256, "seconds": 30} | changes))


def launch_of(host: Host, jobs: Path, script: str, *arguments: str, **changes: Any) -> Launch:
    argv = ("/bin/sh", "-c", script, "sh", *arguments)
    return Launch(**on(host), **({"argv": argv, "jobs": str(jobs), "job": "train-1"} | changes))


def on(host: Host) -> dict[str, Any]:
    """The fields of an action that say where it is done."""
    return {"host": host.name, "host_keys": host.fingerprints}
