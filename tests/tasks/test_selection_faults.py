"""Hostile and damaged checkpoints: each is a named error, quickly, with nothing run and nothing made."""

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.checkpoint_layout import CheckpointError, DamagedError, NotACheckpointError, UnsafePickleError
from tasks.repack import Checksums, Repack, combine_crc32
from tasks.selection import select
from tasks.sources import LocalSource
from tests.tasks.selections import CountedSource, write_out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"model_state_dict": {"w": torch.arange(300.0), "v": torch.ones(40)}}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {member.filename: archive.read(member) for member in archive.infolist()}


def with_pickle(path: Path, data: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        for name, content in records.items():
            archive.writestr(f"a/data/{name}", content)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"


WHOLE = TENSOR + b"(" + STORAGE + b"K\x00))tR"
HUGE = b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20)


def nested(depth: int, leaf: bytes) -> bytes:
    """A tuple of two, each the same tuple of two, and so on: 2**depth leaves to whoever walks it."""
    return leaf + b"q\x00" + b"".join(b"0h%ch%c\x86q%c" % (n, n, n + 1) for n in range(depth))


BOMBS = {
    "nested tuple as a key": (b"\x80\x02}" + nested(60, b")") + b"K\x01s.", "a tuple is no key"),
    "nested tuple in a set": (
        b"\x80\x02c__builtin__\nset\n(](" + nested(60, b")") + b"etR.",
        "a tuple is no key",
    ),
    "nested tuple as a shape": (
        b"\x80\x02" + TENSOR + b"(" + STORAGE + b"K\x00" + nested(60, b")") + b")tR.",
        "a tensor is not described",
    ),
    "nested tuple as a storage": (
        b"\x80\x02(" + text("storage") + nested(60, b")") + text("0") + b"NK\x01tQ.",
        "a storage is not described",
    ),
    "nested tuple as a name": (b"\x80\x02" + nested(60, b")") + text("x") + b"\x93.", "a name is not text"),
    "one list copied without end": (
        b"\x80\x02ctorch\nSize\nq\x010](" + b"N" * 1000 + b"eq\x02" + b"0h\x01h\x02\x85R" * 100 + b".",
        "more than 20000 steps",
    ),
    "more steps than any checkpoint": (b"\x80\x02" + b"N0" * 10_001 + b"N.", "more than 20000 steps"),
    "a memo index of gigabytes": (b"\x80\x02}r\xff\xff\xff\x7f.", "numbers its objects up to 2147483647"),
    "a string longer than the file": (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "only 1 remain"),
    "a pop from an empty stack": (b"\x80\x020.", "more from the stack than is there"),
    "a pop behind a mark": (b"\x80\x02}K\x01(0.", "more from the stack than is there"),
    "an item behind the stack": (b"\x80\x02}K\x01s.", "IndexError"),
    "a number of megabytes as a size": (
        b"\x80\x02" + TENSOR + b"(" + STORAGE + b"K\x00" + HUGE + b"\x85" + b"K\x01\x85tR.",
        "a tensor is not described",
    ),
    "a storage of two dtypes": (
        b"\x80\x02}" + text("a") + WHOLE + b"s" + text("b") + WHOLE.replace(b"FloatStorage", b"IntStorage") + b"s.",
        "has 4 bytes for 1 elements of int32",
    ),
    "a storage of another size": (b"\x80\x02" + WHOLE.replace(b"K\x01tQ", b"K\x02tQ") + b".", "has 4 bytes for 2"),
    "a state for a name": (b"\x80\x02" + TENSOR + b"}b.", "gives a state to a Call"),
    "a call of a tensor": (
        b"\x80\x02" + WHOLE + b")R.",
        "it calls what is not a name",
    ),
    "a name that runs code": (b"\x80\x02cposix\nsystem\n" + text("touch ran") + b"\x85R.", "names posix.system"),
    "an attribute of a name": (
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x15_rebuild_tensor_v2.xy\x93.",
        "names torch._utils._rebuild_tensor_v2.xy",
    ),
    "an extension code": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "an object by text": (b"(iposix\nsystem\n.", "opcode INST"),
    "a buffer from outside": (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    "lists in lists": (b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "holds no dictionary"),
}


@pytest.mark.timeout(60, method="thread")  # without the bounds some never end, inside of C
@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs_are_refused_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: str) -> None:
    data, says = BOMBS[bomb]
    evil = with_pickle(tmp_path / "evil.pt", data, **{"0": bytes(4)})
    monkeypatch.setattr("dflash.inert_pickle._MOST_STEPS", 20_000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        select(LocalSource(evil))
    assert "evil.pt" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "ran").exists()


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(("depth", "width"), [(60, 2), (12, 10)])
def test_a_config_that_holds_itself_a_million_times_is_no_config(tmp_path: Path, depth: int, width: int) -> None:
    inner: Any = []
    for _ in range(depth):
        inner = [inner] * width
    content = {"model_state_dict": {"w": torch.ones(2)}, "config": {"hidden_size": 1, "inner": inner}}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DamagedError, match="key config is no plain config"):
        select(LocalSource(tmp_path / "a.pt"))


