"""Calls of tools are read from the text alone: any split of it into pieces gives the same text and calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tool_templates import ANSWERS, FIRST, SECOND
from neuron_runtime.config import TextOptions
from neuron_runtime.flags import fields_of
from neuron_runtime.text.reasoning import REASONING_PARSERS, ReasoningSplitter
from neuron_runtime.text.tool_calls import TOOL_PARSERS, ToolCallSplitter

NAMES = {"weather", "search", "f"}


def read(parser: str, pieces: Iterable[str], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call."""
    splitter = ToolCallSplitter(TOOL_PARSERS[parser], NAMES, **options)
    text, calls = "", list[tuple[str, str]]()
    for part, parts in [*(splitter.feed(piece) for piece in pieces), splitter.flush()]:
        text += part
        for piece in parts:
            assert bool(piece.name) == bool(piece.id) == (piece.index == len(calls))
            if piece.name:
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = name, arguments + piece.arguments
    return text, calls


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return pieces


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@given(sizes=SIZES)
def test_each_family_writes_the_same_two_calls_in_its_own_way(parser: str, sizes: list[int]) -> None:
    text, calls = read(parser, cut(ANSWERS[parser], sizes))
    assert text == ""
    assert [name for name, _ in calls] == ["weather", "search"]
    assert [json.loads(arguments) for _, arguments in calls] == [json.loads(FIRST), json.loads(SECOND)]


_SNIPPETS = [
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', "}", "{", "]", "[", '"', "\\", ",", ":", ";"),
    *(" ", "\n", "f", "f(", "a=1", ")", "'", "null", "-", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("```json", "function", "<|python_tag|>", "<|python_start|>", "word", "é"),
]
_TEXTS = st.lists(st.sampled_from(_SNIPPETS) | st.text(max_size=3), max_size=24).map("".join)


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@given(text=_TEXTS, sizes=SIZES, whole=st.booleans())
def test_any_text_gives_the_same_for_any_split(parser: str, text: str, sizes: list[int], whole: bool) -> None:
    text = ANSWERS[parser][: len(text) * 8] + text if whole else text
    once = read(parser, [text])
    assert read(parser, cut(text, sizes)) == once
    assert read(parser, text) == once
    if not once[1]:
        assert once[0] == text


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", "Let me look.\n<tool_call>" + '{"name": "f"}</tool_call>', ("Let me look.", [("f", "{}")])),
        ("hermes", 'a<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("a", [("f", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> b', ("b", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', ("", [("f", '{"a": "cut')])),
        ("hermes", 'a <tool_call>{"nam', ('a <tool_call>{"nam', [])),
        ("hermes", "a <tool_call>no</tool_call> b", ("a <tool_call>no</tool_call> b", [])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops</tool_call>b', ("b", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "new", "arguments": {}}</tool_call>', ("", [("new", "{}")])),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
        ("hermes", "1 < 2 <tool", ("1 < 2 <tool", [])),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}\n', ("", [("f", '{"a": 1}')])),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
        ("llama3_json", '{"name": "Bob", "age": 5}', ('{"name": "Bob", "age": 5}', [])),
        ("llama3_json", '{"name": "f"}; {"name": "Bob"}', ('; {"name": "Bob"}', [("f", "{}")])),
        ("llama3_json", '{"name": "f"}\n{"name": "Bob"}', ('\n{"name": "Bob"}', [("f", "{}")])),
        ("llama3_json", '{"name": "f"}, and', (", and", [("f", "{}")])),
        ("llama3_json", '[{"name": "f"}, {"name": "f"}', ("", [("f", "{}"), ("f", "{}")])),
        ("llama3_json", '[{"name": "f"}, 2]', (", 2]", [("f", "{}")])),
        ("llama3_json", '[{"name": "Bob"}]', ('[{"name": "Bob"}]', [])),
        ("hermes", '<tool_call>{"name": "f"} {"a": 1}</tool_call>b', ("b", [("f", "{}")])),
        ("llama3_json", "The answer is {}.", ("The answer is {}.", [])),
        ("pythonic", "[f(), f(a=-1, b=true)]", ("", [("f", "{}"), ("f", '{"a": -1, "b": true}')])),
        ("pythonic", "[f](https://a.b)", ("[f](https://a.b)", [])),
        ("pythonic", "[f(1)]", ("[f(1)]", [])),
        ("pythonic", "[f(a=open('x'))]", ("[f(a=open('x'))]", [])),
        ("pythonic", "[f(a=1e999)]", ("[f(a=1e999)]", [])),
        ("pythonic", "[f(a=1), f(b=", ("[f(a=1), f(b=", [])),
        ("mistral", 'ok[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS]{}', ("ok", [("f", '{"a": 1}'), ("f", "{}")])),
        ("mistral", "[TOOL_CALLS] not a {", ("[TOOL_CALLS] not a {", [])),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", []),
        ),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>text", ("<｜tool▁calls▁begin｜>text", [])),
    ],
)
def test_what_is_no_call_stays_text_and_a_cut_call_keeps_what_was_written(
    parser: str, text: str, expected: tuple[str, list[tuple[str, str]]]
) -> None:
    assert read(parser, text) == expected


