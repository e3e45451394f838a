"""``dflash compare``: two reports, one verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash.cli_options import JsonOption, text

if TYPE_CHECKING:
    from dflash.compare import ReportComparison


def compare(
    ours: Annotated[Path, typer.Argument(help="report.json of the drafter in question")],
    theirs: Annotated[Path, typer.Argument(help="report.json of the one it is compared with")],
    as_json: JsonOption = False,
) -> None:
    """Difference of two drafters on the same prompts, first minus second, by a paired bootstrap over the prompts.

    Refuses reports that measured different things: other prompts, mode, target, block size or lengths, or a report
    that is not valid.
    """
    from dflash.compare import compare_reports
    from dflash.report import read_report

    result = compare_reports(read_report(ours), read_report(theirs))
    if as_json:
        print(result.model_dump_json(indent=1))
    else:
        _show(result)


def _show(result: "ReportComparison") -> None:
    table = Table("prompt", "ours", "theirs", "difference", "", box=None, padding=(0, 2, 0, 0))
    for one in result.prompts:
        difference = "–" if one.ours is None or one.theirs is None else f"{one.ours - one.theirs:+.3f}"
        shown = ["–" if tau is None else f"{tau:.3f}" for tau in (one.ours, one.theirs)]
        table.add_row(text(one.id), *shown, difference, "" if one.same_completion else "other completion")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print()
    for line in (f"ours: {result.ours}", f"theirs: {result.theirs}", *result.notes, result.headline()):
        console.print(text(line))
