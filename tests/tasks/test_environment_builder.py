"""The program that builds environments on hosts, run here as it runs there: killed, raced, damaged, out of room."""

import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.environments import program
from tests.disks import small_disk
from tests.wheelhouses import sha256, small_wheel, stand_in_pip

KILLED = """
import os, sys, types
first, then, step, *arguments = sys.argv[1:]
module = sys.modules["environment_files"] = types.ModuleType("environment_files")
exec(first, module.__dict__)
names = {"__name__": "environment"}
exec(then, names)
tell = names["tell"]
def tell_or_die(fields):
    if fields.get("step") == step:
        os.kill(os.getpid(), 9)
    tell(fields)
names["tell"] = tell_or_die
sys.exit(names["main"](arguments))
"""


class Bench:
    """A folder of environments on this machine, and small wheels for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "environments"
        self.shelf = folder / "shelf"
        self.shelf.mkdir()
        self.pip = stand_in_pip(self.shelf)

    def spec(
        self, name: str = "one", *, body: str = "", imports: tuple[str, ...] = ("alpha",), **more: Any
    ) -> dict[str, Any]:
        """What to build: one wheel, whose module ``alpha`` holds ``body``."""
        wheel = small_wheel(self.shelf, "alpha", body=body or f"name = {name!r}\n")
        parcel = self.parcel(name, wheel)
        spec: dict[str, Any] = {
            "name": name,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "version": platform.python_version(),
            "wheels": [[wheel.name, sha256(wheel)]],
            "pip": [self.pip.name, sha256(self.pip)],
            "carried": [sha256(wheel), sha256(self.pip)],
            "index": "",
            "uv": "",
            "parcel": parcel.name,
            "imports": list(imports),
            "kernels": "",
            "gpu": "",
            "room": 1000,
        }
        return spec | more

    def parcel(self, name: str, wheel: Path) -> Path:
        self.folder.mkdir(exist_ok=True)
        made = self.folder / f".parcel-{name}.tar"
        with tarfile.open(made, "w") as tar:
            for file in (wheel, self.pip):
                tar.add(file, f"{sha256(file)}/{file.name}")
        return made

    def start(self, spec: dict[str, Any], killed_at: str = "") -> "subprocess.Popen[str]":
        """The program at work, which is killed as soon as it announces the step ``killed_at``."""
        *_, first, then = program()
        started = program() if not killed_at else ("-I", "-c", KILLED, first, then, killed_at)
        argv = [sys.executable, *started, "build", str(self.folder), json.dumps(spec)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def build(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The last thing that the program says."""
        output, error = self.start(spec).communicate(timeout=60)
        assert error == ""
        last: dict[str, Any] = json.loads(output.splitlines()[-1])
        return last

    def look(self) -> dict[str, Any]:
        argv = [sys.executable, *program(), "look", str(self.folder)]
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        done: dict[str, Any] = json.loads(told)["done"]
        return done

    def current(self) -> str:
        """What the current environment's module says it is."""
        code = "import alpha; print(alpha.name)"
        return subprocess.run(
            [self.folder / "current/bin/python", "-c", code], capture_output=True, text=True
        ).stdout.strip()

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_environment_is_built_once_and_found_afterwards(bench: Bench) -> None:
    first = bench.build(bench.spec())["done"]
    assert (first["built"], first["switched"]) == (True, True)
    assert bench.current() == "one"
    before = (bench.folder / "one").stat().st_mtime_ns
    second = bench.build(bench.spec())["done"]
    assert (second["built"], second["switched"], second["removed"]) == (False, False, [])
    assert second["content"] == first["content"]
    assert (bench.folder / "one").stat().st_mtime_ns == before
    assert bench.names() == {"one", "current", ".lock", ".wheels"}
    found = bench.look()
    assert (found["current"], found["taken"]) == ("one", False)
    assert [(one["name"], one["sound"]) for one in found["environments"]] == [("one", True)]
    assert len(found["wheels"]) == 2


def test_nothing_is_what_is_seen_where_nothing_is(bench: Bench) -> None:
    found = bench.look()
    assert (found["exists"], found["current"], found["environments"]) == (False, None, [])
    assert found["free"] > 0
    assert not bench.folder.exists()


STEPS = ("unpack", "venv", "install", "verify", "mark", "switch", "prune")


