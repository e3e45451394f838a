"""A terminal of its own for a program, with somebody at it who answers."""

import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
    try:
        for question, answer in dialogue:
            while question not in said[len(answered) :]:
                part = _next(child.stdout, said)
                assert part, said
                said += part
            answered = said
            time.sleep(0.2)  # ssh-keygen throws away what was typed before it asked
            child.stdin.write(answer.encode() + b"\n")
            child.stdin.flush()
        while part := _next(child.stdout, said):
            said += part
    except BaseException:
        child.kill()
        raise
    finally:
        child.stdin.close()
        status = child.wait()
    return status, said


def _next(screen: IO[bytes], said: str) -> str:
    """What appears next; empty at the end. A program that waits for an answer that nobody gives fails the test."""
    assert select.select([screen], [], [], 60)[0], f"it waits: {said}"
    return os.read(screen.fileno(), 4096).decode("utf-8", "replace")
