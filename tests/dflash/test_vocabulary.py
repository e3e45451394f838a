"""The borrowed parts of a target, read by slices, against the loaded target."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import vocabulary
from dflash.head import BLOCK_ROWS
from dflash.shards import Reader
from dflash.target import Target, TargetLoadError
from dflash.vocabulary import SlicedVocabulary, VocabularyError
from tests.dflash.test_offload import MODELS, shard
from tests.dflash.test_target import HIDDEN, VOCABULARY, dense, saved

TOKENS = [3, 4, 5, 90, 0, 96, 5]


@pytest.mark.parametrize("name", ["dense", "tied", "vision-language"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_embedding_and_logits_are_those_of_the_loaded_target(tmp_path, name, dtype):
    directory, _ = saved(MODELS[name], tmp_path)
    shard(directory)
    target = Target.load(directory, dtype=dtype)
    sliced = SlicedVocabulary.open(directory, TOKENS, dtype=dtype)
    ids = torch.tensor([TOKENS, TOKENS[::-1]])
    hidden = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(sliced.embed(ids), target.embed(ids))
    assert torch.equal(sliced.logits(hidden), target.logits(hidden))
    assert sliced.vocab_size == target.vocab_size
    assert not sliced.streamed


def test_only_the_rows_in_use_and_the_head_are_read(tmp_path, monkeypatch):
    directory, _ = saved(dense, tmp_path)
    read = []
    whole = Reader.rows

    def counting(self, name, start, stop, *, out):
        read.append((name, start, stop))
        return whole(self, name, start, stop, out=out)

    monkeypatch.setattr(Reader, "rows", counting)
    SlicedVocabulary.open(directory, TOKENS)
    embedding = "model.embed_tokens.weight"
    rows = [(embedding, 0, 1), (embedding, 3, 6), (embedding, 90, 91), (embedding, 96, 97)]
    assert read == [*rows, ("lm_head.weight", 0, VOCABULARY)]


def test_the_embedding_of_a_token_that_was_not_opened_is_an_error(tmp_path):
    directory, _ = saved(dense, tmp_path)
    sliced = SlicedVocabulary.open(directory, [3, 4])
    with pytest.raises(VocabularyError, match="embedding of token 7 was not read: 2 tokens were asked for"):
        sliced.embed(torch.tensor([[3, 7]]))
    with pytest.raises(VocabularyError, match="token 97 is outside the 97 rows"):
        SlicedVocabulary.open(directory, [3, 97])


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_nan_in_what_is_borrowed_is_an_error_and_no_token(tmp_path, name):
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights[name][3, 4] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VocabularyError, match=rf"{name} holds NaN or infinity; copy the target again"):
        SlicedVocabulary.open(directory, [3, 4])


def test_a_head_without_room_on_the_device_stays_in_host_memory(monkeypatch):
    size = 1000
    free = {"cuda": 2 * size, "cpu": size}
    monkeypatch.setattr(vocabulary, "free_bytes", lambda device: free[torch.device(device).type])
    device = torch.device("cuda", 0)
    assert vocabulary._home(size, device, source="target") == device
    free["cuda"] -= 1
    assert vocabulary._home(size, device, source="target") == torch.device("cpu")
    free["cpu"] -= 1
    with pytest.raises(VocabularyError, match="the head of target takes 1000 B, 999 B of host memory are free"):
        vocabulary._home(size, device, source="target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_by_block_are_the_logits(dtype):
    """As if the head were elsewhere; with more rows than a block has."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(2 * BLOCK_ROWS + 9, 8, generator=generator).to(dtype)
    rows = torch.zeros(0, 8, dtype=dtype)
    sliced = SlicedVocabulary(torch.device("meta"), head, rows, torch.zeros(len(head)))
    assert sliced.streamed
    hidden = torch.randn(3, 5, 8, generator=generator).to(dtype)
    torch.testing.assert_close(sliced.logits(hidden), hidden @ head.T, rtol=1e-2, atol=1e-2)
    flat, wanted = hidden.flatten(0, 1), torch.arange(15) * 2000
    drafted, ranks = sliced.best_and_ranks(flat, wanted)
    logits = sliced.logits(flat).float()
    assert torch.equal(drafted, logits.argmax(1))
    assert torch.equal(logits.argsort(dim=1, descending=True, stable=True).gather(1, ranks[:, None])[:, 0], wanted)


def test_a_target_that_does_not_fit_its_class_is_refused(tmp_path):
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.3.mlp.up_proj.weight")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetLoadError, match=r"missing model\.layers\.3\.mlp\.up_proj\.weight"):
        SlicedVocabulary.open(directory, [1])
