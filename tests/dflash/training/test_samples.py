"""Lines of data become samples: what is kept, cut, left out and refused, and how it lies on disk."""

import errno
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.errors import UsageError
from dflash.prompts import ThinkingError, read_prompts
from dflash.target import Target, load_tokenizer
from dflash.training import token_store
from dflash.training.lines import DataError, file_source
from dflash.training.run_config import DataSection
from dflash.training.samples import SampleCounts, load_samples
from dflash.training.token_store import TokenStore, TokenStoreError, writing
from tests.fixtures.make_training_text import OUTPUT as TEXT

ROWS = 512
PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture
def tokenizer(tiny_hybrid):
    tokenizer = load_tokenizer(str(tiny_hybrid.target))
    tokenizer.chat_template = PLAIN
    return tokenizer


@pytest.fixture
def load(tmp_path, tokenizer):
    """Samples of lines, written to a file of their own; keywords go into the data section."""

    def load(*lines, vocab_size=ROWS, progress=lambda done, total: None, **settings):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        data = DataSection(files=(path,), **{"thinking": False} | settings)
        return load_samples(data, tokenizer, cache=tmp_path / "cache", vocab_size=vocab_size, progress=progress)

    return load


def exact(prompt=(5, 6), response=(7, 8, 9), **more):
    return {"prompt_ids": list(prompt), "response_ids": list(response), **more}


def chat(*said):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": one} for place, one in enumerate(said)]}


# --- what a line becomes


def test_exact_ids_are_taken_as_they_are(load):
    (sample,) = load(exact())
    assert sample.index == 0
    assert sample.ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.ids.dtype == torch.int64
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.loss_mask.dtype == torch.bool


def test_ids_count_before_the_texts_beside_them(load, tokenizer):
    ids = tokenizer(" spelt")["input_ids"]
    (sample,) = load(chat("one?", "spelt") | exact([5], ids) | {"response": " spelt"})
    assert sample.ids.tolist() == [5, *ids]


def test_a_chat_and_a_pair_are_tokenised_and_marked(load, tokenizer):
    one, two = load(chat("one?", "two"), {"prompt": "def f", "response": "(x): return x"})
    assert tokenizer.decode(one.ids[one.loss_mask]) == "two<|im_end|>"
    assert tokenizer.decode(two.ids[two.loss_mask]) == "(x): return x"
    assert tokenizer.decode(two.ids) == "def f(x): return x"


def test_columns_of_others_and_nulls_are_left_alone(load):
    line = {"prompt": None, "source": "web", **chat("one?", "two")}
    line["messages"][1]["reasoning_content"] = None
    line["messages"][1]["tool_calls"] = None
    assert len(load(line)) == 1


def test_samples_keep_the_order_of_files_and_lines(load, tmp_path, tokenizer):
    files = []
    for name in ("b", "a"):
        files.append(tmp_path / f"{name}.jsonl")
        lines = [exact([ord(name)], [place, 1, 1]) for place in range(300)]  # more than are tokenised at once
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = load_samples(DataSection(files=tuple(files)), tokenizer, cache=tmp_path / "cache", vocab_size=ROWS)
    found = [(int(sample.ids[0]), int(sample.ids[1]), sample.index) for sample in samples]
    assert found == [(ord(name), place, 300 * part + place) for part, name in enumerate("ba") for place in range(300)]


# --- what is cut, left out and counted


def test_what_becomes_of_each_line_is_counted_by_reason(load):
    samples = load(
        exact(),
        exact(response=(7,)),  # too short
        exact([1] * 9, [2] * 9),  # cut behind two of its own tokens
        exact([1] * 11, [2] * 9),  # cut before the first
        chat("one?"),
        {"prompt": "p", "response": ""},
        exact(retokenized=True),
        max_length=11,
    )
    assert samples.counts == SampleCounts(
        read=7,
        kept=3,
        truncated=1,
        too_short=2,
        refused={"no assistant turn": 1, "empty response": 1},
        turns_left_out={},
        retokenized=1,
        tokens=5 + 11 + 5,
        loss_tokens=3 + 2 + 3,
    )
    assert samples.counts.read == samples.counts.kept + samples.counts.too_short + sum(samples.counts.refused.values())
    assert [len(sample.ids) for sample in samples] == samples.lengths.tolist() == [5, 11, 5]
    said = "\n".join(samples.counts.lines())
    for part in ("3 of 7 samples", "1 were cut", "2 were left out: too few", "1 were left out: no assistant turn"):
        assert part in said


