"""Results kept on disk by what they depend on: hidden states per text and layer, completions, checks.

::

    <directory>/dflash-cache.json                    which version wrote it
    <directory>/<target>/facts.json                  the target's sizes and identity
    <directory>/<target>/taps/ab/<text>.safetensors  tap.<layer> [S, H] and shortfall [S] of one text
    <directory>/<target>/completions/<digest>.jsonl
    <directory>/<target>/checks/<name>.<digest>.json

``<target>`` is a digest of weights, tokenizer, kernel and dtype, ``<text>`` of that and the token ids. A file appears
under its name complete or not at all, so any number of processes may share a directory; of two that write the same
entry the later adds to what the earlier one wrote.
"""

import fcntl
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash.errors import DFlashError
from dflash.report import Check

VERSION = 1
_MARKER = "dflash-cache.json"
_SHORTFALL = "shortfall"
_TAP = re.compile(r"tap\.(\d+)")


class CacheError(DFlashError):
    """The directory is no cache of this version, or a file in it is damaged or cannot be written."""


@dataclass(frozen=True)
class TargetKey:
    """What every entry depends on: digests of weights and tokenizer, the kernel, the dtype."""

    fingerprint: str
    tokenizer: str
    kernel: str
    dtype: str


@dataclass(frozen=True)
class CachedText:
    """``taps`` [S, H] by layer, and ``shortfall`` [S] float32 where it is known; all on the CPU."""

    taps: Mapping[int, Tensor]
    shortfall: Tensor | None


