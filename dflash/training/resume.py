"""Whether a run may go on under a config that is not, word for word, the one it began with."""

from collections.abc import Iterator
from typing import Any

from dflash.errors import UsageError
from dflash.training.run_config import RunConfig
from dflash.training.training_state import Identity

# What a run says of itself and keeps: none of it touches a weight.
_FREE = (
    "output",
    "tracking",
    "checkpoints",
    "preflight",
    "data.cache",
    "features.directory",
    "evaluation.eval_interval",
)
# The same sums in another order: losses agree to rounding, no longer to the last bit.
_ROUNDING = ("target.device", "parallel", "objective.chunk_tokens", "features.mode")
# Paths and names, where the content that they lead to is compared instead.
_CONTENT = {
    "target.path": "target",
    "data.files": "data",
    "data.datasets": "data",
    "data.split": "data",
    "drafter.config": "drafter",
}
_BATCH = ("optimizer.rows", "optimizer.accumulate")


class ResumeError(UsageError):
    """The config would make another run of the one that its output holds."""


def require_same_run(
    began: RunConfig, now: RunConfig, *, identity_then: Identity, identity_now: Identity, source: str
) -> list[str]:
    """Say what of a run's config changed and may; :class:`ResumeError` names each key that would make another run.

    ``source`` is the checkpoint to go on from. Output, tracking, intervals and retention may change; so may where the
    target and the data lie, as long as they are the same and the kernel is, and how a step's rows are shared out, as
    long as they are as many. Evaluation may be added or dropped; its prompts may not change, in name or content: the
    best τ is chosen among all.
    """
    changes = dict(_changes(began, now))
    kernels = (identity_then.kernel, identity_now.kernel)
    prompts = (identity_then.prompts, identity_now.prompts)
    refused = [
        f"{key} was {_said(before)} and is {_said(after)}"
        for key, (before, after) in changes.items()
        if not _may_change(key, before, after)
    ]
    refused += [
        f"{what} {'is' if what != 'data' else 'are'} not the same (its content has another digest)"
        for what in ("target", "data", "drafter")
        if getattr(identity_then, what) != getattr(identity_now, what)
    ]
    if None not in kernels and kernels[0] != kernels[1]:
        refused.append(
            f"linear attention was computed by {kernels[0]} and would be by {kernels[1]}, whose states differ; go on "
            f"on a machine that has {kernels[0]}"
        )
    if None not in prompts and prompts[0] != prompts[1]:
        refused.append("evaluation.prompts is not the same (its content has another digest), nor would its τ be")
    rows = [_rows(began, identity_then.world), _rows(now, identity_now.world)]
    if rows[0] != rows[1]:
        refused.append(
            f"a step took {rows[0]} rows and would take {rows[1]} (optimizer.rows × optimizer.accumulate × "
            f"{identity_now.world} ranks, {identity_then.world} then)"
        )
    if refused:
        raise ResumeError(
            f"{source} belongs to another run: {'; '.join(refused)}. Put that back to go on, or begin a run of its own "
            f"with another output, from these weights with drafter.init: {source}"
        )
    rounding = [key for key in changes if _under(key, _ROUNDING)]
    if identity_then.world != identity_now.world:
        rounding.append(f"the number of ranks ({identity_then.world}, now {identity_now.world})")
    notes = [f"{', '.join(sorted(changes))} changed since {source}"] if changes else []
    if rounding:
        notes.append(f"{', '.join(rounding)}: losses go on to rounding, not to the last bit")
    return notes


def _may_change(key: str, before: Any, after: Any) -> bool:
    whole_section = key == "evaluation" and (before is None or after is None)
    return whole_section or _under(key, (*_FREE, *_ROUNDING, *_CONTENT, *_BATCH))


def _under(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _changes(began: RunConfig, now: RunConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    yield from _differences("", began.model_dump(mode="json"), now.model_dump(mode="json"))


def _differences(prefix: str, before: Any, after: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            yield from _differences(f"{prefix}.{name}".lstrip("."), before.get(name), after.get(name))
    elif before != after:
        yield prefix, (before, after)


def _rows(config: RunConfig, world: int) -> int:
    return config.optimizer.rows * config.optimizer.accumulate * world


def _said(value: Any) -> str:
    return "left out" if value is None else str(value)
