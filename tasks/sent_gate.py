"""The gate program sent along to a host that has none: as the command of an ordinary login.

There is one program, so there is one protocol; what it may do is decided by the few lines that start it.
"""

import json
from importlib.resources import files

from tasks.certificates import Certificate
from tasks.inventory import Host

# The program needs a module to live in: dataclasses look their annotations up there.
START = (
    "import sys, types; gate = sys.modules['dflash_gate'] = types.ModuleType('dflash_gate'); "
    "exec(sys.argv[1], gate.__dict__); "
)
ORDINARY = START + "sys.exit(gate.ordinary())"
HELD = START + "exec(sys.argv[2], gate.__dict__); sys.exit(gate.serve_held(sys.argv[3]))"


def ordinary_argv() -> list[str]:
    """The command that does the change of its first line or, when that is empty, answers the requests behind it."""
    return [*_python(ORDINARY), _program("training-host", "dflash-gate")]


def held_argv(certificate: Certificate, host: Host) -> list[str]:
    """The command that serves what ``certificate``, already verified, approves, and nothing else."""
    terms = certificate.terms
    held_to = {
        "serial": terms.serial,
        "key_id": terms.key_id,
        "digest": terms.digest,
        "valid_before": terms.not_after,
        "sources": ",".join(terms.source_addresses),
        "host_keys": list(host.fingerprints),
        "read_limit": host.read_limit,
    }
    program, held = _program("training-host", "dflash-gate"), _program("client", "held_gate.py")
    return [*_python(HELD), program, held, json.dumps(held_to)]


def _python(start: str) -> list[str]:
    return ["python3", "-I", "-c", start]


def _program(*path: str) -> str:
    return files("deploy").joinpath(*path).read_text("utf-8")
