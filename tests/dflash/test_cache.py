"""Entries of a cache directory: what is found again, what is refused, and what two writers do to each other."""

import json
import multiprocessing
import os

import pytest
import torch

from dflash import cache as module
from dflash.cache import Cache, CachedText, CacheError, TargetKey
from dflash.report import Check

KEY = TargetKey("weights", "tokenizer", "torch", "bfloat16")
IDS = [5, 3, 9]


def text(*layers: int, shortfall: bool = True, seed: int = 0) -> CachedText:
    generator = torch.Generator().manual_seed(seed)
    taps = {layer: torch.randn(len(IDS), 4, generator=generator).bfloat16() for layer in layers}
    return CachedText(taps, torch.rand(len(IDS), generator=generator) if shortfall else None)


@pytest.fixture
def cache(tmp_path):
    return Cache.open(tmp_path / "cache", KEY)


def entry(cache):
    return next(cache.directory.rglob("*.safetensors"))


def test_what_was_put_is_found_again_by_another_process_of_the_same_target(cache):
    kept = text(1, 5)
    cache.put(IDS, kept)
    again = Cache.open(cache.directory, KEY)
    assert again.layers(IDS) == {1, 5, "shortfall"}
    found = again.get(IDS, [5, 1])
    assert all(torch.equal(found.taps[layer], kept.taps[layer]) for layer in (1, 5))
    assert found.taps[1].dtype == torch.bfloat16
    assert torch.equal(found.shortfall, kept.shortfall)


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer", "kernel", "dtype"])
def test_another_target_tokenizer_kernel_or_dtype_finds_nothing(cache, field):
    cache.put(IDS, text(1))
    cache.keep_facts("{}")
    other = Cache.open(cache.directory, TargetKey(**{**vars(KEY), field: "other"}))
    assert other.layers(IDS) == set()
    assert other.facts() is None
    assert other.completions_file("target", {}) != cache.completions_file("target", {})


def test_other_tokens_find_nothing(cache):
    cache.put(IDS, text(1))
    assert cache.layers(IDS[:2]) == cache.layers([*IDS, 1]) == set()


def test_further_layers_join_those_that_are_there(cache):
    first, second = text(1, 3), text(3, 5, shortfall=False, seed=1)
    cache.put(IDS, first)
    cache.put(IDS, second)
    found = Cache.open(cache.directory, KEY).get(IDS, [1, 3, 5])
    assert torch.equal(found.taps[1], first.taps[1])
    assert torch.equal(found.taps[5], second.taps[5])
    assert torch.equal(found.shortfall, first.shortfall)
    assert len(list(cache.directory.rglob("*.safetensors"))) == 1


def test_of_two_processes_that_add_layers_to_one_text_neither_loses_the_others(cache):
    other = Cache.open(cache.directory, KEY)
    cache.put(IDS, text(1))
    assert other.layers(IDS) == {1, "shortfall"}
    cache.put(IDS, text(3))
    other.put(IDS, text(5))
    assert cache.get(IDS, [1, 3, 5]).taps.keys() == {1, 3, 5}


def test_layers_that_many_processes_add_at_once_are_all_there(cache):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=cache.put, args=([IDS[0], turn], text_of_two(layer)))
        for turn in range(8)
        for layer in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(Cache.open(cache.directory, KEY).layers([IDS[0], turn]) == {0, 1, 2, 3} for turn in range(8))


def text_of_two(layer: int) -> CachedText:
    return CachedText({layer: torch.zeros(2, 4)}, None)


def test_a_cache_of_another_version_is_refused_and_says_what_to_remove(cache, monkeypatch):
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    with pytest.raises(CacheError, match=r"cache .*/cache is of version 1, this program reads 2; remove the directory"):
        Cache.open(cache.directory, KEY)


