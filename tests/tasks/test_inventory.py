import os
from pathlib import Path

import pytest

from tasks import inventory, public_keys
from tasks.hosts_yaml import InventoryError
from tasks.inventory import Inventory, LocationError, UnknownHostError

SHIPPED = Path(__file__).parents[2] / "hosts.yaml"
TEXT = SHIPPED.read_text()


@pytest.fixture(scope="module")
def shipped() -> Inventory:
    return inventory.load(SHIPPED)


def key_of(host: str) -> str:
    return inventory.parse(TEXT).host(host).host_keys[0]


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_shipped_file_is_the_reference_setting(shipped: Inventory) -> None:
    training, inference = shipped.host("kpro6"), shipped.host("ct129")
    assert (training.address, training.protected, training.read_limit) == ("10.1.2.6", True, 200_000_000)
    assert training.endpoints == (("10.1.2.6", 22), ("10.1.2.200", 22))
    assert {key.split()[0] for key in training.host_keys} == {"ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"}
    assert (inference.address, inference.protected) == ("10.1.230.172", False)
    assert inference.server is not None
    assert inference.server.url == "http://localhost:30000"
    assert not shipped.guard.lab


def test_an_alias_is_the_host(shipped: Inventory) -> None:
    assert shipped.host("ct200") is shipped.host("kpro6")
    assert len(shipped.host("kpro6").fingerprints) == 4


def test_a_host_is_known_by_its_keys(shipped: Inventory) -> None:
    training = shipped.host("kpro6")
    for key in training.all_host_keys:
        assert shipped.owner_of_key(key) is training
        assert shipped.owner_of_key(public_keys.blob(key)) is training
    assert shipped.owner_of_key(shipped.host("ct129").host_keys[0] + " comment") is shipped.host("ct129")
    assert shipped.owner_of_key(shipped.guard.ca_public_key) is None


CA, ONE = inventory.parse(TEXT).guard.ca_public_key, key_of("ct129")
ERRORS = [
    ("role: training", "role: training\n    protected: false", "hosts.kpro6.protected", "cannot be switched off"),
    ("user: root", "user: root\n    colour: red", "hosts.ct129.colour", "known here are role, address"),
    ("device: auto", "devise: auto", "hosts.ct129.gpu.devise", "known here are device, reserve_gib"),
    ("notify: []", "notes: []", "notes", "known here are version, guard"),
    ("notify: []", "notify: [mail]", "notify[0]", "write its type and its name, as in custom-webhook/ops"),
    ("version: 1", "version: 2", "version", "should be 1"),
    ("user: root", "", "hosts.ct129.user", "missing"),
    ("user: root", "user: -oProxyCommand=x", "hosts.ct129.user", "letters, digits"),
    ("  ct129:", "  ct 129:", "hosts.ct 129", "host name"),
    ("    user: root", "    user: root\n    name: other", "hosts.ct129.name", "the key it stands under"),
    ("role: training", "role: spare", "hosts.kpro6.role", "'training' or 'inference'"),
    ("enforcement: host", "enforcement: none", "hosts.kpro6.enforcement", "'host', 'authorized-keys' or 'client'"),
    ("enforcement: host", "enforcement: host\n    gate_state: gate", "hosts.kpro6.gate_state", "not absolute"),
    ("enforcement: host", "enforcement: host\n    job_user: -u root", "hosts.kpro6.job_user", "letters, digits"),
    ("two_person: false", "two_person: true", "guard.second_persons", "name who may be the second"),
    ("two_person: false", f'second_persons: {{bob: "{CA}"}}', "guard.second_persons.bob", "the operator's CA key"),
    ("two_person: false", f'second_persons: {{a: "{ONE}", b: "{ONE}"}}', "guard.second_persons.b", "the key of a"),
    ("two_person: false", "second_persons: {bob: me}", "guard.second_persons.bob", "not a public key"),
    ("two_person: false", f'second_persons: {{"b b": "{ONE}"}}', "guard.second_persons.b b", "not a host name"),
    ("port: 22", "port: 0", "hosts.kpro6.port", "greater than or equal to 1"),
    ("port: 22", "port: 65536", "hosts.kpro6.port", "less than or equal to 65535"),
    ("port: 22", 'port: "22"', "hosts.kpro6.port", "integer"),
    ("port: 22", "port: 22\n    port: 23", "hosts.kpro6.port", "given twice"),
    ("  ct129:", "  kpro6:", "hosts.kpro6", "given twice"),
    ("  ct129:", "  KPRO6:", "hosts.KPRO6", "same name"),
    ("200MB/s", "200", "hosts.kpro6.read_limit", "as in 200MB/s"),
    ("200MB/s", "fast", "hosts.kpro6.read_limit", "as in 200MB/s"),
    ("[10.1.2.1]", "[10.1.2.1/24]", "hosts.kpro6.source_addresses[0]", "10.1.2.0/24"),
    ("source_addresses: [10.1.2.1]", "source_addresses: []", "hosts.kpro6.source_addresses", "approvals are bound"),
    ("address: 10.1.230.172", "address: 10.1.2.6", "hosts.ct129.address", "belongs to kpro6"),
    ("address: 10.1.230.172", 'address: "::ffff:10.1.2.200"', "hosts.ct129.address", "belongs to kpro6"),
    ("10.1.230.172\n", "10.1.2.6\n    port: 222\n", "hosts.ct129.address", "alias of kpro6"),
    ("address: 10.1.2.200", "address: 10.1.2.6", "hosts.kpro6.aliases[0].address", "belongs to kpro6"),
    ("name: ct200", "name: ct129", "hosts.kpro6.aliases[0].name", "is host ct129 already"),
    ("name: ct200", "name: kpro6", "hosts.kpro6.aliases[0].name", "is host kpro6 already"),
    ("    user: root", "    user: root\n    aliases: [{name: ct200}]", "hosts.ct129.aliases[0].name", "alias of kpro6"),
    (key_of("ct129"), key_of("kpro6"), "hosts.ct129.host_keys[0]", "pinned for kpro6 already"),
    (key_of("kpro6"), key_of("ct129"), "hosts.ct129.host_keys[0]", "pinned for kpro6 already"),
    (inventory.parse(TEXT).host("kpro6").aliases[0].host_keys[0], key_of("ct129"), "host_keys[0]", "already"),
    (key_of("ct129"), key_of("ct129")[:-8], "hosts.ct129.host_keys[0]", "copy the whole line"),
    (f'      - "{key_of("ct129")}"', "", "hosts.ct129.host_keys", "found None"),
    ("/root/eval/cache", "/root/../cache", "hosts.ct129.cache", "'..'"),
    ("http://localhost:30000", "localhost:30000", "hosts.ct129.server.url", "pattern"),
    ("10.1.230.172", '"10.1.2.6:22"', "hosts.ct129.address", "letters, digits"),
    ("user: root", "user: root\n    identity_file: ~nobody-here/key", "hosts.ct129.identity_file", "no such user"),
    ("user: root", 'user: root\n    identity_file: "a\\nb"', "hosts.ct129.identity_file", "cannot be printed"),
    ("  ct129:", '  "ct129\\n":', "hosts.ct129\\x0a", "host name"),
    ("notify: []", '"\\e[31mnotify": []', "\\x1b[31mnotify", "known here are"),
    ("notify: []", "notify: []\n2027-01-31: x", "2027-01-31", "quote it"),
    ("  ct129:", "  129:", "hosts.129", "quote it"),
]


