"""What holds for every command of both programs."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import typer

from dflash import command_line
from dflash.cli import app as dflash
from dflash.command_line import leaves, with_common_options
from dflash.errors import run_cli
from dflash.progress import Phases
from flows.cli import app as dflash_ops
from flows.terminal import shown_progress

PRINT_NO_RESULT = {
    *("dflash-ops demo", "dflash-ops lab up", "dflash-ops lab down", "dflash-ops lab exec"),
    *(f"dflash-ops guard {verb}" for verb in ("approve", "countersign", "deny", "standing drop")),
    "dflash-ops guard plan",  # runs another command with --plan, which has its own
    "dflash-ops guard setup",  # prints a script
    "dflash-ops jobs logs",  # prints what the job wrote
    "dflash report html",  # writes a page
}

OVER_AT_ONCE = {
    *("dflash-ops hosts list", "dflash-ops notify add", "dflash-ops lab exec"),
    *(
        f"dflash-ops guard {verb}"
        for verb in ("requests", "deny", "plan", "setup", "standing request", "standing drop")
    ),
    *(
        "dflash-ops audit show",
        "dflash-ops audit verify",
        "dflash inspect",
        "dflash report html",
        "dflash report trend",
    ),
}
ENDED_BY_CTRL_C = {"dflash-ops status", "dflash-ops jobs logs"}
"""Commands that show what goes on anyway; the second says where to go on looking, and has a test of its own."""


def commands(command: Any, name: str) -> Iterator[Any]:
    below = getattr(command, "commands", None)
    if below is None:
        yield pytest.param(name, command, id=name)
    else:
        for word, one in below.items():
            yield from commands(one, f"{name} {word}")


EVERY = [
    *commands(with_common_options(dflash), "dflash"),
    *commands(with_common_options(dflash_ops), "dflash-ops"),
]


@pytest.mark.parametrize(("name", "command"), EVERY)
def test_every_command_explains_itself_can_be_quiet_and_prints_its_result_as_json(name: str, command: Any) -> None:
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--quiet" in options
    assert ("--json" in options) != (name in PRINT_NO_RESULT)
    assert command.help
    assert not [
        parameter.name for parameter in command.params if parameter.opts[0].startswith("-") and not parameter.help
    ]


@pytest.mark.parametrize(("name", "command"), EVERY)
def test_ctrl_c_says_what_remains_of_whatever_takes_longer_than_a_moment(name: str, command: Any) -> None:
    said = getattr(command.callback, "leaves", None)
    assert (said is None) == (name in OVER_AT_ONCE | ENDED_BY_CTRL_C)


def test_ctrl_c_ends_with_one_line_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    @leaves("half of it is there")
    def command(count: Annotated[int, typer.Option()] = 1) -> None:
        raise KeyboardInterrupt

    def call() -> None:
        with_common_options(app)(["--count", "2"], prog_name="command")

    with pytest.raises(SystemExit) as ended:
        run_cli(call)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted: half of it is there\n"


def test_shells_complete_both_programs() -> None:
    for app in (dflash, dflash_ops):
        assert "--install-completion" in {option for one in typer.main.get_command(app).params for option in one.opts}


def test_quiet_leaves_progress_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def progress() -> str:
        with Phases(1).phase("k", "title") as report:
            report(1, 2)
        with shown_progress("file") as report:
            monkeypatch.setattr("time.monotonic", lambda: 1e9)
            report(1, 2)
            monkeypatch.setattr("time.monotonic", lambda: 1e9 + 60)
            report(2, 2)
        return capsys.readouterr().err

    monkeypatch.setattr(command_line, "_quiet", False)
    assert "title" in (said := progress())
    assert "file: 2 B of 2 B" in said
    monkeypatch.setattr(command_line, "_quiet", True)
    assert progress() == ""
