"""``dflash-ops launch`` and ``dflash-ops jobs``: training runs as jobs of their hosts, which go on by themselves."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.text import Text

from dflash.command_line import NOTHING_CHANGED, leaves
from dflash.errors import DFlashError, Interrupted, UsageError
from flows.prefect_home import configure_prefect
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing, show_plan
from tasks import jobs as watched
from tasks import launching
from tasks.actions import escape, said
from tasks.audit import show_time
from tasks.inventory import Host
from tasks.jobs import JobStatus, SignalName
from tasks.quantities import show_size
from tasks.run_file import read_run
from tasks.ssh import Connector

jobs_app = typer.Typer(no_args_is_help=True, help="Jobs that were launched on a host.")

HostName = Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.yaml.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Its id, as 'jobs list' shows it.")]


@leaves("a job that has started goes on; the same command finds it and starts nothing twice")
def launch(
    config: Annotated[Path, typer.Option(help="run.yaml: what is to run, see docs/launching.md.")],
    on: Annotated[str | None, typer.Option(help="The host, where the file names none.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Launch the same run again, as this attempt.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show its log until it ends; Ctrl-C leaves it alone.")
    ] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Launch a training run as a job that goes on by itself; launched again, the same run is found and left alone."""
    connector = Connector.load(hosts)
    described = read_run(config, attempt=attempt)
    prepared = launching.prepare(described, launching.run_host(connector.inventory, described, on))
    if plan:
        show_plan(connector.store, prepared.plan, f"job {prepared.job} on {prepared.host.name}", as_json=as_json)
        return
    found = launching.find(connector, prepared)
    if found is None:
        if prepared.plan is not None:
            connector.store.require(prepared.plan, asked_here())
        configure_prefect()
        from flows.launch_training import launch_training

        found = launch_training(str(config.absolute()), on, attempt, hosts)
    if as_json:
        typer.echo(json.dumps({"host": found.host, "found": found.found, **asdict(found.status)}))
    else:
        typer.echo(f"{found.job} on {found.host}: " + (_sentence(found.status) if found.found else "launched"))
    if found.found and found.status.over:
        typer.echo(f"nothing was started; to run it again: --attempt {described.run.attempt + 1}", err=True)
    if follow:
        logs(found.host, found.job, follow=True, hosts=hosts)


@jobs_app.callback()
def jobs() -> None:
    """Jobs that were launched on a host: they go on by themselves and are looked at from here."""


