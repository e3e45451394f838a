"""Looks at the virtual environments of a host, or builds one. Stdlib only, Python 3.9; sent along by
``tasks/environments.py`` together with ``environment_files.py``.

    environment.py look ENVIRONMENTS           what there is, one line of JSON
    environment.py build ENVIRONMENTS SPEC     builds what SPEC (JSON) says, verifies it and has ``current`` lead to it

    ENVIRONMENTS/<name>/               one environment; complete.json in it comes last, so what has none is a wreck
                 current, previous     symbolic links to <name>, replaced at once
                 .wheels/<sha256>/     one verified wheel each
                 .parcel-*.tar         wheels on their way into .wheels
                 .lock                 held by whoever builds, and by everything that it has started

It prints one JSON object a line: ``{"step", …}`` on the way, at last ``{"done": {…}}`` or ``{"problem", "message"}``.
Killed at any moment it leaves something that the next call mends, so it never has to be cleaned up behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import pwd
import shutil
import signal
import subprocess  # noqa: TID251 - runs on the host, where there is no tasks/process.py
import sys
import tarfile
import time
from collections.abc import Iterator
from typing import IO, Any

from environment_files import (
    CHUNK,
    MARKER,
    content_digest,
    damage,
    distributions,
    environment,
    normal,
    python,
    read_marker,
    site_packages,
    users,
)

BUILDING, LOG = "building.json", "build.log"
FORGOTTEN_SECONDS = 24 * 3600.0
"""A parcel that lies there for longer is of a command that died."""
IMPORT_SECONDS = 600.0
STEP_SECONDS = 2.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EMPTY = {
    "exists": False,
    "current": None,
    "taken": False,
    "previous": None,
    "environments": [],
    "wheels": {},
    "parcels": [],
}

IMPORTS = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
KERNELS_LOAD = 'from dflash.kernels import select_kernel; select_kernel("fla", device="cuda")'
# both kernels over one short sequence of 2 heads [1, 96, 2, 64]: more than one chunk, and a few megabytes
KERNELS_RUN = """
import torch
from dflash.kernels import select_kernel
select_kernel("fla", device="cuda")
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
torch.manual_seed(0)
q, k, v = (torch.randn(1, 96, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
k = torch.nn.functional.normalize(k, dim=-1)
g, beta = -torch.rand(1, 96, 2, device="cuda"), torch.rand(1, 96, 2, device="cuda", dtype=torch.bfloat16)
chunked, recurrent = (rule(q, k, v, g=g, beta=beta)[0].float()
                      for rule in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule))
error = float((chunked - recurrent).norm() / recurrent.norm())
if not error < 0.05:
    raise SystemExit("fla's chunked and recurrent kernels differ by %.3f of the norm; 0.05 is the most" % error)
"""


class Problem(Exception):
    """It cannot be done; ``kind`` is for the caller to tell one from another."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def look(folder: str) -> dict[str, Any]:
    """What there is below ``folder``; nothing is changed, nor is a lock taken."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return {**EMPTY, "environments": [], "wheels": {}, "parcels": [], "free": free_bytes(folder)}
    current = link(folder, "current")
    found = []
    for name in names:
        marker = environment(folder, name)
        if marker is not None:
            sound = name != current or not damage(os.path.join(folder, name), marker)
            about = {key: marker.get(key) for key in ("digest", "python", "built")}
            found.append({"name": name, **about, "sound": sound, "used": users(os.path.join(folder, name))})
    return {
        "exists": True,
        "current": current,
        "taken": taken(folder),
        "previous": link(folder, "previous"),
        "environments": found,
        "wheels": {os.path.basename(os.path.dirname(path)): os.path.getsize(path) for path in stored(folder)},
        "parcels": [name for name in names if name.startswith(".parcel-") and name.endswith(".tar")],
        "free": free_bytes(folder),
    }


def build(folder: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Have the environment of ``spec`` stand complete, and ``current`` lead to it; what came of it."""
    if platform.python_version() != spec["version"]:
        raise Problem("changed", f"{sys.executable} is Python {platform.python_version()}, not {spec['version']}")
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, spec["name"])
    with locked(folder) as lock:
        if taken(folder):
            raise Problem("not-a-link", f"{folder}/current is no symbolic link, so it cannot be switched")
        clear_away(folder)
        marker = read_marker(place)
        broken = damage(place, marker) if marker is not None else ""
        if broken and (pids := users(place)):
            raise Problem("in-use", f"{place} is damaged ({broken}) and processes {listed(pids)} use it")
        built = marker is None or bool(broken) or marker.get("digest") != spec["digest"]
        if built:
            remove(place)
            take_in(folder, spec)
            marker = make(folder, place, spec, lock)
        for leftover in (spec["parcel"], f"{spec['parcel']}.relay.json") if spec["parcel"] else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, leftover))
        switched = switch(folder, spec["name"])
        removed = prune(folder, spec["name"])
    return {"built": built, "switched": switched, "removed": removed, "content": marker["content"]}