FIRST_CALL, SECOND_CALL = '{"name": "f", "arguments": {"a": 1}}', '{"name": "search", "arguments": {"b": 2}}'


@pytest.mark.parametrize(
    ("parser", "form"),
    [
        ("hermes", "<tool_call>\n%s\n%s\n</tool_call>"),
        ("hermes", "<tool_call>%s, %s</tool_call>"),
        ("hermes", "<tool_call>\n[%s, %s]\n</tool_call>"),
        ("llama3_json", "%s\n%s"),
        ("llama3_json", "%s, %s"),
        ("llama3_json", "%s<|python_tag|>%s"),
        ("llama3_json", "<|python_tag|>[%s,\n%s]"),
    ],
)
@given(sizes=SIZES)
def test_no_call_is_lost_that_is_written_beside_the_documented_form(parser: str, form: str, sizes: list[int]) -> None:
    text = form % (FIRST_CALL, SECOND_CALL)
    assert read(parser, cut(text, sizes)) == ("", [("f", '{"a": 1}'), ("search", '{"b": 2}')])


def test_deep_python_is_text() -> None:
    for deep in (f"[f(a={'[' * 5000}{']' * 5000})]", f"[f(a={'-' * 20_000}1)]", "[f(a=" + "1" * 9000 + ")]"):
        assert read("pythonic", [deep]) == (deep, [])


def test_only_the_first_call_counts_where_one_is_allowed() -> None:
    for parser, answer in ANSWERS.items():
        text, calls = read(parser, [answer], one_call=True)
        assert (text, [name for name, _ in calls]) == ("", ["weather"])


def test_arguments_are_shown_as_they_are_written() -> None:
    splitter = ToolCallSplitter(TOOL_PARSERS["hermes"], NAMES)
    assert splitter.feed('<tool_call>\n{"name": "f", "arguments": {"a": ')[1][-1].arguments == '{"a": '
    assert [piece.arguments for piece in splitter.feed('"b')[1]] == ['"b']
    assert [piece.arguments for piece in splitter.feed('"}}')[1]] == ['"}']


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@given(sizes=SIZES)
def test_reasoning_ends_before_calls_begin(parser: str, sizes: list[int]) -> None:
    thinks = ReasoningSplitter(REASONING_PARSERS["qwen3"], "")
    pieces = cut(f"<think>I call <tool_call> now</think>\n\n{ANSWERS[parser]}", sizes)
    parts = [*(thinks.feed(piece) for piece in pieces), thinks.flush()]
    assert "".join(thought for thought, _ in parts) == "I call <tool_call> now"
    assert len(read(parser, (answer for _, answer in parts))[1]) == 2


def test_the_parsers_of_the_configuration_are_those_of_the_table() -> None:
    (field,) = (field for field in fields_of(TextOptions) if field.argument == "tool_call_parser")
    assert set(field.kind.values) == {"", *TOOL_PARSERS}  # type: ignore[attr-defined]
