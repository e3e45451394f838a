"""What becomes of a flow that the guard refused, and how it goes on once the operator has approved.

Nothing waits: the run ends in the state :data:`STATE` with an artifact that shows the plan and the command. Approving
starts the deployment anew, and that run asks the guard again. Prefect is never asked whether something is approved, so
no state that its API or its page can force lets anything through.
"""

import io
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rich.console import Console

from dflash.errors import DFlashError
from flows.fenced import fenced
from flows.prefect_home import configure_prefect
from tasks import countersigning
from tasks.approvals import ApprovalStore, Approved
from tasks.errors import Refused
from tasks.plans import Plan
from tasks.requests import Origin, Request

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

STATE = "AwaitingApproval"


class NotStartedError(DFlashError):
    """The approval counts, but the deployment that asked for it could not be started."""


def require(store: ApprovalStore, plan: Plan | None) -> Approved | None:
    """The approval of ``plan``, within a flow; None when nothing needs one.

    Raises ``Refused`` without one. Its request then knows this run's deployment, so that approving can start it again.
    """
    return None if plan is None else store.require(plan, _origin())


def awaiting_approval(store: ApprovalStore, plan: Plan | None, refusal: Refused) -> Any:
    """The final state of a flow that met ``refusal``, for the flow to return; whoever called the flow gets ``refusal``.

    Raises ``refusal`` itself when there is nothing to approve: no plan, or an approval that is in force and was refused
    for another reason.
    """
    if plan is None:
        raise refusal
    request = _waiting(store, plan, refusal)
    pending = request.status == "pending"
    command = f"dflash-ops guard approve {request.id}" if pending else countersigning.command(request.id)
    _leave_artifact(request, command)
    # failed, not completed: whatever waits for this run must not take it for done
    return _failed(refusal, f"request {request.id} waits: {command}")


def start_deployment(request: Request) -> str | None:
    """Start what asked for ``request``, once however often this is called; its run's name, None when there is no way.

    There is none when no deployment asked, or no Prefect API is configured. Raises :class:`NotStartedError` when the
    API does not answer or does not know the deployment.
    """
    if request.origin is None or request.origin.deployment is None:
        return None
    configure_prefect()
    import httpx
    from prefect.deployments import run_deployment
    from prefect.exceptions import PrefectException
    from prefect.settings import get_current_settings

    api = get_current_settings().api.url
    if api is None:
        return None
    try:
        run = run_deployment(
            UUID(request.origin.deployment),
            parameters=request.origin.parameters,
            idempotency_key=request.id,
            timeout=0,
            as_subflow=False,
        )
    except (PrefectException, httpx.HTTPError, ValueError) as error:
        raise NotStartedError(
            f"request {request.id} is approved, but its deployment {request.origin.deployment} was not started by "
            f"{api}: {error or type(error).__name__}; start it there yourself while the approval counts"
        ) from error
    assert not isinstance(run, Coroutine)
    return run.name


def _origin() -> Origin | None:
    """The deployment of the flow run that this is called in; None for a flow that was called as a function."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return None
    run = context.flow_run
    return Origin(deployment=str(run.deployment_id), parameters=run.parameters, flow_run=str(run.id))


def _waiting(store: ApprovalStore, plan: Plan, refusal: Refused) -> Request:
    """The request that has to be answered before ``plan`` can go on; a new one when its approval ended meanwhile."""
    if refusal.request_id is not None:
        request = store.get(refusal.request_id)
        if request.status == "pending":
            return request
    try:
        store.require(plan, _origin())
    except Refused as unapproved:
        if unapproved.request_id is None:
            raise
        return store.get(unapproved.request_id)
    raise refusal


def _leave_artifact(request: Request, command: str) -> None:
    from prefect.artifacts import create_markdown_artifact

    text = io.StringIO()
    request.plan.render(Console(file=text, width=80))
    create_markdown_artifact(
        f"# Waits for the operator's approval\n\n{fenced(text.getvalue())}\n"
        f"On the operator's machine, at a terminal:\n\n{fenced(command)}\n"
        "Nothing on this page approves it: whatever state this run is set to, nothing runs on the host.\n",
        key=f"approval-{request.id}",
        description=f"request {request.id}",
    )


def _failed(refusal: Refused, message: str) -> "State[Any]":
    from prefect.states import Failed

    return Failed(name=STATE, message=message, data=refusal)
