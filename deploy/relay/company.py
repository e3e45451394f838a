"""What stands beside the files that are on their way. Stdlib only, Python 3.9."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

from deploy.relay.disk import ReceiveError, opened_file

SIDECAR = ".relay.json"
LONGEST_SIDECAR = 1 << 20
READ = (".safetensors", ".json", ".metadata", ".distcp")
"""What a reader of a checkpoint's directory looks at."""


def require_alone(folder: str, names: Sequence[str], about: dict[str, str]) -> None:
    """Raise :class:`ReceiveError` where ``folder`` holds what an earlier relay brought of something else.

    ``names`` are those that will be replaced; ``about`` are fields of a sidecar that is of the same. What stayed of
    another checkpoint would be taken for a part of this one.
    """
    try:
        found = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(set(found).difference(names)):
        if not name.endswith(READ) or name + SIDECAR not in found:
            continue
        fields = told_by(os.path.join(folder, name + SIDECAR))
        if fields and any(fields.get(key) != value for key, value in about.items()):
            raise ReceiveError(
                f"{folder!r} holds {name!r} of {str(fields.get('source'))[:500]!r}, which this does not replace, and "
                "both would be read as one checkpoint: name another folder, or remove what is there"
            )


def told_by(sidecar: str) -> dict[str, Any]:
    """The fields of ``sidecar``; none where nothing that can be believed is there."""
    with contextlib.suppress(OSError, ValueError, RecursionError), opened_file(sidecar) as file:
        fields = json.loads(os.read(file, LONGEST_SIDECAR))
        return fields if isinstance(fields, dict) else {}
    return {}
