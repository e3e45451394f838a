"""``dflash-ops notify``: who is told, and whether telling them works."""

import json
import sys
from typing import Annotated

import typer

from dflash.command_line import leaves
from dflash.errors import UsageError
from flows.notify import notify, save_block
from flows.terminal import AsJson, HostsFile
from tasks import inventory
from tasks.actions import escape

app = typer.Typer(no_args_is_help=True, help="Who is told of verdicts, grants and failures, by Prefect's blocks.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="TYPE/NAME", help="custom-webhook/NAME, or apprise/NAME for mail.")],
    as_json: AsJson = False,
) -> None:
    """Save a block: the URL is asked for at a terminal, else read from stdin, for it may hold a secret.

    A webhook gets {"subject", "body"} by POST; an Apprise URL for mail is mailtos://user:password@smtp.example.org.
    Then name the block under notify in hosts.yaml.
    """
    url = str(typer.prompt("URL", hide_input=True)) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not url:
        raise UsageError("no URL was given; type it when asked, or pipe it in")
    save_block(name, url)
    typer.echo(json.dumps({"saved": name}) if as_json else f"saved {escape(name)}; name it under notify in hosts.yaml")


@app.command("test")
@leaves("some may have been told")
def send_test(hosts: HostsFile = None, as_json: AsJson = False) -> None:
    """Send a test message to everybody whom hosts.yaml names."""
    known = inventory.load(hosts)
    if not known.notify:
        raise UsageError("hosts.yaml names nobody under notify; make a block with 'dflash-ops notify add' and name it")
    told = notify(known, "DFlash: a test", "This is a test: whoever reads it is told of verdicts, grants and failures.")
    typer.echo(json.dumps({"told": told}) if as_json else f"told {escape(', '.join(told))}")
