"""Prompts found in training data by runs of thirteen words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.overlap import TrainingDataError, grams, overlapping, training_texts, write_grams
from dflash.prompts import ChatPrompt, Message, RawPrompt

WORDS = [f"word{number}" for number in range(40)]
PROMPT = RawPrompt(id="p", prompt=" ".join(WORDS[:20]))


def training(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def around(words: list[str]) -> str:
    return " ".join(["before", *words, "behind"])


@pytest.mark.parametrize(
    ("words", "found"),
    [(WORDS[:13], True), (WORDS[7:20], True), (WORDS[:12], False), (WORDS[8:21], False), (WORDS[12::-1], False)],
)
def test_thirteen_words_in_a_row_are_an_overlap(tmp_path: Path, words: list[str], found: bool) -> None:
    for name, path in (
        ("texts", training(tmp_path / "data.jsonl", {"text": around(words)})),
        ("hashes", tmp_path / "data.npy"),
    ):
        write_grams(tmp_path / "data.npy", [around(words)])
        assert (overlapping([PROMPT], path) == ["p"]) is found, name


def test_case_and_punctuation_do_not_count(tmp_path: Path) -> None:
    text = ", ".join(word.upper() for word in WORDS[:13]) + "!"
    assert overlapping([PROMPT], training(tmp_path / "data.jsonl", {"text": text})) == ["p"]


def test_a_short_prompt_must_be_a_whole_text(tmp_path: Path) -> None:
    short = RawPrompt(id="s", prompt="Sort a list.")
    assert overlapping([short], training(tmp_path / "a.jsonl", {"text": "sort a list"})) == ["s"]
    assert overlapping([short], training(tmp_path / "b.jsonl", {"text": "sort a list quickly"})) == []
    wordless = RawPrompt(id="w", prompt="…")
    assert overlapping([wordless], training(tmp_path / "c.jsonl", {"text": "…"})) == []


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": around(WORDS), "completion": "x"},
        {"prompt": "x", "completion": around(WORDS)},
        {"messages": [{"role": "user", "content": around(WORDS)}]},
        {"conversations": [{"from": "human", "value": around(WORDS)}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": around(WORDS)}]}]},
    ],
)
def test_every_usual_field_of_training_data_is_read(tmp_path: Path, line: dict[str, Any]) -> None:
    assert overlapping([PROMPT], training(tmp_path / "data.jsonl", {"text": "other"}, line)) == ["p"]


def test_of_a_chat_the_users_turns_count(tmp_path: Path) -> None:
    data = training(tmp_path / "data.jsonl", {"text": around(WORDS[:20])})

    def chat(role: Any) -> ChatPrompt:
        return ChatPrompt(id=role, messages=[Message(role=role, content=" ".join(WORDS[:20]))])

    assert overlapping([chat("system"), chat("user"), PROMPT], data) == ["user", "p"]


def test_hashes_are_sorted_and_counted_once(tmp_path: Path) -> None:
    count = write_grams(tmp_path / "data.npy", [around(WORDS), around(WORDS)])
    hashes = np.load(tmp_path / "data.npy")
    assert (hashes.dtype, len(hashes)) == (np.uint64, count)
    assert count == len(set(grams(around(WORDS)))) == len(WORDS) + 2 - 12
    assert (np.diff(hashes.astype(object)) > 0).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"data\.jsonl:1: is not JSON"),
        ('["a"]', "is no JSON object"),
        ('{"id": 1}', "has none of text, prompt, completion, messages, conversations"),
        ('{"messages": 5}', "has none of text, prompt, completion, messages, conversations"),
    ],
)
def test_a_line_without_a_text_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(TrainingDataError, match=message):
        list(training_texts(tmp_path / "data.jsonl"))


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.npy"):
        with pytest.raises(TrainingDataError, match="cannot be read"):
            overlapping([PROMPT], tmp_path / name)
    np.save(tmp_path / "other.npy", np.zeros(3))
    with pytest.raises(TrainingDataError, match="expected sorted uint64 hashes"):
        overlapping([PROMPT], tmp_path / "other.npy")


@pytest.mark.parametrize("content", ["", "\n \n", '{"text": ""}\n'])
def test_a_file_without_a_word_finds_nothing_because_there_is_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(TrainingDataError, match="has no text"):
        overlapping([PROMPT], tmp_path / "data.jsonl")


def test_hashes_out_of_order_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.array(sorted(grams(PROMPT.prompt), reverse=True), dtype=np.uint64))
    with pytest.raises(TrainingDataError, match="not sorted"):
        overlapping([PROMPT], tmp_path / "data.npy")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": around(WORDS)}), encoding="utf-8-sig")
    assert overlapping([PROMPT], tmp_path / "data.jsonl") == ["p"]
