"""This program as a wheel, made of the files that run here, so that a host runs just them.

A wheel is a zip of the packages and four small files about them (PEP 427). Made here it needs no build tool and no
network, is the same bytes for the same files, and works from a source checkout as from an installed copy.
"""

import base64
import hashlib
import io
import os
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dflash.errors import DFlashError

NAME = "dflash-pipeline"
PACKAGES = ("dflash", "tasks", "flows", "deploy")
PROMPTS = "dflash/prompt_files"
"""Where a wheel has the shipped prompts, which a checkout keeps in its folder ``prompts``."""
EPOCH = (1980, 1, 1, 0, 0, 0)


class NotInstalledError(DFlashError):
    """This program runs without having been installed, so what it needs elsewhere is not known."""

    state_name = "NotInstalled"


@dataclass(frozen=True)
class OwnWheel:
    """A wheel in memory."""

    file_name: str
    content: bytes
    requirements: tuple[str, ...]
    """Its ``Requires-Dist`` lines, those of extras with their markers."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def own_wheel(root: Path | None = None) -> OwnWheel:
    """The wheel of the program in ``root``, by default of the one that runs.

    Raises :class:`NotInstalledError` when it was never installed.
    """
    root = root or Path(__file__).resolve().parent.parent
    try:
        about = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise NotInstalledError(
            f"{NAME} is not installed in this Python: pip install -e {root} tells what it needs"
        ) from None
    stem = f"{NAME.replace('-', '_')}-{about.version}"
    files = dict(_files(root))
    files[f"{stem}.dist-info/METADATA"] = (about.read_text("METADATA") or "").encode()
    files[f"{stem}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: dflash-pipeline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{stem}.dist-info/entry_points.txt"] = (about.read_text("entry_points.txt") or "").encode()
    record = f"{stem}.dist-info/RECORD"
    files[record] = (
        "".join(f"{name},{_recorded(content)}\n" for name, content in files.items()).encode() + f"{record},,\n".encode()
    )
    return OwnWheel(f"{stem}-py3-none-any.whl", _zip(files), tuple(about.requires or ()))


def _files(root: Path) -> list[tuple[str, bytes]]:
    found = []
    for package in PACKAGES:
        for folder, below, names in os.walk(root / package):
            below[:] = sorted(name for name in below if name != "__pycache__")
            paths = [Path(folder, name) for name in sorted(names) if not name.endswith((".pyc", ".pyo"))]
            found += [(str(path.relative_to(root)), path.read_bytes()) for path in paths if path.is_file()]
    prompts = root / "prompts"
    if prompts.is_dir():
        found += [(f"{PROMPTS}/{path.name}", path.read_bytes()) for path in sorted(prompts.iterdir()) if path.is_file()]
    return found


def _recorded(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(content)}"


def _zip(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
    return made.getvalue()
