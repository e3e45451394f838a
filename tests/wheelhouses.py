"""Wheels for tests: those of packages that are installed here, and small ones of the tests' own; no index is asked."""

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tasks.environments import Profile
from tasks.resolving import Candidate, Lock
from tasks.wheelhouse import Wheelhouse

PIP = """
import os, sys, sysconfig, zipfile
if sys.argv[1] == "install":
    folder, listed = (sys.argv[sys.argv.index(option) + 1] for option in ("--find-links", "-r"))
    wanted = [line.split(" ")[0].replace("==", "-") for line in open(listed)]
    for name in sorted(os.listdir(folder)):
        if name.startswith(tuple(wanted)):
            zipfile.ZipFile(os.path.join(folder, name)).extractall(sysconfig.get_path("purelib"))
"""
"""Unpacks wheels as pip does, in a tenth of its time; the tests over a real sshd have the real one."""

NOT_OF_THE_WHEEL = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def installed_wheels(projects: list[str], folder: Path) -> Path:
    """``folder`` with a wheel of each of ``projects`` as installed here, and of what they ask for."""
    folder.mkdir()
    done: set[str] = set()
    while projects:
        name = projects.pop().lower().replace("_", "-")
        if name not in done:
            done.add(name)
            found = metadata.distribution(name)
            write_wheel(folder / _file_name(found), _content(found))
            wanted = map(Requirement, found.requires or ())
            projects += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return folder


def small_wheel(folder: Path, name: str, version: str = "1.0", *, requires: str = "", body: str = "") -> Path:
    """A wheel of one module, which holds ``body``."""
    about = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    write_wheel(
        file,
        {
            f"{name}.py": body.encode(),
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode(),
            f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        },
    )
    return file


def stand_in_pip(folder: Path) -> Path:
    """The wheel of a pip that only unpacks."""
    file = folder / "pip-1.0-py3-none-any.whl"
    about = {"pip-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pip\nVersion: 1.0\n"}
    write_wheel(file, {"pip/__main__.py": PIP.encode(), **about})
    return file


def write_wheel(file: Path, content: dict[str, bytes]) -> None:
    """A wheel with ``content`` and the RECORD of it."""
    (about,) = {name.split("/")[0] for name in content if name.split("/")[0].endswith(".dist-info")}
    rows = [f"{_quoted(name)},sha256={_digest(data)},{len(data)}\n" for name, data in content.items()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as wheel:
        for name, data in {**content, f"{about}/RECORD": "".join([*rows, f"{about}/RECORD,,\n"]).encode()}.items():
            wheel.writestr(zipfile.ZipInfo(name), data)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _file_name(found: metadata.Distribution) -> str:
    tags = [line.split()[1] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    parts = [sorted({tag.split("-")[place] for tag in tags}) for place in range(3)]
    name = found.metadata["Name"].replace("-", "_")
    return f"{name}-{found.version}-{'-'.join('.'.join(part) for part in parts)}.whl"


def _content(found: metadata.Distribution) -> dict[str, bytes]:
    files = [one for one in found.files or () if not str(one).startswith("..") and one.suffix != ".pyc"]
    return {str(one): one.locate().read_bytes() for one in files if one.name not in NOT_OF_THE_WHEEL}  # type: ignore[attr-defined]


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class SmallHouse(Wheelhouse):
    """A wheelhouse with one small module under this program's name, and a pip that only unpacks; it asks no index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.shelf = folder / "shelf"
        self.shelf.mkdir(parents=True)
        self.pip = stand_in_pip(self.shelf)
        self.offer("name = 'small'")

    def offer(self, body: str) -> None:
        """Have the module hold ``body`` from now on."""
        small_wheel(self.shelf, "dflash_pipeline", "0.1.0", body=body)

    def lock(self, *_: object, **__: object) -> Lock:
        (wheel,) = self.shelf.glob("dflash_pipeline-*")
        own = Candidate(name="dflash-pipeline", version="0.1.0", file_name=wheel.name, sha256=sha256(wheel))
        return Lock(
            packages=(own,),
            pip=Candidate(name="pip", version="1.0", file_name=self.pip.name, sha256=sha256(self.pip)),
        )

    def gather(self, lock: Lock, wanted: Sequence[str], *_: object, **__: object) -> dict[str, Path]:
        return {digest: path for path in self.shelf.iterdir() if (digest := sha256(path)) in wanted}


SMALL_PROFILE = Profile((), ("dflash_pipeline",), 1000)
"""What the module of a :class:`SmallHouse` needs."""
