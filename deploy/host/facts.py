"""What this machine is and has, as one line of JSON on stdout. Changes nothing.

Runs as ``python3 -I -c <this text> QUESTIONS``, so it takes the standard library alone (Python 3.9 or newer).
QUESTIONS is JSON: ``disks`` (paths), ``server`` and ``index`` (URLs or null), ``environment`` (a venv or null),
``kernel`` (whether to try in that venv that fla's kernels load, which takes half a minute).
What cannot be found out is null; what was expected and failed stands in ``problems`` as well.
"""

from __future__ import annotations

import concurrent.futures
import glob
import json
import os
import platform
import pwd
import re
import shutil
import subprocess  # noqa: TID251 - this runs on the host
import sys
import time
import urllib.request

VERSION = "import json, sys, importlib.util as u; print(json.dumps([list(sys.version_info[:3]), sys.base_prefix, "
VERSION += "all(map(u.find_spec, ('venv', 'ensurepip')))]))"
PACKAGES = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions() "
PACKAGES += "if d.name in ('torch', 'triton', 'transformers', 'flash-linear-attention', 'dflash-pipeline')}))"
KERNEL = "import torch; from fla.ops.gated_delta_rule import chunk_gated_delta_rule; assert torch.cuda.is_available()"
problems = []


def told(argv, seconds=10, quiet=False):
    """What a program prints; None when it is not there. A failure is None too, and a problem unless ``quiet``."""
    why = None
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace")
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no word"]
        why = f"{argv[0]} ended with {done.returncode}: {lines[-1][:300]}"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{argv[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        why = f"{argv[0]} did not end within {seconds} s"
    return None if quiet else problem(why)


def problem(text):
    problems.append(text)


def pythons():
    """The Pythons of PATH, the usual places, uv and pyenv, newest first, and whether each makes venvs."""
    places = [*os.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/bin", "/opt/conda/bin"]
    for pattern in ("~/.local/share/uv/python/*/bin", "~/.pyenv/versions/*/bin"):
        places += glob.glob(os.path.expanduser(pattern))
    paths = [path for place in places for path in sorted(glob.glob(f"{place}/python3*"))]
    paths = [path for path in paths if re.fullmatch(r"python3(\.\d+)?", os.path.basename(path))]
    found = {}
    for path in {os.path.realpath(path): path for path in reversed(paths)}.values():
        try:
            version, prefix, venv = json.loads(told([path, "-I", "-c", VERSION], quiet=True) or "null")
        except (TypeError, ValueError):
            continue  # a shim without a Python behind it
        found[prefix] = {"path": path, "version": ".".join(map(str, version)), "prefix": prefix, "venv": venv}
    return sorted(found.values(), key=lambda one: [int(part) for part in one["version"].split(".")], reverse=True)


def gpus():
    """One entry a GPU, total and free in MiB where they are told; an empty list without nvidia-smi."""
    names = ["index", "uuid", "name", "total", "free", "driver"]
    fields = "index,uuid,name,memory.total,memory.free,driver_version"
    answer = told(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], 30)
    rows = [dict(zip(names, map(str.strip, line.split(",")))) for line in (answer or "").splitlines()]  # noqa: B905
    numbers = ("index", "total", "free")
    return [
        {name: int(value) if name in numbers and value.isdigit() else value for name, value in row.items()}
        for row in rows
        if len(row) == len(names)
    ]


def disk(path):
    """Free and total bytes where ``path`` is or would be."""
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return problem(f"{there}: {error.strerror}")
    return {"exists": there == path, "writable": os.access(there, os.W_OK), "free": usage.free, "total": usage.total}


def boot():
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def memory():
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    return {"total": kib["MemTotal"] * 1024, "available": kib["MemAvailable"] * 1024}


def user_manager():
    """Whether systemd keeps what outlives this login: tried with a program that does nothing."""
    folder, user = f"/run/user/{os.getuid()}", pwd.getpwuid(os.getuid()).pw_name
    if shutil.which("systemd-run") is None or not os.path.isdir(folder):
        return False
    argv = ["env", f"XDG_RUNTIME_DIR={folder}", "systemd-run", "--user", "--scope", "--quiet", "--collect", "true"]
    if told(argv, quiet=True) is None:
        return False
    if os.path.exists(f"/var/lib/systemd/linger/{user}"):
        return True
    problem(f"systemd's user manager ends with the login, and jobs in it: loginctl enable-linger {user}")
    return False


def answers(url, seconds=5):
    """``[HTTP status, start of the answer]`` of ``url``; None when nothing answers there."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:  # noqa: S310
            return [answer.status, answer.read(1 << 16).decode("utf-8", "replace")]
    except urllib.error.HTTPError as error:
        return [error.code, ""]
    except (OSError, ValueError) as error:
        return problem(f"{url}: {getattr(error, 'reason', None) or error}")


def server(url):
    """Whether the inference server is well, and the models that it says it serves."""
    health = answers(f"{url.rstrip('/')}/health")
    models = answers(f"{url.rstrip('/')}/v1/models") if health else None
    try:
        served = [str(one["id"]) for one in json.loads(models[1])["data"]]
    except (TypeError, ValueError, KeyError):
        served = []
    return {"url": url, "status": health and health[0], "models": served}


def environment(path, kernel):
    """What is installed in the venv at ``path``; with ``kernel`` also whether fla's kernels load there."""
    python = f"{os.path.realpath(path)}/bin/python"
    if not os.path.exists(python):
        return None
    listed = told([python, "-I", "-c", PACKAGES], 30)
    packages = json.loads(listed) if listed else {}
    loads = None
    if kernel and "flash-linear-attention" in packages:
        loads = told([python, "-I", "-c", KERNEL], 120) is not None
    return {"path": os.path.realpath(path), "packages": packages, "kernel": loads}


def command(name, *argument):
    path = shutil.which(name) or next(iter(glob.glob(os.path.expanduser(f"~/.local/bin/{name}"))), None)
    return path and {"path": path, "version": (told([path, *(argument or ["--version"])]) or "").strip()}


def main(asked):
    asked = json.loads(asked)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        started = {
            "pythons": pool.submit(pythons),
            "gpus": pool.submit(gpus),
            "user_manager": pool.submit(user_manager),
            "uv": pool.submit(command, "uv"),
            "nvcc": pool.submit(command, "nvcc"),
        }
        if asked.get("server"):
            started["server"] = pool.submit(server, asked["server"])
        if asked.get("index"):
            started["index"] = pool.submit(lambda url: {"url": url, "reachable": bool(answers(url))}, asked["index"])
        if asked.get("environment"):
            started["environment"] = pool.submit(environment, asked["environment"], asked.get("kernel"))
        found = {
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "platform": {"system": sys.platform, "machine": platform.machine(), "libc": platform.libc_ver()},
            "boot": boot(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory": memory(),
            "disks": {path: disk(path) for path in asked.get("disks", [])},
            **{name: attempt(future.result) for name, future in started.items()},
        }
    # last, so that it is as close as can be to the moment in which the answer is read
    print(json.dumps({**found, "problems": problems, "now": time.time()}))


def attempt(ask, *arguments):
    try:
        return ask(*arguments)
    except Exception as error:
        return problem(f"{getattr(ask, '__name__', ask)}: {error or type(error).__name__}")


main(sys.argv[1])
