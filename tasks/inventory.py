"""``hosts.yaml``: which machines there are, which of them is protected, and the keys they are known by.

The file is read strictly: what is not understood is an error that names the key and the mend, never ignored, because
a misspelt key here would be a guard that is switched off.
"""

import ipaddress
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash.errors import UsageError
from tasks import public_keys
from tasks.actions import PathError, escape, normalise_path
from tasks.hosts_yaml import InventoryError, KeyPath, Lines, read
from tasks.quantities import rate


class UnknownHostError(UsageError):
    """A host that ``hosts.yaml`` does not know."""


class LocationError(UsageError):
    """A text that is neither ``HOST:/absolute/path`` nor a path of this machine."""


def _word(text: str) -> str:
    # a leading dash would read as an option of ssh, a space as a second argument
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
        raise ValueError(f"{text!r} is not a name or an address; letters, digits and . _ - only")
    return text


def _host_address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _word(text)
    if not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", text):
        raise ValueError(f"{text!r} has an odd zone; write it as in fe80::1%eth0")
    return text


def _local_path(path: Path) -> Path:
    if not str(path).isprintable():
        raise ValueError(f"{str(path)!r} holds a character that cannot be printed")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r}: there is no such user; write the whole path") from None


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        raise ValueError(f"{text!r} is not a host name; letters, digits and . _ - only, a letter or digit first")
    return text


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an IP address nor a network such as 10.1.2.0/24") from None
    return text


def _block_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*", text):
        raise ValueError(f"{text!r} is not a Prefect block; write its type and its name, as in custom-webhook/ops")
    return text


