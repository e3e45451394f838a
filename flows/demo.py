"""``dflash-ops demo``: the whole pipeline over the local lab, with a really trained drafter and its real numbers."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dflash.command_line import leaves
from dflash.errors import DFlashError
from flows.cli_evaluate import run_evaluations, show_evaluations
from flows.decide import decide
from flows.prefect_home import configure_prefect
from flows.terminal import console
from tasks import process
from tasks.errors import Refused
from tasks.evaluation import Suite, plan_evaluation
from tasks.lab import CHECKPOINTS, MODELS, Lab, remove_tree
from tasks.plans import Plan
from tasks.ssh import Connector
from tasks.state import state_dir

CHECKOUT = Path(__file__).parents[1]
FIXTURES = CHECKOUT / "tests" / "fixtures"
PROMPTS = CHECKOUT / "prompts" / "tiny.jsonl"
STEPS = (100, 200, 400)
SUITE = Suite(prompts=PROMPTS, max_new_tokens=96, ignore_eos=True)


class NoCheckoutError(DFlashError):
    """The demo's models and prompts come with the source checkout, not with an installed package."""


@leaves("the same command begins anew")
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up at the end.")] = False,
) -> None:
    """Send three training checkpoints across the lab's two networks and measure each beside the reference drafter."""
    if not FIXTURES.is_dir():
        raise NoCheckoutError(f"{FIXTURES} is missing: run the demo from a source checkout")
    configure_prefect()
    reports = state_dir() / "demo" / "reports"
    with _clean_state() as state:
        _say("lab up: two hosts with a real sshd, on networks that cannot see each other")
        lab = Lab.up(state)
        try:
            if lab.weaker:
                _say(f"weaker than as root: {lab.weaker}")
            _say("training a drafter of the tiny hybrid target, 3 checkpoints (a minute, once)")
            _furnish(lab)
            with lab.entered():
                _evaluate(lab, reports)
        finally:
            if keep:
                _say(f"lab left up, docs/lab.md says what to try in it; take it down with {take_down(state)}")
            else:
                lab.down()
                _say("lab down")


def take_down(state: Path) -> str:
    """The command that ends a lab left up, for a shell that knows nothing of this environment."""
    program = Path(sys.executable).with_name("dflash-ops")
    return f"DFLASH_STATE={shlex.quote(str(state))} {shlex.quote(str(program))} lab down"


def _evaluate(lab: Lab, reports: Path) -> None:
    connector = Connector.load(lab.hosts_file)
    inventory = connector.inventory
    host = inventory.host("ct129")
    sources = [inventory.location(f"kpro6:{lab.seen('kpro6', f'{CHECKPOINTS}/step_{step}.pt')}") for step in STEPS]
    plan = plan_evaluation(sources, host)
    assert plan is not None
    _say("without an approval nothing happens on the training host:")
    request = _refused(connector, plan)
    at_terminal = sys.stdin.isatty()
    _say("your approval" if at_terminal else "no terminal here, so the lab's own CA signs unattended (a lab's only)")
    decide(inventory, connector.store, connector.store.get(request), reason=None if at_terminal else "demo")
    _say("relay, evaluate on ct129, fetch the report: one Prefect flow run a checkpoint")
    done = run_evaluations(sources, host, SUITE, reports, lab.hosts_file)
    show_evaluations(done)


def _refused(connector: Connector, plan: Plan) -> str:
    """Ask without an approval, show the refusal, and return the id of the request it left."""
    try:
        connector.store.require(plan)
    except Refused as refusal:
        print(f"  refused (exit code {refusal.exit_code}): {refusal}")
        if refusal.request_id is not None:
            return refusal.request_id
        raise
    raise DFlashError("reading the training host was not refused: the guard is off")


@contextmanager
def _clean_state() -> Iterator[Path]:
    """A state folder of the demo's own: requests and audit of an earlier lab would be another CA's."""
    state = state_dir() / "demo"
    Lab.remove(state)
    remove_tree(state / "guard")
    state.mkdir(parents=True, mode=0o700, exist_ok=True)
    before = os.environ.get("DFLASH_STATE")
    os.environ["DFLASH_STATE"] = str(state)
    try:
        yield state
    finally:
        if before is None:
            del os.environ["DFLASH_STATE"]
        else:
            os.environ["DFLASH_STATE"] = before


def _furnish(lab: Lab) -> None:
    """Put checkpoints on the training host, target and reference drafter on the inference host."""
    place = str(lab.host_path("kpro6", CHECKPOINTS))
    process.run([sys.executable, "-m", "tests.fixtures.make_checkpoints", "--output", place], cwd=CHECKOUT, timeout=600)
    models = lab.host_path("ct129", MODELS)
    shutil.copytree(FIXTURES / "tiny-hybrid", models / "target")
    shutil.copytree(FIXTURES / "tiny-hybrid-dflash", models / "reference")


def _say(text: str) -> None:
    # soft: a command in the text can be copied
    console().print(f"\n[bold]▸[/bold] {text}", soft_wrap=True)
