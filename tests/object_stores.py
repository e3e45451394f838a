"""Fixtures: two S3 servers that have nothing to do with each other, SeaweedFS and ``rclone serve s3``.

Both ask for credentials. Every port of theirs is chosen, so that runs beside each other do not meet.
"""

import dataclasses
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from tasks.inventory import Staging
from tasks.object_store import ObjectStore

PATIENCE_SECONDS = 60.0
BUCKET = "dflash"
KINDS = ("seaweedfs", "rclone")
LOOPBACK = "127.9.30.3"


@dataclasses.dataclass(frozen=True)
class StoreServer:
    """A running server with one empty bucket; :meth:`environment` holds the only credentials that it takes."""

    kind: str
    endpoint: str
    access_key: str
    secret_key: str
    folder: Path
    pid: int

    def staging(self, **changes: str) -> Staging:
        fields = {"kind": "s3", "bucket": BUCKET, "prefix": "relay/", "endpoint_url": self.endpoint}
        return Staging.model_validate(fields | changes)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def keys(self) -> list[str]:
        """Every key in the bucket, as boto3 alone sees them."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def content(self, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def clear(self) -> None:
        for key in self.keys():
            self.client().delete_object(Bucket=BUCKET, Key=key)

    def client(self):  # type: ignore[no-untyped-def]  # boto3 has no types
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )


@contextmanager
def store_server(
    kind: str, folder: Path, *, address: str = LOOPBACK, inside: Sequence[str] = ()
) -> Iterator[StoreServer]:
    """Run a server on ``address`` with its files in ``folder``; ``inside`` are the words that enter a namespace.

    It must be reached from the calling thread, whose end is its own.
    """
    program = Path(sys.prefix, "bin", {"seaweedfs": "weed", "rclone": "rclone"}[kind])
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: `make venv` brings it")
    folder.mkdir(parents=True)
    access, secret = f"AKID{secrets.token_hex(8).upper()}", f"{secrets.token_urlsafe(24)}+/="
    port, argv, environment = {"seaweedfs": _seaweedfs, "rclone": _rclone}[kind](
        program, folder, address, access, secret
    )
    with (folder / "log").open("wb") as log:
        # setpriv: the server goes when this process does, however that ends
        running = subprocess.Popen(
            [*inside, "setpriv", "--pdeathsig", "KILL", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )
    server = StoreServer(kind, f"http://{address}:{port}", access, secret, folder, running.pid)
    try:
        _wait_for(server, running)
        with suppress(server.client().exceptions.BucketAlreadyExists):
            server.client().create_bucket(Bucket=BUCKET)
        _wait_until_it_stores(server)
        yield server
    finally:
        _end(running)


LAB_ADDRESS = "10.1.99.9"
LAB_NAMESPACE = "dflash-store"


@contextmanager
def lab_store(kind: str, folder: Path) -> Iterator[StoreServer]:
    """A server in a namespace of its own, which both hosts of the isolated lab and the operator reach at one address.

    Each has a cable of its own to it, and it forwards nothing: the two hosts are as far from each other as before.
    """
    hosts = {"kpro6": "10.1.2.6", "ct129": "10.1.230.172", "operator": "10.1.2.1"}
    _run("ip", "netns", "add", LAB_NAMESPACE)
    try:
        inside = ("nsenter", f"--net=/run/netns/{LAB_NAMESPACE}", "--")
        _run(*inside, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        _ip(LAB_NAMESPACE, "link set lo up", f"address add {LAB_ADDRESS}/32 dev lo")
        for name, address in hosts.items():
            _ip(LAB_NAMESPACE, f"link add {name} type veth peer name store netns dflash-{name}")
            _ip(f"dflash-{name}", "link set store up", f"route add {LAB_ADDRESS} dev store src {address}")
            _ip(LAB_NAMESPACE, f"link set {name} up", f"route add {address} dev {name} src {LAB_ADDRESS}")
        with store_server(kind, folder, address=LAB_ADDRESS, inside=inside) as server:
            yield server
    finally:
        # the cables go with it
        _run("ip", "netns", "delete", LAB_NAMESPACE)


def _ip(namespace: str, *commands: str) -> None:
    for command in commands:
        _run("ip", "-n", namespace, *command.split())


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=30)


def ports(address: str, count: int) -> list[int]:
    """Free ports of ``address``, each another one."""
    taken = [socket.create_server((address, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()


@contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session", params=KINDS)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """Each of the two servers in turn, with its credentials in the environment."""
    folder = tmp_path_factory.mktemp("store") / "s3"
    with store_server(request.param, folder) as server, in_environment(server.environment):
        yield server


@pytest.fixture
def server(any_server: StoreServer) -> StoreServer:
    """A server whose bucket is empty."""
    any_server.clear()
    return any_server


@pytest.fixture
def store(server: StoreServer) -> ObjectStore:
    return ObjectStore(server.staging())


def _ports_of(address: str, count: int) -> list[int]:
    """Free ports of ``address``, or any in a namespace that only one server lives in."""
    if address == LAB_ADDRESS:
        return list(range(9000, 9000 + count))
    # SeaweedFS listens on 127.0.0.1 as well
    return ports("127.0.0.1", count)


def _seaweedfs(
    program: Path, folder: Path, address: str, access: str, secret: str
) -> tuple[int, list[str], dict[str, str]]:
    identity = {
        "name": "dflash",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    (folder / "logs").mkdir()
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    chosen = dict(zip(names, _ports_of(address, len(names)), strict=True))
    options = {
        "dir": folder / "data",
        "ip": address,
        "ip.bind": address,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.max": 40,
        "filer": "true",
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.config": folder / "identities.json",
        "s3.localSocket": folder / "s3.sock",
        # else a bucket that is gone comes back with the first object
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **chosen,
    }
    argv = [
        str(program),
        f"-logdir={folder / 'logs'}",
        "server",
        *(f"-{name}={value}" for name, value in options.items()),
    ]
    return chosen["s3.port"], argv, {}


def _rclone(
    program: Path, folder: Path, address: str, access: str, secret: str
) -> tuple[int, list[str], dict[str, str]]:
    (folder / "data" / BUCKET).mkdir(parents=True)
    (port,) = _ports_of(address, 1)
    argv = [str(program), "serve", "s3", f"--addr={address}:{port}", "--config=/dev/null", str(folder / "data")]
    # argv is everybody's to read
    return port, argv, {"RCLONE_AUTH_KEY": f'"{access},{secret}"'}


def _wait_for(server: StoreServer, running: "subprocess.Popen[bytes]") -> None:
    host = server.endpoint.removeprefix("http://")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while running.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, timeout=2)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            if connection.getresponse().status < 500:
                return
        connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"{server.kind} does not answer: {(server.folder / 'log').read_text()[-2000:]}")


def _wait_until_it_stores(server: StoreServer) -> None:
    """SeaweedFS answers some seconds before it has a volume to write to."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            server.client().put_object(Bucket=BUCKET, Key="first", Body=b"first")
            server.client().delete_object(Bucket=BUCKET, Key="first")
            return
        except server.client().exceptions.ClientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _end(running: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, and do not wait for long: SeaweedFS was alive 20 s after it was asked."""
    running.send_signal(signal.SIGTERM)
    try:
        running.wait(1.0)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
