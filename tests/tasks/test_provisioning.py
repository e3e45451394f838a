"""A host gets its environment over a real sshd: wheels sent once, built once, found afterwards."""

import os
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash.errors import DFlashError
from tasks import environments, own_wheel, provisioning
from tasks.approvals import Approved
from tasks.environments import BASE_IMPORTS
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.process import run
from tasks.provision_errors import (
    CurrentTakenError,
    HostDiskFullError,
    InterruptedProvisionError,
    KernelsMissingError,
    VerificationError,
)
from tasks.provisioning import Environment, Prepared, decide, observe, plan_observation, prepare, questions
from tasks.ssh import ConnectionFailed
from tests.sshds import Operator, Site
from tests.wheelhouses import SMALL_PROFILE, SmallHouse, installed_wheels

RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"
SLIM = ["numpy", "pydantic", "pyyaml", "rich", "safetensors", "typer", "pip"]


@dataclass
class Small:
    """The operator and what there is to be sent."""

    operator: Operator
    house: SmallHouse

    def provide(self, steps: list[str] | None = None) -> Environment:
        return provide(self.operator, self.operator.infer, steps)

    @property
    def folder(self) -> Path:
        return Path(str(self.operator.infer.environments))

    def current(self) -> str:
        """What the current environment's module says it is; empty where none is current."""
        program = self.folder / "current/bin/python"
        code = "import dflash_pipeline; print(dflash_pipeline.name)"
        return run([program, "-c", code]).stdout.strip() if program.exists() else ""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the slim profile asks for, in a folder that pip takes for an index."""
    return installed_wheels(list(SLIM), tmp_path_factory.mktemp("wheels") / "wheels")


@pytest.fixture
def offline(site: Site, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator whose pip knows one folder and no index, and whose program stays the same meanwhile."""
    folder = str(tmp_path / "environments")
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    made = own_wheel.own_wheel()
    monkeypatch.setattr(provisioning, "own_wheel", lambda: made)
    monkeypatch.setattr(provisioning, "index_for", lambda host: None)
    monkeypatch.setattr(provisioning, "constraints", lambda: "")
    return site.operator(tmp_path / "operator", infer={"environments": folder}, train={"environments": folder})


@pytest.fixture
def small(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """An operator whose slim profile is one small module, out of a house that asks no index."""
    folder = str(tmp_path / "environments")
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    house = SmallHouse(tmp_path / "house")
    monkeypatch.setattr(provisioning, "Wheelhouse", lambda: house)
    monkeypatch.setattr(provisioning, "index_for", lambda host: None)
    monkeypatch.setitem(environments.PROFILES, "slim", SMALL_PROFILE)
    place = {"environments": folder}
    return Small(site.operator(tmp_path / "operator", infer=place, train=place), house)


def provide(operator: Operator, host: Host, steps: list[str] | None = None) -> Environment:
    """Provision an unprotected host, as the flow does."""
    prepared = prepared_for(operator, host)
    return provisioning.provision(operator.connector, None, prepared, None, None if steps is None else steps.append)


def prepared_for(operator: Operator, host: Host) -> Prepared:
    seen = observe(operator.connector, host, None, questions(host))
    return prepare(decide(host, seen, "slim", python=RELEASE), seen)


def test_the_slim_profile_is_sent_built_verified_and_found_again(offline: Operator) -> None:
    steps: list[str] = []
    made = provide(offline, offline.infer, steps)
    assert made.changed
    assert made.packages >= len(SLIM)
    for word in ("unpacking", "making a venv", "installed", "verifying", "current leads"):
        assert word in " ".join(steps)
    folder = Path(str(offline.infer.environments))
    program = folder / "current" / "bin" / "dflash"
    assert program.resolve().parents[1] == Path(made.path)
    told = run([program, "--help"], env={"PATH": os.defpath})
    assert "inspect" in told.stdout
    code = f"import sys, {', '.join(BASE_IMPORTS)}; print(sys.prefix, 'torch' in sys.modules)"
    assert run([f"{made.path}/bin/python", "-I", "-c", code]).stdout.split() == [made.path, "False"]

    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    again = prepared_for(offline, offline.infer)
    assert again.actions == ()
    assert provisioning.provision(offline.connector, None, again) == provisioning.Environment(
        **{**vars(made), "changed": False, "removed": ()}
    )
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"} == before
    assert not list((folder.parent / "state/wheelhouse/parcels").iterdir())


def test_a_protected_host_is_looked_at_and_changed_by_an_approval_each(small: Small) -> None:
    operator = small.operator
    train, connector, store = operator.train, operator.connector, operator.store
    looking = plan_observation(train, questions(train))
    assert looking is not None
    with pytest.raises(Refused):
        store.require(looking)
    seen = observe(connector, train, approve(operator, looking), questions(train))
    prepared = prepare(decide(train, seen, "slim", python=RELEASE), seen)
    assert [action.kind for action in prepared.actions] == ["run", "put", "run"]
    assert prepared.plan is not None
    with pytest.raises(Refused):
        provisioning.provision(connector, None, prepared)

    # what was seen need not be seen again, and comes to the very same plan
    observe(connector, train, approve(operator, looking), questions(train))
    recalled = provisioning.recalled(train, "slim", python=RELEASE)
    assert recalled is not None
    assert recalled.plan == prepared.plan
    made = provisioning.provision(connector, approve(operator, prepared.plan), prepared)
    assert made.changed
    assert small.current() == "small"
    # and after it was changed nobody knows what it is
    assert provisioning.recalled(train, "slim", python=RELEASE) is None
    with pytest.raises(Refused):
        provisioning.provision(connector, store.find(prepared.plan), prepared)


@pytest.mark.slow
def test_that_nothing_was_to_do_yesterday_is_not_remembered_as_so_today(small: Small) -> None:
    operator, train = small.operator, small.operator.train
    small.provide()
    looking = plan_observation(train, questions(train))
    assert looking is not None
    seen = observe(operator.connector, train, approve(operator, looking), questions(train))
    prepared = prepare(decide(train, seen, "slim", python=RELEASE), seen)
    assert (prepared.actions, prepared.plan) == ((), None)
    assert provisioning.recalled(train, "slim", python=RELEASE) is None
    assert provisioning.next_plan(train, "slim", python=RELEASE) == looking


def test_what_was_wrong_with_a_host_is_looked_at_again_and_not_remembered(
    small: Small,
) -> None:
    train = small.operator.train
    looking = plan_observation(train, questions(train))
    assert looking is not None
    small.folder.mkdir()
    (small.folder / "current").mkdir()
    seen = observe(small.operator.connector, train, approve(small.operator, looking), questions(train))
    with pytest.raises(CurrentTakenError):
        prepare(decide(train, seen, "slim", python=RELEASE), seen)
    assert provisioning.remembered(train) == seen
    assert provisioning.next_plan(train, "slim", python=RELEASE) == looking
    assert provisioning.remembered(train) is None


SESSIONS = {1: "facts", 2: "look", 3: "folder", 4: "parcel", 5: "build"}


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS, ids=SESSIONS.get)
def test_a_host_that_goes_away_at_any_step_is_named_and_the_next_try_goes_on(
    small: Small, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, sshd = small.operator, small.operator.site.ordinary
    start, count = operator.connector.start, iter(range(1, 100))

    def start_or_find_it_gone(*arguments, **options):  # type: ignore[no-untyped-def]
        if next(count) >= session:
            sshd.crash()
        return start(*arguments, **options)

    monkeypatch.setattr(operator.connector, "start", start_or_find_it_gone)
    try:
        with pytest.raises(DFlashError) as raised:
            small.provide()
    finally:
        sshd.restart()
    assert raised.value.state_name == "HostUnreachable"
    assert small.current() == ""
    monkeypatch.setattr(operator.connector, "start", start)
    assert small.provide().changed
    assert small.current() == "small"


@pytest.mark.slow
def test_a_link_that_breaks_in_the_middle_of_a_build_ends_it_and_nothing_half_made_is_used(small: Small) -> None:
    sshd = small.operator.site.ordinary
    small.house.offer("import time; name = 'slow'; time.sleep(60)")
    steps: list[str] = []

    class Crashing(list[str]):
        def append(self, step: str) -> None:
            steps.append(step)
            if "imports" in step:
                sshd.crash()

    try:
        with pytest.raises((InterruptedProvisionError, ConnectionFailed)) as raised:
            small.provide(Crashing())
    finally:
        sshd.restart()
    assert raised.value.state_name in ("ProvisionInterrupted", "HostUnreachable")
    assert "run it again" in str(raised.value) or "port" in str(raised.value)
    small.house.offer("name = 'quick'")
    assert small.provide().changed
    assert small.current() == "quick"
    assert [path.name for path in small.folder.glob("slim*")] == [os.readlink(small.folder / "current")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kernels", "error", "says"),
    [
        ("import not_there", "", VerificationError, "No module named 'not_there'"),
        ("", "load", KernelsMissingError, "No module named 'dflash'"),
    ],
)
def test_what_does_not_work_there_never_becomes_current(
    small: Small, body: str, kernels: str, error: type[DFlashError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provisioning.wish
    monkeypatch.setattr(provisioning, "wish", lambda *a, **k: replace(made(*a, **k), kernels=kernels))
    small.house.offer(body)
    with pytest.raises(error, match=says):
        small.provide()
    assert not (small.folder / "current").exists()
    assert list(small.folder.glob("slim*")) == []


def test_a_current_that_is_a_folder_is_named_before_anything_is_sent(small: Small) -> None:
    (small.folder / "current").mkdir(parents=True)
    with pytest.raises(CurrentTakenError, match="move it away"):
        small.provide()
    assert [path.name for path in small.folder.iterdir()] == ["current"]


@pytest.mark.slow
def test_two_commands_build_it_once(small: Small) -> None:
    host, made, waited = small.operator.infer, list[Environment](), list[str]()

    def command() -> None:
        with provisioning.one_at_a_time(host, waited.append):
            made.append(small.provide())

    both = [threading.Thread(target=command) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert sorted(one.changed for one in made) == [False, True]
    assert waited == [f"another command provisions {host.name}; waiting for it"]


def test_a_parcel_that_finds_no_room_names_the_full_disk(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DFlashError(f"infer: /srv/.parcel: {os.strerror(28)}")

    monkeypatch.setattr(provisioning, "relay", full)
    with pytest.raises(HostDiskFullError, match="make room on infer"):
        small.provide()


@pytest.mark.slow
def test_old_environments_go_when_nothing_uses_them(small: Small) -> None:
    for number in range(3):
        small.house.offer(f"name = 'n{number}'")
        removed = small.provide().removed
    assert len(removed) == 1
    assert small.current() == "n2"


def approve(operator: Operator, plan: Plan) -> Approved:
    """Ask for ``plan`` and approve it as the operator does."""
    request = operator.store.request(plan)
    return operator.store.approve(request.id, reason="a test", ca_key=operator.site.ca_key, seconds=600)
