"""Entry point of ``dflash-ops``. What takes long to import comes after Ctrl-C means a line and not a traceback."""

import sys

from dflash.errors import run_cli


def main() -> None:
    """Run the command line and leave with its exit code."""
    run_cli(_run)


def _run() -> None:
    from dflash.command_line import with_common_options
    from flows.cli import app
    from flows.terminal import COMMAND_LINE

    COMMAND_LINE.set(tuple(sys.argv[1:]))
    with_common_options(app)(prog_name="dflash-ops")


if __name__ == "__main__":
    main()
