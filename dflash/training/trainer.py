"""``dflash train``: prepare, check, go on from where a run was left, then step by step to its end.

A step is :meth:`dflash.training.step.Steps.take`; what happens between steps stands here: logging, measuring τ,
writing checkpoints, and ending well. All ranks walk through this together; rank 0 alone writes, prints and measures.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from dflash.doctor import to_table
from dflash.errors import DFlashError
from dflash.training import checkpointing
from dflash.training.checkpointing import STATE, DiskFullError, SaveError
from dflash.training.claim import sole_writer
from dflash.training.distributed import Ranks, wrap
from dflash.training.metric_log import MetricLog
from dflash.training.optimizer import adamw, learning_rate
from dflash.training.order import Order
from dflash.training.plan import plan
from dflash.training.preflight import preflight_checks, require, write_preflight
from dflash.training.preparation import PHASES, Prepared, prepare
from dflash.training.resume import ResumeError, require_same_run
from dflash.training.run_config import RunConfig
from dflash.training.snapshot import current_drafter, keep_for_replay, recipe_of, require_finite, write_files
from dflash.training.step import Figures, MicroBatch, NotFiniteError, Steps
from dflash.training.stop import Stop, Stopped
from dflash.training.training_state import Progress, TrainingState, read_state
from dflash.training.validation import Truth
from dflash.training.voice import Voice


class NothingSupervisedError(DFlashError):
    """No step of a whole epoch had a slot to learn from."""


class Outcome(BaseModel):
    """How a run ended. ``stopped``: it was asked to, before its last step; ``total`` is 0 where it had not begun."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    total: int
    stopped: bool
    skipped: int
    checkpoint: str | None
    best: str | None
    tau: float | None

    def headline(self) -> str:
        if not self.total:
            return "stopped before the first step; what was there is as it was"
        ended = "stopped at" if self.stopped else "done:"
        told = [f"{ended} step {self.step} of {self.total}"]
        told += [f"last checkpoint {self.checkpoint}"] if self.checkpoint else []
        told += [f"best τ {self.tau:.2f} in {self.best}"] if self.best and self.tau is not None else []
        told += [f"{self.skipped} steps had nothing supervised and updated nothing"] if self.skipped else []
        return "; ".join(told)


def train(config: RunConfig) -> Outcome:
    """Run ``config`` to its end, or until SIGTERM; goes on from the newest whole checkpoint of its output.

    Raises a :class:`~dflash.errors.DFlashError` for whatever stops it: a failed check, a loss that is not finite, a
    full disk, another run in the same output.
    """
    with Stop.on_sigterm() as stop, Ranks.joined(config.target.device) as ranks, ExitStack() as claimed:
        ranks.first(lambda: claimed.enter_context(sole_writer(config.output)))
        voice = Voice(PHASES, heard=ranks.main)
        try:
            with stop.at_once():
                run = _Run.ready(prepare(config, ranks, voice), voice, stop)
        except Stopped:
            voice.say("asked to stop before the first step; nothing was begun")
            return Outcome(step=0, total=0, stopped=True, skipped=0, checkpoint=None, best=None, tau=None)
        try:
            return run.to_the_end()
        finally:
            run.close()