@dataclass(frozen=True)
class Cache:
    """One target's part of a cache directory. Raises :class:`CacheError` throughout."""

    directory: Path
    key: TargetKey
    home: Path
    _held: dict[Path, frozenset[int | str]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, directory: Path, key: TargetKey) -> Self:
        """Make or open ``directory``; one that holds anything else, or another version's cache, is refused."""
        marker = directory / _MARKER
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                others = [path.name for path in directory.iterdir() if not path.name.startswith(f".{_MARKER}")]
                if others and not marker.exists():  # another process may have made it just now
                    raise CacheError(
                        f"cache {directory} holds {sorted(others)[0]} and no {_MARKER}: it is not a cache; "
                        f"choose an empty directory"
                    )
                _write(marker, json.dumps({"version": VERSION}).encode())
            version = _version(marker)
        except OSError as error:
            raise CacheError(f"cache {directory} cannot be used ({error.strerror}); choose another") from None
        if version != VERSION:
            raise CacheError(
                f"cache {directory} is of version {version}, this program reads {VERSION}; remove the directory or "
                f"choose another"
            )
        return cls(directory, key, directory / _digest([VERSION, *vars(key).values()])[:32])

    def layers(self, ids: Sequence[int]) -> frozenset[int | str]:
        """The layers that are held for the text ``ids``, and "shortfall" if that is."""
        path = self._entry(ids)
        if path not in self._held:
            if not path.exists():
                return frozenset()
            with self._opened(path) as file:
                self._held[path] = _held(file.keys())
        return self._held[path]

    def get(self, ids: Sequence[int], layer_ids: Sequence[int]) -> CachedText:
        """These layers of the text ``ids``, all of which must be held (see :meth:`layers`)."""
        path = self._entry(ids)
        while True:
            inode = _inode(path)
            try:
                return self._read(path, len(ids), layer_ids)
            except CacheError:
                # safetensors opens the file once for its header and once for its tensors, and another process
                # may have put a newer one there in between: only a file that stayed is damaged.
                if _inode(path) == inode:
                    raise

    def put(self, ids: Sequence[int], text: CachedText) -> None:
        """Keep ``text`` beside what is already held of it."""
        path = self._entry(ids)
        with _locked(path.parent):
            self._held.pop(path, None)  # another process may have added to it since
            held = self.layers(ids)
            before = (
                self.get(ids, [layer for layer in held if isinstance(layer, int)]) if held else CachedText({}, None)
            )
            shortfall = text.shortfall if text.shortfall is not None else before.shortfall
            tensors = {f"tap.{layer}": tap.contiguous() for layer, tap in ({**before.taps, **text.taps}).items()}
            if shortfall is not None:
                tensors[_SHORTFALL] = shortfall.contiguous()
            sums = {f"crc32.{name}": str(_crc32(tensor)) for name, tensor in tensors.items()}
            _write(path, save(tensors, metadata={"version": str(VERSION), "key": path.stem, **sums}))
        self._held[path] = _held(tensors)

    def facts(self) -> str | None:
        """What :meth:`keep_facts` kept of this target, as JSON."""
        return self._text(self.home / "facts.json")

    def keep_facts(self, facts: str) -> None:
        """Keep the JSON ``facts`` of this target."""
        self._keep_text(self.home / "facts.json", facts)

    def completions_file(self, source: str, settings: Mapping[str, Any]) -> Path:
        """Where the completions that ``source`` writes with ``settings`` are kept; its folder is there afterwards."""
        path = self.home / "completions" / f"{_digest([source, dict(settings)])[:32]}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"cache {path.parent} cannot be made ({error.strerror})") from None
        return path

    def remember(self, name: str, digest: str, check: Check) -> None:
        """Keep the result of a check; ``digest`` is of everything it depends on besides the target."""
        self._keep_text(self._check(name, digest), check.model_dump_json())

    def remembered(self, name: str, digest: str) -> Check | None:
        """What :meth:`remember` kept under the same ``name`` and ``digest``."""
        path = self._check(name, digest)
        kept = self._text(path)
        try:
            return None if kept is None else Check.model_validate_json(kept)
        except ValidationError:
            raise CacheError(f"cache {path} is not a check; remove the file") from None

    def _read(self, path: Path, length: int, layer_ids: Sequence[int]) -> CachedText:
        with self._opened(path) as file:
            taps = {layer: _tensor(path, file, f"tap.{layer}", length) for layer in dict.fromkeys(layer_ids)}
            there = _SHORTFALL in file.keys()  # noqa: SIM118 (not a mapping)
            return CachedText(taps, _tensor(path, file, _SHORTFALL, length) if there else None)

    def _entry(self, ids: Sequence[int]) -> Path:
        name = _digest([VERSION, *vars(self.key).values(), list(ids)])
        return self.home / "taps" / name[:2] / f"{name}.safetensors"

    def _check(self, name: str, digest: str) -> Path:
        return self.home / "checks" / f"{re.sub(r'[^a-z0-9-]', '_', name)}.{_digest([name, digest])[:32]}.json"

    def _opened(self, path: Path) -> Any:
        try:
            file: Any = safe_open(str(path), framework="pt")
            said = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CacheError(f"cache {path} is damaged or cut short ({error}); remove the file") from None
        if said.get("version") != str(VERSION) or said.get("key") != path.stem:
            raise CacheError(
                f"cache {path} says version {said.get('version')} and key {said.get('key')}, expected {VERSION} and "
                f"its own name; remove the file"
            )
        return file

    def _text(self, path: Path) -> str | None:
        try:
            kept = json.loads(path.read_bytes())
            if kept["version"] != VERSION:
                raise CacheError(f"cache {path} is of version {kept['version']}, expected {VERSION}; remove the file")
            return json.dumps(kept["content"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"cache {path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CacheError(f"cache {path} is damaged; remove the file") from None

    def _keep_text(self, path: Path, content: str) -> None:
        _write(path, json.dumps({"version": VERSION, "content": json.loads(content)}).encode())


def _tensor(path: Path, file: Any, name: str, length: int) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CacheError(f"cache {path}: {name} cannot be read ({error}); remove the file") from None
    if len(tensor) != length or file.metadata().get(f"crc32.{name}") != str(_crc32(tensor)):
        raise CacheError(f"cache {path}: {name} is not what was written there; remove the file")
    return tensor


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _held(names: Sequence[str] | Mapping[str, Tensor]) -> frozenset[int | str]:
    taps = (_TAP.fullmatch(name) for name in names)
    return frozenset([*(int(tap[1]) for tap in taps if tap), *({_SHORTFALL} & set(names))])


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _version(marker: Path) -> Any:
    try:
        return json.loads(marker.read_bytes())["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """``folder``, made if need be, is no other process's to write in meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CacheError(f"cache {folder} could not be made ({error.strerror}); free space or leave it out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise CacheError(f"cache {folder} cannot be locked ({error.strerror}); choose another") from None
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    """Under a temporary name in the same folder, on the disk, then renamed."""
    partial: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except OSError as error:
        raise CacheError(f"cache {path} could not be written ({error.strerror}); free space or leave it out") from None
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                os.unlink(partial)