def test_turns_that_the_template_rewrites_are_counted(load, tokenizer):
    tokenizer.chat_template = PLAIN.replace(
        "message.content", "(message.content if loop.last or message.role == 'user' else '…')"
    )
    samples = load(chat("one?", "1", "two?", "2"))
    assert samples.counts.turns_left_out == {"the template rewrites the turn": 1}
    assert "1 turns are context only" in "\n".join(samples.counts.lines())


def test_as_many_own_tokens_as_asked_for_are_enough(load):
    lines = [exact(response=[7] * own) for own in (3, 4, 5)]
    assert load(*lines, min_loss_tokens=4).lengths.tolist() == [6, 7]


def test_data_of_which_nothing_is_left_is_an_error_that_says_why(load):
    with pytest.raises(DataError, match=r"no sample is left.*2 were left out: no assistant turn"):
        load(chat("one?"), chat("two?"))


# --- what is refused


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense\n", r"data.jsonl:2: is not JSON"),
        ("[1]\n", r"data.jsonl:2: is no JSON object"),
        ({"text": "t"}, r"data.jsonl:2: has text; expected messages, or prompt and response"),
        ({"prompt": "p"}, r"data.jsonl:2: has prompt; expected"),
        ({"messages": []}, r"data.jsonl:2: messages: "),
        ({"messages": [{"role": "human", "content": "c"}]}, r"data.jsonl:2: messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"text": "c"}]}]}, r"data.jsonl:2: messages.0.content is no"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, r"messages.0.tool_calls is not known; a turn has"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"data.jsonl:2: messages.0.content: holds '.ud800'"),
        ({"prompt": "p", "response": "a\udfffb"}, r"data.jsonl:2: response: holds '.udfff'"),
        (exact([-1]), r"data.jsonl:2: prompt_ids.0: "),
        (exact([5.5]), r"data.jsonl:2: prompt_ids.0: "),
    ],
)
def test_a_line_that_is_none_is_named(load, line, said):
    with pytest.raises(DataError, match=said):
        load(exact(), line)


def test_a_chat_needs_its_thinking_mode_said(load):
    with pytest.raises(ThinkingError, match=r"data.jsonl:1: is a chat, and data.thinking is not given"):
        load(chat("one?", "1"), thinking=None)
    assert len(load(exact(thinking=True), thinking=None)) == 1, "ids were asked for in a mode already"


def test_ids_written_in_the_other_thinking_mode_are_refused(load):
    assert len(load(exact(thinking=False))) == 1
    with pytest.raises(DataError, match=r"data.jsonl:1: was written with thinking on, and data.thinking is off"):
        load(exact(thinking=True))


def test_ids_of_both_thinking_modes_are_no_data_for_one_drafter(load):
    with pytest.raises(DataError, match=r"data.jsonl:3: was written with thinking off, and lines before it with thin"):
        load(exact(), exact(thinking=True), exact(thinking=False), thinking=None)


def test_data_of_a_target_with_a_larger_vocabulary_is_refused(load):
    with pytest.raises(DataError, match=r"data.jsonl:2: has token 400, and the target has 300 rows"):
        load(exact(), exact(response=(7, 400, 8)), vocab_size=300)


def test_ids_of_another_tokenizer_are_found_by_their_text(load, tokenizer):
    ids = tokenizer("return None")["input_ids"]
    assert len(load(exact([5], ids) | {"response": "return None"})) == 1
    assert len(load(exact([5], [*ids, tokenizer.eos_token_id]) | {"response": "return None"})) == 1, (
        "no text for the end"
    )
    with pytest.raises(DataError, match=r"data.jsonl:1: its response_ids read 'return None'.*written with another"):
        load(exact([5], ids) | {"response": "import os"})