@pytest.mark.parametrize(("old", "new", "key", "mend"), ERRORS, ids=[f"{key} {mend}" for *_, key, mend in ERRORS])
def test_what_is_not_understood_is_an_error_that_names_key_and_mend(old: str, new: str, key: str, mend: str) -> None:
    assert old in TEXT
    with pytest.raises(InventoryError) as caught:
        inventory.parse(TEXT.replace(old, new, 1))
    message = str(caught.value)
    assert message.startswith("hosts.yaml:")
    assert f"{key}: " in message
    assert mend in message
    assert "\n" not in message


def test_errors_name_the_line() -> None:
    text = TEXT.replace("user: root", "user: root\n    colour: red")
    with pytest.raises(InventoryError, match=rf"^hosts.yaml:{line_of(text, 'colour')}: "):
        inventory.parse(text)


def test_a_protected_host_needs_a_pinned_key() -> None:
    lines = TEXT.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("    host_keys:")))
    text = "\n".join([*lines[:first], "    host_keys: []", *lines[first + 4 :]])
    with pytest.raises(InventoryError, match=rf"hosts.yaml:{first + 1}: hosts.kpro6.host_keys: no pinned key.*\.pub"):
        inventory.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n",
        "version: [1\n",
        "a: b: c\n",
        "version: 1\n",
        "a: \x07\n",
        "a: &a [*a]\n",
        "[a]: 1\n",
        "a: !!int x",
        "a: " + "9" * 5000,
        'version: "\\ud800"\n',
    ],
)
def test_other_texts_are_one_line_errors(text: str) -> None:
    with pytest.raises(InventoryError) as caught:
        inventory.parse(text)
    assert "\n" not in str(caught.value)


def test_the_file_is_named_by_option_then_environment_then_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_HOSTS", raising=False)
    with pytest.raises(InventoryError, match=r"^hosts.yaml: No such file.*--hosts"):
        inventory.load()
    (tmp_path / "hosts.yaml").write_text(TEXT.replace("user: dflash", "user: here"))
    assert inventory.load().host("kpro6").user == "here"
    (tmp_path / "env.yaml").write_text(TEXT.replace("user: dflash", "user: env"))
    monkeypatch.setenv("DFLASH_HOSTS", str(tmp_path / "env.yaml"))
    assert inventory.load().host("kpro6").user == "env"
    assert inventory.load(SHIPPED).host("kpro6").user == "dflash"


def test_locations(shipped: Inventory) -> None:
    there = shipped.location("ct200:/workspace//dflash/step_4:0.pt")
    assert (there.host, there.path) == (shipped.host("kpro6"), "/workspace/dflash/step_4:0.pt")
    assert str(there) == "kpro6:/workspace/dflash/step_4:0.pt"
    here = shipped.location("reports/a:b")
    assert (here.host, here.path) == (None, os.path.abspath("reports/a:b"))


def test_wrong_locations(shipped: Inventory) -> None:
    with pytest.raises(UnknownHostError, match=r"unknown host 'kpro7'; hosts.yaml knows kpro6 \(alias ct200\), ct129"):
        shipped.location("kpro7:/a")
    for text in ("kpro6:", "kpro6:a", "kpro6:/a/../b", "kpro6:/a\nb"):
        with pytest.raises(LocationError, match=r"kpro6: path '"):
            shipped.location(text)
