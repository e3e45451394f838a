import json

import pytest

from dflash.prompts import (
    ChatPrompt,
    PromptFileError,
    RawPrompt,
    ThinkingError,
    default_prompts,
    has_chats,
    read_prompts,
    tokenize,
)

RAW = '{"id": "a", "prompt": "def f():"}'
CHAT = '{"id": "b", "messages": [{"role": "user", "content": "Write f."}]}'


class WordTokenizer:
    """Splits at spaces; its template writes the thinking switch into the text, as Qwen's does."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ([0] if add_special_tokens else []) + [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, enable_thinking):
        assert not tokenize
        assert add_generation_prompt
        turns = " ".join(f"{message['role']} {message['content']}" for message in messages)
        return turns + (" <think>" if enable_thinking else " <think></think>")


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_raw_and_chat_prompts_in_file_order(tmp_path):
    prompts = read_prompts(write(tmp_path, RAW, "", CHAT)).prompts
    assert [type(prompt) for prompt in prompts] == [RawPrompt, ChatPrompt]
    assert has_chats(prompts)
    assert not has_chats(prompts[:1])


def test_limit_takes_the_first_but_the_digest_is_of_the_file(tmp_path):
    path = write(tmp_path, RAW, CHAT)
    assert [prompt.id for prompt in read_prompts(path, limit=1).prompts] == ["a"]
    assert read_prompts(path, limit=1).sha256 == read_prompts(path).sha256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "prompt": ', "is not JSON"),
        ('["b"]', "expected an object"),
        ('{"id": "b"}', "either prompt"),
        ('{"id": "b", "prompt": "x", "messages": []}', "either prompt"),
        ('{"prompt": "x"}', "id: Field required"),
        ('{"id": "b", "prompt": ""}', "prompt: String should have at least 1 character"),
        ('{"id": "b", "messages": [{"role": "robot", "content": "x"}]}', "messages.0.role"),
        ('{"id": "b", "prompt": "x", "extra": 1}', "extra: Extra inputs"),
        (RAW, "id 'a' is already used in line 1"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    path = write(tmp_path, RAW, line)
    with pytest.raises(PromptFileError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match="has no prompt"):
        read_prompts(path)


def test_a_missing_file_and_a_binary_one_are_errors(tmp_path):
    with pytest.raises(PromptFileError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptFileError, match="not UTF-8"):
        read_prompts(tmp_path / "binary")


def test_chats_need_thinking_said(tmp_path):
    prompts = read_prompts(write(tmp_path, RAW, CHAT)).prompts
    with pytest.raises(ThinkingError, match="--thinking on or --thinking off"):
        tokenize(prompts, WordTokenizer(), thinking=None)
    assert ThinkingError.exit_code == 2
    assert tokenize(prompts[:1], WordTokenizer(), thinking=None) == [[0, 3, 4]]


def test_thinking_reaches_the_template_and_chats_get_no_second_start_token(tmp_path):
    prompts = read_prompts(write(tmp_path, CHAT)).prompts
    assert tokenize(prompts, WordTokenizer(), thinking=True) == [[4, 5, 2, 7]]
    assert tokenize(prompts, WordTokenizer(), thinking=False) == [[4, 5, 2, 15]]


def test_a_tokenizer_without_a_template_cannot_take_chats(tmp_path):
    tokenizer = WordTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptFileError, match="no chat template"):
        tokenize(read_prompts(write(tmp_path, CHAT)).prompts, tokenizer, thinking=True)


def test_a_template_that_refuses_a_chat_is_quoted_and_the_prompt_named(tmp_path):
    """Qwen3.5's and Qwen3.6's raise on a chat without a question."""

    class Refusing(WordTokenizer):
        def apply_chat_template(self, messages, **how):
            raise RuntimeError("No user query found in messages.")

    with pytest.raises(PromptFileError, match=r"prompt 'b': .* refuses the chat \(No user query found in messages"):
        tokenize(read_prompts(write(tmp_path, CHAT)).prompts, Refusing(), thinking=True)


def test_the_default_prompts_are_ten_chats():
    prompt_set = read_prompts(default_prompts())
    assert len(prompt_set.prompts) == 10
    assert {"fizzbuzz", "binary_search", "linked_list_reverse"} <= {prompt.id for prompt in prompt_set.prompts}
    assert all(json.loads(line)["id"] for line in prompt_set.path.read_text().splitlines())
