"""A cache that took back the end of a block against one that never saw it, filled by transformers in one pass.

Tolerance: both compute the same sums in another order (a block against one pass over everything, chunks cut elsewhere,
a recurrent step against a chunk). In float32 that moves a state by about 1e-5 of its largest entry; a single rejected
token left in a state moves it by 1e-1 and more, which each test checks as well.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from dflash.rollback import RollbackCache, RollbackError, RoomyLayer
from dflash.target import Target
from tests.tiny import Pair

TOLERANCE = 1e-3
"""Of a state's largest entry."""
CONVOLUTION, CHUNK = 4, 64
KEPT = (1, 2, CONVOLUTION - 1, CONVOLUTION, CONVOLUTION + 1, CHUNK - 1, CHUNK, CHUNK + 1)


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request: pytest.FixtureRequest) -> Target:
    pair: Pair = request.getfixturevalue(f"tiny_{request.param}")
    return Target.load(pair.target, kernel="torch")


def tokens(count: int, seed: int) -> Tensor:
    rng = random.Random(seed)
    return torch.tensor([[rng.randrange(512) for _ in range(count)]])


def states(cache: DynamicCache) -> dict[str, Tensor]:
    """Every tensor the cache would continue from, by layer and kind."""
    found: dict[str, Tensor] = {}
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            found[f"{place} convolution"] = layer.conv_states[0]
            found[f"{place} recurrent"] = layer.recurrent_states[0]
        else:
            found[f"{place} keys"], found[f"{place} values"] = layer.keys, layer.values
    return found


def never_rejected(target: Target, ids: Tensor) -> dict[str, Tensor]:
    cache = DynamicCache(config=target.config)
    with torch.inference_mode():
        target.model.get_submodule("model")(input_ids=ids, cache=cache, use_cache=True)
    return states(cache)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each state relative to its largest entry; 9 for another shape."""
    assert a.keys() == b.keys()
    return {
        name: float((a[name] - b[name]).abs().max() / b[name].abs().max()) if a[name].shape == b[name].shape else 9.0
        for name in a
    }


@pytest.mark.parametrize("prompt", [2, CHUNK - 2], ids=lambda count: f"prompt{count}")
@pytest.mark.parametrize("kept", KEPT)
def test_a_cache_after_rollback_is_one_that_never_saw_the_rejected_tokens(
    target: Target, prompt: int, kept: int
) -> None:
    text, block = tokens(prompt, seed=1), tokens(CHUNK + 6, seed=2)
    cache = RollbackCache(target, room=200)
    cache.extend(text)
    cache.propose(block)
    clean = never_rejected(target, torch.cat((text, block[:, :kept]), dim=1))
    spoiled = distance(states(cache.cache), clean)
    cache.keep(kept)

    assert cache.length == prompt + kept
    assert max(distance(states(cache.cache), clean).values()) < TOLERANCE
    assert min(spoiled.values()) > 20 * TOLERANCE


def test_rounds_of_all_lengths_leave_the_state_of_the_text_alone(target: Target) -> None:
    """Behind each other, so that a round starts from what the roll-back of the round before left."""
    text, size = tokens(5, seed=3), 8
    cache = RollbackCache(target, room=20)  # outgrown on the way
    cache.extend(text)
    for place, kept in enumerate((1, 8, 2, 3, 8, 8, 4, 5, 1, 1, 7, 6)):
        block = tokens(size, seed=100 + place)
        hidden = cache.propose(block)
        cache.keep(kept)
        text = torch.cat((text, block[:, :kept]), dim=1)
    clean = never_rejected(target, text)
    assert max(distance(states(cache.cache), clean).values()) < TOLERANCE
    last = tokens(3, seed=4)
    with torch.inference_mode():
        whole = target.model.get_submodule("model")(input_ids=torch.cat((text, last), dim=1), use_cache=False)
    continued = cache.extend(last)
    assert hidden.shape == (1, size, target.hidden_size)
    torch.testing.assert_close(continued, whole.last_hidden_state[:, -3:], rtol=1e-3, atol=1e-3)


def test_a_block_taken_back_whole_leaves_no_trace(target: Target) -> None:
    cache = RollbackCache(target, room=100)
    cache.extend(tokens(30, seed=1))
    before = {name: state.clone() for name, state in states(cache.cache).items()}
    cache.propose(tokens(8, seed=2))
    cache.keep(0)
    assert all(torch.equal(state, before[name]) for name, state in states(cache.cache).items())


def test_a_block_kept_whole_runs_nothing_again(target: Target) -> None:
    cache = RollbackCache(target, room=100)
    cache.extend(tokens(30, seed=1))
    cache.propose(tokens(8, seed=2))
    before = {name: state.clone() for name, state in states(cache.cache).items()}
    cache.keep(8)
    assert all(torch.equal(state, before[name]) for name, state in states(cache.cache).items())


def test_no_hook_stays_on_the_target(target: Target) -> None:
    cache = RollbackCache(target, room=100)
    cache.extend(tokens(30, seed=1))
    cache.propose(tokens(8, seed=2))
    assert not any(module._forward_pre_hooks for module in target.model.modules())


def test_appending_and_cropping_copy_nothing_that_is_held() -> None:
    layer, rows = RoomyLayer(40), torch.arange(30.0)[None, None, :, None].expand(1, 2, 30, 4)
    keys, _ = layer.update(rows[:, :, :20], -rows[:, :, :20])
    at = keys.data_ptr()
    layer.update(rows[:, :, 20:], -rows[:, :, 20:])
    layer.crop(-12)
    keys, values = layer.update(rows[:, :, :3], rows[:, :, :3])
    assert keys.data_ptr() == layer.key_value[0].data_ptr() == at
    assert keys[0, 0, :, 0].tolist() == [*range(18), 0, 1, 2]
    assert values[0, 1, :, 3].tolist() == [*range(0, -18, -1), 0, 1, 2]


def test_a_full_buffer_grows_and_keeps_what_it_held() -> None:
    layer, rows = RoomyLayer(4), torch.arange(30.0)[None, None, :, None].expand(1, 2, 30, 4)
    layer.update(rows[:, :, :4], rows[:, :, :4])
    keys, values = layer.update(rows[:, :, 4:9], -rows[:, :, 4:9])
    assert keys[0, 1, :, 2].tolist() == list(range(9))
    assert values[0, 1, :, 2].tolist() == [0, 1, 2, 3, -4, -5, -6, -7, -8]
    at = keys.data_ptr()
    assert layer.update(rows[:, :, 9:12], rows[:, :, 9:12])[0].data_ptr() == at


def test_a_target_with_another_kind_of_cache_is_refused_by_name(tmp_path: Any) -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
    )
    model = Qwen3ForCausalLM(config)
    target = Target("somewhere/windowed", config, model, None, "none", 0)  # type: ignore[arg-type]
    with pytest.raises(RollbackError, match=r"somewhere/windowed: layer 2 keeps a DynamicSlidingWindowLayer") as caught:
        RollbackCache(target, room=10)
    assert "--mode replay" in str(caught.value)
