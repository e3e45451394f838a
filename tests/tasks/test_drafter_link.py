"""The link that the server loads its drafter by: it names one whole directory at every moment, and nothing is lost."""

import functools
import itertools
import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "deploy" / "promotion" / "drafter_link.py"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("reference", "a", "b", "c"):
        (tmp_path / name).mkdir()
    return tmp_path


def ask(models: Path, verb: str, *rest: str, link: str = "served") -> dict[str, Any]:
    argv = [sys.executable, "-I", str(PROGRAM), verb, str(models / link), *rest]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def switch(models: Path, name: str, expected: str = "") -> dict[str, Any]:
    return ask(models, "switch", str(models / name), expected)


def test_a_switch_keeps_what_was_served_before(models: Path) -> None:
    assert ask(models, "show") == {"current": None, "previous": None}
    assert switch(models, "a") == {"current": "a", "previous": None}
    assert switch(models, "b", "a") == {"current": "b", "previous": "a"}
    assert (models / "served").resolve() == models / "b"
    assert sorted(one.name for one in models.iterdir()) == ["a", "b", "c", "reference", "served", "served.previous"]


def test_the_same_switch_again_changes_nothing(models: Path) -> None:
    switch(models, "a")
    switch(models, "b", "a")
    assert switch(models, "b", "a") == {"current": "b", "previous": "a"}


def test_a_rollback_goes_back_and_forth(models: Path) -> None:
    switch(models, "a")
    switch(models, "b", "a")
    assert ask(models, "rollback", "b") == {"current": "a", "previous": "b"}
    assert ask(models, "rollback", "a") == {"current": "b", "previous": "a"}


def test_what_somebody_else_changed_meanwhile_is_not_changed_again(models: Path) -> None:
    switch(models, "a")
    assert "somebody else" in switch(models, "c", "b")["refused"]
    assert "somebody else" in switch(models, "c")["refused"]
    switch(models, "b", "a")
    assert "somebody else" in ask(models, "rollback", "a")["refused"]
    assert ask(models, "show") == {"current": "b", "previous": "a"}


def test_a_link_that_is_none_is_left_alone(models: Path) -> None:
    (models / "served").mkdir()
    (models / "served" / "weights").touch()
    assert "is no link" in switch(models, "a")["refused"]
    assert (models / "served" / "weights").exists()


@pytest.mark.parametrize(
    ("directory", "why"), [("missing", "is no directory"), ("../elsewhere", "does not lie beside")]
)
def test_only_a_directory_beside_it_is_named(models: Path, directory: str, why: str) -> None:
    (models.parent / "elsewhere").mkdir(exist_ok=True)
    target = os.path.normpath(models / directory)
    assert why in ask(models, "switch", target, "")["refused"]
    assert not (models / "served").is_symlink()


def test_there_is_no_going_back_to_nothing_or_to_what_is_gone(models: Path) -> None:
    assert "named nothing before" in ask(models, "rollback", "")["refused"]
    switch(models, "a")
    assert "named nothing before" in ask(models, "rollback", "a")["refused"]
    switch(models, "b", "a")
    (models / "a").rmdir()
    assert "not there any more" in ask(models, "rollback", "b")["refused"]
    assert ask(models, "show") == {"current": "b", "previous": "a"}


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file or directory" in ask(tmp_path / "none", "show")["refused"]


def test_the_link_names_a_directory_at_every_moment(models: Path) -> None:
    switch(models, "a")
    seen, over = [], threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(os.path.isdir(models / "served"))

    looking = threading.Thread(target=look)
    looking.start()
    names = ["b", "c", "a"] * 3
    for before, name in zip(["a", *names], names, strict=False):
        switch(models, name, before)
    over.set()
    looking.join()
    assert seen
    assert all(seen)


class Killed(BaseException):
    """What kill -9 is, for a program that runs in this process."""


@pytest.mark.parametrize("verb", ["switch", "rollback"])
def test_killed_between_any_two_steps_it_loses_neither_name(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    link, program = models / "served", runpy.run_path(str(PROGRAM))
    real = {name: getattr(os, name) for name in ("symlink", "replace", "unlink")}

    def run(*arguments: str, until: int = 99) -> Any:
        """What it prints; None when it is killed in place of that step."""
        left = itertools.count(until, -1)

        def step(name: str, *about: Any) -> None:
            if next(left) == 0:
                raise Killed
            real[name](*about)

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, functools.partial(step, name))
            try:
                program["main"]([arguments[0], str(link), *arguments[1:]])
            except Killed:
                return None
        return json.loads(capsys.readouterr().out)

    for until in itertools.count():
        for name in ("served", "served.previous", "served.before", "served.new"):
            (models / name).unlink(missing_ok=True)
        link.symlink_to("b")
        (models / "served.previous").symlink_to("a")
        done = run(verb, *([str(models / "c")] if verb == "switch" else []), "b", until=until)
        found, new = run("show"), "c" if verb == "switch" else "a"
        assert found in ({"current": "b", "previous": "a"}, {"current": new, "previous": "b"})
        # the next change is what it would have been, and nothing of the broken one stays
        again = run("switch", str(models / "reference"), found["current"])
        assert again == {"current": "reference", "previous": found["current"]}
        assert not {"served.before", "served.new"} & set(os.listdir(models))
        if done is not None:
            break
    assert until >= 5