def test_a_file_that_is_not_there_is_named(tmp_path, tokenizer):
    data = DataSection(files=(tmp_path / "none.jsonl",))
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read"):
        load_samples(data, tokenizer, cache=tmp_path / "cache", vocab_size=ROWS)


# --- on disk


def test_a_pipe_is_refused_for_it_can_be_read_once_only(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: is a directory or a pipe"):
        load_samples(DataSection(files=(tmp_path / "pipe",)), tokenizer, cache=tmp_path, vocab_size=ROWS)


def test_a_file_that_changes_while_it_is_read_is_not_kept_under_what_it_was(load, tmp_path):
    def add(done, total):
        with (tmp_path / "data.jsonl").open("a") as file:
            file.write(json.dumps(exact(response=(9, 9, 9))) + "\n" if done < 2 * total else "")

    with pytest.raises(DataError, match=r"data.jsonl: was changed while it was read"):
        load(exact(), progress=add)
    assert list((tmp_path / "cache").iterdir()) == []


def test_data_that_goes_away_while_it_is_read_is_not_taken_for_a_full_cache(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(exact()))
    source = file_source(path)
    path.unlink()
    with pytest.raises(DataError, match=r"data.jsonl: cannot be read \(No such file"):
        list(source.read(lambda done: None))


def test_lines_are_tokenised_once_and_again_when_anything_they_depend_on_changes(load, tokenizer, monkeypatch):
    lines = (exact(), chat("one?", "two"))
    first = load(*lines)
    made = []
    monkeypatch.setattr(token_store, "writing", lambda directory: made.append(directory) or writing(directory))
    assert load(*lines).directory == first.directory
    assert made == []
    changes = [{"max_length": 4}, {"min_loss_tokens": 3}, {"thinking": True}, {"vocab_size": 511}]
    others = {load(*lines, **change).directory for change in changes}
    others.add(load(exact(), chat("one?", "three")).directory)
    tokenizer.chat_template = "{{- '' }}" + PLAIN
    others.add(load(*lines).directory)
    tokenizer.add_tokens(["zzz"])
    others.add(load(*lines).directory)
    assert len(others - {first.directory}) == len(made) == 7


def test_padding_by_somebody_else_makes_no_other_tokenizer(load, tokenizer):
    first = load(exact())
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=4)
    assert load(exact()).directory == first.directory


def test_the_digest_is_of_the_tokens_and_marks_alone(load):
    first = load(exact())
    assert load(exact(source="elsewhere")).sha256 == first.sha256
    others = [load(exact(response=(7, 8, 1))), load(exact((5, 6, 7), (8, 9))), load(exact(), exact())]
    assert len({first.sha256, *(samples.sha256 for samples in others)}) == 4


def test_progress_goes_over_the_bytes_of_the_file(load, tmp_path):
    seen = []
    load(*(exact() for _ in range(5)), progress=lambda *at: seen.append(at))
    size = (tmp_path / "data.jsonl").stat().st_size
    assert seen == [(size * done // 5, size) for done in range(1, 6)]


def test_a_broken_build_leaves_nothing_behind(load, tmp_path):
    with pytest.raises(DataError):
        load(exact(), "nonsense\n")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_an_error_that_says_what_to_do(load, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_store, "_to_disk", full)
    with pytest.raises(TokenStoreError, match=r"No space left on device.*data.cache"):
        load(exact())
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["tokens.u32", "offsets.i64", "store.json"])
def test_a_file_that_was_cut_off_is_named(load, name):
    path = load(exact()).directory / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TokenStoreError, match=rf"{name}.*remove the directory"):
        load(exact())


@pytest.mark.parametrize("name", ["tokens.u32", "offsets.i64"])
def test_one_flipped_bit_is_found_before_it_is_trained_on(load, name):
    path = load(exact(), exact()).directory / name
    content = bytearray(path.read_bytes())
    content[11] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(TokenStoreError, match=r"is not what was written there; remove the directory"):
        load(exact(), exact())


def test_another_version_of_the_store_is_refused(load, monkeypatch):
    load(exact())
    monkeypatch.setattr(token_store, "VERSION", 99)
    with pytest.raises(TokenStoreError, match="is of version 1, this program reads 99"):
        load(exact())


