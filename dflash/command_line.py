"""What every command of both programs has: ``--quiet``, a way to ask whether it was given, and an end by Ctrl-C."""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from dflash.errors import Interrupted

P = ParamSpec("P")
R = TypeVar("R")

NOTHING_CHANGED = "nothing was changed"

_quiet = False


def leaves(remains: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of a command: when it is interrupted by Ctrl-C, its last line says what ``remains`` and how to go on."""

    def having(command: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(command)
        def interruptible(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                raise Interrupted(remains) from None

        vars(interruptible)["leaves"] = remains
        return interruptible

    return having


def is_quiet() -> bool:
    """Whether progress is to be left out. Results, warnings and errors are printed all the same."""
    return _quiet


def with_common_options(app: typer.Typer) -> Callable[..., Any]:
    """The commands of ``app``, each with ``--quiet``, ready to be called with a ``prog_name``."""
    whole = typer.main.get_command(app)
    for command in _leaves(whole):
        command.params.append(_quiet_option())
    return whole


def _leaves(command: Any) -> Iterator[Any]:
    below = getattr(command, "commands", None)
    if below is None:
        yield command
    else:
        for one in below.values():
            yield from _leaves(one)


def _quiet_option() -> Any:
    """The option as typer makes it of a function's parameter, so that it fits whatever version is installed."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        quiet: Annotated[
            bool, typer.Option("--quiet", help="No progress.", expose_value=False, callback=_be_quiet)
        ] = False,
    ) -> None: ...

    return next(option for option in typer.main.get_command(app).params if "--quiet" in option.opts)


def _be_quiet(value: bool) -> None:
    # one command a process: a context variable would not reach the threads that a flow's tasks run in
    global _quiet
    _quiet = value