def _rate(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a rate; write a number, a unit and /s, as in 200MB/s")
    return rate(value)


HostName = Annotated[str, AfterValidator(_host_name)]
Word = Annotated[str, AfterValidator(_word)]
Address = Annotated[str, AfterValidator(_host_address)]
Network = Annotated[str, AfterValidator(_network)]
PublicKey = Annotated[str, AfterValidator(public_keys.normalise)]
SigningKey = Annotated[str, AfterValidator(public_keys.normalise_signing)]
Enforcement = Literal["host", "authorized-keys", "client"]
BlockName = Annotated[str, AfterValidator(_block_name)]
RemotePath = Annotated[str, AfterValidator(normalise_path)]
LocalPath = Annotated[Path, AfterValidator(_local_path)]
Rate = Annotated[int, BeforeValidator(_rate)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """One mapping of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Guard(Section):
    """Who may approve."""

    ca_public_key: SigningKey
    """The public half of the key that signs approvals, made for nothing else."""
    ca_key: LocalPath | None = None
    """The operator's private key; named only on the machine where approvals are given."""
    lab: bool = False
    """The CA was made by the local lab, which signs unattended."""
    two_person: bool = False
    """Every approval also needs the signature of one of :attr:`second_persons`."""
    second_persons: dict[HostName, SigningKey] = {}
    """Name and public key of everybody who may sign as the second."""


class Alias(Section):
    """Another name of a host, or another sshd on it with an address and keys of its own."""

    name: HostName
    """What it may be called in commands."""
    address: Address | None = None
    """Of its own sshd; none: only another name."""
    port: Port = 22
    """Of that sshd."""
    host_keys: tuple[PublicKey, ...] = ()
    """The keys of that sshd."""


class Server(Section):
    """The inference server that already runs on the host."""

    kind: Literal["sglang", "vllm"]
    """Which counters and options it has."""
    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Where it answers, as the host itself sees it."""


class Gpu(Section):
    """How an evaluation may use the host's accelerator."""

    device: str = "auto"
    """``auto`` (the GPU with the most free memory, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    reserve_gib: float = Field(default=0.0, ge=0)
    """GiB of the free memory that an evaluation leaves to others."""
    kernel: Literal["auto", "fla", "torch"] = "auto"
    """How linear attention is computed; the kernel of the training, or the taps differ."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the target computes in."""
    offload: Literal["auto"] | bool = "auto"
    """Stream the target's layers from its files, for a GPU that cannot hold them."""


class Host(Section):
    """One machine. A training host is protected; nothing can switch that off."""

    name: HostName
    """Its key in the file."""
    role: Literal["training", "inference"]
    """``training`` is protected: nothing happens there that was not approved."""
    address: Address
    """Name or address of its sshd."""
    aliases: tuple[Alias, ...] = ()
    """Its other names and sshds."""
    port: Port = 22
    """Of its sshd."""
    user: Word
    """Who to log in as."""
    identity_file: LocalPath | None = None
    """Private key of the ordinary login; none leaves it to the ssh configuration."""
    host_keys: tuple[PublicKey, ...] = ()
    """The keys it may show; any other is refused. Of a protected host, all it has."""
    source_addresses: tuple[Network, ...] = ()
    """This machine as the host sees it; an approval is valid from there only."""
    enforcement: Enforcement = "host"
    """Who refuses what is not approved: the host's sshd, its authorized_keys, or only this program."""
    gate_state: RemotePath = "/var/lib/dflash-gate"
    """Where the gate keeps budgets, spent serials and its log."""
    gate: RemotePath | None = None
    """The gate program; none: where ``guard setup`` puts it."""
    job_user: Word | None = None
    """Who commands run as, where the gate may change to them; none: as the login."""
    read_limit: Rate = 200_000_000
    """Bytes a second that are read there at most."""
    checkpoints: RemotePath | None = None
    """Where its training writes checkpoints."""
    environments: RemotePath | None = None
    """Virtual environments; ``current/bin/dflash`` there is what runs."""
    index: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    """The package index that the host may install from, as it sees it; none: the one that this machine's pip uses."""
    jobs: RemotePath | None = None
    """A folder for each launched job."""
    cache: RemotePath | None = None
    """Relayed drafters, hidden states and completions."""
    target: RemotePath | None = None
    """The target, a folder of Hugging Face layout."""
    reference: RemotePath | None = None
    """The reference drafter, a folder as well."""
    server: Server | None = None
    """The server that runs there; it writes the reference completions."""
    gpu: Gpu = Gpu()
    """How an evaluation may use the accelerator."""

    @property
    def protected(self) -> bool:
        return self.role == "training"

    @property
    def all_host_keys(self) -> tuple[str, ...]:
        """Every key the host may show, those of its aliases included."""
        return (*self.host_keys, *(key for alias in self.aliases for key in alias.host_keys))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Sorted SHA256 fingerprints of :attr:`all_host_keys`: what a grant names the host by."""
        return tuple(sorted(public_keys.fingerprint(key) for key in self.all_host_keys))

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        """(address, port) of the host and of the aliases that have one."""
        own = [(alias.address, alias.port) for alias in self.aliases if alias.address is not None]
        return ((self.address, self.port), *own)


class Staging(Section):
    """The object store that large checkpoints may go through."""

    kind: Literal["s3"]
    """The protocol."""
    bucket: str
    """It must exist."""
    prefix: str = ""
    """What every key begins with."""
    endpoint_url: str | None = None
    """Of a store that is not Amazon's; every host must reach it under this name."""
    profile: str | None = None
    """Of the operator's AWS configuration; the hosts get no credentials."""
    checksums: Literal["when_required", "when_supported"] = "when_required"
    """As boto3 has it; many stores take ``when_required`` only."""


class Inventory(Section):
    """The whole file."""

    version: Literal[1]
    """Of this layout."""
    guard: Guard
    """Who may approve."""
    hosts: Annotated[dict[HostName, Host], Field(min_length=1)]
    """The machines by name."""
    staging: Staging | None = None
    """For relays through an object store."""
    notify: tuple[BlockName, ...] = ()
    """Prefect notification blocks that are told what a person has to know."""

    def host(self, name: str) -> Host:
        """The host called ``name`` or having that alias; raises :class:`UnknownHostError`."""
        for host in self.hosts.values():
            if name == host.name or any(name == alias.name for alias in host.aliases):
                return host
        raise UnknownHostError(f"unknown host '{escape(name)}'; hosts.yaml knows {', '.join(self._names())}")

    def owner_of_key(self, key: str | bytes) -> Host | None:
        """The host that pins ``key`` (a public key line, or its bytes as the protocol carries them)."""
        wanted = key if isinstance(key, bytes) else public_keys.blob(public_keys.normalise(key))
        for host in self.hosts.values():
            if any(public_keys.blob(pinned) == wanted for pinned in host.all_host_keys):
                return host
        return None

    def location(self, text: str) -> "Location":
        """``HOST:/absolute/path``, or a path of this machine; a colon behind the first slash belongs to the path."""
        name, colon, path = text.partition(":")
        if not colon or "/" in name:
            return Location(None, os.path.abspath(text))
        host = self.host(name)
        try:
            return Location(host, normalise_path(path))
        except PathError as error:
            raise LocationError(f"{host.name}: {error}") from None

    def _names(self) -> list[str]:
        return [host.name + "".join(f" (alias {alias.name})" for alias in host.aliases) for host in self.hosts.values()]


@dataclass(frozen=True)
class Location:
    """A path on a host, or on this machine when ``host`` is None."""

    host: Host | None
    path: str

    def __str__(self) -> str:
        return self.path if self.host is None else f"{self.host.name}:{self.path}"


def load(path: Path | None = None) -> Inventory:
    """Read ``path``, else ``$DFLASH_HOSTS``, else ``./hosts.yaml``; raises :class:`InventoryError`."""
    file = path or Path(os.environ.get("DFLASH_HOSTS") or "hosts.yaml")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InventoryError(f"{file}: {reason}; name the file with --hosts or in $DFLASH_HOSTS") from None
    return parse(text, source=str(file))


def parse(text: str, *, source: str = "hosts.yaml") -> Inventory:
    """The inventory in ``text``; errors begin with ``source``, the line and the key they are about."""
    tree, where = read(text, source)
    if not isinstance(tree, dict):
        raise InventoryError(f"{source}: expected a mapping with version, guard and hosts, found {type(tree).__name__}")
    _name_hosts(tree, where)
    try:
        # JSON, because only there does strict validation take a list for a tuple
        inventory = Inventory.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise _first(error, where) from None
    for key, message in _conflicts(inventory):
        raise where.error(key, message)
    return inventory


def _name_hosts(tree: dict[str, Any], where: Lines) -> None:
    """Write each host's key into it as its name."""
    hosts = tree.get("hosts")
    for name, host in hosts.items() if isinstance(hosts, dict) else ():
        if isinstance(host, dict):
            if "name" in host:
                raise where.error(("hosts", str(name), "name"), "unknown key; a host's name is the key it stands under")
            host["name"] = str(name)


def _first(error: ValidationError, where: Lines) -> InventoryError:
    problems = error.errors(include_url=False)
    problem = problems[0]
    key: KeyPath = tuple(part for part in problem["loc"] if part != "[key]")
    match problem["type"]:
        case "extra_forbidden" if key[-1] == "protected":
            message = "unknown key; a training host is protected and that cannot be switched off: remove the line"
        case "extra_forbidden":
            message = f"unknown key; known here are {', '.join(_known_keys(key[:-1]))}"
        case "json_invalid":
            return InventoryError(f"{where.source}: an escape in it is no character; write the character itself")
        case "missing":
            message = "missing; add it"
        case "value_error":
            message = str(problem["ctx"]["error"])
        case _:
            message = f"found {problem['input']!r}: {problem['msg']}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return where.error(key, message + more)


def _known_keys(key: KeyPath) -> list[str]:
    model: type[Section] = Inventory
    for part in key:
        if part in model.model_fields:
            model = _section_in(model.model_fields[str(part)].annotation) or model
    return [name for name in model.model_fields if not (model is Host and name == "name")]


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _conflicts(inventory: Inventory) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong between entries, each with the key to mend."""
    hosts = list(inventory.hosts.values())
    yield from _name_conflicts(hosts)
    yield from _endpoint_conflicts(hosts)
    yield from _key_conflicts(hosts)
    yield from _person_conflicts(inventory.guard)
    for host in hosts:
        if not host.host_keys:
            mend = "pin every line of its /etc/ssh/ssh_host_*_key.pub"
            yield ("hosts", host.name, "host_keys"), f"no pinned key, and an unknown key is never accepted; {mend}"
        if host.protected and not host.source_addresses:
            mend = "name the addresses of this machine as the host sees them"
            yield ("hosts", host.name, "source_addresses"), f"missing; approvals are bound to them: {mend}"


def _person_conflicts(guard: Guard) -> Iterator[tuple[KeyPath, str]]:
    if guard.two_person and not guard.second_persons:
        mend = "name who may be the second, with a public key each"
        yield ("guard", "second_persons"), f"missing, and two_person asks for a second person: {mend}"
    taken = {guard.ca_public_key: "the operator's CA key"}
    for name, key in guard.second_persons.items():
        if key in taken:
            yield ("guard", "second_persons", name), f"this is {taken[key]} already; two persons have two keys"
        taken[key] = f"the key of {name}"


def _name_conflicts(hosts: list[Host]) -> Iterator[tuple[KeyPath, str]]:
    taken: dict[str, str] = {}
    for host in hosts:
        if (other := taken.get(host.name.lower())) is not None:
            yield ("hosts", host.name), f"{other} has the same name; rename one"
        taken[host.name.lower()] = f"host {host.name}"
    for host in hosts:
        for index, alias in enumerate(host.aliases):
            if (other := taken.get(alias.name.lower())) is not None:
                yield ("hosts", host.name, "aliases", index, "name"), f"{alias.name!r} is {other} already; rename one"
            taken[alias.name.lower()] = f"an alias of {host.name}"


def _endpoint_conflicts(hosts: list[Host]) -> Iterator[tuple[KeyPath, str]]:
    taken: dict[tuple[str, int], str] = {}
    protected = {_address(address): host.name for host in hosts if host.protected for address, _ in host.endpoints}
    for host in hosts:
        for key, address, port in _endpoints(host):
            place = (_address(address), port)
            if place in taken:
                yield key, f"{address} port {port} belongs to {taken[place]} already; one machine is one entry"
            taken[place] = host.name
            if not host.protected and place[0] in protected:
                owner = protected[place[0]]
                yield key, f"{address} is the protected host {owner}; another sshd there is an alias of {owner}"


def _endpoints(host: Host) -> Iterator[tuple[KeyPath, str, int]]:
    yield ("hosts", host.name, "address"), host.address, host.port
    for index, alias in enumerate(host.aliases):
        if alias.address is not None:
            yield ("hosts", host.name, "aliases", index, "address"), alias.address, alias.port


def _key_conflicts(hosts: list[Host]) -> Iterator[tuple[KeyPath, str]]:
    taken: dict[str, str] = {}
    for host in hosts:
        for key, pinned in _pinned(host):
            if pinned in taken:
                shown = public_keys.fingerprint(pinned)
                yield key, f"key {shown} is pinned for {taken[pinned]} already; a key belongs to one machine, once"
            taken[pinned] = host.name


def _pinned(host: Host) -> Iterator[tuple[KeyPath, str]]:
    for index, key in enumerate(host.host_keys):
        yield ("hosts", host.name, "host_keys", index), key
    for position, alias in enumerate(host.aliases):
        for index, key in enumerate(alias.host_keys):
            yield ("hosts", host.name, "aliases", position, "host_keys", index), key


def _address(text: str) -> str:
    """One spelling of an address, so that two spellings of it are found to be one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text.lower().rstrip(".")
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
