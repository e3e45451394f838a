"""``dflash report``: the pages of a report and of a run's course, made again from what was measured."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash.cli_options import JsonOption, text
from dflash.errors import one_line

if TYPE_CHECKING:
    from dflash.trend import Trend

app = typer.Typer(help="Pages and pictures of reports.", no_args_is_help=True)

PlotsOption = Annotated[Path | None, typer.Option(help="folder for the same charts as PNG and SVG")]


@app.command()
def html(
    report: Annotated[Path, typer.Argument(help="report.json, or the folder it is in")],
    output: Annotated[Path | None, typer.Option(help="the page; report.html beside the report by default")] = None,
    plots: PlotsOption = None,
) -> None:
    """One report as a page that needs no network: figures, every round of every prompt, checks, provenance.

    The rounds come from rounds.jsonl beside the report; without it completions are plain text.
    """
    from dflash.pages import report_page, write_page
    from dflash.renderings import PAGE, ROUNDS
    from dflash.report import read_report
    from dflash.rounds_file import read_rounds

    path = report / "report.json" if report.is_dir() else report
    read = read_report(path)
    told = path.with_name(ROUNDS)
    rounds = read_rounds(told, read) if told.exists() else []
    output = output or path.with_name(PAGE)
    write_page(output, report_page(read, rounds))
    print(output)
    if plots is not None:
        from dflash.plots import report_plots

        for one in report_plots(read, rounds, plots):
            print(one)


@app.command()
def trend(
    folder: Annotated[Path, typer.Argument(help="folder below which the reports of a run lie")],
    output: Annotated[Path | None, typer.Option(help="the page; trend.html in the folder by default")] = None,
    plots: PlotsOption = None,
    as_json: JsonOption = False,
) -> None:
    """τ over the steps of a run: best, regressions, invalid reports, beside the reference and training's own figure."""
    from dflash.pages import trend_page, write_page
    from dflash.progress import Phases
    from dflash.trend import read_trend

    with Phases(1).phase("reports", one_line(f"reports below {folder}"), unit="reports") as progress:
        found = read_trend(folder, progress)
    output = output or folder / "trend.html"
    write_page(output, trend_page(found, folder.resolve().name, base=_way(output, folder)))
    files = [output]
    if plots is not None:
        from dflash.plots import trend_plots

        files += trend_plots(found.series, plots)
    if as_json:
        # in ASCII, because a folder's name need not be UTF-8
        print(json.dumps(found.model_dump(mode="json"), indent=1))
    else:
        _show(found, files)


def _way(page: Path, folder: Path) -> str:
    """How the page names the folder in its links: relative, so that both can be moved together."""
    return Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()


def _show(found: "Trend", files: list[Path]) -> None:
    from dflash.trend import training_tau

    console = Console(highlight=False, soft_wrap=True)
    for series in found.series:
        table = Table("step", "τ", "95 % interval", "reference", "training says", "", box=None, padding=(0, 2, 0, 0))
        for point in series.points:
            reference = f"{point.reference.pooled:.3f}" if point.reference else "–"
            interval = "–" if point.tau.ci95 is None else f"{point.tau.ci95[0]:.3f} to {point.tau.ci95[1]:.3f}"
            said = training_tau(point.training)
            mark = "best" if point.best else "regression" if point.regression else ""
            table.add_row(
                str(point.step),
                f"{point.tau.pooled:.3f}" if point.valid else "not valid",
                interval if point.valid else text(", ".join(point.invalid_because)),
                reference,
                "–" if said is None else f"{said:.3f}",
                mark,
            )
        console.print(text(series.title))
        console.print(table)
        console.print(text(series.headline()))
        console.print()
    for problem in found.problems:
        console.print(text(f"not used: {problem}"))
    for file in files:
        console.print(text(file))
