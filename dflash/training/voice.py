"""What a run says on stderr. Of several ranks one speaks."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

from dflash.progress import Phases, Report


class Voice:
    """Lines, warnings and the progress of what takes long; nothing at all where not ``heard``."""

    def __init__(self, phases: int, *, heard: bool) -> None:
        self._phases = Phases(phases)
        self._heard = heard
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=not heard)

    def say(self, line: RenderableType) -> None:
        self._console.print(line)

    def warn(self, line: str) -> None:
        self._console.print(f"warning: {line}")

    @contextmanager
    def phase(self, key: str, title: str) -> Iterator[Report]:
        """A phase of the preparation, see :meth:`dflash.progress.Phases.phase`."""
        if not self._heard:
            yield lambda done, total: None
            return
        with self._phases.phase(key, title) as report:
            yield report

    @contextmanager
    def alone(self, title: str) -> Iterator[Report]:
        """One long thing between steps."""
        if not self._heard:
            yield lambda done, total: None
            return
        with Phases(1).phase("alone", title) as report:
            yield report