class _Run:
    """A run under way: ``progress`` is where it is, ``best`` the highest τ that a checkpoint of it was measured at."""

    def __init__(
        self, prepared: Prepared, steps: Steps, progress: Progress, log: MetricLog | None, voice: Voice, stop: Stop
    ) -> None:
        self.prepared, self.config, self.ranks = prepared, prepared.config, prepared.ranks
        self.steps, self.progress, self.log, self.voice, self.stop = steps, progress, log, voice, stop
        self.stopped = False
        self._clock = time.monotonic()

    @classmethod
    def ready(cls, prepared: Prepared, voice: Voice, stop: Stop) -> Self:
        """Check ``prepared``, and put it where its output was left."""
        config, ranks, model = prepared.config, prepared.ranks, prepared.model
        state = _left_off(prepared, voice)
        if state is not None:
            state.restore_weights(model.drafter)
        section = config.optimizer
        order = Order(len(prepared.rows), section.rows, section.accumulate, config.seed, ranks.rank, ranks.world)
        steps = Steps(
            config=config,
            drafter=prepared.drafter_config,
            recipe=prepared.recipe,
            samples=prepared.samples,
            rows=prepared.rows,
            source=prepared.source,
            vocabulary=prepared.vocabulary,
            model=model,
            optimizer=adamw(model, section),
            order=order,
            total=order.steps(section.num_epochs, section.max_steps),
            ranks=ranks,
        )
        ranks.first(lambda: _preflight(prepared, steps, voice))
        wrapped = wrap(model, config.parallel, ranks)
        steps = replace(steps, model=wrapped, optimizer=adamw(wrapped, section))
        if state is not None:
            state.restore_optimizer(model.drafter, steps.optimizer)
        progress = Progress() if state is None else state.progress
        resumed_at = None if state is None else progress.step
        log = ranks.first(lambda: MetricLog.open(config.output, config.tracking, run=config, resumed_at=resumed_at))
        return cls(prepared, steps, progress, log, voice, stop)

    def to_the_end(self) -> Outcome:
        """Every step that is left, with what is due between them."""
        checkpoints, evaluation = self.config.checkpoints, self.config.evaluation
        saved: int | None = self.progress.step or None
        while self.progress.step < self.steps.total and not self.stopped:
            figures, batch = self._step()
            step, last = self.progress.step, self.progress.step == self.steps.total
            if self.progress.skipped == step and (last or step == self.steps.order.steps_per_epoch):
                raise NothingSupervisedError(
                    f"{step} steps, and in none was there anything to learn: a block needs two tokens in a row that "
                    f"the target wrote, and no sample has them; look at the data's answers, and at data.min_loss_tokens"
                )
            self.stopped = figures.stop and not last
            truth = None
            if evaluation is not None and not self.stopped and (last or step % evaluation.eval_interval == 0):
                truth = self._measured()
            due = last or self.stopped or step % checkpoints.save_interval == 0
            if due or self._is_best(truth):
                saved = step if self._saved(batch, truth, must=last or self.stopped) else saved
        return self._outcome(saved)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _step(self) -> tuple[Figures, MicroBatch]:
        number, order = self.progress.step, self.steps.order
        try:
            figures, batch = self.steps.take(number, stop=self.stop.asked)
        except NotFiniteError as error:
            raise keep_for_replay(self.prepared, self.steps, error) from None
        done = number + 1
        self.progress = Progress(
            step=done,
            skipped=self.progress.skipped + figures.skipped,
            anchorless=self.progress.anchorless + figures.anchorless,
            epoch=order.epoch(done),
            row=min(done % order.steps_per_epoch * order.rows_per_step, order.total),
        )
        if done % self.config.tracking.log_interval == 0 or done == self.steps.total or figures.stop:
            self._logged(figures)
        return figures, batch

    def _logged(self, figures: Figures) -> None:
        now, step = time.monotonic(), self.progress.step
        values = figures.values() | {
            "epoch": step / self.steps.order.steps_per_epoch,
            "skipped": float(self.progress.skipped),
            "anchorless": float(self.progress.anchorless),
            "seconds": now - self._clock,
        }
        self._clock = now
        if self.log is not None:
            self.log.write(step, values, "train")
        shown = (("loss", "loss"), ("accuracy", "accuracy"), ("streak1", "streak"), ("learning_rate", "rate"))
        told = [f"{word} {values[name]:.4g}" for name, word in shown if name in values]
        told += ["nothing supervised, no update"] if figures.skipped else []
        self.voice.say(f"step {step}/{self.steps.total}: {', '.join(told)}")

    def _measured(self) -> Truth | None:
        """The walk's τ now; None on other ranks than 0, and where it was asked to stop meanwhile."""
        drafter, step, held_out = current_drafter(self.prepared), self.progress.step, self.prepared.held_out

        def measure() -> Truth | None:
            assert held_out is not None
            assert drafter is not None
            try:
                with self.stop.at_once(), self.voice.alone(f"measuring τ after step {step}") as progress:
                    return held_out.measure(drafter, self.prepared.vocabulary, progress=progress)
            except Stopped:
                self.voice.say("asked to stop; τ is left unmeasured")
                return None

        truth = self.ranks.first(measure)
        self.stopped = self.ranks.any(self.stop.asked)
        if truth is not None and self.log is not None:
            self.log.write(step, truth.values(), "eval")
            self.voice.say(f"step {step}/{self.steps.total}: τ {truth.tau_pooled:.3f}")
        self._clock = time.monotonic()
        return truth

    def _is_best(self, truth: Truth | None) -> bool:
        """Whether the checkpoint of this step would be the best so far; the same answer on every rank."""
        if not self.config.checkpoints.keep_best:
            return False
        before = self.progress.step - 1  # what may lie at this step was passed over, and is made again
        highest = checkpointing.best(self.config.output, until=before) if truth is not None else None
        tau = None if highest is None else checkpointing.tau_of(highest.manifest)
        return self.ranks.share(truth is not None and (tau is None or truth.tau_pooled > tau))

    def _saved(self, batch: MicroBatch, truth: Truth | None, *, must: bool) -> bool:
        """Write the checkpoint of this step and remove those that are not kept; False where the disk is full.

        A full disk ends the run unless the config says to go on, and always where nothing comes after (``must``).
        """
        step, prepared = self.progress.step, self.prepared
        state = TrainingState.gather(
            prepared.model.drafter,
            self.steps.optimizer,
            keep=self.ranks.main,
            progress=self.progress,
            identity=prepared.identity,
            run=self.config,
            learning_rate=learning_rate(self.config.optimizer, step, self.steps.total),
            total_steps=self.steps.total,
        )
        drafter = current_drafter(prepared)

        def fill(directory: Path) -> Mapping[str, Any]:
            assert drafter is not None
            assert state is not None
            figures = write_files(directory, prepared, drafter=drafter, state=state, batch=batch, truth=truth)
            require_finite(step, figures)
            return figures

        def write() -> bool:
            try:
                path = checkpointing.save(self.config.output, step, fill, recipe=recipe_of(prepared))
            except DiskFullError as error:
                if must or self.config.checkpoints.on_full_disk == "stop":
                    raise
                self.voice.warn(f"{error}; going on without it")
                return False
            self.voice.say(f"step {step}/{self.steps.total}: saved {path}")
            try:
                for removed in checkpointing.retain(self.config.output, self.config.checkpoints, until=step):
                    self.voice.say(f"      removed {removed}")
            except SaveError as error:  # one too many is kept, which ends no run
                self.voice.warn(str(error))
            return True

        saved = self.ranks.share(self.ranks.first(write))
        self._clock = time.monotonic()
        return bool(saved)

    def _outcome(self, saved: int | None) -> Outcome:
        output = self.config.output
        best = checkpointing.best(output, until=self.progress.step) if self.ranks.main else None
        return Outcome(
            step=self.progress.step,
            total=self.steps.total,
            stopped=self.stopped,
            skipped=self.progress.skipped,
            checkpoint=None if saved is None else str(output / f"step_{saved}"),
            best=None if best is None else str(best.path),
            tau=None if best is None else checkpointing.tau_of(best.manifest),
        )


