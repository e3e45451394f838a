"""What a virtual environment of a host is: its marker, its files as its packages say, and who uses it.

The module ``environment_files`` of ``environment.py``, with which it is sent along. Stdlib only, Python 3.9.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

MARKER = "complete.json"
CHUNK = 1 << 20
ADDED_BY_PIP = ("/INSTALLER", "/REQUESTED", "/direct_url.json")


def environment(folder: str, name: str) -> dict[str, Any] | None:
    """What the environment ``name`` says of itself; None where that is none, as a link to one is none."""
    place = os.path.join(folder, name)
    return None if name.startswith(".") or os.path.islink(place) else read_marker(place)


def read_marker(place: str) -> dict[str, Any] | None:
    """What complete.json says; None where there is none or it is not whole."""
    try:
        with open(os.path.join(place, MARKER), encoding="utf-8") as file:
            marker = json.load(file)
        return marker if {"digest", "wheels", "content"} <= set(marker) else None
    except (OSError, ValueError, TypeError):
        return None


def users(place: str) -> list[int]:
    """The processes that use an environment: by program, arguments, folder or mapped files, or by a lock on its marker.

    One that was started through ``current`` and has loaded nothing of its own may use any. Of another user's processes
    only the arguments can be seen.
    """
    folder, name = os.path.split(place)
    named, found = re.compile(re.escape(os.fsencode(folder)) + rb"/([^/\0\n]+)/"), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        names: set[str] = set()
        for what in ("cmdline", "exe", "cwd", "maps") if int(pid) != os.getpid() else ():
            with contextlib.suppress(OSError):
                names.update(map(os.fsdecode, named.findall(seen(f"/proc/{pid}/{what}"))))
        if name in names or names == {"current"}:
            found.append(int(pid))
    with contextlib.suppress(FileNotFoundError), open(os.path.join(place, MARKER), "rb") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = found or [0]
    return found


def seen(path: str) -> bytes:
    if path.endswith(("exe", "cwd")):
        return os.fsencode(os.readlink(path)) + b"/"
    with open(path, "rb") as file:
        return file.read()


def damage(place: str, marker: dict[str, Any] | None, *, deeply: bool = False) -> str:
    """What is wrong with the files of an environment, in words; by their sizes, ``deeply`` by their sha256."""
    if not os.path.exists(python(place)):
        return f"{python(place)} leads nowhere"
    site = site_packages(place)
    for name, sha256, size in recorded(place):
        path = os.path.normpath(os.path.join(site, name))
        try:
            if os.path.getsize(path) != size or (deeply and file_digest(path) != sha256):
                return f"{path} is not as it was installed"
        except OSError as error:
            return f"{path}: {error.strerror}"
    if marker is not None and marker.get("content") != content_digest(place):
        return "its packages are not those that it was completed with"
    return ""


def recorded(place: str) -> Iterator[tuple[str, str, int]]:
    """Name, sha256 in base64 and size of every installed file whose package says so."""
    site = site_packages(place)
    for entry in sorted(os.listdir(site)) if os.path.isdir(site) else ():
        if entry.endswith(".dist-info"):
            record = os.path.join(site, entry, "RECORD")
            with contextlib.suppress(FileNotFoundError), open(record, encoding="utf-8", newline="") as file:
                for name, digest, size in csv.reader(file):
                    if digest.startswith("sha256="):
                        yield name, digest[len("sha256=") :], int(size)


def content_digest(place: str) -> str:
    """One digest of what all packages say that they have installed; what pip adds to them is not among it."""
    digest = hashlib.sha256()
    for name, sha256, size in recorded(place):
        if not name.endswith(ADDED_BY_PIP) and not name.startswith("../"):
            digest.update(f"{name},{sha256},{size}\n".encode())
    return digest.hexdigest()


def file_digest(path: str) -> str:
    """As RECORD has it: URL-safe base64 without padding."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode("ascii")


def distributions(place: str) -> Iterator[list[str]]:
    site = site_packages(place)
    for entry in os.listdir(site):
        if entry.endswith(".dist-info"):
            yield entry[: -len(".dist-info")].split("-")[:2]


def normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def python(place: str) -> str:
    return os.path.join(place, "bin", "python")


def site_packages(place: str) -> str:
    found = [name for name in os.listdir(os.path.join(place, "lib")) if name.startswith("python")]
    return os.path.join(place, "lib", found[0], "site-packages")
