"""``dflash compare``: two reports, one verdict."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash.cli_options import JsonOption, text
from dflash.command_line import NOTHING_CHANGED, leaves

if TYPE_CHECKING:
    from dflash.compare import ReportComparison


@leaves(NOTHING_CHANGED)
def compare(
    ours: Annotated[Path, typer.Argument(help="report.json of the drafter in question")],
    theirs: Annotated[list[Path], typer.Argument(help="report.json of the one, or those, it is compared with")],
    html: Annotated[Path | None, typer.Option(help="the comparison as a page", dir_okay=False)] = None,
    plots: Annotated[Path | None, typer.Option(help="folder for its chart as PNG and SVG")] = None,
    as_json: JsonOption = False,
) -> None:
    """Difference of drafters on the same prompts, first minus each other, by a paired bootstrap over the prompts.

    Refuses reports that measured different things: other prompts, mode, target, block size or lengths, or a report
    that is not valid.
    """
    from dflash.compare import compare_reports
    from dflash.pages import comparison_page, write_page
    from dflash.plots import comparison_plots
    from dflash.report import read_report

    reports = [read_report(path) for path in (ours, *theirs)]
    results = [compare_reports(reports[0], other) for other in reports[1:]]
    if html is not None:
        write_page(html, comparison_page(reports))
    if plots is not None:
        comparison_plots(results, plots)
    if as_json:
        shown = [result.model_dump(mode="json") for result in results]
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=1, ensure_ascii=False))
    else:
        for result in results:
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