def _left_off(prepared: Prepared, voice: Voice) -> TrainingState | None:
    """The state to go on from; None for a new run. Raises :class:`ResumeError` where that would mix two runs."""
    config, ranks = prepared.config, prepared.ranks
    path = ranks.share(ranks.first(lambda: _to_go_on_from(config, voice)))
    if path is None:
        return None
    state = read_state(path / STATE)
    notes = require_same_run(
        state.run, config, identity_then=state.identity, identity_now=prepared.identity, source=str(path)
    )
    voice.say(f"going on from {path}")
    for note in notes:
        voice.say(f"      {note}")
    return state


def _to_go_on_from(config: RunConfig, voice: Voice) -> Path | None:
    output = config.output
    checkpointing.remove_partial(output)
    there = checkpointing.steps_of(output)
    if not there:
        return None
    if config.checkpoints.resume == "never":
        raise ResumeError(
            f"{output} holds checkpoints up to step {there[-1]}, and checkpoints.resume is never; choose another "
            f"output, or say auto to go on"
        )
    whole = checkpointing.newest_whole(output, warn=voice.warn)
    if whole is None:
        raise ResumeError(
            f"{output} holds checkpoints up to step {there[-1]}, and none of them is whole; remove them to begin anew"
        )
    return whole.path


def _preflight(prepared: Prepared, steps: Steps, voice: Voice) -> None:
    """Say what is going to be done, and whether it would be done rightly."""
    config, facts = prepared.config, prepared.facts
    planned = plan(
        config,
        prepared.drafter_config,
        prepared.recipe,
        target_class=facts.class_name,
        kernel=facts.kernel,
        samples=len(prepared.samples),
        steps=steps.total,
        ranks=prepared.ranks.world,
        attention=prepared.model.attention,
        target_bytes=prepared.target_bytes,
        vocab_size=facts.vocab_size,
    )
    voice.say(planned.to_table())
    first = next(steps.order.micro_batches(0))
    found = preflight_checks(
        model=prepared.model,
        vocabulary=prepared.vocabulary,
        target=prepared.target,
        facts=facts,
        source=prepared.source,
        rows=[[prepared.samples[index] for index in prepared.rows[place.row]] for place in first],
        recipe=prepared.recipe,
        max_length=config.data.max_length,
        noise=config.objective.noise,
        chunk_tokens=config.objective.chunk_tokens,
        seed=config.seed,
    )
    voice.say(to_table(found))
    write_preflight(config.output, planned, found)
    require(found, config.preflight.allow)
