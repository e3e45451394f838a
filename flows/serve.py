"""``dflash-ops serve``: an embedded Prefect server, every deployment and the watches, in one process until it is ended.

What a run started on a host goes on there by itself. Ending this process ends its runs; what they were about is in the
ledger, and the next ``serve`` takes it up again.
"""

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dflash.command_line import leaves
from dflash.errors import DFlashError, UsageError
from dflash.prompts import read_prompts, require_thinking
from flows import prefect_database, pruning, workers
from flows.deployments import Nightly, deployments
from flows.embedded_server import EmbeddedServer, ServerError, answers, api_url
from flows.prefect_home import configure_prefect, home, serving
from flows.pruning import Retention
from flows.serving import POLL_SECONDS, Serving, end_left_over
from flows.terminal import AsJson, HostsFile, PlanOnly, open_store, show_plan
from flows.watching import Watching, default_suite, saved_trigger, sources
from flows.workers import Workers
from tasks.actions import escape
from tasks.inventory import Inventory
from tasks.state import state_dir
from tasks.watch import Rules, plan_watch

PORT = 4200
CLIENT_RETRIES = 9
"""With a doubling pause from 2 s on: a run waits some ten minutes for a server that is being restarted."""


class AlreadyServingError(DFlashError):
    """Another ``dflash-ops serve`` runs over the same state folder."""

    state_name = "AlreadyServing"


@leaves("what runs on hosts goes on there, and the next dflash-ops serve takes it up")
def serve(
    watched: Annotated[
        list[str] | None, typer.Option("--watch", metavar="HOST:/FOLDER", help="Else all that hosts.yaml names.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Of what is found; the shipped coding10 by default.")] = None,
    thinking: Annotated[str, typer.Option(help="on or off, for prompts that are chats.")] = "off",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 256,
    by_event: Annotated[
        bool, typer.Option("--by-event", help="Events start evaluations, not the watch itself.")
    ] = False,
    nightly: Annotated[str, typer.Option(help="Cron schedule of the nightly comparison.")] = Nightly.cron,
    timezone: Annotated[str, typer.Option(help="Its timezone, as in Europe/Berlin.")] = Nightly.timezone,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the Prefect server, on 127.0.0.1.")] = PORT,
    keep_runs: Annotated[float, typer.Option(help="Days that ended runs are kept with their logs.")] = Retention.runs,
    keep_events: Annotated[float, typer.Option(help="Days that events are kept.")] = Retention.events,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Run everything that is due until it is ended: watch for checkpoints, evaluate them, compare every night.

    With PREFECT_API_URL set, that server is used; else one is started here, over SQLite in the state folder.
    """
    known, store = open_store(hosts)
    keep = Retention(runs=keep_runs, events=keep_events)
    watches = _watches(known, watched, prompts, thinking, max_new_tokens, by_event, hosts)
    if plan:
        for one in watches:
            show_plan(store, plan_watch(known.location(one.source)), f"watching {one.source}", as_json=as_json)
        return
    with _alone():
        end_left_over()
        embedded = configure(port, keep)
        more = {"evaluate_checkpoint": workers.deployment_options(known)}
        if by_event:
            more["evaluate_checkpoint"]["triggers"] = [saved_trigger(one) for one in watches]
        wanted = deployments(hosts, nightly=Nightly(nightly, timezone), more=more)
        with _server(port) if embedded else _others_server() as server:
            shared = Workers(tuple(host.name for host in workers.sharing_hosts(known)), state_dir() / "logs")
            asyncio.run(Serving(wanted, watches, shared, server, _say).run())
    _say("ended")


def _watches(
    known: Inventory,
    watched: Sequence[str] | None,
    prompts: Path | None,
    thinking: str,
    max_new_tokens: int,
    by_event: bool,
    hosts: Path | None,
) -> list[Watching]:
    if thinking not in ("on", "off"):
        raise UsageError(f"--thinking '{escape(thinking)}' is neither on nor off")
    suite = replace(default_suite(), thinking=thinking, max_new_tokens=max_new_tokens)
    if prompts is not None:
        suite = replace(suite, prompts=prompts)
    require_thinking(read_prompts(suite.prompts).prompts, thinking == "on")
    found = tuple(watched or sources(known))
    for source in found:
        known.location(source)
    rules = Rules(at_once=1 + sum(host.role == "inference" for host in known.hosts.values()), by_event=by_event)
    return [Watching(source, suite, hosts=hosts, rules=rules) for source in found]


def configure(port: int, keep: Retention) -> bool:
    """Put what this process and its runs need into the environment; whether the server is to be embedded."""
    embedded = "PREFECT_API_URL" not in os.environ
    if embedded:
        os.environ["PREFECT_API_URL"] = api_url(port)
    own = {
        **pruning.settings(keep),
        "PREFECT_RUNNER_POLL_FREQUENCY": str(POLL_SECONDS),
        "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)
    configure_prefect()
    return embedded


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the state folder's lock of serving. Raises :class:`AlreadyServingError`."""
    with (state_dir() / "serve.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = serving() or "it is just starting"
            raise AlreadyServingError(
                f"another dflash-ops serve runs over {state_dir()} already ({where}): end that one, or use it"
            ) from None
        yield


@contextmanager
def _server(port: int) -> Iterator[EmbeddedServer]:
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    if "PREFECT_API_DATABASE_CONNECTION_URL" not in os.environ:
        prefect_database.make_ready(home() / "prefect.db", _say)
    _say("starting the Prefect server (the first time it makes its database, half a minute)")
    server = EmbeddedServer(port)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def _others_server() -> Iterator[None]:
    api = os.environ["PREFECT_API_URL"]
    if not answers(api):
        raise ServerError(f"no Prefect server answers at {api}, which PREFECT_API_URL names: start it, or unset it")
    yield


def _say(text: str) -> None:
    print(f"dflash-ops serve: {text}", file=sys.stderr, flush=True)
