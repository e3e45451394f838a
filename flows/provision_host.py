"""One host gets its environment: seen, decided, gathered, built. A second run finds it and changes nothing.

Only order stands here. A protected host is approved twice: to be looked at and, when it is known what that needs, to be
changed; what was seen is remembered in between, so that the run which the approval starts goes on with it.
"""

import re
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from flows.awaiting import awaiting_approval, require
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from flows.terminal import say_progress, shown_progress
from tasks import provisioning
from tasks.approvals import Approved
from tasks.environments import ProfileName
from tasks.errors import Refused
from tasks.facts import Questions
from tasks.inventory import Host
from tasks.provision_errors import HostChangedError
from tasks.provisioning import MOST_TRIES, Environment, Observation, Prepared
from tasks.ssh import Connector


@flow(name="provision-host", flow_run_name="provision {host}")
@named_states
def provision_host(
    host: str,
    profile: ProfileName = "eval",
    python: str | None = None,
    refresh: bool = False,
    hosts: Path | None = None,
) -> Environment:
    """Have ``host`` get the environment of ``profile``; ``python`` is a path or a release there, else the newest.

    ``refresh`` asks the package index again what there is. Raises ``Refused`` when the host is protected and the next
    step is not approved; the run is then in the state ``AwaitingApproval``.
    """
    forget_agent()
    connector = Connector.load(hosts)
    one = connector.inventory.host(host)
    with provisioning.one_at_a_time(one, notice):
        prepared = provisioning.recalled(one, profile, python=python, refresh=refresh, notice=notice)
        asked = provisioning.questions(one)
        for tries in range(1, MOST_TRIES + 1):
            plan = provisioning.plan_observation(one, asked) if prepared is None else prepared.plan
            try:
                if prepared is None:
                    seen = observe_step(connector, one, require(connector.store, plan), asked)
                    prepared = prepare_step(one, seen, profile, python, refresh=refresh)
                    plan = prepared.plan
                environment = build_step(connector, prepared, require(connector.store, plan))
                break
            except Refused as refusal:
                return awaiting_approval(connector.store, plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
            except HostChangedError:
                # another command was at work there; where each step is approved, somebody has to look at it first
                if one.protected or tries == MOST_TRIES:
                    raise
                prepared = None
    publish(environment, profile)
    return environment


@task(name="observe", task_run_name="look at {host.name}", cache_policy=NO_CACHE)
def observe_step(connector: Connector, host: Host, approved: Approved | None, asked: Questions) -> Observation:
    """Ask the host what it is and what environments it has."""
    return provisioning.observe(connector, host, approved, asked)


@task(name="gather", task_run_name="wheels for {host.name}", cache_policy=NO_CACHE)
def prepare_step(host: Host, seen: Observation, profile: ProfileName, python: str | None, *, refresh: bool) -> Prepared:
    """Decide what is to be done, and gather what travels."""
    decided = provisioning.decide(host, seen, profile, python=python, refresh=refresh, notice=notice)
    return provisioning.prepare(decided, seen, notice)


@task(name="build", cache_policy=NO_CACHE)
def build_step(connector: Connector, prepared: Prepared, approved: Approved | None) -> Environment:
    """Send it and have it built, verified and switched to; nothing when it is there."""
    with shown_progress(f"wheels to {prepared.provision.host.name}") as progress:
        return provisioning.provision(connector, approved, prepared, progress, notice)


def publish(environment: Environment, profile: ProfileName) -> None:
    """Leave what is there now as a Prefect artifact."""
    key = re.sub("[^a-z0-9]+", "-", environment.host.lower()).strip("-")
    outcome = "built" if environment.changed else "it was there already"
    create_markdown_artifact(
        f"# {profile} on {environment.host}\n\n`{environment.path}`: {environment.packages} packages, Python "
        f"{environment.python}, {outcome}\n\ndigest `{environment.digest}`\n",
        key=f"environment-{key}",
        description=f"{profile} on {environment.host}, {outcome}",
    )


def notice(text: str) -> None:
    """A line on stderr for whoever waits."""
    say_progress(f"  {text}")
