"""Named errors and the one place where a command turns them into a line and an exit code."""

import io
import sys
from collections.abc import Callable
from typing import Any, ClassVar

INTERRUPTED = 130


class Interrupted(Exception):
    """Somebody pressed Ctrl-C; the message says what remains of what was begun, and how to go on."""


class DFlashError(Exception):
    """A failure the user can act on; the message says what was found, what was expected and what to do."""

    exit_code = 1
    state_name: ClassVar[str] = "Failed"
    """What the state of a run that ends with this failure is called, where somebody has to act differently on it."""


class UsageError(DFlashError):
    """The command was called wrongly."""

    exit_code = 2


class NotValidError(DFlashError):
    """Something was measured, but a check failed, so the number must not be believed."""

    exit_code = 3


def one_line(text: str) -> str:
    """``text`` with line ends, terminal controls and other unprintable characters, as files can hold, as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def run_cli(app: Callable[[], Any]) -> None:
    """Run a command-line ``app``; a :class:`DFlashError` becomes one line on stderr and its exit code.

    So does an :class:`OSError` that nothing closer to the file has named: it is the machine's state, not a fault here.
    What a terminal's encoding does not have is printed as an escape.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except DFlashError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(DFlashError.exit_code)
    except Interrupted as left:
        print(f"interrupted: {one_line(str(left))}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        # typer makes this of Ctrl-C, without a word
        if ended.code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise
