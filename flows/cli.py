"""The ``dflash-ops`` command, for the operator's machine."""

import typer

from flows import cli_audit, cli_guard, cli_hosts, cli_lab, cli_notify
from flows.cli_evaluate import evaluate
from flows.cli_jobs import jobs_app, launch
from flows.cli_nightly import compare_nightly
from flows.cli_promote import promote
from flows.cli_provision import provision
from flows.cli_relay import relay
from flows.cli_status import status
from flows.demo import demo
from flows.serve import serve

app = typer.Typer(
    help="Move checkpoints to where they can be measured, and measure them; never disturb the training host.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(cli_lab.app, name="lab")
app.command()(serve)
app.command()(status)
app.add_typer(cli_hosts.hosts_app, name="hosts")
app.command()(relay)
app.command()(evaluate)
app.command()(provision)
app.command("compare-nightly")(compare_nightly)
app.command()(promote)
app.add_typer(cli_notify.app, name="notify")
app.command()(launch)
app.add_typer(jobs_app, name="jobs")
app.add_typer(cli_guard.app, name="guard")
app.add_typer(cli_audit.app, name="audit")
