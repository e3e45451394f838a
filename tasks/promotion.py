"""A drafter put in the place of the one that is served: exported beside it, read again, named by the link.

What the server loads is a link beside the reference drafter. A promotion writes a new directory, lets it be read as an
evaluation would, and changes the link in one step; what the link named before stays and is named by a second link. No
server is touched: whoever runs it restarts it, with the command that :func:`server_commands` gives.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError, UsageError
from dflash.report import Report
from tasks import changes
from tasks.actions import Run, escape, said
from tasks.evaluation import not_provisioned, program
from tasks.inventory import Host
from tasks.ledger import Seen
from tasks.ssh import Connector

EXPORT_SECONDS = 3600
SECONDS = 60
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
IDENTITY_SHOWN = 8
WEIGHTS = "model.safetensors"

Model = TypeVar("Model", bound=BaseModel)


class PromotionError(DFlashError):
    """A drafter could not be promoted; the one that is served is the one that was served."""

    state_name = "NotPromoted"


class Links(BaseModel):
    """What the served link and the one behind it name, directories beside them; None where there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    current: str | None
    previous: str | None


class ExportedFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    sha256: str


class Exported(BaseModel):
    """What of ``dflash export --json`` matters here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source_sha256: str
    files: list[ExportedFile]


@dataclass(frozen=True)
class Place:
    """Where drafters lie on a host, and the link that its server loads."""

    host: Host
    link: PurePosixPath

    @classmethod
    def of(cls, host: Host) -> "Place":
        """Beside the reference drafter. Raises ``UsageError`` when hosts.yaml names none."""
        if host.role != "inference":
            raise UsageError(f"{host.name} is a {host.role} host; drafters are served by an inference host")
        if host.reference is None:
            raise UsageError(f"hosts.{host.name}.reference is missing in hosts.yaml: promoted drafters lie beside it")
        reference = PurePosixPath(host.reference)
        return cls(host, reference.with_name(f"{reference.name}-promoted"))

    def directory(self, checkpoint: Seen) -> PurePosixPath:
        """The directory that ``checkpoint`` is exported to: one name for one content."""
        short = "".join(one for one in checkpoint.identity.rpartition(":")[2] if one.isalnum())[:IDENTITY_SHOWN]
        step = "" if checkpoint.step is None else f"-step_{checkpoint.step}"
        return self.link.with_name(f"{PurePosixPath(str(self.host.reference)).name}{step}-{short}")


def links(connector: Connector, place: Place) -> Links:
    """What the links name now. Raises :class:`PromotionError`, as :func:`switch` and :func:`rollback` do."""
    return _linked(connector, place, "show")


def switch(connector: Connector, place: Place, directory: PurePosixPath, before: Links) -> Links:
    """Have the link name ``directory``, when it still names what it named ``before``; the links afterwards."""
    return _linked(connector, place, "switch", str(directory), before.current or "")


def rollback(connector: Connector, place: Place, before: Links) -> Links:
    """Have the link name what it named before that, when nobody changed it meanwhile; the links afterwards."""
    return _linked(connector, place, "rollback", before.current or "")


def export_argv(place: Place, report: Report, directory: PurePosixPath) -> tuple[str, ...]:
    """The command that writes the drafter of ``report`` to ``directory``."""
    return (
        str(program(place.host)),
        "export",
        report.checkpoint.path,
        "--format",
        "zlab",
        "--output",
        str(directory),
        "--reference",
        str(place.host.reference),
        "--json",
    )


def export(
    connector: Connector, place: Place, report: Report, directory: PurePosixPath, *, known: str | None = None
) -> str:
    """Export the very drafter that ``report`` measured; the sha256 of the weights that were written.

    A directory that is there already is kept when its weights are those that an
    earlier export wrote (``known``). Raises :class:`PromotionError`; the link is as it was then.
    """
    host = place.host
    _require_provisioned(connector, host)
    if _is_there(connector, host, directory):
        weights = _require_known(connector, host, directory, known)
    else:
        status, out, last = _run(connector, host, export_argv(place, report, directory), EXPORT_SECONDS)
        if status:
            raise PromotionError(
                f"{host.name} could not export {escape(report.checkpoint.path)}: {last}. When it is gone from the "
                "cache, evaluate the checkpoint again; when the disk is full, free space beside the reference drafter"
            )
        exported = _read(Exported, out, host, "dflash export")
        if exported.source_sha256 != report.checkpoint.sha256:
            raise PromotionError(
                f"{escape(report.checkpoint.path)} on {host.name} is not what was measured: sha256 "
                f"{said(exported.source_sha256)}, and the report says {report.checkpoint.sha256}; evaluate it "
                f"again, and remove {directory}"
            )
        weights = next((file.sha256 for file in exported.files if file.name == WEIGHTS), "")
    return weights


def require_loads(connector: Connector, place: Place, report: Report, directory: PurePosixPath) -> None:
    """Have what lies in ``directory`` read as an evaluation would. Raises :class:`PromotionError` for any fault."""
    inspected = _inspected(connector, place.host, directory)
    if inspected.get("step") not in (None, report.checkpoint.step):
        raise PromotionError(
            f"{place.host.name}:{directory} is of step {inspected['step']}, not {report.checkpoint.step}; remove it "
            "and promote again"
        )


def block_size(connector: Connector, place: Place) -> int:
    """The block size of the drafter that the link names. Raises :class:`PromotionError`."""
    found = _inspected(connector, place.host, place.link).get("config", {}).get("block_size")
    if type(found) is not int:
        raise PromotionError(f"{place.host.name}:{place.link} does not say its block size; see 'dflash inspect' there")
    return found


def server_commands(place: Place, block_size: int) -> list[str]:
    """How the server is started with the promoted drafter; of the kind that hosts.yaml names, else of both."""
    host = place.host
    target, kind = str(host.target or "TARGET"), None if host.server is None else host.server.kind
    port = None if host.server is None else urlsplit(str(host.server.url)).port
    at = [] if port is None else ["--port", str(port)]
    speculation = {"method": "dflash", "model": str(place.link), "num_speculative_tokens": block_size - 1}
    sglang = ["python3", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH"]
    sglang += ["--speculative-draft-model-path", str(place.link), *at]
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculation), *at]
    return [shlex.join(argv) for name, argv in (("sglang", sglang), ("vllm", vllm)) if kind in (None, name)]


def _require_known(connector: Connector, host: Host, directory: PurePosixPath, known: str | None) -> str:
    argv = ("/usr/bin/env", "sha256sum", str(directory / WEIGHTS))
    status, out, _ = _run(connector, host, argv, EXPORT_SECONDS)
    found = out.split(b" ")[0].decode("ascii", "replace")
    if status or known is None or found != known:
        raise PromotionError(
            f"{host.name}:{directory} is there already and is not what an earlier export wrote: move it away and "
            "promote again"
        )
    return found


def _inspected(connector: Connector, host: Host, directory: PurePosixPath) -> dict[str, Any]:
    """What ``dflash inspect`` says of a drafter without a fault; raises :class:`PromotionError` for any other."""
    _require_provisioned(connector, host)
    argv = (str(program(host)), "inspect", str(directory), "--json")
    status, out, last = _run(connector, host, argv, EXPORT_SECONDS)
    inspected = {} if status else _json(out)
    problems = inspected.get("problems")
    if status or problems != [] or not isinstance(inspected.get("config"), dict) or not inspected.get("tensors"):
        why = last if status else "; ".join(map(str, problems or ["it does not say what it is"]))
        raise PromotionError(
            f"{host.name}:{directory} does not load: {said(why)}. The drafter that is served is unchanged; remove the "
            "directory and promote again"
        )
    return inspected


def _linked(connector: Connector, place: Place, verb: Literal["show", "switch", "rollback"], *rest: str) -> Links:
    program = files("deploy").joinpath("promotion", "drafter_link.py").read_text("utf-8")
    argv = ("/usr/bin/env", "python3", "-I", "-c", program, verb, str(place.link), *rest)
    status, out, last = _run(connector, place.host, argv, SECONDS)
    told = {} if status else _json(out)
    if status or "refused" in told:
        why = last if status else said(str(told["refused"]))
        raise PromotionError(f"{place.host.name}: {why}; no drafter was put in another's place")
    return _read(Links, out, place.host, "the links")


def _is_there(connector: Connector, host: Host, directory: PurePosixPath) -> bool:
    status, _, _ = _run(connector, host, ("/usr/bin/env", "test", "-d", str(directory)), SECONDS)
    return status == 0


def _require_provisioned(connector: Connector, host: Host) -> None:
    """Raises :class:`~tasks.evaluation.NotProvisionedError`."""
    status, _, _ = _run(connector, host, ("/usr/bin/env", "test", "-x", str(program(host))), SECONDS)
    if status:
        raise not_provisioned(host)


def _run(connector: Connector, host: Host, argv: Sequence[str], seconds: int) -> tuple[int, bytes, str]:
    """Exit status, what it printed, and the last line of its errors."""
    action = Run(
        host=host.name,
        host_keys=host.fingerprints,
        argv=tuple(argv),
        env=(("LANG", "C.UTF-8"), ("PATH", SEARCH_PATH)),
        seconds=seconds,
        bytes=16 << 20,
    )
    output: dict[Literal["stdout", "stderr"], bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    status = changes.run(connector, host, None, action, lambda stream, data: output[stream].extend(data))
    lines = bytes(output["stderr"]).decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return status, bytes(output["stdout"]), said(lines[-1].removeprefix("error: "))


def _json(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _read(model: type[Model], text: bytes, host: Host, what: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise PromotionError(f"{host.name} told {what} in a way that cannot be read ({said(problem)})") from None
