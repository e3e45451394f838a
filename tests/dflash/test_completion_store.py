"""Completions on disk: what half-done runs, crashes, other settings and two processes at once do to them."""

import errno
import fcntl
import json
import multiprocessing
import os
import threading

import pytest

from dflash import completion_store
from dflash.completion_store import Completion, CompletionStore, CompletionStoreError

SETTINGS = {"model": "/models/m", "max_new_tokens": 256, "ignore_eos": False, "tokenizer": None}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "completions.jsonl"


def test_what_was_put_is_there_on_the_next_run(path):
    store = CompletionStore.open(path, SETTINGS)
    assert store.get([1, 2]) is None
    store.put([1, 2], Completion([3, 4]))
    store.put([1], Completion([], retokenized=True))
    again = CompletionStore.open(path, SETTINGS)
    assert [again.get(prompt) for prompt in ([1, 2], [1], [12])] == [
        Completion([3, 4]),
        Completion([], retokenized=True),
        None,
    ]
    assert store.get([1, 2]) == Completion([3, 4]), "and in the same run"


def test_each_is_in_the_file_as_soon_as_it_is_put(path):
    store = CompletionStore.open(path, SETTINGS)
    store.put([1], Completion([2]))
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("lost", [1, 5, 30])
def test_a_last_line_that_was_cut_off_is_dropped_and_written_again(path, lost):
    store = CompletionStore.open(path, SETTINGS)
    store.put([1], Completion([2]))
    store.put([3], Completion([4]))
    path.write_bytes(path.read_bytes()[:-lost])
    again = CompletionStore.open(path, SETTINGS)
    assert (again.get([1]), again.get([3])) == (Completion([2]), None)
    again.put([3], Completion([4]))
    assert CompletionStore.open(path, SETTINGS).get([3]) == Completion([4])


def test_a_line_that_another_process_left_cut_off_is_dropped_before_the_next_is_added(path):
    store = CompletionStore.open(path, SETTINGS)
    store.put([1], Completion([2]))
    with path.open("ab") as file:
        file.write(b'{"prompt":"0123')
    store.put([3], Completion([4]))
    again = CompletionStore.open(path, SETTINGS)
    assert (len(again), again.get([3])) == (2, Completion([4]))


def test_a_header_that_was_cut_off_is_written_again(path):
    CompletionStore.open(path, SETTINGS)
    path.write_bytes(path.read_bytes()[:-3])
    CompletionStore.open(path, SETTINGS).put([1], Completion([2]))
    assert CompletionStore.open(path, SETTINGS).get([1]) == Completion([2])


def test_other_settings_are_refused_by_name(path):
    CompletionStore.open(path, SETTINGS)
    with pytest.raises(CompletionStoreError, match=r"max_new_tokens 256, now 64.*give another --cache"):
        CompletionStore.open(path, SETTINGS | {"max_new_tokens": 64})
    with pytest.raises(CompletionStoreError, match=r"kind None, now 'openai'"):
        CompletionStore.open(path, SETTINGS | {"kind": "openai"})


def test_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(completion_store, "VERSION", 99)
    CompletionStore.open(path, SETTINGS)
    monkeypatch.undo()
    with pytest.raises(CompletionStoreError, match=r"another version \(99, this one writes 1\)"):
        CompletionStore.open(path, SETTINGS)


@pytest.mark.parametrize("content", [b"something of mine", b"something of mine\n", b'{"prompt":"a"}\n', b"\xff\n"])
def test_a_file_that_is_none_of_ours_is_refused_and_left_as_it_is(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CompletionStoreError, match="is not a file of completions"):
        CompletionStore.open(path, SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"nonsense", b'{"prompt":"a","ids":[-1],"retokenized":false}', b"{}"])
def test_a_line_that_is_damaged_in_the_middle_is_named(path, line):
    store = CompletionStore.open(path, SETTINGS)
    store.put([1], Completion([2]))
    with path.open("ab") as file:
        file.write(line + b"\n")
    store.put([3], Completion([4]))
    with pytest.raises(CompletionStoreError, match=r"completions.jsonl:3: is not a completion"):
        CompletionStore.open(path, SETTINGS)


def test_completions_stay_on_disk_and_are_found_there_again(path):
    """A training set's worth of them fits into no memory."""
    store = CompletionStore.open(path, SETTINGS)
    for place in range(50):
        store.put([place], Completion(list(range(place))))
    store.put([7], Completion([1]))
    again = CompletionStore.open(path, SETTINGS)
    for one in (store, again):
        assert [one.get([place]) for place in (0, 8, 49)] == [Completion(list(range(n))) for n in (0, 8, 49)]
        assert one.get([7]) == Completion([1]), "the later one counts"
        assert ([7] in one, [50] in one, len(one)) == (True, False, 50)


def test_a_file_that_was_exchanged_while_it_was_in_use_is_named(path):
    store = CompletionStore.open(path, SETTINGS, option="--output")
    store.put([1], Completion([2]))
    store.put([3], Completion([4]))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2] + lines[1])
    with pytest.raises(CompletionStoreError, match=r"was changed while it was in use.*another --output"):
        store.get([1])


def test_a_full_disk_is_an_error_and_leaves_the_file_good(path, monkeypatch):
    store = CompletionStore.open(path, SETTINGS)
    store.put([1], Completion([2]))
    write, calls = os.write, []

    def full(file, data):
        calls.append(data)
        if len(calls) == 1:
            return write(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CompletionStoreError, match="No space left on device"):
        store.put([3], Completion([4]))
    monkeypatch.undo()
    assert store.get([3]) is None
    again = CompletionStore.open(path, SETTINGS)
    assert (len(again), again.get([1])) == (1, Completion([2]))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CompletionStoreError, match="cannot be opened"):
        CompletionStore.open(tmp_path / "file" / "completions.jsonl", SETTINGS)


def test_two_processes_add_to_one_file_without_harm(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(path, name)) for name in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 1 + 3 * 100
    store = CompletionStore.open(path, SETTINGS)
    assert all(store.get([name, place]) == Completion([place] * 500) for name in (1, 2, 3) for place in range(100))


def test_a_file_that_another_process_is_writing_to_is_waited_for(path):
    store = CompletionStore.open(path, SETTINGS)
    writer = threading.Thread(target=store.put, args=([1], Completion([2])))
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = path.stat().st_size
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert path.stat().st_size == before
    writer.join(30)
    assert CompletionStore.open(path, SETTINGS).get([1]) == Completion([2])


def add_many(path, name):
    store = CompletionStore.open(path, SETTINGS)
    for place in range(100):
        store.put([name, place], Completion([place] * 500))
