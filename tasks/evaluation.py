"""Running ``dflash evaluate`` on an inference host and bringing its report home.

The command is an argv list made from the host's entry in ``hosts.yaml`` (:func:`evaluation_argv`, pure) and started
over the control connection; what it prints on the way is handed on line by line. The report is read with the same
model that wrote it.
"""

import hashlib
import json
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from dflash.errors import DFlashError, NotValidError, UsageError
from dflash.prompts import read_prompts
from dflash.render import to_markdown
from dflash.report import RelayInfo, Report, read_report
from tasks.actions import said
from tasks.inventory import Host, Inventory, Location
from tasks.plans import Plan
from tasks.relay import RelayResult, Settings, plan_relay
from tasks.ssh import Connector

REPORT_FILES = ("report.json", "rounds.jsonl", "report.md")


class EvaluationError(DFlashError):
    """The evaluation did not end with a report; the message carries the last line the host printed."""


def inference_host(inventory: Inventory, name: str | None) -> Host:
    """Return the inference host called ``name``, or the only one. Raises :class:`UsageError`."""
    known = [host for host in inventory.hosts.values() if host.role == "inference"]
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        names = ", ".join(host.name for host in known) or "none"
        raise UsageError(f"hosts.yaml has {len(known)} inference hosts ({names}): name one with --on")
    host = inventory.host(name)
    if host not in known:
        raise UsageError(f"{host.name} is a {host.role} host; evaluations run on an inference host")
    return host


@dataclass(frozen=True)
class Suite:
    """What is asked of every checkpoint: the prompts and how far they are continued."""

    prompts: Path
    max_new_tokens: int = 256
    num_prompts: int | None = None
    ignore_eos: bool = False
    thinking: str | None = None  # "on" | "off"; needed when the prompts are chats

    def digest(self) -> str:
        """Return the sha256 of all that decides the number: the prompt file's content and every setting.

        Where the file lies does not count. Raises :class:`dflash.prompts.PromptFileError` when it cannot be read.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "prompts"}
        content = {"prompts_sha256": read_prompts(self.prompts).sha256, **settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Workspace:
    """The folder of one evaluation on the inference host."""

    path: PurePosixPath

    @property
    def prompts(self) -> PurePosixPath:
        """The prompt file, copied there so that both machines agree on its digest."""
        return self.path / "prompts.jsonl"

    @property
    def output(self) -> PurePosixPath:
        """Where ``dflash evaluate`` writes its report."""
        return self.path / "report"


DRAFTER = Settings(what="drafter", by_identity=True)
"""How a checkpoint is relayed to be evaluated: what the evaluation needs of it, each state in a folder of its own."""


def plan_evaluation(sources: Sequence[Location], host: Host) -> Plan | None:
    """Return what must be approved before ``sources`` may be evaluated on ``host``; None when nothing must be."""
    return plan_relay(sources, f"the drafter is read out of it and evaluated on {host.name}")


def checkpoint_place(host: Host, source: Location) -> Location:
    """Return the folder of what is relayed of a checkpoint: in the cache of ``host``, by the source's host and path."""
    folder = _folder(host, "cache") / "checkpoints" / (source.host.name if source.host else "local")
    return Location(host, str(folder / PurePosixPath(source.path).relative_to("/")))


