"""An environment out of a package index: a real pip, and uv where it is installed, against a small index over HTTP."""

import functools
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.environments import program
from tests.wheelhouses import installed_wheels, sha256, small_wheel

pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The URL of an index with one project: beta."""
    project = tmp_path / "index" / "simple" / "beta"
    project.mkdir(parents=True)
    wheel = small_wheel(project, "beta", body="name = 'beta'")
    (project / "index.html").write_text(f'<a href="{wheel.name}#sha256={sha256(wheel)}">{wheel.name}</a>')
    served = functools.partial(Quiet, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_the_index_has_need_not_be_sent_and_is_held_to_its_hash(
    index: str, installer: str, tmp_path: Path
) -> None:
    uv = shutil.which("uv") or ""
    if installer == "uv" and not uv:
        pytest.skip("uv is not installed here")
    (pip,) = installed_wheels(["pip"], tmp_path / "pip").iterdir()
    own = small_wheel(tmp_path, "alpha", requires="beta", body="import beta")
    beta = tmp_path / "index/simple/beta/beta-1.0-py3-none-any.whl"
    folder = tmp_path / "environments"
    folder.mkdir()
    with tarfile.open(folder / ".parcel-one.tar", "w") as parcel:
        for file in (own, pip):
            parcel.add(file, f"{sha256(file)}/{file.name}")
    spec: dict[str, Any] = {
        "name": "one",
        "digest": hashlib.sha256(b"one").hexdigest(),
        "version": platform.python_version(),
        "wheels": [[own.name, sha256(own)], [beta.name, sha256(beta)]],
        "pip": [pip.name, sha256(pip)],
        "carried": [sha256(own), sha256(pip)],
        "index": index,
        "uv": uv if installer == "uv" else "",
        "parcel": ".parcel-one.tar",
        "imports": ["alpha"],
        "kernels": "",
        "gpu": "",
        "room": 1000,
    }
    said = build(folder, spec)
    assert said["done"]["built"] is True, said
    assert (folder / "current/bin/python").exists()

    # a file of that name with another content than was locked
    other = [[own.name, sha256(own)], [beta.name, "0" * 64]]
    said = build(folder, {**spec, "name": "two", "digest": "2", "wheels": other, "parcel": ""})
    assert said["problem"] == "install"
    assert "hash" in said["message"].lower()
    assert not (folder / "two").exists()


def build(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    argv = [sys.executable, *program(), "build", str(folder), json.dumps(spec)]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    last: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return last