def test_a_directory_with_other_things_in_it_is_no_cache(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CacheError, match=r"holds thesis\.txt and no dflash-cache\.json: it is not a cache"):
        Cache.open(tmp_path, KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_half_written_entry_names_its_file(cache):
    cache.put(IDS, text(1))
    path = entry(cache)
    content = path.read_bytes()
    for length in (0, 20, len(content) - 5):
        path.write_bytes(content[:length])
        with pytest.raises(CacheError, match=rf"cache {path} is damaged or cut short .*; remove the file"):
            Cache.open(cache.directory, KEY).get(IDS, [1])


def test_changed_bytes_and_swapped_entries_are_noticed(cache):
    cache.put(IDS, text(1))
    path = entry(cache)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"is not what was written there; remove the file"):
        cache.get(IDS, [1])
    cache.put([1, 2, 3], text(1))
    other = next(one for one in cache.directory.rglob("*.safetensors") if one != path)
    path.write_bytes(other.read_bytes())
    with pytest.raises(CacheError, match=r"expected 1 and its own name; remove the file"):
        Cache.open(cache.directory, KEY).layers(IDS)


def test_a_full_disk_leaves_nothing_behind(cache, monkeypatch):
    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"could not be written \(No space left on device\)"):
        cache.put(IDS, text(1))
    assert [path.name for path in cache.directory.rglob("*") if path.is_file()] == ["dflash-cache.json"]
    assert cache.layers(IDS) == set()


def test_an_entry_replaced_between_its_header_and_its_tensors_is_read_again(cache, monkeypatch):
    cache.put(IDS, text(7))
    opened = Cache._opened

    def replaced_once_open(self, path):
        file = opened(self, path)
        monkeypatch.undo()
        self.put(IDS, text(1, seed=1))
        return file

    monkeypatch.setattr(Cache, "_opened", replaced_once_open)
    assert torch.equal(Cache.open(cache.directory, KEY).get(IDS, [7]).taps[7], text(7).taps[7])


def test_two_processes_writing_the_same_entry_leave_one_whole(cache):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(cache, [layer, 7])) for layer in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        reader = Cache.open(cache.directory, KEY)
        layers = [layer for layer in reader.layers(IDS) if layer != "shortfall"]
        if layers:
            assert 7 in layers
            reader.get(IDS, [7])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert not list(cache.directory.rglob(".*"))


def _write_often(cache, layers):
    for _ in range(30):
        cache._held.clear()
        cache.put(IDS, text(*layers))


def test_facts_and_checks_are_found_again(cache):
    check = Check(name="kernel", status="pass", measured=0.5, limit=1, explanation="as in training")
    cache.keep_facts('{"vocab_size": 7}')
    cache.remember("kernel", "abc", check)
    again = Cache.open(cache.directory, KEY)
    assert json.loads(again.facts()) == {"vocab_size": 7}
    assert again.remembered("kernel", "abc") == check
    assert again.remembered("kernel", "abd") is None
    assert again.remembered("gqa", "abc") is None


def test_damaged_facts_and_checks_name_their_file(cache):
    cache.keep_facts("{}")
    path = cache.home / "facts.json"
    path.write_text('{"version": 1, "cont')
    with pytest.raises(CacheError, match=rf"cache {path} is damaged; remove the file"):
        cache.facts()
    path.write_text('{"version": 2, "content": {}}')
    with pytest.raises(CacheError, match=rf"cache {path} is of version 2, expected 1"):
        cache.facts()
    cache.remember("gqa", "a", Check(name="gqa", status="pass", measured=0, limit=0, explanation=""))
    file = next((cache.home / "checks").iterdir())
    file.write_text('{"version": 1, "content": {"name": 3}}')
    with pytest.raises(CacheError, match="is not a check; remove the file"):
        cache.remembered("gqa", "a")


def test_the_completions_file_is_stable_and_one_for_each_source_and_settings(cache):
    first = cache.completions_file("target", {"max_new_tokens": 96, "ignore_eos": True})
    assert first.parent.is_dir()
    assert first == cache.completions_file("target", {"ignore_eos": True, "max_new_tokens": 96})
    assert first != cache.completions_file("http://localhost", {"ignore_eos": True, "max_new_tokens": 96})
    assert first != cache.completions_file("target", {"ignore_eos": True, "max_new_tokens": 97})
