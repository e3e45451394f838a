"""What a host is asked, by the program that is sent along, and how its answer is read."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tasks import process
from tasks.facts import SEARCH_PATH, Facts, FactsError, Questions, facts, plan_facts, program, questions, read_facts
from tests.sshds import Operator, Site

NVIDIA_SMI = """\
#!/bin/sh
echo "0, GPU-aa, NVIDIA RTX A6000, 49140, 1830, 570.86"
echo "1, GPU-bb, NVIDIA RTX A6000, [N/A], [N/A], 570.86"
"""


def asked(folder: Path, questions: Questions, **env: str) -> Facts:
    """What the program tells here, with ``folder`` first in its PATH."""
    argv = [sys.executable, "-I", "-c", program(), json.dumps(questions.model_dump())]
    done = process.run(argv, env={"PATH": f"{folder}:{SEARCH_PATH}"} | env)
    return read_facts("here", done.stdout.encode())


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@contextmanager
def http(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_machine_tells_what_it_is(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "nvidia-smi", NVIDIA_SMI)
    stand_in(tmp_path / "bin", "uv", "#!/bin/sh\necho uv 0.9.1\n")
    stand_in(tmp_path / "bin", "python3.12", '#!/bin/sh\necho "[[3, 12, 4], \\"/opt/python\\", false]"\n')
    stand_in(tmp_path / "bin", "python3.13", "#!/bin/sh\necho pyenv: not installed >&2\nexit 127\n")
    found = asked(tmp_path / "bin", Questions(disks=("/", str(tmp_path / "not" / "yet"))))
    here = os.statvfs("/")
    assert found.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found.pythons is not None
    assert [(one.version, one.venv) for one in found.pythons if one.path == str(tmp_path / "bin" / "python3.12")] == [
        ("3.12.4", False)
    ]
    assert len({one.prefix for one in found.pythons}) == len(found.pythons)
    assert found.gpus is not None
    assert [(one.index, one.uuid, one.total, one.free) for one in found.gpus] == [
        (0, "GPU-aa", 49140, 1830),
        (1, "GPU-bb", None, None),
    ]
    assert found.uv is not None
    assert found.uv.version == "uv 0.9.1"
    assert found.disks["/"] is not None
    assert found.disks["/"].total == here.f_blocks * here.f_frsize
    assert found.disks[str(tmp_path / "not" / "yet")] is not None
    assert (found.free(str(tmp_path / "not" / "yet")) or 0) > 0
    assert not (tmp_path / "not").exists()
    assert found.problems == ()


def test_what_cannot_be_found_out_is_a_problem_and_no_failure(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\necho 'Driver/library version mismatch' >&2\nexit 18\n")
    wanted = Questions(server="http://127.0.0.1:9", index="not a url", environment=str(tmp_path / "current"))
    found = asked(tmp_path / "bin", wanted)
    assert found.gpus == ()
    assert found.server is not None
    assert found.server.status is None
    assert found.index is not None
    assert found.index.reachable is False
    assert found.environment is None
    assert any("Driver/library version mismatch" in one for one in found.problems)
    assert any("127.0.0.1:9" in one for one in found.problems)


def test_an_environment_and_a_server_tell_what_is_in_them(tmp_path: Path) -> None:
    real = tmp_path / "environments" / "abc"
    packages = {"torch": "2.13.0", "flash-linear-attention": "0.5.1"}
    kernel = "case \"$3\" in *fla.ops*) echo 'no CUDA' >&2; exit 1;; esac"
    stand_in(real / "bin", "python", f"#!/bin/sh\n{kernel}\necho '{json.dumps(packages)}'\n")
    (tmp_path / "environments" / "current").symlink_to("abc")
    models = json.dumps({"data": [{"id": "Qwen3.6-27B"}]})
    with http({"/health": (200, ""), "/v1/models": (200, models), "/simple": (403, "")}) as url:
        current = str(tmp_path / "environments" / "current")
        wanted = Questions(server=url, index=f"{url}/simple", environment=current, kernel=True)
        found = asked(tmp_path / "bin", wanted)
    assert found.server is not None
    assert (found.server.status, found.server.models) == (200, ("Qwen3.6-27B",))
    assert found.index is not None
    assert found.index.reachable
    assert found.environment is not None
    assert (found.environment.path, found.environment.packages) == (str(real), packages)
    assert found.environment.kernel is False
    assert any("no CUDA" in one and str(real) in one for one in found.problems)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (b"", "what it printed"),
        (b"\x1b[31m{}", "what it printed"),
        (b'{"now": "soon"}', "now"),
        (b'{"now": 1e9}', "boot"),
    ],
)
def test_an_answer_that_is_none_is_refused(told: bytes, says: str) -> None:
    with pytest.raises(FactsError, match="kpro6 told") as raised:
        read_facts("kpro6", told)
    assert says in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_protected_host_is_asked_once_an_approval(site: Site, tmp_path: Path) -> None:
    operator: Operator = site.operator(tmp_path / "operator", train={"jobs": str(tmp_path)})
    host = operator.train
    assert questions(host).disks == (str(tmp_path),)
    plan = plan_facts(host)
    assert plan is not None
    assert plan_facts(operator.infer) is None
    request = operator.store.request(plan)
    approved = operator.store.approve(request.id, reason="test", ca_key=site.ca_key)
    found = facts(operator.connector, host, approved)
    assert found.free(str(tmp_path)) is not None
    assert operator.store.find(plan) is None