def new_workspace(host: Host, name: str) -> Workspace:
    """Return a fresh folder under the host's jobs, named after the checkpoint's ``name`` and the time."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Workspace(_folder(host, "jobs") / f"evaluate-{name}-{stamp}-{secrets.token_hex(3)}")


def evaluation_argv(host: Host, checkpoint: PurePosixPath, workspace: Workspace, suite: Suite) -> list[str]:
    """Return the command that evaluates ``checkpoint`` on ``host``; every setting of the host is passed explicitly.

    Raises :class:`EvaluationError` when the host's entry names no environment or no target.
    """
    program = _folder(host, "environments") / "current" / "bin" / "dflash"
    argv = [str(program), "evaluate", "--target", str(_folder(host, "target")), "--checkpoint", str(checkpoint)]
    argv += ["--prompts", str(workspace.prompts), "--output", str(workspace.output), "--mode", "replay"]
    argv += ["--max-new-tokens", str(suite.max_new_tokens)]
    if host.reference:
        argv += ["--reference", str(host.reference)]
    if host.server:
        argv += ["--server", str(host.server.url)]
    if suite.num_prompts is not None:
        argv += ["--num-prompts", str(suite.num_prompts)]
    if suite.ignore_eos:
        argv.append("--ignore-eos")
    if suite.thinking:
        argv += ["--thinking", suite.thinking]
    return [*argv, "--device", host.gpu.device, "--dtype", host.gpu.dtype, "--kernel", host.gpu.kernel]


def run_evaluation(
    connector: Connector,
    host: Host,
    checkpoint: PurePosixPath,
    suite: Suite,
    *,
    name: str,
    on_line: Callable[[str], None],
) -> Workspace:
    """Evaluate ``checkpoint`` on ``host`` and return the folder with the report; ``on_line`` gets its progress.

    ``name`` is the checkpoint's at its source; ``checkpoint`` may lie in a folder that is named after its content.

    A report that is not valid is still a report: exit code 3 of the command raises nothing here. Any other failure
    raises :class:`EvaluationError` with the last line the host printed.
    """
    workspace = new_workspace(host, name)
    argv = evaluation_argv(host, checkpoint, workspace, suite)
    lines = LineSplitter(on_line)
    with connector.connect(host) as connection:
        connection.run(shlex.join(["mkdir", "-p", str(workspace.path)]), hide=True, in_stream=False)
        connection.put(str(suite.prompts), str(workspace.prompts))
        result = connection.run(shlex.join(argv), hide=True, warn=True, in_stream=False, err_stream=lines)
    lines.close()
    if result.exited not in (0, NotValidError.exit_code):
        raise EvaluationError(
            f"the evaluation on {host.name} ended with exit code {result.exited}: {lines.last or 'it printed nothing'}"
        )
    return workspace


def fetch_report(
    connector: Connector, host: Host, workspace: Workspace, relayed: RelayResult, destination: Path
) -> Report:
    """Bring the report home into the new folder ``destination``, add how its checkpoint came, and return it.

    Raises :class:`EvaluationError` when a file is missing there; ``destination`` does not exist then.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as scratch:
        partial = Path(scratch) / destination.name
        partial.mkdir()
        with connector.connect(host) as connection:
            for name in REPORT_FILES:
                try:
                    connection.get(str(workspace.output / name), str(partial / name))
                except OSError as error:
                    raise EvaluationError(
                        f"{host.name}:{workspace.output / name} could not be read: {error}"
                    ) from error
        weights = [file.sha256 for file in relayed.files if file.path.endswith((".safetensors", ".pt"))]
        digest = weights[0] if len(weights) == 1 else relayed.sha256
        way = RelayInfo(source=str(relayed.source), sha256=digest, selected=relayed.what, bytes=relayed.bytes)
        report = read_report(partial / "report.json").model_copy(update={"relay": way})
        (partial / "report.json").write_text(report.to_json(), encoding="utf-8")
        (partial / "report.md").write_text(to_markdown(report), encoding="utf-8")
        partial.rename(destination)
    return report


class LineSplitter:
    """A text stream for fabric that hands on whole lines, escaped; a carriage return ends a line as well."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = ""
        self.last = ""

    def write(self, text: str) -> None:
        """Take ``text`` as it arrives, in pieces of any size."""
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            self._hand_on(line)

    def flush(self) -> None:
        """Do nothing: lines are handed on as soon as they are whole."""

    def close(self) -> None:
        """Hand on what came without an end of line."""
        self._hand_on(self._rest)
        self._rest = ""

    def _hand_on(self, line: str) -> None:
        if line.strip():
            self.last = said(line.strip())
            self._on_line(said(line))


def _folder(host: Host, field: str) -> PurePosixPath:
    value = getattr(host, field)
    if value is None:
        raise EvaluationError(f"hosts.{host.name}.{field} is missing in hosts.yaml: an evaluation needs it")
    return PurePosixPath(value)