def test_processes_that_tokenise_the_same_data_at_once_get_the_same_samples(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_store, args=(tmp_path / "store",)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert TokenStore(tmp_path / "store").read(1)[0].tolist() == list(range(1000))


def test_what_a_killed_build_left_is_removed_by_the_next_and_a_living_one_is_not(tmp_path):
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    killed = context.Process(target=begin_store, args=(tmp_path / "store", begun))
    killed.start()
    assert begun.wait(60)
    with writing(tmp_path / "store") as writer:
        writer.add([1], [])
        assert len(list(tmp_path.iterdir())) == 2, "the other process is still at it"
        killed.kill()
        killed.join(60)
        with writing(tmp_path / "store") as second:
            assert len(list(tmp_path.iterdir())) == 2, "both living ones, and the killed one's no more"
            second.add([2], [])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert TokenStore(tmp_path / "store").read(0)[0].tolist() == [2], "the first to end"


def begin_store(directory: Path, begun: Any) -> None:
    with writing(directory):
        begun.set()
        signal.pause()


def write_store(directory: Path) -> None:
    with writing(directory) as writer:
        for length in (10, 1000):
            writer.add(list(range(length)), [(3, length)])


def test_ids_take_31_bits_and_marks_the_last(tmp_path):
    with writing(tmp_path / "store") as writer:
        writer.add([0, 2**31 - 1, 2**31 - 1], [(0, 1), (2, 3)])
    ids, written = TokenStore(tmp_path / "store").read(0)
    assert ids.tolist() == [0, 2**31 - 1, 2**31 - 1]
    assert written.tolist() == [True, False, True]


def test_samples_outside_of_the_set_are_index_errors(load):
    samples = load(exact(), exact())
    for index in (2, -1):
        with pytest.raises(IndexError):
            samples[index]


# --- data sets by name


def test_a_data_set_by_name_gives_the_samples_of_the_same_file(load, tmp_path, tokenizer, monkeypatch):
    """A local one: the library loads it the way it loads one of the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    lines = [chat("one?", "two"), chat("three?", "four"), exact()]
    from_file = load(*lines)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataSection(datasets=(str(folder),), thinking=False)
    cache = tmp_path / "other"
    samples = load_samples(data, tokenizer, cache=cache, vocab_size=ROWS)
    assert samples.sha256 == from_file.sha256
    assert load_samples(data, tokenizer, cache=cache, vocab_size=ROWS).directory == samples.directory
    with pytest.raises(DataError, match=r"split valid: cannot be loaded"):
        load_samples(data.model_copy(update={"split": "valid"}), tokenizer, cache=cache, vocab_size=ROWS)


def test_without_the_package_a_data_set_is_a_named_error(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"data.datasets names org/name.*dflash-pipeline\[datasets\]"):
        load_samples(DataSection(datasets=("org/name",)), tokenizer, cache=tmp_path, vocab_size=ROWS)


# --- the text that the tiny drafters are trained on


def test_the_tiny_text_is_the_targets_own_and_shares_no_run_of_words_with_the_held_out_prompts(
    tmp_path, tiny_hybrid, tokenizer
):
    from dflash.overlap import grams

    data = DataSection(files=(TEXT,), thinking=False)
    samples = load_samples(data, tokenizer, cache=tmp_path, vocab_size=ROWS)
    assert samples.counts.kept == samples.counts.read == 1152
    assert samples.counts.refused == {}
    held_out = {gram for prompt in read_prompts(tiny_hybrid.prompts).prompts for gram in grams(prompt.prompt)}
    for sample in samples:
        assert held_out.isdisjoint(grams(tokenizer.decode(sample.ids)))
    assert samples.lengths.min() < 60
    assert samples.lengths.max() > 500


def test_the_tiny_text_is_what_the_target_writes_greedily(tiny_hybrid):
    target = Target.load(tiny_hybrid.target, kernel="torch")
    for line in [json.loads(line) for line in TEXT.read_text().splitlines()[:600:100]]:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        shortfall = target.taps(ids, [1], shortfall=True).shortfall
        written = shortfall[0, len(line["prompt_ids"]) - 1 : -1]
        assert written.max() <= 1e-3, f"{line['id']}: a token is not the likeliest one"
