"""Taps and shortfalls of whole texts, and the same out of a cache without the target."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import hidden_states
from dflash.cache import Cache, CacheError
from dflash.config import DrafterConfig
from dflash.hidden_states import (
    CachedTaps,
    HiddenStateError,
    LoadedTaps,
    TextLengthError,
    fingerprint,
    require_positions,
    target_key,
    tokenizer_digest,
)
from dflash.offload import StreamedTaps
from dflash.target import Target, TargetLoadError, TargetMismatchError
from tests.dflash.test_config import changed
from tests.dflash.test_target import HIDDEN, LAYERS, VOCABULARY, dense, hybrid, saved, token_rows

TAPPED = (1, 3, 5)
LENGTHS = [40, 7, 70]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved(hybrid, tmp_path_factory.mktemp("target"))[0]


@pytest.fixture(scope="module")
def loaded(directory):
    return LoadedTaps(Target.load(directory))


def cache_of(directory, where):
    return Cache.open(where / "cache", target_key(directory, kernel="auto", dtype=torch.float32, device="cpu"))


def never():
    raise AssertionError("the target was opened")


def test_every_text_gets_its_own_states_whatever_batch_it_was_in(loaded, monkeypatch):
    monkeypatch.setattr(hidden_states, "PASS_TOKENS", 90)  # two batches
    texts = token_rows(LENGTHS)
    steps = []
    found = loaded.tap(texts, TAPPED, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(2, 3), (3, 3)]
    for ids, one in zip(texts, found, strict=True):
        output = loaded.target.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer + 1][0] for layer in TAPPED], dim=-1)
        torch.testing.assert_close(one.taps, states, rtol=1e-3, atol=1e-2)


def test_the_shortfall_is_what_the_next_token_lacks_to_the_best(loaded):
    texts = token_rows(LENGTHS)
    texts += loaded.target.generate_greedy(texts[:1], 6, ignore_eos=True)
    texts[-1] = texts[0] + texts[-1]
    found = loaded.tap(texts, TAPPED)
    for ids, one in zip(texts, found, strict=True):
        logits = loaded.target.model(input_ids=torch.tensor([ids])).logits[0]
        expected = logits[:-1].amax(-1) - logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        torch.testing.assert_close(one.shortfall[:-1], expected, rtol=1e-3, atol=1e-3)
        assert one.shortfall[-1] == 0
        assert one.shortfall.dtype == torch.float32
    assert found[-1].shortfall[len(texts[0]) - 1 :].tolist() == [0.0] * 7


def test_facts_name_sizes_kernel_and_identity(loaded, directory):
    facts = loaded.facts
    assert (facts.class_name, facts.kernel, facts.dtype) == ("Qwen3_5ForCausalLM", "torch", "float32")
    assert (facts.num_layers, facts.blocks, facts.hidden_size, facts.vocab_size) == (LAYERS, LAYERS, HIDDEN, VOCABULARY)
    assert (facts.eos_token_ids, facts.max_position_embeddings) == ([5], 512)
    assert facts.tensors == len(load_file(directory / "model.safetensors"))
    assert facts.fingerprint == fingerprint(directory)
    raw = changed(num_target_layers=64, nested={"target_layer_ids": [1, 3, 5]})
    with pytest.raises(TargetMismatchError, match="hidden_size is 64"):
        facts.require_fit(DrafterConfig.from_dict(raw | {"hidden_size": 64}, source="test"), source="step_4.pt")


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ("model.layers.2.mlp.up_proj.weight", r"text 0: the hidden states of layer 3 .* weight model\.layers\.2\.mlp"),
        ("model.layers.6.mlp.up_proj.weight", r"text 0: the logits .* weight model\.layers\.6\.mlp\.up_proj\.weight"),
        ("lm_head.weight", r"text 0: the logits .* its weight lm_head\.weight holds NaN"),
    ],
)
def test_nan_in_a_weight_names_the_layer_and_the_weight(tmp_path, weight, says):
    spoiled, _ = saved(dense, tmp_path)
    weights = load_file(spoiled / "model.safetensors")
    weights[weight][2] = torch.nan
    save_file(weights, spoiled / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HiddenStateError, match=says):
        LoadedTaps(Target.load(spoiled)).tap([[1, 2, 3]], TAPPED)


def test_states_that_overflow_name_the_first_tapped_layer_and_the_text(loaded, monkeypatch):
    whole = Target.taps

    def overflowing(self, ids, layer_ids, **settings):
        result = whole(self, ids, layer_ids, **settings)
        result.taps[1, 0, HIDDEN : 2 * HIDDEN] = torch.inf
        return result

    monkeypatch.setattr(Target, "taps", overflowing)
    with pytest.raises(HiddenStateError, match=r"text 1: the hidden states of layer 3 .* finite: the dtype overflows"):
        loaded.tap(token_rows([4, 5]), TAPPED)


def test_a_text_longer_than_the_positions_is_refused_before_anything_runs(loaded, directory, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "taps", None)
    for source in (loaded, CachedTaps(lambda: loaded, cache_of(directory, tmp_path))):
        with pytest.raises(TextLengthError, match=r"text 1 has 513 tokens, the target .* has 512 positions"):
            source.tap([[1], [1] * 513], TAPPED)
        with pytest.raises(TextLengthError, match="text 0 has no token"):
            source.tap([[]], TAPPED)


def test_room_for_what_is_still_to_be_written_counts():
    require_positions([[1] * 10], 16, path="target", new_tokens=6)
    with pytest.raises(TextLengthError, match="text 0 has 10 tokens and 7 are to be written, the target target has 16"):
        require_positions([[1] * 10], 16, path="target", new_tokens=7)
    require_positions([[1] * 10], None, path="target", new_tokens=7)


def test_a_warm_cache_gives_the_same_and_never_opens_the_target(loaded, directory, tmp_path):
    texts = token_rows(LENGTHS)
    cold = CachedTaps(lambda: loaded, cache_of(directory, tmp_path))
    first = cold.tap(texts, TAPPED)
    assert cold.forwards == 3
    warm = CachedTaps(never, cache_of(directory, tmp_path))
    second = warm.tap(texts, TAPPED)
    assert warm.forwards == 0
    assert warm.facts == loaded.facts
    for one, other, direct in zip(first, second, loaded.tap(texts, TAPPED), strict=True):
        assert torch.equal(one.taps, direct.taps)
        assert torch.equal(other.taps, direct.taps)
        assert torch.equal(other.shortfall, direct.shortfall)


def test_only_missing_texts_and_layers_go_through_the_target(loaded, directory, tmp_path):
    asked = []

    class Recording(LoadedTaps):
        def tap(self, ids, layer_ids, **settings):
            asked.append((len(ids), list(layer_ids)))
            return super().tap(ids, layer_ids, **settings)

    texts = token_rows(LENGTHS)
    source = CachedTaps(lambda: Recording(loaded.target), cache_of(directory, tmp_path))
    source.tap(texts[:2], TAPPED)
    source.tap(texts, TAPPED)
    found = source.tap(texts, (5, 2))
    assert asked == [(2, [1, 3, 5]), (1, [1, 3, 5]), (3, [2])]
    assert source.forwards == 6
    for one, direct in zip(found, loaded.tap(texts, (5, 2)), strict=True):
        torch.testing.assert_close(one.taps, direct.taps, rtol=1e-3, atol=1e-2)


def test_streamed_states_without_shortfall_count_as_missing_only_where_one_is_wanted(loaded, directory, tmp_path):
    texts = token_rows(LENGTHS)
    streamed = CachedTaps(lambda: StreamedTaps.open(directory), cache_of(directory, tmp_path), shortfalls=False)
    assert all(one.shortfall is None for one in streamed.tap(texts, TAPPED))
    again = CachedTaps(never, cache_of(directory, tmp_path), shortfalls=False)
    assert torch.equal(again.tap(texts, TAPPED)[0].taps, loaded.tap(texts, TAPPED)[0].taps)
    whole = CachedTaps(lambda: loaded, cache_of(directory, tmp_path))
    assert all(one.shortfall is not None for one in whole.tap(texts, TAPPED))
    assert whole.forwards == 3


def test_damaged_facts_are_an_error(loaded, directory, tmp_path):
    cache = cache_of(directory, tmp_path)
    cache.keep_facts('{"path": "x"}')
    with pytest.raises(CacheError, match=r"facts\.json is damaged"):
        _ = CachedTaps(never, cache).facts


def test_facts_from_the_cache_say_where_the_target_is_now(loaded, directory, tmp_path):
    CachedTaps(lambda: loaded, cache_of(directory, tmp_path)).tap([[1]], (1,))
    assert CachedTaps(never, cache_of(directory, tmp_path), path="/moved").facts.path == "/moved"


def test_the_key_changes_with_weights_tokenizer_kernel_and_dtype(directory, tmp_path):
    key = target_key(directory, kernel="auto", dtype=torch.bfloat16, device="cpu")
    assert (key.fingerprint, key.kernel, key.dtype) == (fingerprint(directory), "torch", "bfloat16")
    other, _ = saved(dense, tmp_path)
    assert target_key(other, kernel="torch", dtype=torch.float32, device="cpu").kernel == "none"
    before = tokenizer_digest(other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(other) != before


def test_a_directory_without_a_config_has_no_fingerprint(tmp_path):
    with pytest.raises(TargetLoadError, match=r"cannot be read \(No such file or directory\)"):
        fingerprint(tmp_path)
