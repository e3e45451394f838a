"""``dflash-ops provision``: a host gets the environment that runs there."""

import json
from dataclasses import asdict
from typing import Annotated, get_args

import typer

from dflash.command_line import leaves
from dflash.errors import UsageError
from flows.prefect_home import configure_prefect
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, show_plan
from tasks import provisioning
from tasks.actions import escape
from tasks.environments import ProfileName, Provision, environments_folder
from tasks.inventory import Host
from tasks.provisioning import Environment
from tasks.ssh import Connector


@leaves("the environment that was current there stays so; the same command goes on")
def provision(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.yaml.")],
    profile: Annotated[
        str, typer.Option(help="eval: what evaluations run; train: with training data; slim: without torch.")
    ] = "eval",
    python: Annotated[
        str | None, typer.Option(help="Its path on the host or a release such as 3.12; else the newest.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the package index again, for versions that are not constrained.")
    ] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Build HOST's virtual environment, verify it and have 'current' lead there; what is there already stays as it is.

    A protected host needs two approvals: to be looked at, and to be changed.
    """
    if profile not in get_args(ProfileName):
        raise UsageError(f"--profile {escape(profile)!r} is not one of {', '.join(get_args(ProfileName))}")
    wanted: ProfileName = profile  # type: ignore[assignment]  # just checked
    connector = Connector.load(hosts)
    one = connector.inventory.host(host)
    environments_folder(one)
    needed = provisioning.next_plan(one, wanted, python=python, refresh=refresh) if one.protected else None
    if plan:
        show_plan(connector.store, needed, f"an environment on {one.name}", as_json=as_json)
        if needed is None and not as_json:
            show_decision(decide(connector, one, wanted, python))
        return
    if needed is not None:
        connector.store.require(needed, asked_here())
    configure_prefect()
    from flows.provision_host import provision_host

    environment = provision_host(one.name, wanted, python, refresh, hosts)
    if as_json:
        typer.echo(json.dumps(asdict(environment)))
    else:
        show_environment(environment)


def decide(connector: Connector, host: Host, profile: ProfileName, python: str | None) -> Provision:
    """What would be done on an unprotected ``host``, which is looked at for it."""
    seen = provisioning.observe(connector, host, None, provisioning.questions(host))
    return provisioning.decide(host, seen, profile, python=python)


def show_decision(decided: Provision) -> None:
    """Say what is there, or what would travel and be built."""
    if decided.satisfied:
        typer.echo(f"{decided.host.name}: {escape(decided.path)} is there and current; nothing would change")
        return
    wish = decided.wish
    count = len(decided.lock.packages)
    way = f"from {escape(wish.index)}" if wish.index else "from wheels that are sent"
    typer.echo(f"{decided.host.name}: {escape(decided.path)} would be built with Python {wish.target.version}")
    typer.echo(f"{count} packages {way}, {len(decided.carried)} wheels to send")


def show_environment(environment: Environment) -> None:
    """Say what is current now, and whether that is new."""
    changed = "built and current now" if environment.changed else "was there already, nothing changed"
    typer.echo(f"{environment.host}: {escape(environment.path)}: {changed}")
    typer.echo(f"{environment.packages} packages, Python {environment.python}, digest {environment.digest}")
    for name in environment.removed:
        typer.echo(f"removed {escape(name)}, which nothing used")