# --- building


def take_in(folder: str, spec: dict[str, Any]) -> None:
    """Move the wheels of the parcel into the store, each only with the content that its name in the store says."""
    wanted = {sha256: name for name, sha256 in (*spec["wheels"], spec["pip"])}
    if spec["parcel"] and os.path.exists(path := os.path.join(folder, spec["parcel"])):
        emit("unpack", parcel=spec["parcel"])
        with open(path, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as parcel:
            for member in parcel:
                sha256, _, name = member.name.partition("/")
                content = parcel.extractfile(member)
                if wanted.get(sha256) != name or content is None:
                    raise Problem("damaged", f"{spec['parcel']} holds {member.name!r}, which was not asked for")
                store(folder, sha256, name, content)
    needed = [sha256 for sha256 in wanted if sha256 in spec["carried"] or not spec["index"]]
    missing = [wanted[sha256] for sha256 in needed if not os.path.exists(wheel(folder, sha256, wanted[sha256]))]
    if missing:
        raise Problem("wheels-missing", f"of {len(needed)} wheels {len(missing)} are not there, such as {missing[0]}")


def store(folder: str, sha256: str, name: str, content: IO[bytes]) -> None:
    path = wheel(folder, sha256, name)
    if os.path.exists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    digest, temporary = hashlib.sha256(), os.path.join(folder, f".incoming-{sha256}")
    with open(temporary, "wb") as file:
        while data := content.read(CHUNK):
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != sha256:
        raise Problem("damaged", f"{name} arrived with another sha256 than {sha256}")
    os.rename(temporary, path)


def make(folder: str, place: str, spec: dict[str, Any], lock: int) -> dict[str, Any]:
    """The environment at its final place, since it cannot be moved afterwards; the marker is written last."""
    free = free_bytes(folder)
    if free < spec["room"]:
        raise Problem("disk-full", f"{folder} has {free} bytes free, and {spec['room']} are needed")
    os.mkdir(place)
    write_whole(os.path.join(place, BUILDING), {"digest": spec["digest"]})
    try:
        emit("venv", python=spec["version"])
        # without pip, which Debian's Python cannot install by itself
        run(place, lock, [sys.executable, "-m", "venv", "--without-pip", place], "venv")
        install(folder, place, spec, lock)
        verify(place, spec, lock)
    except BaseException:
        # what cannot be finished takes no room; a builder that is killed leaves that to the next
        remove(place)
        raise
    marker = {
        "digest": spec["digest"],
        "python": spec["version"],
        "built": time.time(),
        "wheels": [sha256 for _, sha256 in (*spec["wheels"], spec["pip"])],
        "content": content_digest(place),
    }
    emit("mark")
    write_whole(os.path.join(place, MARKER), marker)
    os.unlink(os.path.join(place, BUILDING))
    return marker


def install(folder: str, place: str, spec: dict[str, Any], lock: int) -> None:
    """Exactly the wheels of ``spec``, by their hashes: out of the store, and what is not there from the index."""
    wheels, lines = os.path.join(place, "wheels"), []
    os.mkdir(wheels)
    for name, sha256 in spec["wheels"]:
        project, version = name.split("-")[:2]
        lines.append(f"{project}=={version} --hash=sha256:{sha256}\n")
        if os.path.exists(path := wheel(folder, sha256, name)):
            os.symlink(path, os.path.join(wheels, name))
    requirements = os.path.join(place, "requirements.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.writelines(lines)
    uv = spec["index"] and spec["uv"]
    emit("install", done=0, of=len(lines), by="uv" if uv else "pip")
    exactly = ["--no-deps", "--require-hashes", "--find-links", wheels, "-r", requirements]
    if uv:
        index = ["--default-index", spec["index"], "--compile-bytecode"]
        argv = [uv, "pip", "install", "--python", python(place), "--only-binary=:all:", *index, *exactly]
    else:
        index = ["--index-url", spec["index"]] if spec["index"] else ["--no-index", "--no-cache-dir"]
        argv = [*pip(folder, place, spec), "install", "--only-binary=:all:", "--no-input", *index, *exactly]
    with installing(place, len(lines)) as told:
        run(place, lock, argv, "install", each=told, alone=not spec["index"])
    shutil.rmtree(wheels)


@contextlib.contextmanager
def installing(place: str, of: int) -> Iterator[Any]:
    """A function that says, now and then, how many of the packages are there."""
    said = {"done": 0, "at": time.monotonic()}

    def tell() -> None:
        if time.monotonic() < said["at"] + STEP_SECONDS:
            return
        done = sum(name.endswith(".dist-info") for name in os.listdir(site_packages(place)))
        if done != said["done"]:
            emit("install", done=done, of=of)
        said.update(done=done, at=time.monotonic())

    yield tell


def verify(place: str, spec: dict[str, Any], lock: int) -> None:
    """That just the wheels of ``spec`` are there, byte for byte, with all that they ask for, and can be imported."""
    emit("verify", what="files")
    names = [name.split("-")[:2] for name, _ in spec["wheels"]]
    wanted = {normal(project): version for project, version in names}
    found = {normal(project): version for project, version in distributions(place)}
    if wrong := sorted(set(wanted.items()) ^ set(found.items())):
        raise Problem("verify", f"what was installed is not what was locked: {wrong[0][0]} {wrong[0][1]}")
    if broken := damage(place, None, deeply=True):
        raise Problem("verify", f"after the installation {broken}")
    emit("verify", what="requirements")
    run(place, lock, [*pip(os.path.dirname(place), place, spec), "check"], "verify")
    emit("verify", what="imports")
    run(place, lock, [python(place), "-I", "-c", IMPORTS, *spec["imports"]], "verify")
    if spec["kernels"]:
        emit("verify", what="kernels")
        code = KERNELS_RUN if spec["kernels"] == "run" else KERNELS_LOAD
        gpu = {"CUDA_VISIBLE_DEVICES": spec["gpu"]} if spec["gpu"] else {}
        run(place, lock, [python(place), "-I", "-c", code], "kernels", **gpu)


def run(
    place: str, lock: int, argv: list[str], kind: str, *, each: Any = None, alone: bool = False, **more: str
) -> None:
    """Run ``argv`` to its end; a :class:`Problem` of that ``kind`` with its last line when it fails."""
    environment = {"PATH": PATH, "HOME": home(), "LANG": "C.UTF-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
    if alone:
        environment["PIP_CONFIG_FILE"] = os.devnull
    libc = ctypes.CDLL(None)
    log = os.path.join(place, LOG)
    with open(log, "ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd="/",
            # nobody else gets the lock while it lives, and it does not outlive this process: PR_SET_PDEATHSIG
            pass_fds=(lock,),
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
        )
        deadline = time.monotonic() + (IMPORT_SECONDS if kind in ("verify", "kernels") else float("inf"))
        try:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise Problem(kind, f"{os.path.basename(argv[0])} did not end within {IMPORT_SECONDS:.0f} s")
                if each is not None:
                    each()
                time.sleep(0.02 if each is None else 0.1)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode:
        with open(log, "rb") as file:
            text = file.read().decode("utf-8", "replace")
        # where nothing can be written any more, the log cannot say so
        if free_bytes(place) < CHUNK or os.strerror(errno.ENOSPC) in text or os.strerror(errno.EDQUOT) in text:
            raise Problem("disk-full", f"{os.strerror(errno.ENOSPC)} in {os.path.dirname(place)}")
        raise Problem(kind, telling(text) or f"exit status {child.returncode}")


def telling(text: str) -> str:
    """What of a log tells most about a failure: the last error with what caused it, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = [place for place, line in enumerate(lines) if line.lower().startswith("error")]
    if not places:
        return (lines or [""])[-1]
    return "; ".join([lines[places[-1]], *(line for line in lines[places[-1] :] if line.startswith("Caused by"))])


# --- switching and cleaning


def switch(folder: str, name: str) -> bool:
    """Have ``current`` lead to ``name``, and ``previous`` to where it led; False when it does already."""
    before = link(folder, "current")
    if before == name:
        return False
    emit("switch", to=name)
    for which, target in (("previous", before), ("current", name)):
        if target is not None:
            temporary = os.path.join(folder, f".{which}-{os.getpid()}")
            os.symlink(target, temporary)
            os.replace(temporary, os.path.join(folder, which))
    return True


def prune(folder: str, name: str) -> list[str]:
    """Remove the environments that nothing uses, but ``name`` and the one before it, and wheels of none of them."""
    kept, wheels, removed = {name, os.path.basename(link(folder, "previous") or "")}, set(), []
    for entry in sorted(os.listdir(folder)):
        place, marker = os.path.join(folder, entry), environment(folder, entry)
        if marker is None:
            continue
        if entry in kept or users(place):
            wheels.update(marker["wheels"])
        else:
            emit("prune", name=entry)
            remove(place)
            removed.append(entry)
    for path in stored(folder):
        if os.path.basename(os.path.dirname(path)) not in wheels:
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    return removed


def clear_away(folder: str) -> None:
    """What builders that were killed have left. Under the lock, so nobody is at work on it."""
    for entry in os.listdir(folder):
        place = os.path.join(folder, entry)
        wreck = os.path.exists(os.path.join(place, BUILDING)) and read_marker(place) is None
        if entry.startswith(".removing-") or (wreck and not os.path.islink(place)):
            remove(place)
        temporary = entry.startswith((".incoming-", ".current-", ".previous-"))
        forgotten = entry.startswith(".parcel-") and time.time() - os.lstat(place).st_mtime > FORGOTTEN_SECONDS
        if temporary or forgotten:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)


def remove(place: str) -> None:
    """Remove a folder, first under its name, so that half of it is never taken for an environment."""
    folder, name = os.path.split(place)
    if os.path.lexists(place):
        going = place
        if not name.startswith(".removing-"):
            going = os.path.join(folder, f".removing-{name}-{os.getpid()}")
            os.rename(place, going)
        shutil.rmtree(going, ignore_errors=True)


def pip(folder: str, place: str, spec: dict[str, Any]) -> list[str]:
    """The pip of the lock, run out of its wheel in the new environment: the host needs none."""
    name, sha256 = spec["pip"]
    return [python(place), os.path.join(wheel(folder, sha256, name), "pip")]


def wheel(folder: str, sha256: str, name: str) -> str:
    return os.path.join(folder, ".wheels", sha256, name)


def stored(folder: str) -> Iterator[str]:
    """The wheels of the store."""
    wheels = os.path.join(folder, ".wheels")
    for sha256 in os.listdir(wheels) if os.path.isdir(wheels) else ():
        for name in os.listdir(os.path.join(wheels, sha256)):
            yield os.path.join(wheels, sha256, name)


# --- files and processes


@contextlib.contextmanager
def locked(folder: str) -> Iterator[int]:
    """Hold the folder's lock, waited for as long as it takes; its descriptor."""
    lock = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit("wait", why="another command builds there")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def link(folder: str, name: str) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(os.path.join(folder, name))
    return None


def taken(folder: str) -> bool:
    """Whether something that is no link is called ``current``."""
    return link(folder, "current") is None and os.path.lexists(os.path.join(folder, "current"))


def write_whole(path: str, content: dict[str, Any]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)


def free_bytes(folder: str) -> int:
    """What is free where ``folder`` is or would be."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids[:5])) + (" …" if len(pids) > 5 else "")


def home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def emit(step: str, **more: object) -> None:
    tell({"step": step, **more})


def tell(fields: dict[str, Any]) -> None:
    os.write(1, json.dumps(fields).encode("ascii") + b"\n")


def main(arguments: list[str]) -> int:
    os.umask(0o022)
    try:
        verb, folder, *spec = arguments
        tell({"done": look(folder) if verb == "look" else build(folder, json.loads(spec[0]))})
        return 0
    except Problem as problem:
        tell({"problem": problem.kind, "message": str(problem)})
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        tell({"problem": "disk-full" if full else "file", "message": str(error)})
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
