"""How a host is reached: hosts.yaml says who, the operator's ssh configuration says by which name, key and jumps.

Pure: the ssh configuration comes in as the output of ``ssh -G``, which knows Include and Match, and goes out as a
configuration of our own in which nothing is left to a default.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import DFlashError
from tasks.actions import escape
from tasks.errors import Refused
from tasks.inventory import Host, Inventory, UnknownHostError

CONNECT_SECONDS = 15
KEEPALIVE_SECONDS = 15
MOST_JUMPS = 4
GCM = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
CHACHA = ("chacha20-poly1305@openssh.com",)


class RouteError(DFlashError):
    """The ssh configuration leads to a host in a way that cannot be followed safely."""


@dataclass(frozen=True)
class Settings:
    """What ``ssh -G`` says about one address."""

    hostname: str
    identity_files: tuple[Path, ...] = ()
    proxy_jump: tuple[str, ...] = ()
    proxy_command: str | None = None


def parse_settings(text: str) -> Settings:
    """The output of ``ssh -G``: one ``keyword value`` a line, identityfile repeated."""
    pairs = [line.partition(" ")[::2] for line in text.splitlines()]
    single = {key: value for key, value in pairs if value != "none"}
    return Settings(
        hostname=single["hostname"],
        identity_files=tuple(Path(value).expanduser() for key, value in pairs if key == "identityfile"),
        proxy_jump=tuple(hop for hop in single.get("proxyjump", "").split(",") if hop),
        proxy_command=single.get("proxycommand"),
    )


@dataclass(frozen=True)
class Route:
    """The way to ``host``; ``jump`` is the way to the machine before it."""

    host: Host
    hostname: str
    identity_file: Path | None
    jump: "Route | None" = None

    @property
    def name(self) -> str:
        """The host's name as ssh looks it up, which folds case."""
        return self.host.name.lower()

    def hops(self) -> "list[Route]":
        """Every machine on the way, this one last."""
        return [*(self.jump.hops() if self.jump else ()), self]


def route(inventory: Inventory, host: Host, settings: Callable[[str], Settings], *, depth: int = 0) -> Route:
    """The way to ``host``; ``settings`` answers for an address what the ssh configuration says about it.

    :raises RouteError: a jump host that hosts.yaml does not know, a loop, or a ProxyCommand.
    :raises Refused: a jump through a protected host.
    """
    found = settings(host.address)
    if found.proxy_command is not None:
        raise RouteError(
            f"{host.name}: the ssh configuration has a ProxyCommand, and what that passes through cannot be seen; "
            "use ProxyJump over hosts of hosts.yaml"
        )
    if depth + len(found.proxy_jump) > MOST_JUMPS:
        raise RouteError(f"{host.name}: more than {MOST_JUMPS} jumps, or a circle, in the ssh configuration")
    jump = None
    for hop in found.proxy_jump:
        between = _jump_host(inventory, host, hop)
        way = route(inventory, between, settings, depth=depth + 1)
        jump = way if jump is None else Route(way.host, way.hostname, way.identity_file, jump)
    usable = host.identity_file or next((file for file in found.identity_files if file.exists()), None)
    return Route(host, found.hostname, usable, jump)


def _jump_host(inventory: Inventory, host: Host, hop: str) -> Host:
    match = re.fullmatch(r"(?:ssh://)?(?:[^@]*@)?(?:\[(.+)\]|([^:]*))(?::[0-9]+)?/?", hop)
    name = (match[1] or match[2]) if match else hop
    hosts = inventory.hosts.values()
    known = next((each for each in hosts if name in (address for address, _ in each.endpoints)), None)
    try:
        between = known or inventory.host(name)
    except UnknownHostError:
        raise RouteError(
            f"{host.name}: the ssh configuration jumps over '{escape(hop)}', which hosts.yaml does not know; "
            "add it there with its host keys"
        ) from None
    if between.protected:
        raise Refused(f"{host.name} would be reached through {between.name}, which is protected; no jump goes over it")
    return between


def host_key_types(host: Host) -> tuple[str, ...]:
    """The host key algorithms to negotiate: those of the pinned keys and no other."""
    types = dict.fromkeys(key.split()[0] for key in host.all_host_keys)
    rsa = ("rsa-sha2-512", "rsa-sha2-256")
    return tuple(name for kind in types for name in (rsa if kind == "ssh-rsa" else (kind,)))


def ciphers(cpu: str) -> tuple[str, ...]:
    """AES-GCM where the CPU computes AES (``cpu`` is /proc/cpuinfo), else ChaCha20 first; twice as fast either way."""
    has_aes = re.search(r"^(flags|Features)\s*:.*\baes\b", cpu, re.MULTILINE)
    return GCM + CHACHA if has_aes else CHACHA + GCM


def render_known_hosts(way: Route) -> str:
    """Exactly the pinned keys of the hosts on the way, under their names."""
    return "".join(f"{hop.name} {key}\n" for hop in way.hops() for key in hop.host.all_host_keys)


def render_configuration(
    way: Route, known_hosts: Path, cipher_names: Sequence[str], login: tuple[Path, Path] | None = None
) -> str:
    """The ssh configuration for ``way``; ``login`` is (key, certificate) for its last host, instead of its own key."""
    blocks = []
    for hop in way.hops():
        key, certificate = login if login and hop is way else (hop.identity_file, None)
        lines = [
            f"Host {hop.name}",
            f"HostName {hop.hostname.replace('%', '%%')}",
            f"Port {hop.host.port}",
            f"User {hop.host.user}",
            f"HostKeyAlias {hop.name}",
            f"HostKeyAlgorithms {','.join(host_key_types(hop.host))}",
            f"IdentityFile {_quoted(key) if key else 'none'}",
            f"ProxyJump {hop.jump.name if hop.jump else 'none'}",
        ]
        if certificate is not None:
            lines.append(f"CertificateFile {_quoted(certificate)}")
        blocks.append("\n  ".join(lines))
    everywhere = [
        "Host *",
        f"UserKnownHostsFile {_quoted(known_hosts)}",
        "GlobalKnownHostsFile none",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "CheckHostIP no",
        "BatchMode yes",
        "PreferredAuthentications publickey",
        "IdentitiesOnly yes",
        "IdentityAgent none",
        "ClearAllForwardings yes",
        "ForwardAgent no",
        "ForwardX11 no",
        "PermitLocalCommand no",
        "ControlMaster no",
        "ControlPath none",
        f"Ciphers {','.join(cipher_names)}",
        "Compression no",
        "IPQoS throughput",
        f"ConnectTimeout {CONNECT_SECONDS}",
        f"ServerAliveInterval {KEEPALIVE_SECONDS}",
        "ServerAliveCountMax 4",
        "EscapeChar none",
        "RequestTTY no",
        "LogLevel INFO",
    ]
    return "\n".join([*blocks, "\n  ".join(everywhere), ""])


def _quoted(path: Path) -> str:
    text = str(path).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