def test_a_pickle_with_a_billion_storages_is_refused_by_its_size(tmp_path: Path) -> None:
    evil = tmp_path / "evil.pt"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("a/data.pkl", bytes(33 << 20))
    source = CountedSource(evil)
    with pytest.raises(CheckpointError, match="over the 33554432 that are read"):
        select(source)


def test_a_directory_with_a_billion_entries_is_refused_by_its_size(tmp_path: Path) -> None:
    evil = tmp_path / "evil.pt"
    entries, each = 10**9, 47
    with evil.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(entries * each)
        file.seek(entries * each)
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, entries, entries, entries * each, 0))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, entries * each, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))
    source = CountedSource(evil)
    with pytest.raises(DamagedError, match="its directory would have 47000000000 bytes"):
        select(source)
    assert source.moved < 1 << 20


def test_many_names_for_the_same_bytes_do_not_fill_a_disk(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 16)
    state = {f"w{n}": whole[n:] for n in range(100)}
    torch.save({"model_state_dict": state}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="overlap"):
        select(LocalSource(tmp_path / "a.pt"))


def directory_field(data: bytearray, name: str, at: int, value: bytes) -> None:
    """Overwrite a field of the directory's entry for ``name``."""
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))
    data[entry + at : entry + at + len(value)] = value


def place_of(data: bytearray, name: str) -> bytes:
    """The directory's offset of the local header of ``name``."""
    at = data.rindex(name.encode())
    return bytes(data[at - 4 : at])


