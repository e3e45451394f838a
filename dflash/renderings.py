"""What people read of a report, beside it: ``report.md`` and ``report.html``. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from dflash.metrics import Round
from dflash.pages import report_page, write_page
from dflash.render import to_markdown
from dflash.report import Report
from dflash.rounds_file import read_rounds

ROUNDS = "rounds.jsonl"
PAGE = "report.html"


def write_renderings(folder: Path, report: Report, rounds: Sequence[Round] | None = None) -> None:
    """Write both into ``folder``, from ``report`` and ``rounds``, by default those of ``rounds.jsonl`` there, if any.

    Raises :class:`~dflash.rounds_file.RoundsError` when that file is damaged or of another report.
    """
    if rounds is None:
        rounds = read_rounds(folder / ROUNDS, report) if (folder / ROUNDS).exists() else []
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    write_page(folder / PAGE, report_page(report, rounds))
