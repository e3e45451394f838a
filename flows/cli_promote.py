"""``dflash-ops promote``: a drafter is confirmed, exported beside the served one and named by the link, by a human."""

import getpass
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from dflash.command_line import leaves
from dflash.errors import DFlashError, UsageError
from dflash.prompts import read_prompts, require_thinking
from dflash.report import Report
from flows.prefect_home import configure_prefect
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing
from tasks import confirmation, promotion
from tasks.actions import escape
from tasks.evaluation import Suite, inference_host, plan_evaluation
from tasks.ledger import Ledger, Seen
from tasks.nights import EXPORTED, PROMOTED
from tasks.promotion import Links, Place
from tasks.ssh import Connector
from tasks.state import state_dir
from tasks.watch import source_of


@leaves("the link there names the old drafter or the new one, each whole; the same command ends what was cut short")
def promote(
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The checkpoint's step; none with --rollback.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="Inference host; needed when hosts.yaml has several.")] = None,
    identity: Annotated[str | None, typer.Option(help="How its identity begins, where a step was saved twice.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="What confirms it; the shipped promotion prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 256,
    thinking: Annotated[str | None, typer.Option(help="on or off; off for the shipped prompts.")] = None,
    unconfirmed: Annotated[
        str | None, typer.Option(metavar="REASON", help="Promote though it is not shown to be better, and say why.")
    ] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Serve again what was served before.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes-at-terminal", help="Do not ask; a terminal is needed all the same.")
    ] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Put a drafter in the place of the served one, confirmed on prompts that it was not chosen by.

    It is exported beside the reference drafter, read again, and named by a link that changes in one step; what the link
    named before is kept. No server is restarted: the command for that is printed.
    """
    if rollback == (step is not None):
        raise UsageError("say which step to promote, or --rollback and no step")
    connector = Connector.load(hosts)
    place = Place.of(inference_host(connector.inventory, on))
    asked = _Promotion(connector, place, Ledger.open(), _suite(prompts, max_new_tokens, thinking), hosts, unconfirmed)
    if plan:
        _show_plan(asked, None if step is None else confirmation.find_step(asked.ledger, step, identity), as_json)
        return
    if not sys.stdin.isatty():
        raise UsageError("a promotion is confirmed by a human: run this at a terminal")
    done: tuple[Links, int | None]
    if step is None:
        done = _roll_back(asked, yes)
    else:
        done = _promote(asked, confirmation.find_step(asked.ledger, step, identity), yes)
    _show(place, done, as_json)


class _Promotion:
    """What a promotion is made with."""

    def __init__(
        self,
        connector: Connector,
        place: Place,
        ledger: Ledger,
        suite: Suite,
        hosts: Path | None,
        unconfirmed: str | None,
    ) -> None:
        self.connector, self.place, self.ledger, self.suite, self.hosts = connector, place, ledger, suite, hosts
        self.unconfirmed = unconfirmed

    def report(self, checkpoint: Seen) -> Report:
        """The checkpoint's report in the suite that confirms; it is evaluated when there is none."""
        host = self.place.host
        known = confirmation.measured_on(self.ledger, checkpoint, self.suite.digest(), host)
        if known is not None:
            return known
        needed = plan_evaluation([self.connector.inventory.location(source_of(checkpoint))], host)
        if needed is not None:
            self.connector.store.require(needed, asked_here())
        configure_prefect()
        from flows.evaluate_checkpoint import evaluate_checkpoint

        reports = state_dir() / "reports"
        source = source_of(checkpoint)
        return evaluate_checkpoint(
            source, host.name, self.suite, reports, self.hosts, identity=checkpoint.identity
        ).report

    def served(self, before: Links) -> Seen | None:
        return confirmation.served_checkpoint(self.connector.audit, self.ledger, self.place.host, before.current)


def _promote(asked: _Promotion, checkpoint: Seen, yes: bool) -> tuple[Links, int]:
    prompts_sha256 = confirmation.require_unseen(asked.suite, asked.ledger)
    before = promotion.links(asked.connector, asked.place)
    directory = asked.place.directory(checkpoint)
    report, served = asked.report(checkpoint), asked.served(before)
    if before.current != directory.name:
        line, found = confirmation.confirm(report, None if served is None else asked.report(served))
        typer.echo(f"step {checkpoint.step}, {line}", err=True)
        if asked.unconfirmed is None:
            confirmation.require_confirmed(line, found)
        _ask(f"promote step {checkpoint.step} to {asked.place.host.name}:{asked.place.link}?", yes)
        known = confirmation.weights_of(asked.connector.audit, asked.place.host, directory.name)
        weights = promotion.export(asked.connector, asked.place, report, directory, known=known)
        if weights != known:
            about = {"identity": checkpoint.identity, "directory": directory.name, "weights": weights}
            asked.connector.audit.append(EXPORTED, host=asked.place.host.name, **about)
        promotion.require_loads(asked.connector, asked.place, report, directory)
        # before the effect: a promotion that is not on record has not happened
        asked.connector.audit.append(
            PROMOTED,
            host=asked.place.host.name,
            identity=checkpoint.identity,
            step=checkpoint.step,
            directory=directory.name,
            before=before.current,
            prompts=prompts_sha256,
            shown=line,
            unconfirmed=asked.unconfirmed,
            operator=getpass.getuser(),
        )
        before = promotion.switch(asked.connector, asked.place, directory, before)
    return before, report.settings.block_size


def _roll_back(asked: _Promotion, yes: bool) -> tuple[Links, int | None]:
    """The links afterwards, and the block size of what is served again; None where that cannot be told."""
    before = promotion.links(asked.connector, asked.place)
    if before.previous is None:
        raise promotion.PromotionError(
            f"{asked.place.host.name}:{asked.place.link} has named nothing before, so there is nothing to go back to"
        )
    _ask(f"serve {escape(before.previous)} again, in place of {escape(before.current or 'nothing')}?", yes)
    asked.connector.audit.append(
        "rollback",
        host=asked.place.host.name,
        directory=before.previous,
        before=before.current,
        operator=getpass.getuser(),
    )
    after = promotion.rollback(asked.connector, asked.place, before)
    try:
        return after, promotion.block_size(asked.connector, asked.place)
    except DFlashError as error:
        # it is done: called a failure it would be done again, and that takes it back
        typer.echo(f"how a server is started with it cannot be told: {error}", err=True)
        return after, None


def _ask(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(1)


def _show(place: Place, done: tuple[Links, int | None], as_json: bool) -> None:
    after, block_size = done
    commands = [] if block_size is None else promotion.server_commands(place, block_size)
    if as_json:
        typer.echo(json.dumps({"host": place.host.name, "link": str(place.link), **vars(after), "commands": commands}))
        return
    typer.echo(f"{place.host.name}:{place.link} names {escape(after.current or 'nothing')}")
    if after.previous is not None:
        typer.echo(f"before it: {escape(after.previous)}, which 'dflash-ops promote --rollback' brings back")
    typer.echo("no server was restarted" + ("; with its other options as they are:" if commands else ""))
    for command in commands:
        typer.echo(command)


def _show_plan(asked: _Promotion, checkpoint: Seen | None, as_json: bool) -> None:
    """What would be done, in its order; nothing is asked of a host."""
    place = asked.place
    steps = [("asked", f"{place.host.name}: what {place.link} names")]
    if checkpoint is not None:
        measured = confirmation.measured_on(asked.ledger, checkpoint, asked.suite.digest(), place.host)
        if measured is None:
            steps.append(("evaluated", f"{source_of(checkpoint)} on {place.host.name} with {asked.suite.prompts}"))
        steps += [
            ("compared", "with the one that is served, else with the reference"),
            ("confirmed", "by you, at this terminal"),
            ("exported", f"{place.host.name}:{place.directory(checkpoint)}"),
            ("read again", "as an evaluation would"),
        ]
    else:
        steps.append(("confirmed", "by you, at this terminal"))
    steps.append(
        ("link changed", f"{place.host.name}:{place.link}, what it named before kept as {place.link}.previous")
    )
    if as_json:
        typer.echo(json.dumps([{"step": name, "what": what} for name, what in steps]))
        return
    table = listing("step", "what", folded="what")
    for name, what in steps:
        table.add_row(name, Text(escape(what)))
    console().print(table)


def _suite(prompts: Path | None, max_new_tokens: int, thinking: str | None) -> Suite:
    if thinking not in (None, "on", "off"):
        raise UsageError(f"--thinking {escape(str(thinking))!r} is neither on nor off")
    if prompts is None:
        usual = confirmation.promotion_suite()
        return replace(usual, max_new_tokens=max_new_tokens, thinking=thinking or usual.thinking)
    require_thinking(read_prompts(prompts).prompts, None if thinking is None else thinking == "on")
    return Suite(prompts=prompts, max_new_tokens=max_new_tokens, thinking=thinking)
