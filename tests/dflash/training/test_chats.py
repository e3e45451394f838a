"""Which tokens of a chat are trained on: with templates that keep earlier turns, and with those that rewrite them."""

import json
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash.target import load_tokenizer
from dflash.training.chats import (
    NO_THOUGHT,
    OTHER_MODE,
    REWRITTEN,
    UNASKED,
    Marked,
    UntrainableError,
    chat_pieces,
    encode,
    pair_pieces,
)
from dflash.training.lines import Pair, Turn
from tests.tiny import FIXTURES

# Qwen3's rules in short: the thought of an assistant turn is kept, or an empty one put there, only behind the last
# question; the generation prompt holds an empty thought where thinking is off.
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- if ns.open and message.role == 'user' %}
{%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{%- set said = message.content %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
{%- else %}
{{- said }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

# Qwen3.5's and Qwen3.6's: every turn behind the last question has a thought, and the generation prompt opens one; a
# chat without a question is refused; white space around contents goes.
QWEN3_5 = (
    QWEN3.replace("(loop.last or thought)", "true")
    .replace("{{- said }}", "{{- said|trim }}")
    .replace("{%- for message in messages %}", "{%- if ns.open %}{{- raise_exception('No user query found.') }}"
             "{%- endif %}\n{%- for message in messages %}", 1)
    .replace("{{- '<|im_start|>assistant\\n' }}\n{%- if enable_thinking is defined and enable_thinking is false %}\n"
             "{{- '<think>\\n\\n</think>\\n\\n' }}",
             "{{- '<|im_start|>assistant\\n<think>\\n' }}\n"
             "{%- if enable_thinking is defined and enable_thinking is false %}\n{{- '\\n</think>\\n\\n' }}")
)  # fmt: skip
# A template without thoughts, as Qwen2.5's.
PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TINY = (FIXTURES / "tiny-hybrid" / "chat_template.jinja").read_text()
ENDLESS = PLAIN.replace("<|im_end|>", "")


@pytest.fixture
def tokenizer(tiny_hybrid):
    return load_tokenizer(str(tiny_hybrid.target))


@pytest.fixture(scope="module")
def shared_tokenizer(tiny_hybrid):
    return load_tokenizer(str(tiny_hybrid.target))


def turns(*said: str | tuple[str, str]) -> list[Turn]:
    """User and assistant in turn; of an assistant turn either the content or (thought, content)."""
    made = []
    for place, one in enumerate(said):
        thought, content = one if isinstance(one, tuple) else (None, one)
        role = "assistant" if place % 2 else "user"
        made.append(Turn(role=role, content=content, reasoning_content=thought))
    return made


def trained(tokenizer, template, chat, *, thinking):
    """The texts of the spans that are trained on, the whole text, and the turns left out."""
    tokenizer.chat_template = template
    pieces, left_out = chat_pieces(chat, tokenizer, thinking=thinking)
    (marked,) = encode([pieces], tokenizer)
    assert isinstance(marked, Marked)
    spans = [tokenizer.decode(marked.ids[start:end]) for start, end in marked.spans]
    return spans, tokenizer.decode(marked.ids), dict(left_out)


def reason(tokenizer, template, chat, *, thinking):
    tokenizer.chat_template = template
    with pytest.raises(UntrainableError) as refused:
        chat_pieces(chat, tokenizer, thinking=thinking)
    return str(refused.value)


def test_every_turn_of_a_template_that_keeps_them_is_trained_on_up_to_its_end_token(tokenizer):
    chat = [Turn(role="system", content="Be short."), *turns("one?", "1", "two?", "2")]
    spans, whole, left_out = trained(tokenizer, PLAIN, chat, thinking=False)
    assert spans == ["1<|im_end|>", "2<|im_end|>"]
    assert whole.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n")
    assert whole.endswith("<|im_start|>assistant\n2<|im_end|>\n")
    assert left_out == {}


def test_the_line_feed_that_the_template_puts_behind_a_turn_is_not_trained_on(tokenizer):
    tokenizer.chat_template = PLAIN
    pieces, _ = chat_pieces(turns("one?", "1"), tokenizer, thinking=False)
    (marked,) = encode([pieces], tokenizer)
    ((_, end),) = marked.spans
    assert tokenizer.decode(marked.ids[end:]) == "\n"


def test_nothing_behind_an_end_token_within_a_turn_is_trained_on(tokenizer):
    """Contents are somebody's texts, chats about chat templates among them; served, the target is stopped there."""
    spans, whole, _ = trained(tokenizer, PLAIN, turns("one?", "1<|im_end|> is it", "two?", "2"), thinking=False)
    assert spans == ["1<|im_end|>", "2<|im_end|>"]
    assert "1<|im_end|> is it<|im_end|>\n" in whole


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_thoughts_dropped_from_history_leave_only_the_last_turn(tokenizer, template):
    chat = turns("one?", ("hm one", "1"), "two?", ("hm two", "2"))
    spans, whole, left_out = trained(tokenizer, template, chat, thinking=True)
    opening = "<think>\n" if template is QWEN3 else ""  # Qwen3.5 is asked with it
    assert spans == [f"{opening}hm two\n</think>\n\n2<|im_end|>"]
    assert "hm one" not in whole
    assert left_out == {REWRITTEN: 1}


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_a_thought_in_the_content_is_the_same_as_one_kept_apart(tokenizer, template):
    apart = turns("one?", ("hm one", "1"), "two?", ("hm two", "2"))
    within = turns("one?", "<think>\nhm one\n</think>\n\n1", "two?", "<think>\nhm two\n</think>\n\n2")
    found = [trained(tokenizer, template, chat, thinking=True) for chat in (apart, within)]
    assert found[0] == found[1]


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_with_thinking_off_the_empty_thought_belongs_to_the_question_and_is_not_trained_on(tokenizer, template):
    chat = turns("one?", "1", "two?", "2")
    spans, whole, left_out = trained(tokenizer, template, chat, thinking=False)
    assert spans == ["2<|im_end|>"]
    assert whole.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n2<|im_end|>\n")
    assert left_out == {REWRITTEN: 1}, "the first turn stands in the history without the empty thought it began with"


@pytest.mark.parametrize(("template", "thinking"), list(product([QWEN3, QWEN3_5], [True, False])))
def test_what_is_read_before_a_trained_turn_is_what_the_target_is_asked_with(tokenizer, template, thinking):
    chat = turns("one?", ("hm", "1") if thinking else "1", "two?", ("hm", "2") if thinking else "2")
    tokenizer.chat_template = template
    pieces, _ = chat_pieces(chat, tokenizer, thinking=thinking)
    (marked,) = encode([pieces], tokenizer)
    asked = tokenizer.apply_chat_template(
        [turn.model_dump(exclude_none=True) for turn in chat[:-1]],
        tokenize=True,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )["input_ids"]
    ((start, _),) = marked.spans
    assert marked.ids[:start] == asked


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_turns_around_a_tool_after_the_last_question_keep_their_thoughts_and_are_all_trained_on(tokenizer, template):
    chat = [
        *turns("one?", ("look it up", "call")),
        Turn(role="tool", content="1"),
        Turn(role="assistant", content="It is 1.", reasoning_content="now I know"),
    ]
    spans, _, left_out = trained(tokenizer, template, chat, thinking=True)
    assert [span.split("</think>")[1] for span in spans] == ["\n\ncall<|im_end|>", "\n\nIt is 1.<|im_end|>"]
    assert left_out == {}


def test_what_follows_the_last_answer_is_dropped_so_that_it_is_still_the_last(tokenizer):
    spans, whole, _ = trained(tokenizer, QWEN3, turns("one?", ("hm", "1"), "and two?"), thinking=True)
    assert spans == ["<think>\nhm\n</think>\n\n1<|im_end|>"]
    assert "two" not in whole


def test_a_turn_that_nobody_asked_for_is_context(tokenizer):
    chat = [Turn(role="assistant", content="Hello!"), *turns("one?", "1")]
    spans, _, left_out = trained(tokenizer, PLAIN, chat, thinking=False)
    assert (spans, left_out) == (["1<|im_end|>"], {UNASKED: 1})


def test_a_chat_without_an_answer_is_refused(tokenizer):
    assert reason(tokenizer, PLAIN, turns("one?"), thinking=False) == "no assistant turn"


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_a_thought_where_thinking_is_off_is_refused(tokenizer, template):
    assert reason(tokenizer, template, turns("one?", ("hm", "1")), thinking=False) == OTHER_MODE


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_no_thought_where_thinking_is_on_is_refused(tokenizer, template):
    assert reason(tokenizer, template, turns("one?", "1"), thinking=True) == NO_THOUGHT


def test_a_template_that_does_not_write_the_thoughts_it_asks_with_is_refused(tokenizer):
    """The tiny template opens a thought and writes answers as they are, so an answer must hold its thought itself."""
    template = tokenizer.chat_template
    assert reason(tokenizer, template, turns("one?", "1"), thinking=False) == OTHER_MODE
    spans, _, _ = trained(tokenizer, template, turns("one?", "<think>\n\n</think>\n\n1"), thinking=False)
    assert spans == ["1<|im_end|>"]


def test_a_template_that_refuses_a_chat_is_quoted(tokenizer):
    chat = [Turn(role="system", content="Be short."), Turn(role="assistant", content="1")]
    assert "No user query found." in reason(tokenizer, QWEN3_5, chat, thinking=False)


@pytest.mark.parametrize("said", ["1", "<think>\nhm\n</think>\n\n1"])
def test_a_template_without_an_end_of_turn_is_refused(tokenizer, said):
    """A special token somewhere in the turn is no end of it."""
    tokenizer.chat_template = ENDLESS
    pieces, _ = chat_pieces(turns("one?", said), tokenizer, thinking=False)
    (refused,) = encode([pieces], tokenizer)
    assert isinstance(refused, UntrainableError)
    assert "no special token" in str(refused)


def test_a_template_that_shifts_earlier_turns_moves_no_mask(tokenizer):
    """The number of turns in front: no rendering up to a turn is the beginning of the whole chat."""
    counting = "{{- messages|length }}" + PLAIN
    assert reason(tokenizer, counting, turns("one?", "1", "two?", "2"), thinking=False) in (REWRITTEN, OTHER_MODE)


PARTS = st.sampled_from(["a", " ", "\n", "ab c", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "<|im_end|>", "é"])
CONTENTS = st.lists(PARTS, min_size=0, max_size=4).map("".join)
CHATS = st.lists(
    st.builds(
        Turn,
        role=st.sampled_from(["user", "assistant", "assistant", "tool"]),
        content=CONTENTS,
        reasoning_content=st.none() | CONTENTS,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=st.sampled_from([PLAIN, QWEN3, QWEN3_5, "tiny"]), chat=CHATS, thinking=st.booleans())
def test_no_mask_is_ever_empty_or_shifted(shared_tokenizer, template, chat, thinking):
    """Each span is one turn as the template writes it, to its first end, behind what is asked before that turn."""
    tokenizer = shared_tokenizer
    tokenizer.chat_template = TINY if template == "tiny" else template
    try:
        pieces, left_out = chat_pieces(chat, tokenizer, thinking=thinking)
    except UntrainableError:
        return
    (marked,) = encode([pieces], tokenizer)
    assert isinstance(marked, Marked)
    rendered = [turn.model_dump(exclude_none=True) for turn in chat]
    answers = [place for place, turn in enumerate(chat) if turn.role == "assistant"]

    def render(turns, **how):
        return tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=thinking, **how)

    whole = tokenizer.decode(marked.ids)
    assert render(rendered[: answers[-1] + 1]).startswith(whole), "what is behind the last trained turn is of no use"
    asked = {render(rendered[:place], add_generation_prompt=True): place for place in answers if place}
    assert len(marked.spans) == len(answers) - left_out.total() > 0
    for start, end in marked.spans:
        before = tokenizer.decode(marked.ids[:start])
        assert before in asked
        turn = render(rendered[: asked[before] + 1])
        assert turn.startswith(before)
        said, end_token, _ = turn.removeprefix(before).partition("<|im_end|>")
        assert tokenizer.decode(marked.ids[start:end]) == said + end_token


def test_what_is_read_and_what_is_written_are_tokenised_apart(tokenizer):
    """Served, the target begins a token at the seam, also where the tokenizer would put one across it."""
    joined = tokenizer("return None")["input_ids"]
    seam = next(
        cut for cut in range(1, 11)
        if tokenizer("return None"[:cut])["input_ids"] + tokenizer("return None"[cut:])["input_ids"] != joined
    )  # fmt: skip
    prompt, response = "return None"[:seam], "return None"[seam:]
    (marked,) = encode([pair_pieces(Pair(prompt=prompt, response=response))], tokenizer)
    start = len(tokenizer(prompt)["input_ids"])
    assert marked.ids == tokenizer(prompt)["input_ids"] + tokenizer(response)["input_ids"]
    assert marked.spans == [(start, len(marked.ids))]


INST = """\
{{- bos_token }}
{%- for message in messages %}
{{- '[INST] ' + message.content + ' [/INST]' if message.role == 'user' else ' ' + message.content + eos_token }}
{%- endfor %}"""


@pytest.mark.parametrize("scheme", ["prepended", "first", "always"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_between_question_and_answer(scheme):
    """Llama 2's and Mistral's: what is asked and written, read as one text, is what the pieces make together."""
    tokenizer = spaced_tokenizer(scheme)
    (pair,) = encode([pair_pieces(Pair(prompt="A city of", response=" France"))], tokenizer)
    assert pair.ids == tokenizer("A city of France")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(pair.ids[start]) for start, _ in pair.spans] == ["▁"]
    (pair,) = encode([pair_pieces(Pair(prompt="A city of Fr", response="ance"))], tokenizer)
    assert pair.ids == tokenizer("A city of France")["input_ids"]

    tokenizer.chat_template = INST
    chat = turns("A city?", "Paris", "Why?", "So")
    (marked,) = encode([chat_pieces(chat, tokenizer, thinking=False)[0]], tokenizer)
    whole = tokenizer.apply_chat_template([turn.model_dump() for turn in chat], tokenize=False)
    assert marked.ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    written = ["".join(tokenizer.convert_ids_to_tokens(marked.ids[start:end])) for start, end in marked.spans]
    assert written == ["▁Paris</s>", "▁So</s>"]


def test_a_seam_that_such_a_tokenizer_cannot_be_kept_from_is_refused():
    tokenizer = spaced_tokenizer("always", merges=[("\n", "\n")])
    (refused,) = encode([pair_pieces(Pair(prompt="A", response="\nB"))], tokenizer)
    assert isinstance(refused, UntrainableError)
    assert "a part begins with a line feed" in str(refused)


def spaced_tokenizer(scheme, merges=()):
    """One token a character, besides ``merges``; a space before texts, as sentencepiece puts it, by three means."""
    characters = ["<s>", "</s>", "▁", "\n", *map(chr, range(33, 127))]
    tokens = {token: place for place, token in enumerate([*characters, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(tokens, list(merges)))
    if scheme == "prepended":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_a_raw_prompt_gets_the_special_tokens_it_is_asked_with_and_its_response_none(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("def")["input_ids"][0] == 0
    (marked,) = encode([pair_pieces(Pair(prompt="def", response=" f"))], tokenizer)
    assert [place for place, token in enumerate(marked.ids) if token == 0] == [0]


def test_an_empty_response_is_refused():
    with pytest.raises(UntrainableError, match="empty response"):
        pair_pieces(Pair(prompt="p", response=""))


def test_documents_encoded_together_are_those_encoded_alone(tokenizer):
    tokenizer.chat_template = PLAIN
    documents = [
        chat_pieces(turns("one?", "1", "two?", "2"), tokenizer, thinking=False)[0],
        pair_pieces(Pair(prompt="def f", response="(x):")),
        chat_pieces(turns("three?", "3"), tokenizer, thinking=False)[0],
    ]
    assert encode(documents, tokenizer) == [encode([one], tokenizer)[0] for one in documents]
    assert json.dumps([one.spans for one in encode(documents, tokenizer)]).count("[") == 1 + 3 + 4
