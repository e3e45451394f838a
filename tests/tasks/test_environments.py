"""Facts of hosts of every kind and what is to be done there: a file a case, see the folder ``provision``."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tasks import provision_errors, resolving
from tasks.actions import LONGEST_ACTION, Put
from tasks.environments import (
    Look,
    Parcel,
    Provision,
    Wish,
    actions,
    change_plan,
    environment_digest,
    parcel_name,
    plan_provision,
    wish,
)
from tasks.facts import Facts
from tasks.inventory import Host
from tasks.resolving import Candidate, Lock

CASES = sorted((Path(__file__).parent / "provision").glob("*.json"))
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKWa6k3p2FPTTsqMQTNaNtMWUnKmJZ9RL5jnDqcC9Wdn"
NAMES = {"own": "dflash-pipeline", "pip": "pip", "numpy": "numpy", "torch": "torch"}


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def locked(name: str) -> Candidate:
    project = NAMES[name].replace("-", "_")
    return Candidate(name=NAMES[name], version="1.0", file_name=f"{project}-1.0-py3-none-any.whl", sha256=digest(name))


LOCK = Lock(packages=tuple(locked(name) for name in ("own", "numpy", "torch")), pip=locked("pip"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_facts_become_a_plan(case: Path) -> None:
    given = json.loads(case.read_text())
    expected = given["expect"]
    if "error" in expected:
        error = getattr(provision_errors, expected["error"], None) or getattr(resolving, expected["error"])
        with pytest.raises(error) as raised:
            planned(given)
        assert expected["says"] in str(raised.value)
        assert raised.value.state_name != "Failed"
        return
    wanted, provision, done = planned(given)
    platforms = wanted.target.platforms()
    found: dict[str, Any] = {
        "python": wanted.python.path,
        "extras": list(wanted.extras),
        "kernels": wanted.kernels,
        "gpu": wanted.gpu,
        "index": wanted.index,
        "first_platforms": list(platforms[: len(expected.get("first_platforms", ()))]),
        "last_platforms": list(platforms[-len(expected.get("last_platforms", " ")) :]),
        "name": provision.name[: len(expected.get("name", ""))],
        "carried": sorted(name for name in NAMES if digest(name) in provision.carried),
        "satisfied": provision.satisfied,
        "actions": [action.kind for action in done],
        "protected": provision.host.protected,
    }
    assert {key: found[key] for key in expected} == expected


def planned(given: dict[str, Any]) -> tuple[Wish, Provision, Any]:
    """What the case comes to."""
    host = a_host(given)
    wanted = wish(facts_of(given), given["profile"], host, index=given.get("index"), python=given.get("python"))
    look = look_of(given, wanted)
    provision = plan_provision(wanted, host, look, LOCK)
    parcel = Parcel(parcel_name(provision.carried), 5_000_000, digest("parcel")) if provision.carried else None
    if given.get("look", {}).get("parcel") and parcel is not None:
        look = look.model_copy(update={"parcels": (parcel.name,)})
    return wanted, provision, actions(provision, look, parcel, None if wanted.index else 50_000_000)


def a_host(given: dict[str, Any]) -> Host:
    return Host.model_validate_json(
        json.dumps(
            {
                "name": "there",
                "role": given.get("role", "inference"),
                "address": "10.1.230.172",
                "user": "root",
                "host_keys": [HOST_KEY],
                "environments": "/srv/environments",
                **given.get("host", {}),
            }
        )
    )


def facts_of(given: dict[str, Any]) -> Facts:
    told = {
        "now": 1.8e9,
        "boot": "b",
        "user": "root",
        "platform": {"system": "linux", "machine": "x86_64", "libc": ["glibc", "2.36"]},
        "cpus": 8,
        "memory": None,
        "disks": {},
        "gpus": [],
        "user_manager": False,
        "problems": [],
        **given["facts"],
    }
    return Facts.model_validate_json(json.dumps(told))


def look_of(given: dict[str, Any], wanted: Wish) -> Look:
    """What was seen in the folder; ``there`` says how the environment that is wanted is there already."""
    seen = given.get("look", {})
    target = wanted.target.model_copy(update={"version": seen.get("of_python", wanted.target.version)})
    key = environment_digest(LOCK, target)
    name = f"{wanted.profile}-py{target.version.rpartition('.')[0]}-{key[:16]}"
    found = {"name": name, "digest": key, "python": target.version, "built": 1.0, "used": []}
    there = seen.get("there")
    return Look.model_validate_json(
        json.dumps(
            {
                "exists": seen.get("exists", True),
                "current": {"current": name, "damaged": name, "old": "another"}.get(there),
                "taken": seen.get("taken", False),
                "previous": None,
                "environments": [] if there is None else [{**found, "sound": there != "damaged"}],
                "wheels": {digest(one): 1 for one in seen.get("wheels", ())},
                "parcels": [],
                "free": seen.get("free", 10**11),
            }
        )
    )


def test_every_case_can_fail() -> None:
    assert len(CASES) >= 25
    assert all(json.loads(case.read_text())["expect"] for case in CASES)


def test_the_same_wish_is_the_same_environment_and_any_other_wheel_another() -> None:
    _, one, _ = planned(json.loads(CASES[0].read_text()))
    target = one.wish.target
    assert environment_digest(LOCK, target) == one.digest
    newer = LOCK.with_own("dflash_pipeline-1.0-py3-none-any.whl", digest("newer"))
    assert environment_digest(newer, target) != one.digest
    assert environment_digest(LOCK, target.model_copy(update={"libc": ("glibc", "2.41")})) != one.digest


def test_a_lock_of_two_hundred_packages_fits_into_one_action() -> None:
    given = json.loads(
        (CASES[0].parent / "a-training-host-is-asked-to-load-kernels-and-not-to-run-them.json").read_text()
    )
    wanted, _, _ = planned(given)
    many = tuple(
        Candidate(
            name=f"nvidia-package-{number}",
            version="13.0.88",
            file_name=f"nvidia_package_{number}-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
            sha256=digest(str(number)),
        )
        for number in range(120)
    )
    big = Lock(packages=(*LOCK.packages, *many), pip=LOCK.pip)
    provision = plan_provision(wanted, a_host(given), look_of(given, wanted), big)
    parcel = Parcel(parcel_name(provision.carried), 4 * 10**9, digest("parcel"))
    put, run = actions(provision, look_of(given, wanted), parcel, 8 * 10**9)
    assert len(run.canonical()) < LONGEST_ACTION
    assert isinstance(put, Put)
    assert put.seconds > 3600  # at a megabyte a second


def test_the_operator_reads_what_is_installed_where_and_what_goes() -> None:
    given = json.loads(
        (CASES[0].parent / "a-training-host-is-asked-to-load-kernels-and-not-to-run-them.json").read_text()
    )
    _, provision, done = planned(given)
    plan = change_plan(provision, done)
    assert f"into {provision.path}" in plan.effect
    assert "3 packages" in plan.effect
    assert "environments that no process uses are removed" in plan.effect
    assert [type(action).__name__ for action in plan.changes] == ["Put", "Run"]
