"""One answer as text: reasoning, stop strings and token offsets, for any number of tokens per step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat_model import write_chat_model
from neuron_runtime.core import FinishReason
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.reasoning import REASONING_PARSERS, ReasoningSplitter
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "<think>a core ☃</think>naïve 😀 devices end here"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_chat_model(tmp_path_factory.mktemp("model")))


def feed(answer: ChoiceText, token_ids: tuple[int, ...], sizes: list[int]) -> str:
    text, at, turn = "", 0, 0
    while at < len(token_ids) and answer.finish_reason is None:
        part = token_ids[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(part), turn + 1
        text += answer.feed(part, FinishReason.LENGTH if at == len(token_ids) else None)
    return text


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_reasoning_and_answer_are_independent_of_tokens_per_step(tokenizer: Tokenizer, sizes: list[int]) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    splitter = ReasoningSplitter(REASONING_PARSERS["qwen3"], "")
    answer = ChoiceText(tokenizer, (), stop=("end",), splitter=splitter)
    assert (feed(answer, ids, sizes), answer.reasoning) == ("naïve 😀 devices ", "a core ☃")
    assert answer.finish_reason is FinishReason.STOP
    of_the_thought = tokenizer.encode("<think>a core ☃</think>", add_special_tokens=False)
    assert answer.num_reasoning_tokens in (len(of_the_thought), len(of_the_thought) + 1)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_token_of_reasoning_and_answer_is_counted_once(tokenizer: Tokenizer, sizes: list[int]) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    answer = ChoiceText(tokenizer, (), splitter=ReasoningSplitter(REASONING_PARSERS["qwen3"], ""))
    assert feed(answer, ids, sizes) == "naïve 😀 devices end here"
    assert (answer.num_tokens, answer.reasoning) == (len(ids), "a core ☃")
    assert 0 < answer.num_reasoning_tokens < len(ids)


def test_a_stop_string_ends_reasoning_too(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    answer = ChoiceText(tokenizer, (), stop=("core",), splitter=ReasoningSplitter(REASONING_PARSERS["qwen3"], ""))
    assert (feed(answer, ids, [2]), answer.reasoning, answer.stop_string) == ("", "a ", "core")


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_token_has_the_offset_of_its_first_character(tokenizer: Tokenizer, sizes: list[int]) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    answer = ChoiceText(tokenizer, (), locates=True)
    text = feed(answer, ids, sizes)
    assert text == TEXT
    assert len(answer.text_offsets) == answer.num_tokens == len(ids)
    for at, offset in enumerate(answer.text_offsets):
        before = b"".join(map(tokenizer.token_bytes, ids[:at]))
        assert offset == len(before.decode(errors="ignore"))


def test_the_end_token_has_the_offset_after_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a core", add_special_tokens=False)
    answer = ChoiceText(tokenizer, (), locates=True)
    assert answer.feed((*ids, 1), FinishReason.STOP) == "a core"
    assert (answer.num_tokens, answer.text_offsets[-1]) == (len(ids) + 1, 6)


def test_hidden_tokens_and_invalid_bytes_do_not_shift_offsets(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>☃b", add_special_tokens=False)
    broken = next(one for one in range(320) if tokenizer.token_bytes(one) == b"\xce")
    answer = ChoiceText(tokenizer, (), locates=True)
    text = answer.feed((*ids, broken, *ids), FinishReason.LENGTH)
    assert text == "a☃b\N{REPLACEMENT CHARACTER}a☃b"
    assert answer.text_offsets == [0, 1, 1, 1, 1, 2, 3, 4, 5, 5, 5, 5, 6]


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_them_is_found(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a core of", add_special_tokens=False)
    stopped = {}
    for min_tokens in range(len(ids)):
        answer = ChoiceText(tokenizer, (), stop=("core",), min_tokens=min_tokens)
        stopped[min_tokens] = feed(answer, ids, [1]), answer.num_tokens
    end = stopped[0][1]
    assert stopped == {at: ("a ", end) if at < end else ("a core of", len(ids)) for at in range(len(ids))}
