"""A file from the training host to the inference host of the lab by an object store that each of the three reaches."""

import hashlib
import os
from collections.abc import Iterator

import pytest

from tasks.inventory import Location
from tasks.lab import Lab
from tasks.object_store import ObjectStore
from tasks.relay import Settings, plan_relay
from tasks.ssh import Connector
from tasks.staged_relay import plan_staged_uploads, relay_staged
from tests.object_stores import LAB_ADDRESS, StoreServer, in_environment, lab_store

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("every_progress")]

SOURCE = "/workspace/dflash/checkpoints/staged/step_1.pt"
DESTINATION = "/root/eval/cache/staged/step_1.pt"
CHUNK = 1 << 20
SIZE = 4 * CHUNK + 99


@pytest.fixture(scope="module")
def server(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    if not lab.privileged:
        pytest.skip("a network for the store needs root")
    folder = tmp_path_factory.mktemp("lab-store") / "s3"
    with lab_store("seaweedfs", folder) as running, in_environment(running.environment):
        yield running


@pytest.mark.parametrize("by", ["the training host", "the operator"])
def test_file_goes_through_the_store_between_hosts_that_do_not_reach_each_other(
    lab: Lab, server: StoreServer, by: str
) -> None:
    connector = Connector.load(lab.hosts_file)
    known, approvals, store = connector.inventory, connector.store, ObjectStore(server.staging())
    source_file, destination_file = lab.host_path("kpro6", SOURCE), lab.host_path("ct129", DESTINATION)
    source_file.parent.mkdir(exist_ok=True)
    content = os.urandom(SIZE)
    source_file.write_bytes(content)
    source, destination = Location(known.host("kpro6"), SOURCE), Location(known.host("ct129"), DESTINATION)
    plan = plan_relay([source], "a test reads it")
    assert plan is not None
    approval = approvals.approve(approvals.request(plan).id, reason="test", ca_key=lab.ca_key).read
    settings, uploads = Settings(range_bytes=CHUNK), None
    if by == "the training host":
        plan = plan_staged_uploads(connector, store, approval, source, destination, settings=settings)
        assert plan is not None
        uploads = approvals.approve(approvals.request(plan).id, reason="test", ca_key=lab.ca_key)
    result = relay_staged(connector, store, approval, source, destination, uploads=uploads, settings=settings)
    assert destination_file.read_bytes() == content
    assert result.sha256 == hashlib.sha256(content).hexdigest()
    assert server.keys() == []
    destination_file.unlink()


def test_store_leads_from_neither_host_to_the_other(lab: Lab, server: StoreServer) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"
    store_port = server.endpoint.rpartition(":")[2]
    for here, there in (("kpro6", "10.1.230.172"), ("ct129", "10.1.2.6")):
        assert lab.exec(here, ["python3", "-c", reach, LAB_ADDRESS, store_port]).returncode == 0
        assert lab.exec(here, ["python3", "-c", reach, there, "22"]).returncode != 0
        # not even when it is told to go that way
        assert lab.exec(here, ["ip", "route", "add", there, "dev", "store"]).returncode == 0
        assert lab.exec(here, ["python3", "-c", reach, there, "22"]).returncode != 0
        assert lab.exec(here, ["ip", "route", "delete", there, "dev", "store"]).returncode == 0
