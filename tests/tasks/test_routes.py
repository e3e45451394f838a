"""The way to a host: what of the ssh configuration is followed, and what is written for ssh."""

from pathlib import Path

import pytest

from tasks.errors import Refused
from tasks.inventory import Inventory, parse
from tasks.routes import (
    Route,
    RouteError,
    Settings,
    ciphers,
    host_key_types,
    parse_settings,
    render_configuration,
    render_known_hosts,
    route,
)

CA = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
KEYS = [f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA{last}" for last in "BCDEFGHI"]


@pytest.fixture
def inventory() -> Inventory:
    return parse(f"""
version: 1
guard: {{ca_public_key: "{CA}"}}
hosts:
  kpro6: {{role: training, address: 10.1.2.6, user: dflash, host_keys: ["{KEYS[0]}"], source_addresses: [10.1.2.1]}}
  CT129: {{role: inference, address: 10.1.230.172, user: root, identity_file: /keys/ct129, host_keys: ["{KEYS[1]}"]}}
  bastion: {{role: inference, address: 10.9.0.1, port: 2222, user: me, host_keys: ["{KEYS[2]}"]}}
  outer: {{role: inference, address: outer.example, user: me, host_keys: ["{KEYS[3]}"]}}
""")


def _direct(address: str) -> Settings:
    return Settings(address)


def _jumping(address: str, *jumps: str) -> dict[str, Settings]:
    return {address: Settings(address, proxy_jump=jumps)}


def test_settings_are_what_ssh_says() -> None:
    text = (
        "user me\nhostname 10.1.2.3\nport 22\nidentityfile /keys/a b\nidentityfile ~/.ssh/id_rsa\nproxyjump me@x:1,y\n"
    )
    assert parse_settings(text) == Settings(
        "10.1.2.3", (Path("/keys/a b"), Path.home() / ".ssh" / "id_rsa"), ("me@x:1", "y"), None
    )
    assert parse_settings("hostname h\nproxycommand none\nproxyjump none\n") == Settings("h")
    assert parse_settings("hostname h\nproxycommand nc %h %p\n").proxy_command == "nc %h %p"


def test_hosts_file_says_who_and_ssh_configuration_says_where(inventory: Inventory, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    found = Settings("real.example", (tmp_path / "missing", key))
    way = route(inventory, inventory.host("bastion"), lambda _: found)
    assert way == Route(inventory.host("bastion"), "real.example", key)
    assert route(inventory, inventory.host("CT129"), lambda _: found).identity_file == Path("/keys/ct129")


@pytest.mark.parametrize(
    "jump", ["bastion", "10.9.0.1", "me@bastion", "me@10.9.0.1:2222", "ssh://me@bastion:2222", "[10.9.0.1]:2222"]
)
def test_a_jump_goes_over_a_known_host(inventory: Inventory, jump: str) -> None:
    settings = _jumping("10.1.230.172", jump)
    way = route(inventory, inventory.host("CT129"), lambda address: settings.get(address, _direct(address)))
    assert [hop.host.name for hop in way.hops()] == ["bastion", "CT129"]


def test_jumps_are_followed_in_order_and_to_their_own_jumps(inventory: Inventory) -> None:
    settings = _jumping("10.1.230.172", "outer", "bastion")
    way = route(inventory, inventory.host("CT129"), lambda address: settings.get(address, _direct(address)))
    assert [hop.host.name for hop in way.hops()] == ["outer", "bastion", "CT129"]
    settings = _jumping("10.1.230.172", "bastion") | _jumping("10.9.0.1", "outer")
    way = route(inventory, inventory.host("CT129"), lambda address: settings.get(address, _direct(address)))
    assert [hop.host.name for hop in way.hops()] == ["outer", "bastion", "CT129"]


@pytest.mark.parametrize("jump", ["kpro6", "me@10.1.2.6", "[10.1.2.6]:22"])
def test_no_jump_over_a_protected_host(inventory: Inventory, jump: str) -> None:
    settings = _jumping("10.1.230.172", jump)
    with pytest.raises(Refused, match="through kpro6, which is protected"):
        route(inventory, inventory.host("CT129"), lambda address: settings.get(address, _direct(address)))


def test_ways_that_cannot_be_followed_are_errors(inventory: Inventory) -> None:
    with pytest.raises(RouteError, match=r"jumps over 'stranger', which hosts\.yaml does not know"):
        route(inventory, inventory.host("CT129"), lambda address: Settings(address, proxy_jump=("stranger",)))
    with pytest.raises(RouteError, match="circle"):
        route(inventory, inventory.host("CT129"), lambda address: Settings(address, proxy_jump=("bastion",)))
    with pytest.raises(RouteError, match="ProxyCommand"):
        route(inventory, inventory.host("CT129"), lambda address: Settings(address, proxy_command="nc kpro6 22"))


def test_only_pinned_key_types_are_negotiated(inventory: Inventory) -> None:
    assert host_key_types(inventory.host("CT129")) == ("ssh-ed25519",)


def test_ciphers_follow_the_cpu() -> None:
    assert ciphers("flags\t\t: fpu aes avx\n")[0] == "aes128-gcm@openssh.com"
    assert ciphers("Features\t: fp asimd aes\n")[0] == "aes128-gcm@openssh.com"
    assert ciphers("flags\t\t: fpu vaes avx\n")[0] == "chacha20-poly1305@openssh.com"
    assert ciphers("")[0] == "chacha20-poly1305@openssh.com"


def test_configuration_leaves_nothing_to_a_default(inventory: Inventory) -> None:
    between = Route(inventory.host("bastion"), "10.9.0.1", Path("/keys/bastion"))
    way = Route(inventory.host("CT129"), "10.1.230.172", Path("/keys/own"), between)
    text = render_configuration(way, Path('/tmp/a "b%/known'), ("x", "y"))
    assert text.startswith(
        "Host bastion\n  HostName 10.9.0.1\n  Port 2222\n  User me\n  HostKeyAlias bastion\n"
        '  HostKeyAlgorithms ssh-ed25519\n  IdentityFile "/keys/bastion"\n  ProxyJump none\n'
        "Host ct129\n  HostName 10.1.230.172\n  Port 22\n  User root\n  HostKeyAlias ct129\n"
        '  HostKeyAlgorithms ssh-ed25519\n  IdentityFile "/keys/own"\n  ProxyJump bastion\n'
        'Host *\n  UserKnownHostsFile "/tmp/a \\"b%%/known"\n'
    )
    for line in (
        "StrictHostKeyChecking yes",
        "IdentityAgent none",
        "IdentitiesOnly yes",
        "ClearAllForwardings yes",
        "ControlMaster no",
        "BatchMode yes",
        "Ciphers x,y",
    ):
        assert f"\n  {line}\n" in text


def test_an_address_with_a_zone_is_not_expanded(inventory: Inventory) -> None:
    text = render_configuration(Route(inventory.host("outer"), "fe80::1%eth0", None), Path("/known"), ("x",))
    assert "\n  HostName fe80::1%%eth0\n" in text


def test_an_approval_logs_in_with_its_own_key_on_the_last_host_only(inventory: Inventory) -> None:
    between = Route(inventory.host("bastion"), "10.9.0.1", Path("/keys/bastion"))
    way = Route(inventory.host("kpro6"), "10.1.2.6", Path("/keys/own"), between)
    text = render_configuration(way, Path("/known"), ("x",), (Path("/grant/key"), Path("/grant/key-cert.pub")))
    assert text.count("CertificateFile") == 1
    assert '  IdentityFile "/grant/key"\n  ProxyJump bastion\n  CertificateFile "/grant/key-cert.pub"\n' in text
    assert "/keys/own" not in text


def test_known_hosts_are_exactly_the_pinned_keys(inventory: Inventory) -> None:
    between = Route(inventory.host("bastion"), "10.9.0.1", None)
    way = Route(inventory.host("CT129"), "10.1.230.172", None, between)
    assert render_known_hosts(way) == f"bastion {KEYS[2]}\nct129 {KEYS[1]}\n"
