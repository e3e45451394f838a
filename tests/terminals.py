"""A terminal of its own for a program, with somebody at it who answers."""

import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import process

REPOSITORY = Path(__file__).parents[1]
SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@dataclass
class Terminal:
    """A stdin that somebody sits at, as far as anybody can tell."""

    def isatty(self) -> bool:
        return True


def at_a_terminal(
    program: str, argv: Sequence[str], *dialogue: tuple[str, str], env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run the Python text ``program`` with ``argv``; for each (question, answer) wait for the one and type the other.

    Returns the exit status and everything that stood on the screen.
    """
    command = [sys.executable, "-c", SPAWN, sys.executable, "-c", program, *argv]
    child = process.start(command, stdin=process.PIPE, stdout=process.PIPE, cwd=REPOSITORY, env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    said = answered = ""
    for question, answer in dialogue:
        while question not in said[len(answered) :]:
            assert select.select([child.stdout], [], [], 60)[0], said
            part = os.read(child.stdout.fileno(), 4096).decode()
            assert part, said
            said += part
        answered = said
        time.sleep(0.2)  # ssh-keygen throws away what was typed before it asked
        child.stdin.write(answer.encode() + b"\n")
        child.stdin.flush()
    said += child.stdout.read().decode()
    child.stdin.close()
    return child.wait(), said