@pytest.mark.parametrize(
    "steps", [("install", "switch"), pytest.param(STEPS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_killed_at_any_step_it_leaves_what_was_current_and_the_next_one_mends_the_rest(
    bench: Bench, steps: tuple[str, ...]
) -> None:
    before = ["older", "old"]
    for name in before:
        bench.build(bench.spec(name))
    for step in steps:
        spec = bench.spec(f"with-{step}")
        killed = bench.start(spec, killed_at=step)
        killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
        # what is announced has not been done yet
        assert bench.current() == (spec["name"] if step == "prune" else before[-1]), step

        bench.parcel(spec["name"], bench.shelf / "alpha-1.0-py3-none-any.whl")
        done = bench.build(spec)["done"]
        assert done["built"] is (step not in ("switch", "prune")), step
        assert bench.current() == spec["name"]
        assert bench.names() == {before[-1], spec["name"], "current", "previous", ".lock", ".wheels"}, step
        before.append(spec["name"])


def test_of_two_builders_one_builds_and_the_other_finds_it(bench: Bench) -> None:
    spec = bench.spec()
    both = [bench.start(spec) for _ in range(2)]
    said = [one.communicate(timeout=60)[0] for one in both]
    built = [json.loads(text.splitlines()[-1])["done"]["built"] for text in said]
    assert sorted(built) == [False, True]
    assert bench.current() == "one"


def test_a_builder_s_orphan_keeps_the_lock_until_it_is_gone(bench: Bench) -> None:
    bench.folder.mkdir()
    with (bench.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = bench.start(bench.spec())
        assert waiting.stdout is not None
        assert json.loads(waiting.stdout.readline())["step"] == "wait"
    output, _ = waiting.communicate(timeout=60)
    assert json.loads(output.splitlines()[-1])["done"]["built"] is True


@pytest.mark.slow
def test_old_environments_go_but_for_the_one_before_and_those_in_use(bench: Bench) -> None:
    bench.build(bench.spec("first"))
    used = subprocess.Popen([bench.folder / "current/bin/python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        bench.build(bench.spec("locked"))
        with (bench.folder / "locked/complete.json").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            for name in ("third", "fourth"):
                assert bench.build(bench.spec(name))["done"]["removed"] == []
            assert bench.look()["environments"][0]["used"] == [used.pid]
    finally:
        used.communicate(b"\n")
    assert bench.build(bench.spec("fifth"))["done"]["removed"] == ["first", "locked", "third"]
    kept = {sha256(bench.pip)} | {
        json.loads((bench.folder / name / "complete.json").read_text())["wheels"][0] for name in ("fourth", "fifth")
    }
    assert set(bench.look()["wheels"]) == kept


def test_a_damaged_environment_is_built_again_unless_it_is_used(bench: Bench) -> None:
    spec = bench.spec()
    bench.build(spec)
    (module,) = (bench.folder / "one").glob("lib/python*/site-packages/alpha.py")
    module.write_text("")
    assert bench.look()["environments"][0]["sound"] is False
    used = subprocess.Popen([bench.folder / "one/bin/python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        refused = bench.build(spec)
        assert refused["problem"] == "in-use"
        assert str(used.pid) in refused["message"]
    finally:
        used.communicate(b"\n")
    assert bench.build(bench.spec())["done"]["built"] is True
    assert bench.current() == "one"


def test_what_cannot_be_imported_never_becomes_current(bench: Bench) -> None:
    bench.build(bench.spec("good"))
    said = bench.build(bench.spec("bad", body="import not_there"))
    assert said["problem"] == "verify"
    assert "No module named 'not_there'" in said["message"]
    assert bench.current() == "good"
    assert "bad" not in bench.names()


def test_kernels_that_do_not_load_are_a_problem_of_their_own(bench: Bench) -> None:
    said = bench.build(bench.spec(kernels="load"))
    assert said["problem"] == "kernels"
    assert "No module named 'dflash'" in said["message"]


def test_a_wheel_that_is_not_the_locked_one_is_refused(bench: Bench) -> None:
    spec = bench.spec()
    small_wheel(bench.shelf, "alpha", body="name = 'another'")
    with tarfile.open(bench.folder / spec["parcel"], "w") as tar:
        for (name, digest), file in zip(
            [*spec["wheels"], spec["pip"]], [bench.shelf / spec["wheels"][0][0], bench.pip], strict=True
        ):
            tar.add(file, f"{digest}/{name}")
    said = bench.build(spec)
    assert (said["problem"], "sha256" in said["message"]) == ("damaged", True)
    assert not (bench.folder / "one").exists()


def test_a_parcel_holds_nothing_that_was_not_asked_for(bench: Bench) -> None:
    spec = bench.spec()
    with tarfile.open(bench.folder / spec["parcel"], "w") as tar:
        tar.add(bench.pip, "../../escaped")
    assert bench.build(spec)["problem"] == "damaged"
    assert not (bench.folder.parent.parent / "escaped").exists()


def test_wheels_that_another_has_removed_meanwhile_are_named(bench: Bench) -> None:
    spec = bench.spec()
    (bench.folder / spec["parcel"]).unlink()
    assert bench.build(spec)["problem"] == "wheels-missing"


def test_another_python_than_was_planned_builds_nothing(bench: Bench) -> None:
    said = bench.build(bench.spec(version="3.11.99"))
    assert said["problem"] == "changed"
    assert "3.11.99" in said["message"]


def test_a_current_that_is_no_link_is_left_alone(bench: Bench) -> None:
    (bench.folder / "current").mkdir(parents=True)
    assert bench.look()["taken"] is True
    assert bench.build(bench.spec())["problem"] == "not-a-link"
    assert (bench.folder / "current").is_dir()


def test_without_room_nothing_is_begun(bench: Bench) -> None:
    said = bench.build(bench.spec(room=2**62))
    assert said["problem"] == "disk-full"
    assert not (bench.folder / "one").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "12m") as place:
        yield place


def test_a_disk_that_fills_up_is_named_and_nothing_half_made_stays(disk: Path) -> None:
    bench = Bench(disk)
    bench.build(bench.spec("good"))
    filling = "import pathlib; pathlib.Path(__file__).with_name('filling').write_bytes(bytes(1 << 24))"
    said = bench.build(bench.spec("filling", body=filling))
    assert (said["problem"], "No space left" in said["message"]) == ("disk-full", True), said
    assert bench.current() == "good"
    assert "filling" not in bench.names()


def test_what_died_commands_left_behind_is_cleared_away(bench: Bench) -> None:
    bench.build(bench.spec())
    for name in (".removing-x-1", "wreck"):
        (bench.folder / name / "lib").mkdir(parents=True)
    (bench.folder / "wreck/building.json").write_text("{}")
    for name in (".incoming-0", ".parcel-old.tar", ".parcel-new.tar", "mine"):
        (bench.folder / name).write_text("")
    yesterday = time.time() - 25 * 3600
    os.utime(bench.folder / ".parcel-old.tar", (yesterday, yesterday))
    bench.build(bench.spec())
    assert bench.names() == {"one", "current", ".lock", ".wheels", ".parcel-new.tar", "mine"}
