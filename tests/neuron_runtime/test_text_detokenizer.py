"""Pieces of a stream join to the whole text, and none ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat_model import BOS, EOS, byte_level_tokenizer, metaspace_tokenizer
from neuron_runtime.text.detokenizer import REPLACEMENT, Detokenizer, WindowDetokenizer, make_detokenizer
from neuron_runtime.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
METASPACE = Tokenizer(metaspace_tokenizer())

texts = st.text(st.sampled_from("ab e.\n\t é☃東京😀👩‍👧ελ"), max_size=40)
cuts = st.lists(st.integers(1, 4), min_size=1, max_size=20)


def pieces(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    out, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        out.append(detokenizer.feed(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
@given(text=texts, sizes=cuts)
def test_text_pieces_join_to_the_whole_decode_for_any_grouping_of_tokens(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces(make_detokenizer(tokenizer), ids, sizes)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocabulary_size - 1), max_size=50), sizes=cuts)
def test_text_pieces_of_any_byte_level_tokens_join_to_the_whole_decode(ids: list[int], sizes: list[int]) -> None:
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL), ids, sizes)) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocabulary_size + 1), max_size=50), sizes=cuts, skips=st.booleans())
def test_byte_table_and_window_decoding_give_the_same_text(ids: list[int], sizes: list[int], skips: bool) -> None:
    assert BYTE_LEVEL.joins_bytes
    assert not METASPACE.joins_bytes
    by_window = WindowDetokenizer(BYTE_LEVEL, (), skips)
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL, (), skips), ids, sizes)) == "".join(
        pieces(by_window, ids, sizes)
    )


@given(text=texts, sizes=cuts)
def test_no_piece_of_valid_text_splits_a_character(text: str, sizes: list[int]) -> None:
    ids = list(BYTE_LEVEL.encode(text, add_special_tokens=False))
    assert all(REPLACEMENT not in piece for piece in pieces(make_detokenizer(BYTE_LEVEL), ids, sizes))


@given(prompt=texts, text=texts, sizes=cuts)
def test_an_answer_keeps_its_leading_space_after_the_prompt(prompt: str, text: str, sizes: list[int]) -> None:
    whole = list(METASPACE.encode("a " + prompt + text, add_special_tokens=False))
    for cut in range(1, len(whole)):
        before = METASPACE.decode(whole[:cut])
        if not before.endswith(REPLACEMENT):
            answer = "".join(pieces(make_detokenizer(METASPACE, whole[:cut]), whole[cut:], sizes))
            assert before + answer == METASPACE.decode(whole)


def test_a_prompt_ending_inside_a_character_does_not_damage_the_answer() -> None:
    ids = BYTE_LEVEL.encode("東", add_special_tokens=False)
    answer = make_detokenizer(BYTE_LEVEL, ids[:1])
    rest = [*ids[1:], *BYTE_LEVEL.encode("ok", add_special_tokens=False)]
    assert "".join([answer.feed(rest), answer.flush()]) == BYTE_LEVEL.decode(rest)


def test_special_tokens_are_shown_only_on_request() -> None:
    ids = BYTE_LEVEL.encode("hi" + EOS)
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL), list(ids), [1])) == "hi"
    shown = make_detokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(pieces(shown, list(ids), [1])) == f"{BOS}hi{EOS}"


def test_an_undecodable_tail_is_released() -> None:
    broken = BYTE_LEVEL.encode("東", add_special_tokens=False)[:1] * 200
    detokenizer = make_detokenizer(BYTE_LEVEL)
    assert any(detokenizer.feed([one]) for one in broken)
