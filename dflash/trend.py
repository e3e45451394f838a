"""The course of a training run: every report below a folder, by step. Imports no torch.

Reports that measured different things (other prompts, mode, target, block size or lengths) are series of their own.
Within a series a step is held against the best one before it on the same prompts, by the paired bootstrap of
``dflash compare``, and called a regression when that calls it worse.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict, computed_field

from dflash.checkpoint_layout import step_in_name
from dflash.compare import comparison_key, totals
from dflash.errors import DFlashError
from dflash.metrics import NoRoundsError, Totals, compare
from dflash.report import Comparison, Report, ReportError, Tau, TrainingInfo, read_report

REPORT = "report.json"
PAGE = "report.html"


class NoReportsError(DFlashError):
    """There is no report below the folder of which a trend could be made."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class Point(_Model):
    """One report. ``against`` is τ minus that of the best valid step before it, which stands at ``against_step``.

    Of a report that is not valid the τ is kept to be shown as such, and nothing else is made of it.
    """

    folder: str
    step: int
    created: datetime
    valid: bool
    invalid_because: list[str]
    tau: Tau
    random_anchor_tau: float | None
    training: TrainingInfo | None
    reference: Tau | None
    rounds: int
    prompts: int
    sha256: str
    against: Comparison | None = None
    against_step: int | None = None
    best: bool = False
    page: bool = False

    @computed_field  # type: ignore[prop-decorator]
    @property
    def regression(self) -> bool:
        """Whether this step is worse than the best one before it."""
        return self.against is not None and self.against.verdict == "worse"


class Series(_Model):
    """Reports that measured the same, by step. ``title`` says what; ``reference`` is the newest of its τ."""

    title: str
    block_size: int
    points: list[Point]
    reference: Tau | None

    def best(self) -> Point | None:
        """The step with the highest τ; None where no report is valid."""
        return next((point for point in self.points if point.best), None)

    def last(self) -> Point:
        """The latest step."""
        return self.points[-1]

    def headline(self) -> str:
        """One line: the best step and, where it is another, how the last one stands."""
        best, last = self.best(), self.last()
        if best is None:
            return f"no valid report among {len(self.points)}"
        line = f"best: step {best.step}, τ {_with_interval(best.tau)}"
        if self.reference is not None:
            line += f", reference {self.reference.pooled:.3f}"
        if last is best:
            return f"{line}; it is the last"
        if not last.valid:
            return f"{line}; the last, step {last.step}, is not valid: {', '.join(last.invalid_because)}"
        line += f"; the last, step {last.step}, has τ {_with_interval(last.tau)}"
        return line + (", a regression" if last.regression else "")


class Trend(_Model):
    """Everything found below a folder. ``problems`` are reports that could not be used, each with its sentence."""

    series: list[Series]
    problems: list[str]


def training_tau(training: TrainingInfo | None) -> float | None:
    """What training's own top-1 streak, drafts only, makes with the bonus token: comparable with random anchors."""
    return None if training is None or training.streak1 is None else training.streak1 + 1


def read_trend(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Trend:
    """The trend of every ``report.json`` below ``folder``; the longest series first.

    ``progress(done, total)`` counts reports. Raises :class:`NoReportsError` when none can be used.
    """
    if not folder.is_dir():
        raise NoReportsError(f"{folder}: is no folder; expected one below which reports lie")
    paths = sorted(_reports(folder))
    found: dict[str, list[_Found]] = {}
    problems: list[str] = []
    for done, path in enumerate(paths, start=1):
        try:
            key, one = _read(path, folder)
            found.setdefault(key, []).append(one)
        except ReportError as error:
            problems.append(str(error))
        progress(done, len(paths))
    if not found:
        raise NoReportsError(
            f"{folder}: has no report of a step below it"
            + (f" ({problems[0]})" if problems else "; run dflash evaluate")
        )
    series = [_series(ones) for ones in found.values()]
    return Trend(series=sorted(series, key=lambda one: (-len(one.points), one.title)), problems=problems)


@dataclass(frozen=True)
class _Found:
    """A point with what is needed to compare it; the report's texts are let go."""

    point: Point
    totals: Totals
    seed: int
    title: str
    block_size: int


def _reports(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if REPORT in files:
            yield Path(place, REPORT)


def _read(path: Path, folder: Path) -> tuple[str, _Found]:
    report = read_report(path)
    place = path.parent.relative_to(folder).as_posix()
    step = step_of(report)
    if step is None:
        raise ReportError(f"{path}: its checkpoint {report.checkpoint.path} has no step, so it has no place in a trend")
    point = Point(
        folder=place,
        step=step,
        created=report.created,
        valid=report.valid,
        invalid_because=report.invalid_because,
        tau=report.metrics.tau,
        random_anchor_tau=report.metrics.random_anchor_tau,
        training=report.training,
        reference=report.reference_metrics.tau if report.reference_metrics else None,
        rounds=report.metrics.rounds,
        prompts=len(report.prompts),
        sha256=report.checkpoint.sha256,
        page=(path.parent / PAGE).is_file(),
    )
    found = _Found(point, totals(report), report.settings.seed, _title(report), report.settings.block_size)
    return comparison_key(report), found


def step_of(report: Report) -> int | None:
    """The checkpoint's step, else the one its name tells; None where neither does."""
    if report.checkpoint.step is not None:
        return report.checkpoint.step
    return step_in_name(report.checkpoint.path)


def _series(found: Iterable[_Found]) -> Series:
    ordered = sorted(found, key=lambda one: (one.point.step, one.point.created))
    points: list[Point] = []
    best: _Found | None = None
    for one in ordered:
        point = one.point
        if point.valid and best is not None:
            point = point.model_copy(update={"against": _against(one, best), "against_step": best.point.step})
        if point.valid and (best is None or point.tau.pooled > best.point.tau.pooled):
            best = one
        points.append(point)
    if best is not None:
        place = ordered.index(best)
        points[place] = points[place].model_copy(update={"best": True})
    references = [one.point for one in ordered if one.point.reference is not None and one.point.valid]
    return Series(
        title=ordered[-1].title,
        block_size=ordered[-1].block_size,
        points=points,
        reference=max(references, key=lambda point: point.created).reference if references else None,
    )


def _against(one: _Found, best: _Found) -> Comparison | None:
    try:
        return compare(one.totals, best.totals, seed=one.seed)
    except NoRoundsError:
        return None


def _title(report: Report) -> str:
    settings = report.settings
    parts = [
        f"{PurePath(settings.prompts).name}, {len(report.prompts)} prompts",
        settings.mode if not settings.temperature else f"{settings.mode} at temperature {settings.temperature:g}",
        f"block {settings.block_size}",
        f"at most {settings.max_new_tokens} tokens",
        f"target {PurePath(report.target.path).name}",
    ]
    if settings.thinking is not None:
        parts.append(f"thinking {'on' if settings.thinking else 'off'}")
    return ", ".join(parts)


def _with_interval(tau: Tau) -> str:
    return f"{tau.pooled:.3f}" if tau.ci95 is None else f"{tau.pooled:.3f} [{tau.ci95[0]:.3f}, {tau.ci95[1]:.3f}]"
