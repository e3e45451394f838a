"""Asking a Prefect server over its API, as anybody who reaches it can."""

import json
import urllib.request
from typing import Any


def ask(api: str, what: str, question: dict[str, Any]) -> Any:
    """POST ``question`` to the API."""
    request = urllib.request.Request(
        f"{api}/{what}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def healthy(api: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