@jobs_app.command("list")
@leaves(NOTHING_CHANGED)
def list_jobs(
    host: Annotated[str | None, typer.Argument(metavar="[HOST]", help="Else every host that has jobs.")] = None,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of HOST, or of all hosts that may be looked at, the newest first."""
    connector = Connector.load(hosts)
    if host is not None:
        one = connector.inventory.host(host)
        needed = watched.plan_observation(one)
        if plan:
            show_plan(connector.store, needed, f"the jobs of {one.name}", as_json=as_json)
            return
        found = {
            one.name: watched.all_statuses(
                connector, one, watched.require_observation(connector.store, one, None, asked_here())
            )
        }
        _show_jobs(found, as_json=as_json)
        return
    if plan:
        raise UsageError("name the host whose plan is to be shown")
    found, unknown = {}, []
    for one in (each for each in connector.inventory.hosts.values() if each.jobs is not None):
        approval = watched.approval_in_force(connector.store, one)
        if one.protected and approval is None:
            unknown.append(f"{one.name}: looking there needs an approval: dflash-ops jobs list {one.name}")
            continue
        try:
            found[one.name] = watched.all_statuses(connector, one, approval)
        except DFlashError as error:
            unknown.append(str(error))
    _show_jobs(found, as_json=as_json)
    for line in unknown:
        typer.echo(line, err=True)


@jobs_app.command()
@leaves(NOTHING_CHANGED)
def status(
    host: HostName, job: JobName, plan: PlanOnly = False, hosts: HostsFile = None, as_json: AsJson = False
) -> None:
    """Say how JOB is; exit code 1 when that cannot be told: the host does not answer, or there is no such job."""
    connector = Connector.load(hosts)
    one = connector.inventory.host(host)
    needed = watched.plan_observation(one, job)
    if plan:
        show_plan(connector.store, needed, f"job {job} of {one.name}", as_json=as_json)
        return
    reading = watched.require_observation(connector.store, one, job, asked_here())
    found = watched.status(connector, one, reading, job)
    if as_json:
        typer.echo(json.dumps({"host": one.name, **asdict(found)}))
    else:
        _show_one(one, found)
    if found.state in ("unreachable", "unknown job"):
        raise typer.Exit(1)


@jobs_app.command()
def logs(
    host: HostName,
    job: JobName,
    offset: Annotated[int, typer.Option(min=0, help="Bytes to leave out: go on where an earlier look ended.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
) -> None:
    """Print what JOB wrote; a link that breaks is opened again and nothing is printed twice."""
    connector = Connector.load(hosts)
    one = connector.inventory.host(host)
    needed = watched.plan_observation(one, job)
    if plan:
        show_plan(connector.store, needed, f"the log of job {job} of {one.name}", as_json=False)
        return
    reading = watched.require_observation(connector.store, one, job, asked_here())
    written, show = offset, _Printer()

    def on_bytes(piece: bytes) -> None:
        nonlocal written
        show(piece)
        written += len(piece)

    if not follow:
        for piece in watched.logs(connector, one, reading, job, offset=offset):
            on_bytes(piece)
        show.close()
        return
    try:
        ended = watched.follow(connector, one, reading, job, on_bytes, offset=offset)
    except KeyboardInterrupt:
        raise Interrupted(f"the job goes on; to go on looking: --offset {written}") from None
    show.close()
    print(f"{job} on {one.name}: {_sentence(ended)}", file=sys.stderr)
    if ended.state in ("unreachable", "unknown job"):
        raise typer.Exit(1)


@jobs_app.command()
@leaves("the signal was sent or not; dflash-ops jobs status tells")
def stop(
    host: HostName,
    job: JobName,
    signal: Annotated[str, typer.Option(help="TERM asks it to end; KILL ends it, whatever it does not save.")] = "TERM",
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask JOB to end, with SIGTERM; every signal is an approval of its own on a protected host."""
    if signal not in get_args(SignalName):
        raise UsageError(f"--signal {escape(signal)!r} is none of {', '.join(get_args(SignalName))}")
    connector = Connector.load(hosts)
    one = connector.inventory.host(host)
    action, needed = watched.plan_stop(one, job, signal)  # type: ignore[arg-type]  # looked at above
    if plan:
        show_plan(connector.store, needed, f"stop job {job} of {one.name}", as_json=as_json)
        return
    approved = None if needed is None else connector.store.require(needed, asked_here())
    pid = watched.stop(connector, one, None if approved is None else approved.of(action), action)
    if as_json:
        typer.echo(json.dumps({"host": one.name, "job": job, "signal": signal, "pid": pid}))
    else:
        typer.echo(
            f"{job} on {one.name}: SIG{signal} sent to process {pid} and those it started; whether it ended says "
            f"dflash-ops jobs status {one.name} {job}"
        )


def _show_jobs(found: dict[str, tuple[JobStatus, ...]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([{"host": host, **asdict(one)} for host, several in found.items() for one in several]))
        return
    table = listing("host", "job", "started", "state", folded="state")
    for host, several in found.items():
        for one in several:
            started = "–" if one.started is None else show_time(one.started)
            table.add_row(*map(Text, (host, one.job, started, _sentence(one))))
    if table.row_count:
        console().print(table)
    else:
        typer.echo("no jobs")


def _show_one(host: Host, found: JobStatus) -> None:
    typer.echo(f"{found.job} on {host.name}: {_sentence(found)}")
    if found.command:
        typer.echo(f"command: {' '.join(map(said, found.command))}")
    if found.started is not None:
        ended = "" if found.ended is None else f", ended {show_time(found.ended)}"
        typer.echo(f"started: {show_time(found.started)}{ended}")
    if found.log_bytes is not None:
        typer.echo(f"log: {show_size(found.log_bytes)}, dflash-ops jobs logs {host.name} {found.job}")


def _sentence(found: JobStatus) -> str:
    """The state, with what belongs to it."""
    state: str = found.state
    if found.state == "running" and found.pid is not None:
        state = f"running, process {found.pid}"
    elif found.state == "exited":
        state = "exited" if found.exit is None else f"exited {found.exit}"
    return f"{state} ({found.message})" if found.message else state


class _Printer:
    """Prints bytes as they come: as they are into a file or a pipe; at a terminal only what is text, line by line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._rest = b""

    def __call__(self, piece: bytes) -> None:
        if not self._terminal:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        # a progress bar redraws its line; here every state of it is a line
        *lines, self._rest = (self._rest + piece).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line:
                self._print(line)

    def close(self) -> None:
        """Print what came without an end of line."""
        if self._rest:
            self._print(self._rest)

    def _print(self, line: bytes) -> None:
        print(escape(line.decode("utf-8", "replace")), flush=True)
