"""A failure that somebody has to act on ends its run in a state with a name of its own, so that it is found by it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dflash.errors import DFlashError

P = ParamSpec("P")
R = TypeVar("R")


def named_states(body: Callable[P, R]) -> Callable[P, R]:
    """Have the ``body`` of a flow end in the state that its failure names, with the failure's sentence as message.

    Whoever calls the flow as a function still gets the failure raised. Stands below ``@flow``.
    """

    @functools.wraps(body)
    def named(*arguments: P.args, **options: P.kwargs) -> R:
        from prefect.states import Failed

        try:
            return body(*arguments, **options)
        except DFlashError as failure:
            return Failed(name=failure.state_name, message=str(failure), data=failure)  # type: ignore[return-value]

    return named
