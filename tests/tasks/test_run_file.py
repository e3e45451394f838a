"""run.yaml: what is read, what it becomes on a host, and what is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from tasks import launching
from tasks.inventory import Host, Inventory, parse
from tasks.launching import Prepared
from tasks.run_file import RunFileError, fill, read_run
from tests.guard_state import GuardState


@pytest.fixture
def known(tmp_path: Path) -> Inventory:
    text = GuardState(tmp_path / "guard").hosts_text()
    places = "    jobs: /workspace/jobs\n    environments: /workspace/environments\n"
    return parse(text.replace("  ct129:\n", f"{places}  ct129:\n"))


@pytest.fixture
def host(known: Inventory) -> Host:
    return known.host("kpro6")


def written(folder: Path, **changes: Any) -> Path:
    (folder / "train.yaml").write_text("seed: 1\n")
    run = {"name": "night", "command": ["{python}", "-m", "dflash", "train", "--config", "{config}"]}
    run |= {"config": "train.yaml"}
    file = folder / "run.yaml"
    file.write_text(json.dumps({name: value for name, value in (run | changes).items() if value is not None}))
    return file


def prepared(folder: Path, on: Host, **changes: Any) -> Prepared:
    return launching.prepare(read_run(written(folder, **changes)), on)


def test_a_run_becomes_one_plan(tmp_path: Path, host: Host) -> None:
    made = prepared(tmp_path, host, env={"STEPS": 30, "HERE": "{folder}"})
    folder = f"/workspace/jobs/{made.job}"
    start, config, launch = made.changes
    assert made.launch == launch
    assert [put.path for put, _ in made.puts] == [start.path, f"{folder}.config.yaml"]  # type: ignore[union-attr]
    assert made.puts[1][1] == b"seed: 1\n"
    assert made.launch.argv[:3] == ("/usr/bin/env", "python3", "-I")
    python = "/workspace/environments/current/bin/python"
    assert made.launch.argv[5:] == (python, "-m", "dflash", "train", "--config", f"{folder}.config.yaml")
    assert (made.launch.jobs, made.launch.cwd) == ("/workspace/jobs", folder)
    env = dict(made.launch.env)
    assert (env["STEPS"], env["HERE"]) == ("30", folder)
    assert env["PATH"].startswith("/workspace/environments/current/bin:")
    assert {(file.path, file.sha256) for file in made.launch.requires} == {
        (put.path, put.sha256) for put, _ in made.puts
    }
    assert made.plan is not None
    assert made.plan.changes == made.changes
    assert made.plan.grant is not None
    assert made.plan.grant.root == folder
    assert config in made.plan.changes


def test_the_same_run_has_the_same_id_and_any_other_another(tmp_path: Path, host: Host) -> None:
    first = prepared(tmp_path, host).job
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert prepared(elsewhere, host).job == first
    assert prepared(elsewhere, host, host="kpro6").job == first
    others = [{"env": {"A": "1"}}, {"attempt": 2}, {"command": ["/bin/true"]}, {"cwd": "/tmp"}, {"code": ["/src"]}]
    ids = {first, *(prepared(elsewhere, host, **changes).job for changes in others)}
    file = written(elsewhere)
    (elsewhere / "train.yaml").write_text("seed: 2\n")
    ids |= {launching.prepare(read_run(file), host).job, launching.prepare(read_run(file, attempt=3), host).job}
    assert len(ids) == len(others) + 3
    assert all(one.startswith("night-") for one in ids)


def test_any_trainer_is_a_template(tmp_path: Path, host: Host) -> None:
    command = ["{environment}/bin/torchrun", "--nproc-per-node", "8", "{script}", "{{literal}}", "a=b c"]
    (tmp_path / "train.py").write_text("pass\n")
    made = prepared(tmp_path, host, command=command, script="train.py", config=None)
    script = f"/workspace/jobs/{made.job}.script.py"
    environment = "/workspace/environments/current"
    wanted = (f"{environment}/bin/torchrun", "--nproc-per-node", "8", script, "{literal}", "a=b c")
    assert made.launch.argv[5:] == wanted
    assert fill("{{}} {folder}", {"folder": "x"}) == "{} x"


def test_a_host_without_an_environment_runs_what_needs_none(tmp_path: Path, host: Host) -> None:
    bare = host.model_copy(update={"environments": None})
    assert prepared(tmp_path, bare, command=["/bin/true", "{config}"]).launch.argv[5] == "/bin/true"
    with pytest.raises(UsageError, match=r"kpro6.environments is missing"):
        prepared(tmp_path, bare)
    with pytest.raises(UsageError, match=r"kpro6.jobs is missing"):
        prepared(tmp_path, host.model_copy(update={"jobs": None}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"comand": ["x"]}, "comand: unknown key; known are host, name"),
        ({"command": None}, "command: missing; add it"),
        ({"command": []}, "command"),
        ({"command": ["{checkpoint}"]}, "is none of config, script"),
        ({"command": ["{script}"]}, "{script} is used, and no script is named"),
        ({"config": "missing.yaml"}, "missing.yaml: No such file"),
        ({"name": "../night"}, "is no name"),
        ({"name": "a" * 81}, "is no name"),
        ({"env": {"A B": "1"}}, "A B"),
        ({"env": {"A": True}}, "'A' is no text; quote it"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"command": ["x" * 70_000]}, "too long"),
        ({"cwd": "relative"}, "is not absolute"),
        ({"attempt": 0}, "attempt"),
        ({"code": ["/a/../b"]}, "holds '..'"),
        ({"host": "-oProxyCommand=x"}, "is not a host name"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, host: Host, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        prepared(tmp_path, host, **changes)
    assert says in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\0", "a: &a [*a]", "\ud800", "x"])
def test_what_is_no_run_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RunFileError, match=r"run\.yaml"):
        read_run(file)
    with pytest.raises(RunFileError, match="No such file"):
        read_run(tmp_path / "other.yaml")


def test_the_host_is_named_once(tmp_path: Path, known: Inventory) -> None:
    described = read_run(written(tmp_path, host="kpro6"))
    assert launching.run_host(known, described, None).name == "kpro6"
    assert launching.run_host(known, described, "ct200").name == "kpro6"
    with pytest.raises(UsageError, match="correct one of them"):
        launching.run_host(known, described, "ct129")
    with pytest.raises(UsageError, match="name one"):
        launching.run_host(known, read_run(written(tmp_path)), None)


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="more than 16777216 bytes"):
        read_run(written(tmp_path, config="/dev/zero"))