DAMAGES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "a record that reaches into the next": (
        lambda data: directory_field(data, "a/data/0", 20, struct.pack("<II", 2000, 2000)),
        "reaches into the next one",
    ),
    "two records at one place": (
        lambda data: directory_field(data, "a/data/1", 42, place_of(data, "a/data/0")),
        "reaches into the next one",
    ),
    "a record past the end": (
        lambda data: directory_field(data, "a/data/0", 42, struct.pack("<I", 10**6)),
        "reaches into the next one or beyond the end",
    ),
    "a local header of another record": (
        lambda data: data.__setitem__(slice(data.index(b"a/data/0"), data.index(b"a/data/0") + 8), b"a/data/9"),
        "no record where the directory says a/data/0 is",
    ),
    "a local header with a longer padding": (
        lambda data: data.__setitem__(data.index(b"a/data/0") - 1, 9),
        "no record where the directory says a/data/0 is",
    ),
    "a compressed record": (
        lambda data: directory_field(data, "a/data/0", 10, b"\x08\x00"),
        "a/data/0 is compressed or encrypted",
    ),
    "an encrypted record": (lambda data: directory_field(data, "a/data/0", 8, b"\x01\x08"), "compressed or encrypted"),
    "two records of one name": (
        lambda data: directory_field(data, "a/data/1", 46, b"a/data/0"),
        "a/data/0 is there twice",
    ),
    "more entries than there are": (
        lambda data: data.__setitem__(slice(-98 + 24, -98 + 40), struct.pack("<QQ", 9, 9)),
        "no end",
    ),
    "two lengths of a record": (lambda data: directory_field(data, "a/data/0", 20, b"\x05"), "compressed or encrypted"),
    "the length of a comment that is not there": (lambda data: data.__setitem__(-2, 5), "no end"),
    "a comment behind the end": (lambda data: data.extend(b"comment"), "no end"),
    "a large size without its number": (
        lambda data: directory_field(data, "a/data/0", 20, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
        "no end",
    ),
    "a name that is not UTF-8": (lambda data: directory_field(data, "a/data/0", 46, b"\xff"), "no end"),
    "a directory elsewhere": (lambda data: data.__setitem__(-98 + 48, data[-98 + 48] ^ 1), "no end"),
    "a wrong CRC of the pickle": (
        lambda data: directory_field(data, "a/data.pkl", 16, bytes(4)),
        "data.pkl does not match its checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_directories_are_named(path: Path, damage: str) -> None:
    change, says = DAMAGES[damage]
    data = bytearray(path.read_bytes())
    before = bytes(data)
    change(data)
    assert bytes(data) != before
    path.write_bytes(data)
    with pytest.raises((DamagedError, NotACheckpointError), match=says):
        select(LocalSource(path))


def test_every_cut_is_an_error_that_says_so(path: Path) -> None:
    whole = path.read_bytes()
    for length in (*range(5, len(whole), 61), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match="cut short or still being written"):
            select(LocalSource(path))


@pytest.mark.parametrize("how", [{}, {"output": "pt"}, {"what": "all"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("most", [100, 1 << 20])
def test_a_flipped_byte_of_a_record_is_found_on_the_way(path: Path, tmp_path: Path, how: Any, most: int) -> None:
    source = LocalSource(path)
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<3f", 7, 8, 9)) + 2] ^= 4
    path.write_bytes(data)
    selection = select(source, **how)
    with pytest.raises(DamagedError, match="record a/data/0 does not match its checksum"):
        write_out(selection, source, tmp_path / "out", most=most)


def test_a_source_that_ends_early_or_late_is_named(path: Path, tmp_path: Path) -> None:
    class Lying(CountedSource):
        change: Callable[[bytes], bytes] = staticmethod(lambda data: data)

        def read(self, file: str, ranges: Any) -> bytes:
            return self.change(super().read(file, ranges))

    source = Lying(path)
    selection = select(source)
    for change, says in ((lambda data: data[:-1], "ended before"), (lambda data: data + b"x", "more came")):
        source.change = change
        with pytest.raises(DamagedError, match=says):
            write_out(selection, source, tmp_path / "out")
        with pytest.raises(DamagedError, match="ended while it was read"):
            select(source)


def test_a_safetensors_header_that_lies_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    for prefix, body, says in (
        (2**60, header, "its header would be"),
        (len(header), header, "its header describes"),
        (len(header), header + bytes(9), "its header describes"),
        (len(header), header.replace(b"[2]", b"[3]") + bytes(8), "malformed"),
        (len(header), header.replace(b"[0, 8]", b"[4, 8]") + bytes(8), "malformed"),
        (10**6, b'{"a":' + b"[" * 10**6, "malformed"),
        (33 << 20, bytes(33 << 20), "its header would be"),
    ):
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", prefix) + body)
        with pytest.raises(DamagedError, match=says):
            select(LocalSource(tmp_path / "m.safetensors"))


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "short").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.safetensors").touch()
    pickled = io.BytesIO()
    pickle.dump({}, pickled)
    (tmp_path / "old.pt").write_bytes(pickled.getvalue())
    for name, says in {
        "text.pt": "is neither a torch.save file nor safetensors",
        "old.pt": "is neither a torch.save file nor safetensors",
        "short": "has 1 bytes",
        "empty.safetensors": "has 0 bytes",
        "folder": "holds nothing; expected a manifest.json",
        "missing.pt": r"has no missing\.pt",
    }.items():
        with pytest.raises(CheckpointError, match=says) as caught:
            select(LocalSource(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)


def test_a_torch_file_is_made_of_torch_files_only(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    for place in (tmp_path, tmp_path / "m.safetensors"):
        with pytest.raises(CheckpointError):
            select(LocalSource(place), output="pt")


def test_a_pickle_that_names_code_is_named(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model_state_dict": {"w": torch.ones(2)}, "extra": Runs()}, tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError, match=r"its pickle names posix\.mkdir"):
        select(LocalSource(tmp_path / "a.pt"))
    assert not (tmp_path / "ran").exists()


def test_parts_may_come_in_any_order_and_twice_but_none_may_be_missing(path: Path) -> None:
    data = path.read_bytes()
    (output, *_) = select(LocalSource(path)).outputs
    parts = []
    for planned in output.ranges(100):
        repack = Repack(planned)
        for _ in repack.feed(data[planned.offset : planned.offset + planned.length]):
            pass
        parts += repack.finish()
    assert len(parts) > 10
    checksums = Checksums((output,))
    checksums.add([*reversed(parts), *parts[:3]])
    checksums.verify()
    for missing in (0, 5, len(parts) - 1):
        checksums = Checksums((output,))
        checksums.add(parts[:missing] + parts[missing + 1 :])
        with pytest.raises(DamagedError, match=r"of record a/data/\d \d+ of \d+ bytes were read"):
            checksums.verify()


def test_names_out_of_a_file_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    name = "a\x1b[2J\n\u202e" + "x" * 10**6
    evil = with_pickle(tmp_path / "evil.pt", b"\x80\x04" + text(name) + text("b") + b"\x93.")
    torch.save({"module." + name: torch.ones(1), "_orig_mod." + name: torch.ones(1)}, tmp_path / "twice.pt")
    for path in (evil, tmp_path / "twice.pt"):
        with pytest.raises(CheckpointError, match=r"a\\x1b\[2J\\n\\u202ex") as caught:
            select(LocalSource(path))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 7000


def test_the_crc_of_parts_is_that_of_the_whole() -> None:
    first, second = os.urandom(1234), os.urandom(98_765)
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
    assert combine_crc32(zlib.crc32(first), zlib.crc32(b""), 0) == zlib.crc32(first)
