"""Entry point of ``dflash-ops``. What takes long to import comes after Ctrl-C means a line and not a traceback."""

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from dflash.errors import run_cli

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line and leave with its exit code."""
    signal.signal(signal.SIGTERM, _end)
    run_cli(_run)


def _end(*_: object) -> NoReturn:
    """SIGTERM is what Ctrl-C is: what was begun is ended, such as a Prefect server of the command's own."""
    raise KeyboardInterrupt


def _run() -> None:
    from dflash.command_line import with_common_options
    from flows.terminal import COMMAND_LINE

    COMMAND_LINE.set(tuple(sys.argv[1:]))
    with_common_options(_app())(prog_name="dflash-ops")


def _app() -> "typer.Typer":
    """All commands; for ``status`` that one alone, for it is asked again and again and needs little of the others."""
    if sys.argv[1:2] != ["status"]:
        from flows.cli import app

        return app
    import typer

    from flows.cli_status import status

    quick = typer.Typer(pretty_exceptions_enable=False)
    quick.callback()(lambda: None)
    quick.command()(status)
    return quick


if __name__ == "__main__":
    main()
